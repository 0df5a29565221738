"""`train_head`: from a target to the folder of a head, in stages that a killed training does not repeat."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from langchain_card.config import EngineConfig
from langchain_card.engine.kinds import hash_model
from langchain_card.errors import InvalidInputError
from langchain_card.heads.folder import make_head, save_head
from langchain_card.heads.model import HeadModel
from langchain_card.models.files import Progress, locked
from langchain_card.models.loader import Pair, acquire_model, release_model, resolve
from langchain_card.train.answers import record_answers
from langchain_card.train.loop import Bounds, Trainer, TrainingState, write_at_once
from langchain_card.train.prompts import Conversation, read_prompts
from langchain_card.train.replay import Replay
from langchain_card.train.shards import ShardWriter, StoredText, texts_in

TRAINING = "training"
"""Folder of what only training needs, in that of the head; it may be removed afterwards."""

MAX_IDS = 8192
"""Tokens that a head proposes, at most: the most frequent ones of the answers."""

HELD_OUT = 0.05
"""Share of the texts on which the accepted length is measured."""

LEAST_TEXTS = 8

MAX_LEN = 1024
"""Positions of a text that is recorded."""


PASSES = 3
"""Passes over the answers after which training ends, if their number was given in place of hours."""

MAX_HELD_OUT = 32

Report: TypeAlias = Callable[[str, float, str], None]
"""Receives the name of a stage, the share of it that is over, and a text about it."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What a training is about.

    Attributes:
        kind: of the head.
        model: the target.
        hours: of answers and training together, half each; None where `num_tokens` bounds it.
        num_tokens: of answers, which are trained on `PASSES` times; None where `hours` bounds it.
        max_disk: bytes of recorded states.
        bits: of a number of the head's matrices, 8 or 4.
        data: file of prompts; None for prompts that the target writes.
    """

    kind: str
    model: str
    hours: float | None
    num_tokens: int | None
    max_disk: int
    bits: int
    data: Path | None = None

    def bounds(self, passes: int = 1) -> Bounds:
        """Return the bounds of a stage that has the answers so many times."""
        seconds = math.inf if self.hours is None else self.hours * 1800
        return Bounds(seconds, math.inf if self.num_tokens is None else self.num_tokens * passes)

    @property
    def length(self) -> tuple[str, object]:
        """The option that bounds the training, and its value."""
        return ("--tokens", self.num_tokens) if self.hours is None else ("--hours", self.hours)


def train_head(
    options: TrainingOptions, config: EngineConfig, folder: Path, progress: Progress, report: Report, *, resume: bool
) -> dict[str, Any]:
    """Train a head, and write it.

    Args:
        options: of the training.
        config: of the target's engine.
        folder: of the head.
        progress: receives the loading of the target.
        report: receives the stages of the training.
        resume: whether to go on with a training that ended early, or is to last longer.

    Returns:
        The description of the head, as in `head.json`.

    Raises:
        InvalidInputError: the folder has another training, `resume` finds none, prompts cannot be read, or there are
            too few answers.
        UnsupportedModelError: there are no heads for the target.
    """
    prompts = None if options.data is None else read_prompts(options.data)
    own = folder / TRAINING
    try:
        with locked(own / "lock", progress):
            _begin(own, options, prompts, resume=resume)
            pair = resolve(config, progress)
            model = acquire_model(pair.target)
            try:
                return _train(options, config, prompts, folder, pair, model, report)
            finally:
                release_model(pair.target)
    except OSError as error:
        limit = f"cannot be written ({error})"
        raise InvalidInputError("--out", str(folder), limit, "free room, or name another folder") from error


def _train(
    options: TrainingOptions,
    config: EngineConfig,
    prompts: Sequence[Conversation] | None,
    folder: Path,
    pair: Pair,
    model: Any,
    report: Report,
) -> dict[str, Any]:
    """Record answers of a loaded target, train on them, and write the head."""
    own = folder / TRAINING
    make_head(options.kind, model, torch.float32, ids=torch.arange(8))  # refuses what has no heads before the work
    config = replace(config, max_model_len=min(MAX_LEN, pair.max_len))
    _record(own, config, HeadModel.taps_of(model), prompts, options, report)
    texts = texts_in(own)
    if len(texts) < LEAST_TEXTS:
        name, value = options.length
        limit = f"gave {len(texts)} answers: {LEAST_TEXTS} are needed at least"
        raise InvalidInputError(name, value, limit, "give more, with --resume, or prompts with --data")
    held_out, texts = held_out_of(texts)
    torch.manual_seed(0)
    head = make_head(options.kind, model, torch.float32, ids=_ids_of(own, texts))
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
    return described


def _begin(folder: Path, options: TrainingOptions, prompts: Sequence[Conversation] | None, *, resume: bool) -> None:
    """Note what the training is about, or check that it is the one in the folder."""
    file, out = folder / "options.json", str(folder.parent)
    data = "self" if prompts is None else hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    wanted = {"HEAD": options.kind, "--model": options.model, "--data": data}
    if not file.exists():
        if resume:
            raise InvalidInputError("--resume", out, "has no training", "leave it out to begin one")
        write_at_once(file, lambda part: part.write_text(json.dumps(wanted)))
        return
    if not resume:
        raise InvalidInputError("--out", out, "has a training already", "--resume goes on with it")
    found = json.loads(file.read_text())
    for name, value in wanted.items():
        if found.get(name) != value:
            limit = f"is not that of the training in {out}: {found.get(name)}"
            raise InvalidInputError(name, value, limit, "name another folder with --out")


def _record(
    folder: Path,
    config: EngineConfig,
    taps: Sequence[int],
    prompts: Sequence[Conversation] | None,
    options: TrainingOptions,
    report: Report,
) -> None:
    """Record answers up to the bounds; the time that a killed recording took counts."""
    file, bounds = folder / "answers.json", options.bounds()
    writer, texts = ShardWriter(folder, options.max_disk), texts_in(folder)
    before: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"seconds": 0.0, "ended": False}
    spent = before["seconds"]
    if before["ended"] or bounds.share(spent, writer.num_tokens) >= 1:
        return

    def report_answers(seconds: float, num_tokens: int) -> None:
        report("record answers", bounds.share(spent + seconds, num_tokens), f", {num_tokens:,} tokens")
        write_at_once(file, lambda part: part.write_text(json.dumps({"seconds": spent + seconds, "ended": False})))

    left = None if prompts is None else iter(prompts[len(texts) :])
    seconds = record_answers(
        config, taps, writer, left, Bounds(bounds.seconds - spent, bounds.num_tokens), report_answers
    )
    ended = bounds.share(spent + seconds, writer.num_tokens) < 1  # no prompts are left, or no room
    write_at_once(file, lambda part: part.write_text(json.dumps({"seconds": spent + seconds, "ended": ended})))


def held_out_of(texts: Sequence[StoredText]) -> tuple[Sequence[StoredText], Sequence[StoredText]]:
    """Split texts into those on which the accepted length is measured, and those to train on."""
    count = min(MAX_HELD_OUT, max(2, int(len(texts) * HELD_OUT)))
    return texts[:count], texts[count:]


def frequent_tokens(texts: Sequence[StoredText]) -> Tensor:
    """Return the `MAX_IDS` most frequent tokens of answers, ascending."""
    counts = Counter[int]()
    for text in texts:
        counts.update(text.read_tokens()[text.num_prompt :])
    return torch.tensor(sorted(token for token, _ in counts.most_common(MAX_IDS)))


def _ids_of(folder: Path, texts: Sequence[StoredText]) -> Tensor:
    """Return the tokens that the head proposes: those with which the training began."""
    file = folder / "ids.json"
    if not file.exists():
        ids = frequent_tokens(texts).tolist()
        write_at_once(file, lambda part: part.write_text(json.dumps(ids)))
    return torch.tensor(json.loads(file.read_text()))
