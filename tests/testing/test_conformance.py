"""All built-in drafters pass the conformance suite of plug-ins."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_card.constraints.json_schema import json_grammar
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.model import ModelDrafter
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.engine.drafter_hosts import SCRATCH
from langchain_card.models.loader import ModelSpec, load_model
from langchain_card.ports import Drafter, Setting
from langchain_card.runtime.runner import ModelRunner
from langchain_card.testing import DrafterConformance, prompts
from langchain_card.testing.calls import DrafterContract
from tests.simulation import ToyDrafter, ToyModel

KINDS = {"type": "object", "properties": {"kind": {"enum": ["customer", "supplier"]}}, "required": ["kind"]}


class TestNgram(DrafterConformance):
    drafter = "ngram"
    learns = True


@pytest.mark.slow
class TestForced(DrafterConformance):
    drafter = "forced"
    grammar = json_grammar(KINDS, strict=True)


@functools.cache
def draft_model() -> Any:
    folder = Path(prompts.folder(prompts.ARCHS[0], "draft"))
    return load_model(ModelSpec("draft", folder, "float", torch.device("cpu"), torch.float64))


class Drafting(ModelDrafter):
    """A model drafter with a name that is free for plug-ins."""

    name = "drafting"


@pytest.mark.slow
class TestModel(DrafterConformance):
    """A draft model that agrees with the first tiny model in part."""

    learns = True

    def make(self, setting: Setting) -> Drafter:
        return self.over(setting, None)

    def over(self, setting: Setting, lower: LowerLevel | None) -> Drafter:
        runner = ModelRunner(draft_model(), max_len=setting.max_len, num_scratch=SCRATCH, num_seqs=setting.num_seqs)
        return Drafting(runner, vocab_size=setting.vocab_size, constrain=setting.constrain, lower=lower)


@pytest.mark.slow
class TestStacked(TestModel):
    """A draft model above the n-gram drafter."""

    def make(self, setting: Setting) -> Drafter:
        return self.over(setting, LowerLevel(NgramDrafter(setting), 4, setting.vocab_size))


class TestToy(DrafterContract):
    """The toy drafter of the simulated world, alone: it cannot guess the answers of these texts."""

    def make(self, setting: Setting) -> Drafter:
        return ToyDrafter(ToyModel(setting.vocab_size), step_time=lambda rows: 1e-4)
