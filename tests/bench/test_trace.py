"""Timelines: what they say is what was emitted and counted, and it can be read and seen."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from langchain_card.bench.plots import draw_timeline, plot_timeline
from langchain_card.bench.timeline import Timeline, Tracer, corrections, to_perfetto
from langchain_card.cli import main
from langchain_card.config import EngineConfig, Schedule
from langchain_card.core import messages as m
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.request import SamplingParams
from langchain_card.engine.driver import Driver
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits, Pins

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(40, 60))
PROPOSAL = m.Proposal("model", 1, 0, 0, 0, 1, (0,), (5,), (-0.1,), forwarded=2, together=4, elapsed=0.5)
SCHEDULES: tuple[Schedule, ...] = ("plain", "sequential", "parallel")


@pytest.fixture(scope="module")
def traced(tiny_pairs: dict[str, tuple[str, str]]) -> Iterator[tuple[Engine, Tracer]]:
    target, draft = tiny_pairs["llama"]
    config = EngineConfig(target, draft, dtype="float64", pins=Pins(lead=4, window=6))  # drafts whatever it costs
    with Engine(config, observe=(tracer := Tracer())) as engine:
        yield engine, tracer


def trace(traced: tuple[Engine, Tracer], schedule: Schedule, tokens: int = 96) -> tuple[Timeline, Completion]:
    engine, tracer = traced
    tenant = str(len(tracer.timelines))  # none takes over what another has read
    generation = engine.submit(PROMPT, SamplingParams(max_tokens=tokens, schedule=schedule, tenant=tenant))
    done = generation.result()
    return tracer.timelines[generation.request.request_id], done


@pytest.mark.parametrize("tokens", [12, 96])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_timeline_is_what_was_emitted_and_counted(
    traced: tuple[Engine, Tracer], schedule: Schedule, tokens: int
) -> None:
    timeline, done = trace(traced, schedule, tokens)
    stats = done.stats
    assert tuple(token for one in timeline.rounds for token in one.token_ids) == done.token_ids
    assert [source for one in timeline.rounds for source in one.sources] == [piece.source for piece in done.pieces]
    assert len(timeline.rounds) == stats.rounds and timeline.reason is not None
    assert timeline.rounds[0].read == len(PROMPT) - 1 and timeline.rounds[-1].hit is None
    assert sum(bool(one.hit) for one in timeline.rounds) in (stats.hits, stats.hits - 1), "the last is not asked"
    assert {one.schedule for one in timeline.rounds} == {schedule}
    for before, after in itertools.pairwise(timeline.rounds):
        assert before.begin < before.end <= after.begin + 1e-4, "one target, one pass at a time"
    assert timeline.sources == ([] if schedule == "plain" else ["model"]) or (tokens == 12 and not timeline.sources)
    spent = {"target": stats.target_busy, "model": stats.draft_busy}
    for lane in ("target", *timeline.sources):
        assert timeline.busy(lane) == pytest.approx(spent[lane] / stats.decode_seconds, abs=0.02)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_corrections_lead_from_a_pass_to_the_first_step_that_knows(
    traced: tuple[Engine, Tracer], schedule: Schedule
) -> None:
    timeline, _ = trace(traced, schedule)
    found = corrections(timeline)
    assert len(found) > len(timeline.rounds) / 4
    assert all(step.begin >= done.end - 2e-4 for done, step in found), "not before it was told"
    knew = {(step.source, step.begin): step.applied_len for _, step in found}
    assert len(knew) == len(found), "each step hears of one"


def test_a_trace_for_perfetto_is_whole(traced: tuple[Engine, Tracer]) -> None:
    timeline, done = trace(traced, "parallel")
    written = json.loads(json.dumps(to_perfetto(timeline, traced[0].tokenizer.decode)))
    events = written["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert [*lanes.values()] == ["answer", "target", "model"]
    blocks = {name: [e for e in events if e["ph"] == "X" and lanes[e["tid"]] == name] for name in lanes.values()}
    assert len(blocks["target"]) == len(blocks["answer"]) == done.stats.rounds
    assert len(blocks["model"]) == len(timeline.drafts)
    assert "".join(e["name"] for e in blocks["answer"]) == traced[0].tokenizer.decode(done.token_ids)
    assert all(e["dur"] >= 0 and e["ts"] >= -1 for own in blocks.values() for e in own)
    starts, ends = ([e for e in events if e["ph"] == kind] for kind in "sf")
    assert {e["id"] for e in starts} == {e["id"] for e in ends} and len(starts) == len(corrections(timeline)) > 0
    for start, end in zip(starts, ends, strict=True):
        assert any(b["ts"] <= start["ts"] <= b["ts"] + b["dur"] for b in blocks["target"]), "bound to its block"
        assert any(b["ts"] <= end["ts"] <= b["ts"] + b["dur"] for b in blocks["model"])
    assert written["otherData"]["busy"]["target"] == timeline.busy("target")


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 8), (2, 500)])
def test_a_picture_is_drawn_of_any_rounds(
    traced: tuple[Engine, Tracer], first: int, count: int, tmp_path: Path
) -> None:
    timeline, _ = trace(traced, "parallel", 40)
    path = tmp_path / "trace.png"
    plot_timeline(timeline, lambda ids: "é\n漢 $x$\x00" * len(ids), {"target": "a", "model": "b"}, path, first, count)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_notebook_keeps_its_own_backend_and_gets_the_figure(traced: tuple[Engine, Tracer]) -> None:
    timeline, _ = trace(traced, "parallel", 40)
    figure = draw_timeline(timeline, traced[0].tokenizer.decode, {"target": "a", "model": "b"})
    assert figure.axes[0].texts, "what an inline backend shows"
    script = "import sys, langchain_card.bench.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", script], check=False).returncode


def test_requests_that_run_together_have_timelines_of_their_own(traced: tuple[Engine, Tracer]) -> None:
    engine, tracer = traced
    params = SamplingParams(max_tokens=24, schedule="sequential")
    generations = [engine.submit([*PROMPT, 60 + i], params) for i in range(3)]
    for generation in generations:
        done, timeline = generation.result(), tracer.timelines[generation.request.request_id]
        assert tuple(token for one in timeline.rounds for token in one.token_ids) == done.token_ids
        assert timeline.busy("target") == pytest.approx(done.stats.target_busy / done.stats.decode_seconds, abs=0.02)


def test_a_step_that_ends_during_a_pass_is_seen_to_do_so() -> None:
    """What is published while the target works is heard when it has ended, and says when it was published."""
    now, target = [1.0], SimpleNamespace()
    core = Coordinator([], Limits(), Controller(shared_device=True))
    driver = Driver(core, lambda: target, {}, clock=lambda: now[0])  # type: ignore[arg-type, return-value]
    driver.publish(PROPOSAL)
    now[0] = 5.0
    assert driver._arrived() == [m.Proposed(PROPOSAL, 1.0)]


def test_a_step_that_requests_share_counts_as_long_as_ones_share() -> None:
    tracer = Tracer()
    tracer.timelines[1] = Timeline(1)
    tracer(m.Proposed(PROPOSAL, 3.0), [])
    tracer(m.Proposed(replace(PROPOSAL, request_id=2), 3.0), [])
    (step,) = tracer.timelines[1].drafts
    assert (step.begin, step.end, step.expanded, step.published) == (2.5, 3.0, 2, 1)


def test_an_engine_in_a_process_of_its_own_is_not_watched() -> None:
    with pytest.raises(InvalidInputError, match="isolate"):
        Engine(EngineConfig(isolate=True), observe=Tracer())


def test_the_command_writes_both(
    tiny_pairs: dict[str, tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny_pairs["llama"]
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    pair = ["--model", target, "--draft-model", draft, "--dtype", "float64", "--max-tokens", "40"]
    assert main(["trace", "What is this?", *pair, *files]) == 0
    said = capsys.readouterr()
    assert "40 tokens in " in said.out and f"{draft}: " in said.out and "perfetto" in said.err
    about = json.loads((tmp_path / "t.json").read_text())["otherData"]
    shown = [int(line.rsplit("busy ", 1)[1].split("%")[0]) for line in said.out.splitlines() if "busy" in line]
    assert shown == [pytest.approx(100 * share, abs=1) for share in about["busy"].values()]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json", "nowhere/t.json"], "mkdir -p nowhere"),
        (["--plot", "t.txt"], "must end in .png"),
        (["--rounds", "0"], "--rounds"),
        (["--first", "-1"], "--first"),
        (["--max-tokens", "0"], "max_tokens"),
    ],
)
def test_the_command_looks_before_it_works(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *options]) == 2
    assert said in capsys.readouterr().err
