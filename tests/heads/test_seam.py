"""What a head sees in an engine: for every node that it expands, the logits are those of one pass over the whole text.

The reference reads the text with transformers, and the head over it without KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.drafters.head import HeadDrafter
from langchain_card.drafters.model import StepPart
from langchain_card.engine import build, target_worker
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits
from langchain_card.runtime.heads import HeadRunner, ObservedRows
from tests.simulation import FixedPolicy
from tests.support import tiny
from tests.support.heads import Reference, write_head

TOLERANCES = {"llama": 1e-8, "qwen2": 1e-8, "qwen3": 1e-8, "mistral": 1e-8, "gemma3": 1e-8, "gemma2": 1e-5}
"""Differences that are allowed; Gemma 2 computes its norms in float32."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def head(tiny_pairs: dict[str, tuple[str, str]], tmp_path: Path, request: Any) -> tuple[str, str]:
    """A target, and a head of random weights: "llama" or "llama specformer"."""
    arch, _, kind = request.param.partition(" ")
    target = tiny_pairs[arch][0]
    return target, write_head(kind or "eagle", "random", target, tmp_path / "head")


class Checked(HeadDrafter):
    """Compares what it expands with the reference."""

    reference: Reference
    tolerance: float
    checked: dict[int, int]
    begun: dict[int, tuple[int, ...]]

    def _expand(self, parts: Sequence[StepPart], logits: Tensor) -> None:
        rows = iter(logits)
        for part in parts:
            tree, request = part.step.tree, part.sequence.request_id
            known = len(tree.output_ids)
            if part.step.heads == [tree.root]:
                self.begun[request] = known  # so all below it was drafted after the last window
            for path in part.step.token_paths:
                found = next(rows)
                if self.begun.get(request) == known:
                    wanted = self.reference.logits(part.sequence.text, path)
                    torch.testing.assert_close(
                        self._head.spread(found[None])[0].cpu(), wanted, rtol=self.tolerance, atol=self.tolerance
                    )
                    self.checked[len(path)] = self.checked.get(len(path), 0) + 1
        super()._expand(parts, logits)


@pytest.mark.parametrize("exact", ["default", "strict"])
@pytest.mark.parametrize(
    "head",
    ["llama", "llama specformer", *(pytest.param(arch, marks=pytest.mark.slow) for arch in [*TOLERANCES][1:])],
    indirect=True,
)
def test_every_expanded_node_is_that_of_one_pass(
    head: tuple[str, str], exact: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts in chunks, several requests, prefixes that are reused, windows of n-grams of which some are taken."""
    _answer_with_checks(head, monkeypatch, exact=exact)
    assert "died" not in caplog.text


@pytest.mark.parametrize("head", ["llama"], indirect=True)
def test_every_expanded_node_is_that_of_one_pass_after_failures(
    head: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Passes after which memory ran out are repeated; a target that died has read nothing. 5 s."""
    calls, choose = itertools.count(1), target_worker._choose

    def failing(verified: Any, logits: Any) -> Any:
        match next(calls):
            case 3 | 4 | 17:
                raise MemoryError
            case 9 | 30:
                raise RuntimeError("planted")
        return choose(verified, logits)

    monkeypatch.setattr(target_worker, "_choose", failing)
    _answer_with_checks(head, monkeypatch)
    assert next(calls) > 40 and caplog.text.count("planted") >= 2 and "AssertionError" not in caplog.text


@pytest.mark.parametrize("head", ["llama"], indirect=True)
def test_requests_go_on_without_a_head_that_fails(
    head: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, folder = head
    calls, observe = itertools.count(1), HeadRunner.observe

    def failing(self: HeadRunner, batch: Sequence[ObservedRows]) -> None:
        if next(calls) == 5:
            raise RuntimeError("planted")
        observe(self, batch)

    prompt, params = tiny.byte_tokenizer()("def f(x):").input_ids, SamplingParams(max_tokens=24, schedule="sequential")
    fields: dict[str, Any] = {"dtype": "float64", "max_model_len": 128, "drafters": ()}
    with Engine(EngineConfig(target, None, **fields)) as engine:
        plain = engine.submit(prompt, params).result()
    monkeypatch.setattr(HeadRunner, "observe", failing)
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    with Engine(EngineConfig(target, f"head?file={folder}", **fields)) as engine:
        done = engine.submit(prompt, params).result()
        assert engine.submit(prompt, params).result().token_ids == plain.token_ids
        health = {name: each.state for name, each in engine.health().items()}
    assert done.token_ids == plain.token_ids and done.stats.verified > 0 and {*health.values()} == {"up"}
    assert caplog.text.count("requests go on without it") == 1 and next(calls) == 6


def _answer_with_checks(head: tuple[str, str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Answer several prompts at once, greedy and seeded, in an engine whose head is compared with the reference."""
    target, folder = head
    Checked.reference, Checked.checked, Checked.begun = Reference(target, folder), {}, {}
    Checked.tolerance = TOLERANCES[Checked.reference.model.config.model_type.removesuffix("_text")]
    monkeypatch.setattr("langchain_card.drafters.head.HeadDrafter", Checked)
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    limits = Limits(max_num_seqs=3, max_step_rows=40, max_window=8, restart_seconds=0.01)
    tokenizer = tiny.byte_tokenizer()
    texts = ["for a in range(9):\n    print(a)\n" * 4, "def f(x):\n    return x + 1\n\ndef f(x):\n    ret"]
    prompts = [tokenizer(text).input_ids for text in (*texts, texts[0] + "for b in", texts[0][:50] + "other", texts[1])]
    fields: dict[str, Any] = {"dtype": "float64", "max_model_len": 512, "limits": limits, **options}
    with Engine(EngineConfig(target, f"head?file={folder}", drafters=("ngram",), **fields)) as engine:
        accepted = 0
        for temperature in (0.0, 0.7):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=2, schedule="sequential")
            for generation in [engine.submit(prompt, params) for prompt in prompts]:
                accepted += generation.result().stats.accepted
    assert accepted > 20 and Checked.checked[0] > 30 and Checked.checked[1] > 10 and Checked.checked.get(2, 0) > 0
