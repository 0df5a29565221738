"""`train_head`: from a target to the folder of a head, in stages that a killed training does not repeat."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from langchain_card.config import EngineConfig
from langchain_card.engine.kinds import hash_model
from langchain_card.errors import InvalidInputError
from langchain_card.heads.folder import KINDS, make_head, save_head
from langchain_card.models.loader import acquire_model, release_model, resolve
from langchain_card.train.answers import Prompt, record_answers
from langchain_card.train.loop import Bounds, Trainer, TrainingState
from langchain_card.train.prompts import questions_in
from langchain_card.train.replay import Replay
from langchain_card.train.shards import ShardWriter, StoredText, texts_in

TRAINING = "training"
"""Folder of what only training needs, in that of the head; it may be removed afterwards."""

MAX_IDS = 16_384
"""Tokens that a head proposes, at most: the most frequent ones of the answers."""

HELD_OUT = 0.05
"""Share of the texts on which the accepted length is measured."""

LEAST_TEXTS = 8


PASSES = 3
"""Passes over the answers after which training ends, if their number was given in place of hours."""

MAX_HELD_OUT = 32

Report: TypeAlias = Callable[[str, float, str], None]
"""Receives the name of a stage, the share of it that is over, and a text about it."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What a training is about; one that goes on must have the same.

    Attributes:
        kind: of the head.
        model: the target.
        hours: of answers and training together, half each; None where `num_tokens` bounds it.
        num_tokens: of answers, which are trained on `PASSES` times; None where `hours` bounds it.
        max_disk: bytes of recorded states.
        bits: of a number of the head's matrices, 8 or 4.
        intermediate_size: of the head's gated layer; None for the usual one.
    """

    kind: str
    model: str
    hours: float | None
    num_tokens: int | None
    max_disk: int
    bits: int
    intermediate_size: int | None = None

    def bounds(self, passes: int = 1) -> Bounds:
        """Return the bounds of a stage that has the answers so many times."""
        seconds = math.inf if self.hours is None else self.hours * 1800
        return Bounds(seconds, math.inf if self.num_tokens is None else self.num_tokens * passes)


def train_head(
    options: TrainingOptions, config: EngineConfig, data: Path | None, folder: Path, report: Report, *, resume: bool
) -> dict[str, Any]:
    """Train a head, and write it.

    Args:
        options: of the training.
        config: of the target's engine, with `max_num_seqs`.
        data: file of prompts; None for prompts that the target writes.
        folder: of the head.
        report: receives the progress.
        resume: whether to go on with a training that ended early.

    Returns:
        The description of the head, as in `head.json`.

    Raises:
        InvalidInputError: the folder has another training, `resume` finds none, or there are too few answers.
    """
    own = folder / TRAINING
    _begin(own, options, resume=resume)
    pair = resolve(config)
    model = acquire_model(pair.target)
    try:
        _record(own, config, KINDS[options.kind].taps_of(model), data, options, report)
        texts = texts_in(own)
        if len(texts) < LEAST_TEXTS:
            limit = f"gave {len(texts)} answers: {LEAST_TEXTS} are needed at least"
            raise InvalidInputError("--hours", options.hours, limit, "give more time, or prompts with --data")
        count = min(MAX_HELD_OUT, max(2, int(len(texts) * HELD_OUT)))
        held_out, texts = texts[:count], texts[count:]
        torch.manual_seed(0)
        ids = _frequent(texts)
        head = make_head(options.kind, model, torch.float32, ids=ids, intermediate_size=options.intermediate_size)
        bounds = options.bounds(PASSES)

        def report_training(state: TrainingState) -> None:
            report("train", bounds.share(state.seconds, state.num_tokens), f", {state.curve[-1][2]:.2f} tokens a pass")

        trainer = Trainer(head, Replay(head, model), texts, held_out, own, bounds, report_training)
        trainer.load()
        done = trainer.run()
        target = {"name": options.model, "sha256": hash_model(pair.target)}
        described = {
            "answers": sum(text.num_tokens for text in texts),
            "curve": done.curve,
            "accepted_length": max(length for *_, length in done.curve),
        }
        save_head(head, folder, target, described, options.bits)
    finally:
        release_model(pair.target)
    return described


def _begin(folder: Path, options: TrainingOptions, *, resume: bool) -> None:
    """Note what the training is about, or check that it is the one in the folder."""
    file = folder / "options.json"
    wanted = json.loads(json.dumps(asdict(options)))
    if not file.exists():
        if resume:
            raise InvalidInputError("--resume", str(folder.parent), "has no training", "leave it out to begin one")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted))
        return
    if not resume:
        raise InvalidInputError("--out", str(folder.parent), "has a training already", "--resume goes on with it")
    found = json.loads(file.read_text())
    for name, value in wanted.items():
        if found.get(name) != value:
            raise InvalidInputError(name, value, f"differs from {found.get(name)!r}, with which the training began")


def _record(
    folder: Path,
    config: EngineConfig,
    taps: Sequence[int],
    data: Path | None,
    options: TrainingOptions,
    report: Report,
) -> None:
    """Record answers, unless that was done; the time that a killed recording took counts."""
    file, bounds = folder / "answers.json", options.bounds()
    spent, is_done = 0.0, False
    if file.exists():
        spent, is_done = json.loads(file.read_text()).values()
    if is_done:
        return
    writer = ShardWriter(folder, options.max_disk)
    answered = len(texts_in(folder))

    def note(seconds: float, *, is_done: bool = False) -> None:
        file.write_text(json.dumps({"seconds": spent + seconds, "done": is_done}))

    def report_answers(seconds: float, num_tokens: int) -> None:
        report("record answers", bounds.share(spent + seconds, num_tokens), f", {num_tokens:,} tokens")
        note(seconds)

    prompts: Iterator[Prompt] | None = None
    if data is not None:
        prompts = itertools.islice(questions_in(data), answered, None)
    left = Bounds(bounds.seconds - spent, bounds.num_tokens)
    record_answers(config, taps, writer, prompts, left, report_answers)
    note(0.0, is_done=True)


def _frequent(texts: Sequence[StoredText]) -> Tensor:
    """Return the most frequent tokens of the answers, ascending."""
    counts = Counter[int]()
    for stored in texts:
        text = stored.read()
        counts.update(text.token_ids[text.num_prompt :])
    return torch.tensor(sorted(token for token, _ in counts.most_common(MAX_IDS)))
