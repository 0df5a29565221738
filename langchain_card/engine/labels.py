"""`LabelWeighing`: several labels, each as likely as it is as the whole answer to a prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from langchain_card.config import EngineConfig
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.errors import GenerationAbortedError, InvalidInputError, check_range

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine
    from langchain_card.engine.generation import Completion, Generation


class LabelWeighing:
    """How likely each label is as the answer to a prompt: the weighing, and its result.

    One pass of the target weighs all labels that fit into a window together: their tokens are a tree, as candidates
    are. Labels that do not fit are weighed by further passes, which do not read the prompt again.

    Args:
        engine: weighs them.
        prompt_ids: token ids of the prompt.
        labels: token ids of each label.
        params: of the requests; only `tenant` and `adapter` count.

    Attributes:
        logprobs: [labels] log-probability of each label as the whole answer.
        stats: counts and times of the requests that have ended, one for each pass.

    Raises:
        InvalidInputError: a label is longer than a window.
    """

    def __init__(
        self, engine: Engine, prompt_ids: Sequence[int], labels: Sequence[Sequence[int]], params: SamplingParams
    ) -> None:
        self.engine, self.prompt_ids, self.params = engine, prompt_ids, params
        self.labels = [*map(tuple, labels)]
        self._groups = groups(self.labels, engine.config)
        self._generation: Generation | None = None
        self._aborted: BaseException | None = None
        self.logprobs = [-math.inf] * len(self.labels)
        self.stats = list[RequestStats]()

    def start(self) -> Generation:
        """Submit the next group of labels.

        Raises:
            CARDError: see `Engine.submit`.
        """
        if self._aborted is not None:
            raise self._aborted
        labels = [self.labels[i] for i in self._groups[len(self.stats)]]
        self._generation = self.engine.submit(self.prompt_ids, self.params, labels)
        return self._generation

    def abort(self, error: BaseException | None = None) -> None:
        """End the weighing if it still runs; `error` is raised to its reader."""
        if len(self.stats) < len(self._groups):
            self._aborted = error or GenerationAbortedError("labels", len(self.labels), "the weighing was aborted")
        if self._generation is not None:
            self._generation.abort(self._aborted)

    def result(self) -> list[float]:
        """Wait for the log-probability of each label, and return them."""
        while len(self.stats) < len(self._groups):
            self._note((self._generation or self.start()).result())
        return self.logprobs

    async def aresult(self) -> list[float]:
        """Wait without blocking the event loop; return the log-probability of each label."""
        while len(self.stats) < len(self._groups):
            self._note(await (self._generation or self.start()).aresult())
        return self.logprobs

    def _note(self, completion: Completion) -> None:
        group, self._generation = self._groups[len(self.stats)], None
        for i, logprob in zip(group, completion.stats.label_logprobs, strict=True):
            self.logprobs[i] = logprob
        self.stats.append(completion.stats)


def check_labels(labels: Sequence[Sequence[int]], config: EngineConfig, vocab_size: int) -> None:
    """Raise `InvalidInputError` unless one pass can weigh these labels."""
    for token in itertools.chain(*labels):
        check_range("labels", token, 0, vocab_size - 1, "token ids are the target tokenizer's")
    if len(groups([*map(tuple, labels)], config)) > 1:
        limit = f"the tokens of all, as a tree, must be at most {_room(config)}"
        raise InvalidInputError("labels", len(labels), limit, "submit them in several requests")


def groups(labels: Sequence[tuple[int, ...]], config: EngineConfig) -> list[list[int]]:
    """Divide labels into groups that one pass can weigh: as a tree they fit into a window.

    Under `exact="strict"` a window is a chain, and each label a group.

    Returns:
        The numbers of the labels in each group.

    Raises:
        InvalidInputError: a label is longer than a window.
    """
    most, strict = _room(config), config.exact == "strict"
    for label in labels:
        if len(label) > most:
            raise InvalidInputError("tokens of a label", len(label), f"must be at most {most}", "shorten it")
    divided, nodes = list[list[int]](), set[tuple[int, ...]]()
    for i, label in enumerate(labels):
        own = {label[:end] for end in range(1, len(label) + 1)}
        if not divided or strict or len(nodes | own) > most:
            divided.append([])
            nodes = set()
        divided[-1].append(i)
        nodes |= own
    return divided


def _room(config: EngineConfig) -> int:
    """Return the number of candidates that each of `max_num_seqs` windows may hold."""
    limits = config.limits
    return min(limits.max_window, limits.max_step_rows // limits.num_seqs) - 1
