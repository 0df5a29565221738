"""What goes wrong in one place of the engine stays there."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_card.config import EngineConfig
from langchain_card.core import messages as m
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.controller import Controller
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.request import SamplingParams
from langchain_card.drafters.model import ModelDrafter
from langchain_card.drafters.tree import MAX_NODES, DraftTree
from langchain_card.engine.engine import Engine
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import EngineError, InvalidInputError
from langchain_card.limits import Limits
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    return target, tiny.make_draft(target, folder / "draft", noise=0.02)


def config(pair: tuple[str, str], **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": pair[0], "draft_model": pair[1], "dtype": "float64", "drafters": (), **options})


def answer(engine: Engine, count: int, schedule: str = "parallel", prompt: list[int] = PROMPT) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=count, schedule=schedule)  # type: ignore[arg-type]
    return engine.submit(prompt, params).result().token_ids


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.slow
def test_a_text_longer_than_the_drafts_context(
    pair: tuple[str, str], schedule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft says nothing any more; it does not write past its cache and die."""
    init = ModelDrafter.__init__

    def short(self: ModelDrafter, runner: ModelRunner, **options: Any) -> None:
        init(self, ModelRunner(runner.model, max_len=160, num_scratch=16), **options)

    with Engine(config(pair)) as engine:
        wanted = answer(engine, 200, "plain"), answer(engine, 20, "plain", PROMPT * 10)
    monkeypatch.setattr(ModelDrafter, "__init__", short)
    with Engine(config(pair)) as engine:
        assert answer(engine, 200, schedule) == wanted[0]
        assert answer(engine, 20, schedule, PROMPT * 10) == wanted[1]
    assert not caplog.records


@pytest.mark.parametrize("scratch", [16, 64], ids=["target", "draft"])
def test_no_memory_for_a_sequence(pair: tuple[str, str], scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target: the request is tried once more. Of the draft: the request goes on without it."""
    opened, calls = ModelRunner.open, []

    def scarce(self: ModelRunner, *told: Any) -> Any:
        if self.num_scratch == scratch:
            calls.append(1)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("planted")
        return opened(self, *told)

    with Engine(config(pair)) as engine:
        wanted = answer(engine, 30, "plain")
        monkeypatch.setattr(ModelRunner, "open", scarce)
        assert answer(engine, 30, "sequential") == wanted
        assert calls
        assert answer(engine, 30, "sequential") == wanted


def test_a_text_that_cannot_be_made_ends_one_request(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(config(pair)) as engine:
        broken = engine.submit(PROMPT, SamplingParams(max_tokens=20))
        monkeypatch.setattr(broken._detokenizer, "push", lambda *_: 1 / 0)
        other = engine.submit(PROMPT, SamplingParams(max_tokens=20))
        with pytest.raises(EngineError, match="division by zero"):
            broken.result()
        assert len(other.result().token_ids) == 20


def with_nan(model: str, folder: Path, token_id: int) -> str:
    """Copy a model; texts with this token have logits that are no numbers."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token_id] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8}, {"logprobs": 2}], ids=str)
def test_logits_that_are_no_numbers_end_one_request(tmp_path: Path, fields: dict[str, Any]) -> None:
    target = tiny.make_target("mistral", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.02)
    damaged = with_nan(target, tmp_path / "damaged", PROMPT[0])
    params = SamplingParams(max_tokens=20, banned_ids=(PROMPT[0],), **fields)
    with Engine(config((damaged, draft))) as engine:
        broken, other = engine.submit(PROMPT, params), engine.submit(PROMPT[1:], params)
        with pytest.raises(EngineError, match=r"^logits = nan: must be finite numbers. Hint: the weights[^.]*\.$"):
            broken.result()
        assert len(other.result().token_ids) == 20
    with Engine(config((target, with_nan(draft, tmp_path / "damaged draft", PROMPT[0])))) as engine:
        plain = engine.submit(PROMPT, replace(params, schedule="plain")).result()
        drafted = engine.submit(PROMPT, replace(params, schedule="sequential")).result()
        assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 20


def test_a_fork_of_the_process_gets_an_error_at_once(pair: tuple[str, str]) -> None:
    fork = multiprocessing.get_context("fork")

    def child(sender: Connection) -> None:
        try:
            answer(engine, 3)
        except EngineError as error:
            engine.close()
            sender.send(str(error))

    with Engine(config(pair)) as engine:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=child, args=(sender,))
        process.start()
        assert receiver.poll(30), "the child hangs"
        assert f"is a fork of process {os.getpid()}" in receiver.recv()
        process.join(30)
        assert process.exitcode == 0 and len(answer(engine, 3)) == 3


def test_a_loop_that_is_gone_harms_nobody(pair: tuple[str, str]) -> None:
    with Engine(config(pair)) as engine:
        generation = engine.submit(PROMPT, SamplingParams(max_tokens=400))

        async def leave() -> None:
            async for _ in generation:
                break

        asyncio.run(leave())
        assert len(answer(engine, 10)) == 10


