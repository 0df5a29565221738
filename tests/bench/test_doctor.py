"""`langchain-card doctor`: what it says is so."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from langchain_card.bench import doctor, machine
from langchain_card.bench.step_times import Device
from langchain_card.cli import main
from langchain_card.config import EngineConfig, Schedule
from langchain_card.core.request import SamplingParams
from langchain_card.engine.drafter_hosts import SCRATCH
from langchain_card.engine.engine import Engine
from langchain_card.errors import DeviceError
from langchain_card.limits import Limits
from langchain_card.models import loader
from langchain_card.models.budget import check_budget
from langchain_card.models.loader import resolve
from langchain_card.runtime.cpu import vectors
from langchain_card.runtime.step_timer import StepTimer
from tests.simulation.cuda import simulated_cuda
from tests.support import tiny, vocabularies

pytestmark = pytest.mark.usefixtures("one_thread")
FAST = Device("here", True, "", {1: 0.08, 16: 0.1}, {1: 0.02, 16: 0.04}, (1.5, 1.4))
SLOW = Device("here", True, "", {1: 0.08, 16: 0.1}, {1: 0.06, 16: 0.1})
PAIR: Any = SimpleNamespace(draft=object())
ALONE: Any = SimpleNamespace(draft=None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    return ["--model", target, "--draft-model", draft, "--dtype", "float64"]


def trial(plain: float, best: float, hits: float = 0.9, chosen: Schedule = "sequential") -> doctor.Trial:
    measured: dict[Schedule, float] = {"plain": plain, "sequential": best}
    expected: dict[Schedule, float] = {"plain": 1 / plain, "sequential": 1 / best}
    return doctor.Trial(measured, expected, hits, chosen, shared=True)


def advice(of: doctor.Trial, device: Device | None = FAST, pair: Any = PAIR) -> str:
    return " ".join(doctor.advice(of, device, pair))


def test_advice_fits_what_was_measured() -> None:
    assert trial(10.0, 20.0).predicted == pytest.approx(2.0)
    assert "gains nothing" not in advice(trial(10.0, 20.0)) and "gains nothing" in advice(trial(10.0, 9.0))
    assert "slow beside its target" in advice(trial(10.0, 11.0), SLOW)
    assert "slow beside its target" not in advice(trial(10.0, 20.0), FAST)
    assert "second GPU" in advice(trial(10.0, 20.0), FAST) and "second GPU" not in advice(trial(10.0, 20.0), SLOW)
    assert "often wrong" in advice(trial(10.0, 12.0, hits=0.5)) and "often wrong" not in advice(trial(10.0, 12.0))
    assert "small model of the same family" in advice(trial(10.0, 12.0), None, ALONE)
    assert all("langchain-card bench" in advice(trial(10.0, best)) for best in (5.0, 20.0))


def test_the_sum_of_memory_is_what_the_engine_asks_for(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of one sequence and that of all is exactly what `check_budget` demands."""
    config = EngineConfig(pair[1], pair[3], dtype="float64", max_model_len=100_000, limits=Limits(max_num_seqs=4))
    monkeypatch.setattr(loader, "context_length", lambda _: 100_000)
    found = resolve(config)
    alone = re.findall(
        r"one full sequence takes ([\d.]+) GiB of cpu in all", " ".join(doctor.about_memory(found, config))
    )
    (line,) = doctor.about_room(found, config)
    (full,) = re.findall(r"up to 4 requests will run at once, which take ([\d.]+) GiB of cpu when all are full", line)
    for num_seqs, said in ((1, float(alone[0])), (4, float(full))):
        ask = partial(check_budget, found, num_seqs, config.limits.max_window, SCRATCH)
        ask(free=lambda _, room=said + 0.06: int(room * 2**30))
        with pytest.raises(DeviceError):
            ask(free=lambda _, room=said - 0.06: int(room * 2**30))


