"""`langchain-card bench --context`: texts that are used once, answers of the length that is wanted, honest medians."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import bench_page
from benchmarks.pages import marks
from langchain_card.bench.compare import WARM_UPS, Comparison, Row, markdown_table
from langchain_card.bench.long_texts import SOURCES, compare_long_texts, long_texts, prompts_of, table
from langchain_card.bench.method import Run, longest_gap
from langchain_card.bench.methods import DecodeOptions, EngineMethod
from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Pins
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = tiny.make_target("llama", (folder := tmp_path_factory.mktemp("pair")) / "target")
    pins = Pins(lead=3, window=4)  # drafts whatever it costs
    return EngineConfig(target, tiny.make_draft(target, folder / "draft", noise=0.02), dtype="float64", pins=pins)


class Recording:
    """A method that answers nothing, and keeps what it was to read."""

    name, weights = "plain", "none"

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], int]] = []

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        self.calls.append((tuple(prompts[0]), max_tokens))
        return Run(((1,) * max_tokens,), 0.1, 1.0, max_tokens - 1)


def test_no_text_is_read_twice(pair: EngineConfig) -> None:
    texts, method, turns = long_texts([900, 300], [4, 2], 2), Recording(), list[int]()
    with Engine(pair) as engine:
        found = Comparison({"plain": "none"})
        compare_long_texts(found, [method], texts, engine, lambda _, number, total: turns.append(total - number))
        said = [engine.tokenizer.decode(ids) for ids, _ in method.calls]
    assert turns == list(reversed(range(16))) and len(said) == 16 + WARM_UPS
    parts = {text[at : at + 100] for text in said for at in range(100, len(text) - 200, 100)}
    assert sum(len(range(100, len(text) - 200, 100)) for text in said) == len(parts) > 40
    assert all(abs(len(ids) - t.context) <= 8 for (ids, _), t in zip(method.calls[WARM_UPS:], texts, strict=True))
    assert [tokens for _, tokens in method.calls[WARM_UPS:]] == [text.answer for text in texts]
    assert [text.context for text in texts] == sorted(text.context for text in texts), "peaks of memory rise with them"
    assert {text.kind for text in texts} == {*SOURCES}


def test_sources_that_are_used_up(pair: EngineConfig) -> None:
    with Engine(pair) as engine, pytest.raises(InvalidInputError, match="needs more prose than there is"):
        prompts_of(long_texts([10**6], [1], 1), engine)


def test_an_answer_has_its_length_although_the_model_would_end_it(pair: EngineConfig) -> None:
    options = DecodeOptions(), DecodeOptions(ignore_end=True)
    with Engine(pair) as engine:
        for prompt in ([position, 2, 3] for position in range(10, 60)):
            ends, goes_on = (EngineMethod("plain", "", engine, option).run([prompt], 96, 0) for option in options)
            assert len(goes_on.token_ids[0]) == 96 and 0 < goes_on.gap <= goes_on.seconds
            if len(ends.token_ids[0]) < 96:
                return
    pytest.fail("no answer ended by itself: this test would show nothing")


def test_a_line_has_the_medians_of_its_texts() -> None:
    texts = long_texts([300, 100], [16], 3)
    runs = [Run(((1,) * 16,), float(i), 1.0 + i, 15, 0.25 * i, i << 30) for i in range(len(texts))]
    rows = [Row("plain", group, texts[group].repeat, run) for group, run in enumerate(runs)]
    header, short, long = table(Comparison({"plain": "none", "absent": "none"}, rows), texts)
    assert header[:3] == ("read", "written", "method")
    # code is every second text from 0, prose from 1; six texts to a length
    assert short == ("100", "16", "plain", "2.50 s", "5.0", "3.8", "5.0 s", "7.0 s", "0.62 s", "5.0 GiB")
    assert long[0] == "300" and long[3] == "8.50 s" and long[-1] == "11.0 GiB"
    assert markdown_table([header, short]).startswith("| read | written | method |")


def test_the_longest_gap() -> None:
    assert longest_gap([1.0, 1.5, 3.0, 3.1]) == 1.5 and longest_gap([1.0]) == longest_gap([]) == 0.0
    run = Run.of_steps(((1, 2, 3, 4),), 10.0, [11.0, 11.5, 13.0], 2)
    assert (run.first, run.seconds, run.whole, run.tokens, run.gap) == (1.0, 2.0, 3.0, 2, 1.5)


def test_the_command_measures_draws_and_fills_the_page(
    pair: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["--model", pair.model, "--draft-model", str(pair.draft_model), "--dtype", "float64"]
    files = ["--json", str(tmp_path / "long_texts.json"), "--plot", str(tmp_path / "long_texts.png")]
    assert main(["bench", *own, "--context", "120", "250", "--answer", "3", "6", *files]) == 0
    said = capsys.readouterr()
    assert "8 of 8: 250 tokens of prose read, 6 written, seconds: plain" in said.err
    lines = said.out.splitlines()
    assert lines[0].startswith("| read") and sum(line.startswith("| 250  | 6 ") for line in lines) == 2
    assert (tmp_path / "long_texts.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "long_texts.json").read_text())
    assert len(written["rows"]) == 16 and len(written["texts"]) == 8 and written["packages"] == {}
    assert all(len(row["run"]["token_ids"][0]) == written["texts"][row["group"]]["answer"] for row in written["rows"])
    assert not written["differences"], "both methods are exact"
    begin, end = marks("long-texts")
    (tmp_path / "performance.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    monkeypatch.setattr(bench_page, "DOCS", tmp_path)
    bench_page.main("long-texts")
    text = (tmp_path / "performance.md").read_text()
    assert text.startswith("before\n") and text.endswith(f"{end}\nafter\n") and "old" not in text
    assert lines[0] in text and "bench" in text and "cores" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "0"], "--context"),
        (["--context", "100", "--answer", "0"], "--answer"),
        (["--answer", "16"], "add --context"),
        (["--context", "100", "--batch", "2"], "--batch"),
        (["--context", "100", "--max-tokens", "16"], "--max-tokens"),
        (["--context", "100", "--prompts", "humaneval"], "--prompts"),
        (["--context", "100", "--steps", "steps.json"], "--steps"),
        (["--context", "100", "--max-model-len", "512"], "--max-model-len"),
        (["--context", "100", "--prefix-cache", "folder"], "--prefix-cache"),
        (["--context", "100", "--methods", "openvino"], "pip install openvino-genai"),
    ],
)
def test_the_command_looks_before_it_works(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err