def test_whoever_is_read_last_does_not_block_the_others(pair: tuple[str, str]) -> None:
    """One place, two long answers, the second read first: the first one is paused and gives its place away."""
    with Engine(config(pair, limits=Limits(max_unread=8))) as engine:
        params = SamplingParams(max_tokens=60, schedule="sequential")
        first, second = engine.submit(PROMPT, params), engine.submit(PROMPT, params)
        later = [piece.token_id for piece in second]
        assert [piece.token_id for piece in first] == later and len(later) == 60
        unread = engine.submit(PROMPT, params)
        assert engine.drain(60) is True, "draining does not wait for somebody who does not read"
        assert len(unread.result().token_ids) == 60


def test_what_was_read_before_memory_ran_out_is_not_read_again(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    step = ModelRunner.step

    def short(self: ModelRunner, batch: Any) -> Any:
        if len(read) == 2:
            read.append(0)
            raise MemoryError
        logits = step(self, batch)
        read.append(sum(len(rows.token_ids) for rows in batch if rows.paths is None))
        return logits

    limits = Limits(max_step_rows=40)
    with Engine(config(pair, draft_model=None, limits=limits)) as engine, monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "step", short)
        tokens = answer(engine, 20, "plain", PROMPT * 10)
    assert read[:5] == [40, 40, 0, 40, 40] and sum(read) == len(PROMPT * 10) - 1
    with Engine(config(pair, draft_model=None)) as engine:
        assert answer(engine, 20, "plain", PROMPT * 10) == tokens, "and in chunks as at once"


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.slow
def test_a_draft_that_equals_the_target_is_always_right(
    pair: tuple[str, str], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across corrections that keep its KV, that is: every token was in the cache wherever the draft had looked."""
    hits: list[bool] = []
    verify = TargetWorker.verify

    def slow(self: TargetWorker, windows: Any) -> Any:
        time.sleep(0.02)  # the draft gets far ahead
        return verify(self, windows)

    monkeypatch.setattr(TargetWorker, "verify", slow)
    monkeypatch.setattr(Controller, "observe_token", lambda self, text, *, hit, first: hits.append(hit))
    likely = lambda self, load, texts, frontiers: [sum(at.chances) > 0.1 for at in frontiers]  # noqa: E731
    monkeypatch.setattr(Controller, "draft_pays", likely)
    monkeypatch.setattr(Controller, "windows", lambda self, load, texts, chances: [*map(len, chances)])
    monkeypatch.setattr(Controller, "patience", lambda self, load: 1.0)
    monkeypatch.setattr(Controller, "read_budget", lambda self, load, text, unread, written, left: unread)
    with Engine(config(pair, draft_model=pair[0])) as engine:
        for seed in range(3):
            done = engine.submit(PROMPT[seed:], SamplingParams(max_tokens=80, schedule=schedule)).result()  # type: ignore[arg-type]
            assert done.stats.accepted > 20
    assert len(hits) > 100 and all(hits)


def test_a_draft_tree_that_grows_for_ever_keeps_what_is_alive() -> None:
    """Its nodes are numbered anew now and then; no slot is lost, and the cache knows every living node as before."""
    draft, cache, source = DraftTree((1,), (), 8), CandidateTree(1), DrafterState()
    draft.expand(draft.root, (5, 6), (-0.1, -3.0))
    for _ in range(MAX_NODES):
        for node in draft.choose(3):
            draft.place(node)
            draft.expand(node, (5, 6), (-0.1, -3.0))
        assert enter(draft.publish("toy", 0), source, cache) == 0
        before = [path for node in draft.open if (path := texts(draft, node))[:1] == [5]]
        applied = draft.apply(len(draft.output_ids), (5,))
        cache.advance(5)
        assert len(applied.slots) == 1 and sorted(before) == sorted([5, *texts(draft, node)] for node in draft.open)
        if draft.root == 0:
            break
    assert draft.epoch == 1 and len(draft.tokens) < 40, "the living ones only"
    assert enter(draft.publish("toy", 0), source, cache) == 0
    for node in range(1, len(draft.tokens)):
        seen, below = [], source.nodes[node]
        while below != cache.root:
            seen.append(cache.tokens[below])
            below = cache.parents[below]
        assert seen[::-1] == texts(draft, node)


def enter(proposal: m.Proposal, source: DrafterState, cache: CandidateTree) -> int:
    assert source.admit(proposal, cache, 10)
    return source.enter(proposal, cache, 10**6)


def texts(tree: DraftTree, node: int) -> list[int]:
    """Tokens from below the root down to `node`."""
    return [*tree.token_path(node)]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_unread", "max_window", "max_lead"])
def test_limits_have_limits(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} = 0"):
        Limits(**{name: 0})
