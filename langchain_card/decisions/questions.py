"""A question as labels and text, and an answer from the labels' probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.decisions import Box, Choice, ChoiceAnswer, Noul, NoulAnswer, Score, ScoreAnswer

from langchain_card.decisions.state import state_text
from langchain_card.errors import InvalidInputError, UnsupportedContentError

SYSTEM = "You judge a state by a question. Your whole answer is one of the labels."

_YES, _NO = "yes", "no"


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a question.

    Attributes:
        names: what the model may answer.
        meanings: [labels] what each stands for; None where the name says it.
    """

    names: tuple[str, ...]
    meanings: tuple[Any, ...]


def labels_of(name: str, question: Any, model: str) -> Labels:
    """Return the labels of a question.

    Args:
        name: the question's own, for errors.
        question: a `Noul`, `Choice` or `Score`.
        model: name of the model, for errors.

    Raises:
        UnsupportedContentError: the question is about an image.
        InvalidInputError: the question is of another type.
    """
    match question:
        case Noul(criteria=criteria):
            return Labels((_YES, _NO), (None, None) if criteria is None else (criteria.true, criteria.false))
        case Choice(criteria=criteria):
            return Labels((*criteria,), (*criteria.values(),))
        case Score(criteria=criteria):
            return Labels((*map(str, range(len(criteria))),), (*criteria,))
        case Box():
            hint = "take a model for images"
            raise UnsupportedContentError(f"questions[{name!r}]", "box", f"{model} reads text, no images", hint)
    limit = "must be a Noul, a Choice or a Score of langchain_core.decisions"
    raise InvalidInputError(f"questions[{name!r}]", question, limit)


def prompt_text(state: str, question: Any, labels: Labels, model: str) -> str:
    """Return what the model reads. The longer part comes first, because later decisions share what was read of it.

    Several questions about a long state share the state, and several short states share a long question.
    """
    lines = [
        f"- {name}" + ("" if meaning is None else f": {state_text(meaning, model)}")
        for name, meaning in zip(labels.names, labels.meanings, strict=True)
    ]
    options, names = "\n".join(lines), ", ".join(labels.names)
    parts = f"State:\n{state}", f"Question:\n{state_text(question.instructions, model)}\n\nLabels:\n{options}"
    first, second = parts if len(parts[0]) > len(parts[1]) else parts[::-1]
    return f"{first}\n\n{second}\n\nAnswer with one of these labels and nothing else: {names}"


def answer_to(question: Any, labels: Labels, logprobs: Sequence[float]) -> Any:
    """Return the typed answer.

    The probability of a label is its share in the probability of all labels. The confidence is the largest of them.

    Args:
        question: a `Noul`, `Choice` or `Score`.
        labels: its labels.
        logprobs: [labels] log-probability of each one as the model's whole answer.
    """
    top = max(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    chances = [weight / math.fsum(weights) for weight in weights]
    likeliest = max(range(len(chances)), key=chances.__getitem__)
    match question:
        case Noul():
            return NoulAnswer(type="noul", noul=chances[0])
        case Choice():
            return ChoiceAnswer(
                type="choice",
                choice=labels.names[likeliest],
                probabilities=dict(zip(labels.names, chances, strict=True)),
                confidence=chances[likeliest],
            )
        case Score():
            return ScoreAnswer(
                type="score",
                score=math.fsum(level * chance for level, chance in enumerate(chances)),
                legend=dict(enumerate(labels.meanings)),
                probabilities=dict(enumerate(chances)),
                confidence=chances[likeliest],
            )
    raise TypeError(type(question))
