"""The conformance suite of drafters for heads of random weights, and for untrained ones."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar

import pytest

from langchain_card.constraints.json_schema import json_grammar
from langchain_card.drafters.head import HeadDrafter
from langchain_card.ports import Drafter, Setting
from langchain_card.testing import DrafterConformance, prompts
from tests.support.heads import write_head
from tests.support.reading_head import ReadingHead

KINDS = {"type": "object", "properties": {"kind": {"enum": ["customer", "supplier"]}}, "required": ["kind"]}


@functools.cache
def head_of(arch: str, kind: str, how: str) -> str:
    """Return the folder of a head for a tiny model."""
    target = prompts.folder(arch)
    return write_head(kind, how, target, Path(target).parent / f"{kind}-{how}")


class HeadConformance(DrafterConformance):
    """All tests of a head, whose guesses are seldom right."""

    kind: ClassVar[str]
    how: ClassVar[str] = "random"
    must_accept = False

    def make(self, setting: Setting) -> Drafter:
        if setting.target is None:
            return ReadingHead(setting, prompts.model(prompts.ARCHS[0]), self._file(prompts.ARCHS[0]))
        return HeadDrafter(setting, file=self._file(setting.target.model.config.model_type))

    def _file(self, arch: str) -> str:
        return head_of(arch, self.kind, self.how)


class TestEagle(HeadConformance):
    kind = "eagle"


@pytest.mark.slow
class TestSpecFormer(HeadConformance):
    kind = "specformer"


@pytest.mark.slow
class TestUntrainedEagle(HeadConformance):
    kind, how = "eagle", "untrained"


@pytest.mark.slow
class TestUntrainedSpecFormer(HeadConformance):
    kind, how = "specformer", "untrained"


@pytest.mark.slow
class TestEagleWithGrammar(HeadConformance):
    kind, grammar = "eagle", json_grammar(KINDS, strict=True)


@pytest.mark.slow
class TestSpecFormerWithGrammar(HeadConformance):
    kind, grammar = "specformer", json_grammar(KINDS, strict=True)
