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
from transformers import AutoModelForCausalLM

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.drafters.head import HeadDrafter
from langchain_card.drafters.model import StepPart
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.heads.causal import CausalPlan
from langchain_card.heads.folder import load_head
from langchain_card.limits import Limits
from langchain_card.runtime.families import decoder_layers
from langchain_card.runtime.heads import HeadRunner, ObservedRows
from tests.simulation import FixedPolicy
from tests.support import tiny
from tests.support.heads import write_head

TOLERANCES = {"llama": 1e-8, "qwen2": 1e-8, "qwen3": 1e-8, "mistral": 1e-8, "gemma3": 1e-8, "gemma2": 1e-5}
"""Differences that are allowed; Gemma 2 computes its norms in float32."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def head(tiny_pairs: dict[str, tuple[str, str]], tmp_path: Path, request: Any) -> tuple[str, str]:
    """A target, and a head of random weights."""
    target = tiny_pairs[request.param][0]
    return target, write_head("eagle", "random", target, tmp_path / "head")


class Reference:
    """A head over whole texts."""

    def __init__(self, target: str, head: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        self._head = load_head(Path(head), self.model)
        self._states: dict[int, Tensor] = {}
        for number, layer in enumerate(decoder_layers(self.model)):
            layer.register_forward_hook(lambda _module, _inputs, output, number=number: self._take(number, output))

    def _take(self, layer: int, output: Tensor) -> None:
        self._states[layer] = output[0]

    @torch.inference_mode()
    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Those after drafted tokens, which follow a text: [vocabulary]."""
        self.model(torch.tensor([text]))
        features = self._head.fuse(torch.stack([self._states[layer] for layer in self._head.taps]))[:-1]
        outputs = torch.empty(0, features.shape[1], dtype=features.dtype)
        tokens = [*text[1:]]
        for drafted in (None, *path):
            if drafted is not None:
                tokens, features = [*tokens, drafted], torch.cat([features, outputs[-1:]])
            positions = torch.arange(len(tokens))[None]
            outputs = self._head(torch.tensor([tokens]), positions, features[None], step=CausalPlan()).logits[0]
        return self._head.logits(outputs[-1:])[0]


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
                    torch.testing.assert_close(found.cpu(), wanted, rtol=self.tolerance, atol=self.tolerance)
                    self.checked[len(path)] = self.checked.get(len(path), 0) + 1
        super()._expand(parts, logits)


@pytest.mark.parametrize("exact", ["default", "strict"])
@pytest.mark.parametrize(
    "head", ["llama", *(pytest.param(arch, marks=pytest.mark.slow) for arch in [*TOLERANCES][1:])], indirect=True
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
    """Passes after which memory ran out are repeated; a target that died has read nothing."""
    calls, observe = itertools.count(1), HeadRunner.observe

    def failing(self: HeadRunner, batch: Sequence[ObservedRows]) -> None:
        match next(calls):
            case 3 | 4 | 17:
                raise MemoryError
            case 9 | 30:
                raise RuntimeError("planted")
        observe(self, batch)

    monkeypatch.setattr(HeadRunner, "observe", failing)
    _answer_with_checks(head, monkeypatch)
    assert next(calls) > 40 and caplog.text.count("planted") >= 2 and "AssertionError" not in caplog.text


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
