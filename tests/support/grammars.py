"""Compiled grammars over real and tiny tokenizers."""

from __future__ import annotations

from functools import cache
from typing import Any

from langchain_card.constraints.compiler import Grammars
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.limits import Limits
from langchain_card.testing.tokenizer import byte_tokenizer
from tests.support import vocabularies
from tests.support.schemas import Schema

PADDED = 320
"""Vocabulary size of the models; the byte tokenizer has fewer tokens."""


@cache
def tokenizer(name: str) -> Any:
    return byte_tokenizer() if name == "bytes" else getattr(vocabularies, name)()


@cache
def eos(name: str) -> int:
    return int(
        tokenizer(name).eos_token_id if name == "bytes" else tokenizer(name)("<｜end▁of▁sentence｜>").input_ids[-1]
    )


@cache
def grammars(name: str = "bytes") -> Grammars:
    """Return grammars whose check in another process is left out: it takes 0.1 s, and random schemas do no harm."""
    made = Grammars(tokenizer(name), PADDED if name == "bytes" else len(tokenizer(name)), [eos(name)], Limits())
    made._validate = lambda grammar: None  # type: ignore[method-assign]
    return made


def allows(schema: Schema, text: str) -> bool:
    """Return whether a text is a document of a schema or the beginning of one."""
    grammar = json_grammar(schema)
    grammars().check(grammar, 10**6)
    state = grammars().start(grammar)
    return all(map(state.accept, byte_tokenizer()(text).input_ids))
