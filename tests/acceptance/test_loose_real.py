"""The documented failure of the loose rule, with the real pair: asked for type hints, it drops them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Pins
from langchain_card.text.prompt import encode

pytestmark = [pytest.mark.pair, pytest.mark.timeout(1800)]

GROUP = """\
Add type hints to this code. Answer with the code only.

def group_by(items, key):
    groups = {}
    for item in items:
        groups.setdefault(item[key], []).append(item)
    return groups
"""
MERGE = """\
Add type hints and docstrings to this code. Answer with the code only.

def merge(left, right, key):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i][key] <= right[j][key]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]
"""


def signature(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("def "))


def test_type_hints_that_were_asked_for_are_dropped(say: Callable[[str], None]) -> None:
    """The draft's unannotated signature stays, because all that follows it is the same. (arXiv 2511.22972's own code.)

    The target was in doubt what type to write, not whether to write one: its entropy does not tell the two apart.
    """
    found: dict[str, list[str]] = {"exact": [], "loose": []}
    for rule, signatures in found.items():
        pins = Pins(window=16, lead=15, draft_width=1)
        with Engine(EngineConfig(acceptance=rule, drafters=(), pins=pins)) as engine:
            for text in (GROUP, MERGE):
                prompt_ids = encode([{"role": "user", "content": text}], engine.tokenizer, engine.config.model)
                done = engine.submit(prompt_ids, SamplingParams(max_tokens=64, schedule="sequential")).result()
                signatures.append(signature(done.text))
                say(f"{rule}: {signatures[-1]} ({done.stats.rescued} rescued in {done.stats.rounds} rounds)")
                assert done.stats.lossy is (rule == "loose") and bool(done.stats.rescued) is done.stats.lossy
    assert all(line.count(":") > 1 and "->" in line for line in found["exact"])
    assert all(line.count(":") == 1 and "->" not in line for line in found["loose"]), "it is mended: tell the docs"
