"""`langchain-card train`: from prompts to a head that an engine uses, killed and resumed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from langchain_card import cli
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.runtime.threads import single_threaded
from langchain_card.testing import prompts
from langchain_card.train import shards
from langchain_card.train.prompts import read_prompts
from langchain_card.train.record import STORED, RecordedText
from langchain_card.train.shards import ShardWriter, texts_in
from tests.support.heads import write_head
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [f"write the number {number} again and again" for number in range(60)]
TOKENS = 4000


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


def command(data: Path, out: Path, *more: str) -> list[str]:
    target = prompts.folder("llama")
    return ["train", "eagle", "--model", target, "--data", str(data), "--tokens", str(TOKENS), "--out", str(out), *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head that was trained without interruption, and its curve. Nine seconds."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_prompts(folder)
    with single_threaded():
        assert cli.main([*command(data, folder / "head"), "--plot", str(folder / "curve.png")]) == 0
    return folder / "head"


def test_a_trained_head_is_used(trained: Path) -> None:
    described = json.loads((trained / "head.json").read_text())
    assert described["answers"] >= 0.9 * TOKENS
    assert described["curve"][-1][1] > TOKENS
    assert (trained.parent / "curve.png").stat().st_size > 5_000
    prompt, params = prompts.encode("<user>write the number 3"), SamplingParams(max_tokens=40)
    answers = []
    for draft in (None, f"head?file={trained}"):
        with Engine(EngineConfig(prompts.folder("llama"), draft, drafters=(), max_model_len=256)) as engine:
            answers.append(engine.submit(prompt, params).result())
    plain, done = answers
    assert done.token_ids == plain.token_ids and done.stats.verified > 0


def test_a_training_that_is_killed_goes_on(trained: Path, tmp_path: Path) -> None:
    """The answers are those of the other training; it is killed once it has two checks. Ten seconds."""
    out, own = tmp_path / "head", tmp_path / "head" / "training"
    own.mkdir(parents=True)
    for file in (trained / "training").glob("[!cb]*"):  # no checkpoint, no best weights
        shutil.copy(file, own)
    arguments = command(trained.parent / "prompts.jsonl", out, "--resume")
    child = subprocess.Popen(
        [sys.executable, "-m", "langchain_card", *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        wait_until(lambda: len(curve_in(own)) >= 2, 120)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL, "it was killed in the middle"
    assert not (out / "head.json").exists()
    assert cli.main(arguments) == 0
    found, wanted = (json.loads((each / "head.json").read_text()) for each in (out, trained))
    assert found["accepted_length"] == pytest.approx(wanted["accepted_length"], abs=0.02)
    assert found["answers"] == wanted["answers"]
    resumed, whole = (load_file(each / "training" / "checkpoint.safetensors") for each in (out, trained))
    begun = write_head("eagle", "untrained", prompts.folder("llama"), tmp_path / "untrained")
    for name, weight in load_file(Path(begun) / "head.safetensors").items():
        moved = (whole[f"weights.{name}"] - weight).abs().max()
        torch.testing.assert_close(
            resumed[f"weights.{name}"], whole[f"weights.{name}"], rtol=0, atol=1e-3 * float(moved)
        )


def curve_in(folder: Path) -> list[Any]:
    file = folder / "checkpoint.safetensors"
    if not file.exists():
        return []
    with safe_open(file, "pt") as opened:
        return list(json.loads(opened.metadata()["state"])["curve"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--resume"], "has no training"),
        (["--data", "none.jsonl"], "none.jsonl': cannot be read"),
        (["--tokens", "10"], "--tokens = 10"),
        (["--tokens", "0"], "--tokens = 0"),
        (["--hours", "1"], "not allowed with"),
    ],
)
def test_a_training_that_cannot_be(change: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    try:
        code = cli.main([*command(write_prompts(tmp_path), tmp_path / "head"), *change])
    except SystemExit as error:  # argparse's
        code = int(error.code or 0)
    assert code and words in capsys.readouterr().err


@pytest.mark.slow
def test_a_target_that_writes_no_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("langchain_card.train.prompts.LEAST_CHARS", 10_000)
    assert cli.main([*command(tmp_path, tmp_path / "head"), "--data", "self"])
    assert "100 of 100 were fragments" in capsys.readouterr().err


def test_prompts_without_room_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One is longer than a text that is recorded; one spells a control token, which is read as characters. 3 s."""
    file = tmp_path / "prompts.jsonl"
    texts = ["x" * 2_000, "<|end|> and on", *PROMPTS[:20]]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    out = tmp_path / "head"
    assert cli.main([*command(file, out)[:-4], "--tokens", "100000", "--out", str(out)]) == 0
    assert caplog.text.count("a prompt is left out") == 1
    stored = [text.read_tokens() for text in texts_in(out / "training")]
    assert len(stored) == 21 and not any(256 in tokens[:20] for tokens in stored)


def test_a_folder_has_one_training(trained: Path, capsys: Any) -> None:
    arguments = command(trained.parent / "prompts.jsonl", trained)
    assert cli.main(arguments) and "has a training already" in capsys.readouterr().err
    other = trained.parent / "other.jsonl"
    other.write_text('{"prompt": "another"}')
    assert cli.main([*command(other, trained), "--resume"]) and "--data = " in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[]", '{"text": 1}', '{"prompt": 1}', '{"messages": []}', '{"messages": [1]}'])
def test_a_line_that_is_no_prompt(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(InvalidInputError, match="line 2"):
        read_prompts(file)


def test_shards_hold_what_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 2_000)
    writer, texts = ShardWriter(tmp_path, 8_000), [recorded(length) for length in range(10, 60, 7)]
    for text in texts:
        writer.add(text)
    writer.flush()
    stored = texts_in(tmp_path)
    assert writer.is_full and 1 < len(stored) < len(texts)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8_000
    for text, found in zip(texts, (each.read() for each in stored), strict=False):
        assert found.token_ids == text.token_ids and found.num_prompt == text.num_prompt
        assert torch.equal(found.states, text.states)
    assert writer.num_tokens == sum(each.num_tokens for each in stored) == ShardWriter(tmp_path, 8_000).num_tokens


def recorded(length: int) -> RecordedText:
    return RecordedText([*range(length)], torch.randn(2, length - 1, 8).to(STORED), 3)
