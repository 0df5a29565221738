"""`langchain-card bench`: fair turns, honest columns, real peers on real weights; what remains of a run cut short."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from langchain_card.bench import prompts
from langchain_card.bench.bounds import Measured
from langchain_card.bench.compare import HEADERS, WARM_UPS, Comparison, compare, markdown, measure_gaps, remarks
from langchain_card.bench.method import PeakMemory, Run
from langchain_card.bench.method_table import METHODS, PEERS
from langchain_card.bench.methods import DecodeOptions, EngineMethod, SamplingParams, open_methods
from langchain_card.bench.peers import peer, weights
from langchain_card.bench.peers.peer import Peer
from langchain_card.bench.plots import plot_comparison
from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.errors import CorruptModelError, EngineError, InvalidInputError
from langchain_card.limits import Pins
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
DRAFTED = ("sequential", "parallel", "card", "model", "beside", "below", "hf-assisted")
PROMPTS = [list(range(40, 60)), list(range(70, 82)), list(range(90, 95))]


class Scripted:
    """A method that takes as long as it is told."""

    def __init__(self, name: str, seconds: Sequence[float], answer: tuple[int, ...] = (1, 2, 3)) -> None:
        self.name, self.weights = name, "none"
        self.calls: list[tuple[list[list[int]], int]] = []
        self._seconds, self._answer = seconds, answer

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        self.calls.append(([list(prompt) for prompt in prompts], repeat))
        seconds = self._seconds[len(self.calls) - 1 - WARM_UPS] if len(self.calls) > WARM_UPS else 1.0
        if seconds < 0:
            raise EngineError(self.name, seconds, "failed on purpose")
        return Run((self._answer,) * len(prompts), 0.1, seconds, 10, peak=1 << 30)


def run(*methods: Scripted, batch: int = 1, repeats: int = 1) -> Comparison:
    found = Comparison({method.name: method.weights for method in methods})
    compare(found, methods, PROMPTS, 3, batch, repeats, str, lambda *_: None)
    return found


def test_figures_of_a_comparison_are_those_of_its_runs() -> None:
    plain, fast = Scripted("plain", [1.0, 2.0, 4.0]), Scripted("fast", [0.5, 2.0, 1.0])
    found = run(plain, fast)
    assert found.speedups("fast") == [2.0, 1.0, 4.0]
    times = found.speedup("fast")
    assert times is not None and (times.value, times.low, times.high) == (2.0, 1.0, 4.0)
    assert [prompts for prompts, _ in fast.calls[WARM_UPS:]] == [[prompt] for prompt in PROMPTS]
    assert len({repeat for _, repeat in fast.calls[:WARM_UPS]} | {0}) == WARM_UPS + 1, "nothing is learnt before"
    head, line, first, second = markdown(found).splitlines()
    assert all(name in head for name in HEADERS) and set(line) <= set("|- ") and "| plain " in first
    assert "10.0 (" in second and "| 2.00  " in second and "3 of 3" in second and "1.0 GiB" in second


def test_bounds_are_given_where_there_are_enough_prompts() -> None:
    few = run(Scripted("plain", [1.0] * 3), Scripted("fast", [0.5] * 3))
    assert "Bounds are given from 6 prompts on." in remarks(few) and " to " not in markdown(few).split("2.00")[1]
    many = Comparison(few.weights, [replace(row, group=row.group + 3 * i) for i in range(3) for row in few.rows])
    assert "2.00 (2.00 to 2.00)" in markdown(many) and not remarks(many)


def test_repeats_of_a_prompt_count_once() -> None:
    found = run(Scripted("plain", [1.0] * 9), Scripted("fast", [0.5, 1, 1, 0.25, 1, 1, 0.5, 1, 1]), repeats=3)
    assert found.speedups("fast") == [2.0, 1.0, 1.0]
    assert len(found.rows) == 18 and found.identical("fast") == (9, 9)


def test_turns_change() -> None:
    found = run(Scripted("plain", [1.0] * 30), Scripted("a", [1.0] * 30), Scripted("b", [1.0] * 30), repeats=10)
    firsts = [row.method for row in found.rows[::3]]
    assert {*firsts} == {"plain", "a", "b"} and max(map(firsts.count, firsts)) < 20


def test_a_method_that_fails_is_left_out_and_the_others_go_on() -> None:
    found = run(Scripted("plain", [1.0] * 3), Scripted("weak", [0.5, -1.0, 0.5]), Scripted("fast", [0.5] * 3))
    assert [len(found.of(name)) for name in ("plain", "weak", "fast")] == [3, 1, 3]
    assert "weak was left out" in remarks(found)[0] and "on purpose" in remarks(found)[0]
    with pytest.raises(EngineError, match="on purpose"):
        run(Scripted("plain", [1.0, -1.0]), Scripted("fast", [0.5] * 3))


def test_bounds_hold_the_truth_as_often_as_they_say() -> None:
    import random

    rng, held = random.Random(1), 0
    for _ in range(200):
        measured = Measured.of([rng.gauss(1.5, 0.3) for _ in range(20)], statistics.median, draws=400)
        held += measured.low <= 1.5 <= measured.high
    assert 0.88 < held / 200 <= 1.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = tiny.make_target("llama", (folder := tmp_path_factory.mktemp("pair")) / "target")
    pins = Pins(lead=3, window=4)  # drafts whatever it costs
    return EngineConfig(target, tiny.make_draft(target, folder / "draft", noise=0.02), dtype="float64", pins=pins)


@pytest.fixture(scope="module")
def real(pair: EngineConfig) -> Iterator[tuple[Engine, Comparison]]:
    """Every method there is on one pair, in float64, where all must say the same."""
    kinds = {name: PEERS.get(name, PEERS["hf-generate"]) for name in METHODS}
    names = [name for name, kind in kinds.items() if not (kind.package or kind.program)]
    with contextlib.ExitStack() as held:
        engine, methods, failed = open_methods(names, pair, DecodeOptions(), held, Engine, lambda _: None)
        found = Comparison({method.name: method.weights for method in methods})
        compare(found, methods, PROMPTS[:2], 24, 1, 1, engine.tokenizer.decode, lambda *_: None)
        measure_gaps(found, engine, PROMPTS[:2], 1, lambda _: None)
        assert not failed
        yield engine, found


@pytest.mark.slow
def test_all_methods_run_on_the_same_weights_and_say_the_same(real: tuple[Engine, Comparison]) -> None:
    found = real[1]
    assert not found.failed and len(found.weights) >= 12
    for name, said in found.weights.items():
        assert said.split(",")[0] == ("float32" if name == "hf-float32" else "float64")
        assert ("draft float64" in said) == (name in DRAFTED)
        if name not in ("plain", "hf-float32"):
            assert found.identical(name) == (2, 2), remarks(found)
    assert all(row.run.tokens == 23 for row in found.rows if not row.method.startswith("hf-a"))
    assert all(0 < row.run.tokens <= 23 and row.run.first > 0 and row.run.seconds > 0 for row in found.rows)
    assert all(row.run.peak > 1 << 27 for row in found.rows), "python with torch takes more"
    card = found.of("card")[0].run.figures
    assert card["accepted_length"] > 1 and 0 < card["acceptance"] <= 1 and 0 < card["target_busy"] <= 1.01
    assert found.of("plain")[0].run.figures["accepted_length"] == 1


@pytest.mark.slow
def test_a_text_that_differs_is_told_with_the_place_and_how_close_it_was(real: tuple[Engine, Comparison]) -> None:
    engine, found = real
    (row,) = [row for row in found.of("plain") if row.group == 0]
    answer = row.run.token_ids[0]
    other = ((answer[0] + 1) % 200, *answer[1:])
    made_up = Comparison({"plain": "", "loose": "", "short": ""})
    answers = (("plain", answer), ("loose", other), ("short", answer[:7]))
    scripted = [Scripted(name, [1.0], ids) for name, ids in answers]
    compare(made_up, scripted, PROMPTS[:1], 24, 1, 1, engine.tokenizer.decode, lambda *_: None)
    assert [each.gap for each in made_up.differences] == [None, None], "nobody was asked yet"
    measure_gaps(made_up, engine, PROMPTS, 1, lambda _: None)
    loose, short = made_up.differences
    assert (loose.position, loose.own, loose.plain) == (0, *map(engine.tokenizer.decode, ([other[0]], [answer[0]])))
    assert (short.position, short.own) == (7, "") and made_up.identical("loose") == (0, 1)
    likeliest = engine.submit(PROMPTS[0], SamplingParams(max_tokens=1, logprobs=2)).result()
    best, second = (logprob for _, logprob in likeliest.logprobs[0].top)
    assert loose.gap == pytest.approx(best - second) and loose.gap > 0
    (said,) = [line for line in remarks(made_up) if line.startswith("loose")]
    assert "loose is not lossless here: 1 of" in said and "nats apart" in said
    made_up.weights["loose"] = "float32"
    assert any("loose runs on other weights: 1 of" in line for line in remarks(made_up))


@pytest.mark.slow
def test_several_prompts_at_once(pair: EngineConfig) -> None:
    """Those of different lengths are padded for transformers; answers stay what they are alone."""
    with contextlib.ExitStack() as held:
        _, methods, _ = open_methods(
            ["plain", "card", "hf-generate"], pair, DecodeOptions(), held, Engine, lambda _: None
        )
        found = Comparison({method.name: method.weights for method in methods})
        compare(found, methods, PROMPTS, 16, 3, 1, str, lambda *_: None)
    assert found.identical("card") == found.identical("hf-generate") == (3, 3)
    assert {row.run.tokens for row in found.rows} == {45} and len(found.rows) == 3


def test_a_temperature_gives_the_same_draws_under_every_schedule(pair: EngineConfig) -> None:
    with contextlib.ExitStack() as held:
        _, methods, _ = open_methods(["plain", "card", "ngram"], pair, DecodeOptions(0.8), held, Engine, lambda _: None)
        found = Comparison({method.name: method.weights for method in methods})
        compare(found, methods, PROMPTS, 24, 1, 1, str, lambda *_: None)
    assert found.identical("card") == found.identical("ngram") == (3, 3)


@pytest.mark.slow
def test_flashspec(pair: EngineConfig) -> None:
    pytest.importorskip("flashspec")
    with pytest.raises(EngineError, match="float64"):
        Peer("flashspec", pair)
    peer = Peer("flashspec", single := replace(pair, dtype="float32"))
    try:
        with Engine(single) as engine:
            plain = EngineMethod("plain", "", engine, DecodeOptions()).run(PROMPTS[:1], 16, 0)
        seen = peer.run(PROMPTS[:1], 16, 0)
    finally:
        peer.close()
    assert seen.token_ids == plain.token_ids and 0 < seen.tokens < 16 and seen.figures["accepted_length"] > 1


@pytest.mark.slow
def test_habits_of_a_models_folder_change_nothing(pair: EngineConfig, tmp_path: Path) -> None:
    """Its generation_config.json may ask for penalties, which plain decoding here knows nothing of."""
    folder = tmp_path / "model"
    shutil.copytree(pair.model, folder)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.9, "max_length": 12}')
    own = replace(pair, model=str(folder), draft_model=None)
    with contextlib.ExitStack() as held:
        _, methods, _ = open_methods(["plain", "hf-generate"], own, DecodeOptions(), held, Engine, lambda _: None)
        found = Comparison({method.name: method.weights for method in methods})
        compare(found, methods, PROMPTS[:1], 24, 1, 1, str, lambda *_: None)
    assert found.identical("hf-generate") == (1, 1)


def test_a_peer_without_room_is_left_out(pair: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "free_bytes", lambda device: 1 << 10)
    with contextlib.ExitStack() as held:
        _, methods, failed = open_methods(["plain", "hf-generate"], pair, DecodeOptions(), held, Engine, lambda _: None)
        assert [method.name for method in methods] == ["plain"] and "GiB are free" in failed["hf-generate"]


def test_a_peer_that_hangs_is_ended(pair: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SECONDS", 0.5)  # less than Python takes to start
    with pytest.raises(EngineError, match="ended after 0 s"):
        Peer("hf-generate", pair)


def test_leaving_while_a_peer_works_leaves_nothing_behind(pair: EngineConfig) -> None:
    """A timer that was left would hold up the end of the program."""
    threads, children = set(threading.enumerate()), set(psutil.Process().children())
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    interrupt = threading.Timer(0.5, signal.pthread_kill, (main_thread, signal.SIGINT))  # while it loads
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        Peer("hf-generate", pair)
    for timer in (one for one in set(threading.enumerate()) - threads if isinstance(one, threading.Timer)):
        timer.join(10)
        assert not timer.is_alive()
    assert set(psutil.Process().children()) <= children


@pytest.mark.slow
def test_a_peer_that_fails_says_why(pair: EngineConfig) -> None:
    peer = Peer("hf-generate", pair)
    with pytest.raises(EngineError, match=r"IndexError|out of range"):
        peer.run([[10**6]], 16, 0)
    assert len(peer.run(PROMPTS[:1], 16, 0).token_ids[0]) == 16, "bad input ends one run"
    peer._process.kill()
    with pytest.raises(EngineError, match="its process ended"):
        peer.run(PROMPTS[:1], 16, 0)
    peer.close()


def test_the_command_compares_and_writes(
    pair: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--model", pair.model, "--draft-model", str(pair.draft_model), "--dtype", "float64"]
    files = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    assert main(["bench", *own, "--count", "3", "--max-tokens", "12", "--methods", "card", *files]) == 0
    said = capsys.readouterr()
    assert "| plain " in said.out and "| card (" in said.out and "3 of 3" in said.out and "3 of 3, tokens/s" in said.err
    written = json.loads((tmp_path / "rows.json").read_text())
    assert len(written["rows"]) == 6 and written["machine"]["cores"] >= 1 and "bench" in written["command"]
    assert written["engine"]["model"] == pair.model and written["prompts"] == ["own"]
    assert written["asked"] == {"max_tokens": 12, "temperature": 0.0, "batch": 1}
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_cut_short_leaves_what_it_measured(
    pair: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, calls = EngineMethod.run, list[str]()

    def interrupted(self: Any, prompts: Any, max_tokens: int, repeat: int) -> Run:
        calls.append(self.name)
        if len(calls) > 2 * (WARM_UPS + 2):
            raise KeyboardInterrupt
        return answer(self, prompts, max_tokens, repeat)

    monkeypatch.setattr(EngineMethod, "run", interrupted)
    own = ["--model", pair.model, "--draft-model", str(pair.draft_model), "--dtype", "float64", "--max-tokens", "8"]
    assert main(["bench", *own, "--methods", "card", "--json", str(tmp_path / "rows.json")]) == 130
    assert "| card (" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "hf-asisted"], "did you mean hf-assisted"),
        (["--methods", "card", "--draft-model", "none"], "needs a draft"),
        (["--methods", "model", "--draft-model", "ngram"], "needs a draft model"),
        (["--methods", "hf-assisted", "--draft-model", "ngram"], "needs a draft model"),
        (["--methods", "hf-assisted", "--batch", "4"], "one prompt at a time"),
        (["--prompts", "absent.jsonl"], "own, copying, code, maths, chat, multilingual, humaneval"),
        (["--count", "0"], "--count"),
        (["--batch", "0"], "--batch"),
        (["--repeat", "0"], "--repeat"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--json", "nowhere/rows.json"], "mkdir -p nowhere"),
        (["--plot", "rows.txt"], "must end in .png"),
        (["--methods", "openvino"], "pip install openvino-genai"),
        (["--steps", "steps.json", "--draft-model", "none"], "must be a model"),
    ],
)
def test_the_command_looks_before_it_works(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err


def test_an_empty_set_of_prompts_and_a_pair_that_does_not_fit(
    pair: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main(["bench", "--prompts", str(tmp_path / "empty.jsonl")]) == 2
    assert "holds no prompt" in capsys.readouterr().err
    monkeypatch.setattr("langchain_card.engine.backends.free_bytes", lambda device: 1 << 20)
    own = ["--model", pair.model, "--draft-model", str(pair.draft_model), "--dtype", "float64"]
    assert main(["bench", *own, "--methods", "plain"]) == 2
    assert "GiB are free" in capsys.readouterr().err


def test_humaneval_comes_from_its_authors_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path))
    texts = prompts.find("humaneval", 1000)
    assert len(texts) == 164 and texts[0].startswith("from typing import List") and "def " in texts[-1]
    monkeypatch.setattr(prompts, "download_wheel", lambda *_: pytest.fail("it is here"))
    assert prompts.find("humaneval", 3) == texts[:3]


def test_prompts_are_read_as_they_are(tmp_path: Path) -> None:
    rows = ['{"prompt": "a\u2028b"}', '{"prompt": ["one", "two"]}', '{"prompt": null, "question": "three"}']
    (tmp_path / "set.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert prompts.load(tmp_path / "set.jsonl", 9) == ["a\u2028b", "one", "three"]
    for wrong in ('{"prompt": 5}', '{"prompt": [{"a": 1}]}', '["a"]', '{"prompt": null}', '{"asked": "a"}', "a"):
        (tmp_path / "set.jsonl").write_text('{"prompt": "a"}\n' + wrong)
        with pytest.raises(InvalidInputError, match=r"set.jsonl, line 2.*(has no text under prompt, |is no JSON)"):
            prompts.load(tmp_path / "set.jsonl", 9)
    (tmp_path / "set.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        prompts.load(tmp_path / "set.jsonl", 9)


def test_a_set_that_was_changed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path))
    monkeypatch.setattr(prompts, "_SHA256", "0" * 64)
    with pytest.raises(CorruptModelError, match="sha256"):
        prompts.find("humaneval", 1)
    assert not (tmp_path / "prompts" / "humaneval.jsonl").exists()
    with pytest.raises(InvalidInputError, match="none of the sets"):
        prompts.find("humanevl", 1)


def test_the_peak_is_of_the_time_since_it_was_reset() -> None:
    peak = PeakMemory(cuda=False)
    peak.reset()
    before = peak.read()
    held = bytearray(1 << 28)
    held[:: 1 << 12] = b"x" * (1 << 16)
    assert peak.read() > before + (1 << 27)
    del held
    peak.reset()
    if Path("/proc/self/clear_refs").exists():
        assert peak.read() < before + (1 << 27)


def test_a_picture_of_a_comparison(tmp_path: Path) -> None:
    plot_comparison(
        run(Scripted("plain", [1.0, 2.0, 4.0]), Scripted("fast", [0.5, 2.0, 1.0])), tmp_path / "race.svg", "a title"
    )
    assert "<svg" in (tmp_path / "race.svg").read_text()
