"""A plug-in whose steps cost device time, in a process of its own: `draft_transport="process"`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_card import plugins
from langchain_card.engine import drafter_hosts
from langchain_card.errors import InvalidInputError
from langchain_card.runtime.threads import ThreadPlan
from langchain_card.testing import DrafterConformance, prompts
from tests.simulation import ToyDrafter
from tests.support.documents import PLUGIN_FILES
from tests.support.packages import installed
from tests.support.processes import child_processes

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = (
    PLUGIN_FILES["echoing.py"]
    + """

class PacedEcho(EchoDrafter):
    name, paced = "paced-echo", True

    def __init__(self, setting, depth=4):
        super().__init__(setting, depth)
        self.setting = setting

    def propose(self, request_id):
        from dataclasses import replace

        return replace(super().propose(request_id), forwarded=1, together=1, elapsed=1e-4)
"""
)


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "paced_echo.py").write_text(CODE)
    with installed(tmp_path, "paced_echo", paced_echo="paced_echo:PacedEcho"):
        yield "paced-echo?depth=3"
    sys.modules.pop("paced_echo", None)


@pytest.mark.slow
def test_it_has_a_process_and_drafts_there(paced: str) -> None:
    before = child_processes()
    with prompts.running(prompts.ARCHS[0], draft_model=paced, draft_transport="process") as engine:
        assert len(child_processes() - before) == 1 and "paced_echo" in sys.modules
        every = prompts.cases(prompts.ARCHS[0])
        for schedule in ("sequential", "parallel"):
            done = prompts.answers(engine, every, schedule)
            assert [one.token_ids for one in done] == [prompts.answer(prompts.ARCHS[0], one) for one in every]
            assert sum(one.stats.accepted_by_source.get("paced-echo", 0) for one in done) > 0
    assert child_processes() <= before


@pytest.mark.slow
def test_it_conforms(paced: str) -> None:
    suite = type("Suite", (DrafterConformance,), {"drafter": paced})()
    for transport in ("inline", "thread", "process"):
        suite.test_it_answers_the_same_wherever_it_runs(transport)


def test_it_is_told_where_it_works(paced: str) -> None:
    here = prompts.setting()
    threads = ThreadPlan(target_on_cpu=True, draft_on_cpu=True)
    arguments = drafter_hosts._setting_arguments(here, Path(prompts.folder(prompts.ARCHS[0])), threads)
    worker = drafter_hosts.build_plugin_worker(print, print, spec=paced, **json.loads(json.dumps(arguments)))
    there = worker.drafter.setting  # type: ignore[attr-defined]
    for name in ("vocab_size", "max_len", "num_seqs", "eos_ids", "limits"):
        assert getattr(there, name) == getattr(here, name)
    assert there.tokenizer.get_vocab() == here.tokenizer.get_vocab()
    letters = there.constrain("start: /a/")
    assert letters.forced() == [*prompts.encode("a"), *there.eos_ids]


@pytest.mark.slow
def test_what_is_registered_here_alone_is_not_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._registered, ("drafters", "toy"), ToyDrafter)
    monkeypatch.setattr(ToyDrafter, "name", "toy", raising=False)
    monkeypatch.setattr(ToyDrafter, "paced", True, raising=False)
    before = child_processes()
    with (
        pytest.raises(InvalidInputError, match="drafters = 'toy'"),
        prompts.running(prompts.ARCHS[0], draft_model="toy", draft_transport="process"),
    ):
        pass
    assert child_processes() <= before