@pytest.mark.slow  # 3 seconds
def test_both_devices_of_a_draft_beside_one_gpu(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With given times: 10 ms on the GPU, 4 ms on the CPU."""
    steps = lambda timer, rows: 0.01 if timer._runner.device.type == "cuda" else 0.004  # noqa: E731
    monkeypatch.setattr(StepTimer, "seconds", steps)
    config = EngineConfig(pair[1], pair[3], dtype="float64", max_model_len=512, device="cuda:0")
    with simulated_cuda(num_devices=1):
        steps, choice = doctor.about_placement(config, resolve(config))
    assert "takes 10.0 ms on cuda:0, in turns with the target, and 4.0 ms" in steps
    assert choice.endswith("draft_device='auto' takes cpu.")


def test_a_target_over_two_gpus(pair: list[str]) -> None:
    config = EngineConfig(pair[1], pair[3], dtype="float64", max_model_len=512, device="cuda:0,cuda:1")
    with simulated_cuda():
        found = resolve(config)
        assert "without CUDA graphs" in " ".join(doctor.about_kernels(found))
        assert not [*doctor.about_placement(config, found)], "the draft has no other device"


def test_a_prediction_that_was_not_borne_out_is_told() -> None:
    measured: dict[Schedule, float] = {"plain": 10.0, "sequential": 20.0, "parallel": 15.0}
    expected: dict[Schedule, float] = {"plain": 0.1, "sequential": 0.06, "parallel": 0.05}

    def said(**others: float) -> str:
        seen = measured | others  # type: ignore[operator]
        return " ".join(doctor.about_schedule(doctor.Trial(seen, expected, 0.9, "parallel", shared=True)))

    assert "predicted 2.00 times plain decoding, measured 1.50" in said() and "Here 'sequential' was faster" in said()
    assert "far apart" in said(sequential=16.0) and "was faster" not in said(sequential=16.0)
    assert "far apart" not in said(sequential=16.0, parallel=18.0)
    expected = {"plain": 0.1, "sequential": 0.06, "parallel": 0.0}
    assert "will take 'parallel': measured 1.50 times plain decoding." in said(), "its steps were never measured"


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert "unreliable" in " ".join(doctor.about_machine())
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 9.0, 9.0))
    assert "not to be trusted" not in " ".join(doctor.about_machine())


def test_extras_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed" not in " ".join(doctor.about_machine())
    monkeypatch.setitem(doctor.EXTRAS, "server", "no_such_package")
    assert "Extras that are not installed: server (" in " ".join(doctor.about_machine())


def test_a_machine_is_described() -> None:
    known = machine.describe()
    assert known["torch"] == torch.__version__ and known["cores"] >= 1 and known["memory"].endswith("GiB")
    assert machine.version("no-such-package") == "not installed" and known["processor"]


@pytest.mark.slow
def test_the_command_finds_what_the_engine_does(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *pair]) == 0
    said = capsys.readouterr().out
    for heading in ("This machine", "The models", "Memory", "Steps, measured", "Schedule", "What would help"):
        assert heading in said
    assert "runs in float64 on cpu" in said and "one vocabulary" in said and "requests will run at once" in said
    assert "plain " in said and "sequential " in said and "parallel " in said
    assert "schedule='auto' will take '" in said and "times plain decoding" in said


def test_no_answer_is_drafted_from_one_to_the_same_prompt(pair: list[str]) -> None:
    """The warm-up asks what is measured first; where nothing else is copied n-grams have nothing to say."""
    with Engine(EngineConfig(pair[1], "ngram", dtype="float64")) as engine:
        asked = list[SamplingParams]()
        submit = engine.submit
        engine.submit = lambda ids, params: asked.append(params) or submit(ids, params)  # type: ignore[method-assign, assignment, func-returns-value]
        doctor.try_out(engine, ["What is this?", "And that?"], 8)
    warm, measured = asked[:2], asked[2:]
    assert len(measured) == 4 and not {one.tenant for one in warm} & {one.tenant for one in measured}


def test_nothing_is_loaded_where_nothing_is_to_be_measured(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_card.models.loader.load_model", lambda *_, **__: pytest.fail("loaded"))
    assert main(["doctor", "--no-measure", *pair]) == 0
    assert "Steps" not in capsys.readouterr().out


def test_without_a_draft_model(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *pair[:2], "--draft-model", "ngram", "--dtype", "float64"]) == 0
    said = capsys.readouterr().out
    assert "The draft" not in said.split("Schedule")[0] and "small model of the same family" in said
    assert "The first guess" not in said and "predicted" not in said, "nobody measured that"


def test_without_any_draft(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *pair[:2], "--draft-model", "none", "--dtype", "float64"]) == 0
    said = capsys.readouterr().out
    assert "guessed" not in said and "will take" not in said and "gains nothing" not in said and "plain " in said


def test_another_vocabulary_is_told(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.make_target("llama", tmp_path / "other")
    vocabularies.byte_pairs("the other thing is another thing than the others\n" * 9, 300, "</s>").save_pretrained(
        other
    )
    assert main(["doctor", "--no-measure", *pair[:2], "--draft-model", other, "--dtype", "float64"]) == 0
    assert "vocabulary of its own" in capsys.readouterr().out


def test_what_does_not_fit_is_said_after_what_was_found(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_card.engine.backends.free_bytes", lambda device: 1 << 20)
    assert main(["doctor", *pair]) == 2
    said = capsys.readouterr()
    assert "Memory" in said.out and "GiB are free" in said.err


def test_the_kernels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure", "--model", "smollm2-135m", "--draft-model", "ngram"]) == 0
    said = capsys.readouterr().out
    assert f"integer products use {vectors.instructions()}" in said
