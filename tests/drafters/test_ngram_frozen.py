"""Frozen tables: counting, files, the command that makes them, and what the drafter does with them."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.drafters.ngram.frozen import ENTRY_BYTES, FOLLOWERS, ORDERS, SHARES, FrozenTable, count, write
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.ports import Budget, Setting
from langchain_card.testing.tokenizer import byte_tokenizer
from tests.support.tiny import make_target

HIDDEN = "zqzqzqzqzqzq"
TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "deep").mkdir()
    for i in range(3):
        (folder / "deep" / f"{i}.py").write_text(TEXT * (i + 1))
    for hidden in (folder / ".git" / "objects" / "a.py", folder / "deep" / ".secret"):
        hidden.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text(HIDDEN)
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros.txt").write_bytes(b"a\0b")
    (folder / "large.txt").write_text("x" * (1 << 20) + "x")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_target("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def table(folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out") / "code.ngrams"
    assert main(["ngrams", str(folder), "--model", model, "--out", str(out)]) == 0
    return str(out)


def test_counts_are_those_of_a_plain_count() -> None:
    source = random.Random(0)
    ids = [source.choice([-1, *range(6)]) for _ in range(3000)]
    tables = count(np.array(ids, np.int32), 1 << 20)
    for order in ORDERS:
        wanted: dict[int, Counter[int]] = defaultdict(Counter)
        for start in range(len(ids) - order):
            *leader, follower = ids[start : start + order + 1]
            if min(*leader, follower) >= 0:
                wanted[sum(token << 21 * (order - 1 - i) for i, token in enumerate(leader))][follower] += 1
        leaders, followers, shares = tables[order]
        assert leaders.tolist() == sorted(key for key, came in wanted.items() if max(came.values()) >= 2)
        for key, row, share in zip(leaders.tolist(), followers.tolist(), shares.tolist(), strict=True):
            best = sorted(wanted[key].items(), key=lambda item: (-item[1], item[0]))[:FOLLOWERS]
            padded = [token for token, _ in best] + [-1] * (FOLLOWERS - len(best))
            assert row == padded
            assert share[: len(best)] == [SHARES * came // (wanted[key].total() + 1) for _, came in best]


def test_the_most_frequent_are_kept_within_the_bound() -> None:
    ids = [token for i in range(200) for token in [i, i] * (2 + i % 7)]
    tables = count(np.array(ids, np.int32), 100 * ENTRY_BYTES)
    kept = sum(len(columns[0]) for columns in tables.values())
    assert 0 < kept <= 100
    assert {int(leader) % 7 for leader in tables[1][0]} == {6}, "those that came most often"
    assert sum(len(columns[0]) for columns in count(np.array([1, -1, 2], np.int32), 1000).values()) == 0


def test_the_command_says_what_it_did(
    folder: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.ngrams"
    assert main(["ngrams", str(folder), "--model", model, "--out", str(out), "--max-bytes", "2800"]) == 0
    said = capsys.readouterr()
    assert "skipped 2 files: not text in UTF-8" in said.err and "skipped 1 files: larger than 1.0 MB" in said.err
    assert f"{out}: " in said.out and out.stat().st_size < 2800 + 1500 and [*tmp_path.iterdir()] == [out]
    (tmp_path / "empty").mkdir()
    for arguments, error in {
        (str(tmp_path / "empty"), "--out", str(out)): "holds no text that says anything twice",
        (str(out), "--out", str(out)): "is no folder",
        (str(folder), "--out", str(tmp_path / "no" / "x")): "make the folder first",
        (str(folder), "--out", str(out), "--max-bytes", "5"): "must be a whole number between 1,024",
    }.items():
        assert main(["ngrams", *arguments, "--model", model]) == 2
        assert error in capsys.readouterr().err


def test_what_follows_is_asked_by_the_longest_leader(table: str) -> None:
    tokenizer = byte_tokenizer()
    frozen = FrozenTable(table, Setting(vocab_size=320, tokenizer=tokenizer))
    token = {char: tokenizer.encode(char)[0] for char in "retun a(s"}
    [(best, share)] = frozen.followers([token[char] for char in "retu"])
    assert best == token["r"] and share == SHARES + 7
    assert len(frozen.followers([300, 301, token["a"]])) > 1 and frozen.followers([300]) == frozen.followers([]) == []


def test_what_is_hidden_is_left_out(table: str) -> None:
    """Histories, caches and secrets."""
    tokenizer = byte_tokenizer()
    assert FrozenTable(table, Setting(vocab_size=320, tokenizer=tokenizer)).followers(tokenizer.encode(HIDDEN)) == []


def test_a_cold_request_drafts_from_it(table: str) -> None:
    tokenizer = byte_tokenizer()
    asked = NgramDrafter(Setting(vocab_size=320, tokenizer=tokenizer), table=table)
    asked.begin(Request(0, tuple(tokenizer.encode("    retu")), SamplingParams()), ())
    [proposal] = asked.step([Budget(0)])
    assert proposal.token_ids[0] == tokenizer.encode("r")[0]
    for done, char in enumerate("rn a + b\n\n\ndef"):
        before = asked.step([Budget(0)])[0].scores
        asked.correct(0, done, tokenizer.encode(char))
    assert before, "it goes on"


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        said = json.dumps(header).encode()
        return struct.pack("<Q", len(said)) + said + data[8 + length :]

    return changed


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: b"", "cannot be read"),
        (lambda data: data[:5], "cannot be read"),
        (lambda data: data[: len(data) // 2], "deserializing header"),
        (lambda data: b"\xff" * 8 + data[8:], "cannot be read"),
        (lambda data: data[:8] + b"[" * 100_000, "cannot be read"),
        (_header(lambda header: header["__metadata__"].update(format="other")), "is of format other"),
        (_header(lambda header: header.pop("__metadata__")), "cannot be read"),
        (_header(lambda header: header["followers.1"].update(dtype="F32")), "its columns have other types"),
        (_header(lambda header: header["shares.3"].update(data_offsets=[0, 3])), "deserializing header"),
        (_header(lambda header: header["shares.3"].update(data_offsets=header["followers.3"]["data_offsets"][:1] * 2)),
         "deserializing header"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(table: str, tmp_path: Path, damage: Callable[[bytes], bytes], error: str) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(damage(Path(table).read_bytes()))
    with pytest.raises(InvalidInputError, match=rf"table = .*{error}.*Hint: build it anew"):
        FrozenTable(str(broken), Setting(vocab_size=320))


def test_a_file_for_others_is_refused(table: str, tmp_path: Path) -> None:
    other = byte_tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(InvalidInputError, match=r"table = .*another tokenizer"):
        FrozenTable(table, Setting(vocab_size=320, tokenizer=other))
    with pytest.raises(InvalidInputError, match=r"table = .*not below 50"):
        FrozenTable(table, Setting(vocab_size=50))
    with pytest.raises(InvalidInputError, match=r"table = .*No such file"):
        FrozenTable(str(tmp_path / "none"), Setting())
    tables = {
        order: (np.zeros(1, np.int64), np.zeros((1, 4), np.int32), np.full((1, 4), 8, np.uint8)) for order in ORDERS
    }
    write(tmp_path / "shares", tables, byte_tokenizer(), "x")
    with pytest.raises(InvalidInputError, match="a share is not below 8"):
        FrozenTable(str(tmp_path / "shares"), Setting())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.slow
def test_an_engine_answers_with_it_as_without(table: str, model: str, tmp_path: Path, isolate: bool) -> None:
    config = EngineConfig(model, f"ngram?table={table}", dtype="float64", isolate=isolate)
    prompt = byte_tokenizer().encode("def add(")
    with Engine(config) as engine:
        done = engine.submit(prompt, SamplingParams(max_tokens=24, schedule="sequential")).result()
        plain = engine.submit(prompt, SamplingParams(max_tokens=24, schedule="plain")).result()
    assert done.token_ids == plain.token_ids
    broken = tmp_path / "broken"
    broken.write_bytes(b"no table")
    with pytest.raises(InvalidInputError, match=r"table = .*cannot be read"):
        Engine(EngineConfig(model, f"ngram?table={broken}", dtype="float64", isolate=isolate)).close()
