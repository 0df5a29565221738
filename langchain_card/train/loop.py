"""The training loop of a head: AdamW over replayed texts, with checkpoints from which it goes on."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from langchain_card.heads.model import HeadModel
from langchain_card.train.replay import NUM_STEPS, Replay, mean_accepted
from langchain_card.train.shards import StoredText

RATE, LEAST_SHARE = 0.48, 0.05
"""Learning rate after the warm-up, times the size of a state; the share of it at the end of a cosine (docs/LOG.md)."""

WARM_UP = 20
"""Steps until the learning rate is reached."""

TEXTS_A_STEP = 2

ONE_STEP = 0.3
"""Share of a training in which the first draft step alone is replayed: it takes 0.4 of the time of three, and what it
learns serves the others (docs/LOG.md)."""

CHECKS = 8
"""Number of times that the accepted length is measured and a checkpoint written."""

SAVE_SECONDS = 300.0
"""Seconds of training that are lost at most when it is killed."""

PATIENCE = 3
"""Checks without a better accepted length after which training ends."""

BF16_FEATURES = "avx512bf16", "amx-bf16", "bf16"
"""LLVM's names for instructions that multiply bfloat16: of x86 and of ARM."""

WEIGHTS = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The end of a stage of training: the earlier of two.

    Attributes:
        seconds: that it takes.
        num_tokens: rows of answers that it has.
    """

    seconds: float = math.inf
    num_tokens: float = math.inf

    def share(self, seconds: float, num_tokens: int) -> float:
        """Return how much of the stage is over, from 0; 1 and more when it ends."""
        return max(seconds / self.seconds, num_tokens / self.num_tokens)


@dataclass(slots=True)
class TrainingState:
    """How far a training is.

    Attributes:
        steps: of the optimiser.
        seconds: of training.
        num_tokens: rows that were trained on.
        curve: seconds, tokens and accepted length of each check.
    """

    steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    curve: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def is_stalled(self) -> bool:
        """Whether the last checks brought nothing."""
        lengths = [length for *_, length in self.curve]
        return len(lengths) > PATIENCE and max(lengths[-PATIENCE:]) <= max(lengths[:-PATIENCE])


class Trainer:
    """Trains a head.

    Args:
        head: with the weights from which it starts.
        replay: of the head.
        texts: to train on.
        held_out: texts on which the accepted length is measured.
        folder: of checkpoints.
        bounds: when training ends at the latest.
        report: called after each step with the state.
    """

    def __init__(
        self,
        head: HeadModel,
        replay: Replay,
        texts: Sequence[StoredText],
        held_out: Sequence[StoredText],
        folder: Path,
        bounds: Bounds,
        report: Callable[[TrainingState], None] = lambda state: None,
    ) -> None:
        from accelerate import Accelerator  # half a second

        on_cpu = head.device.type == "cpu"
        in_bf16 = not on_cpu or _multiplies_bf16()
        self._accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if in_bf16 else "no")
        self._folder, self._bounds, self._report = folder, bounds, report
        self._replay, self._texts = replay, texts
        self._held_out = [text.read() for text in held_out]
        self._head = head
        self._parameters = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
        self._rate = RATE / head.config.hidden_size
        self._optimizer = torch.optim.AdamW(self._parameters.values(), self._rate, (0.9, 0.95), weight_decay=0.01)
        self.state, self._saved = TrainingState(), 0.0

    def run(self) -> TrainingState:
        """Train until a bound is reached or the accepted length stalls; the head has its best weights then."""
        if not self.state.curve:
            self._check()
        while self._share < 1 and not self.state.is_stalled:
            begun = time.monotonic()
            self._step()
            self.state.seconds += time.monotonic() - begun
            if self._share >= len(self.state.curve) / CHECKS:
                self._check()
            elif self.state.seconds - self._saved > SAVE_SECONDS:
                self._save(is_best=False)
            self._report(self.state)
        self._load_best()
        return self.state

    def _step(self) -> None:
        self._head.train()
        stored = self._next_texts()
        with self._accelerator.autocast():
            loss = self._replay([text.read() for text in stored], 1 if self._share < ONE_STEP else NUM_STEPS).loss
        self._accelerator.backward(loss)
        self.state.num_tokens += sum(text.num_tokens for text in stored)
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
        fallen = LEAST_SHARE + (1 - LEAST_SHARE) * (1 + math.cos(math.pi * min(1.0, self._share))) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * fallen * min(1.0, (self.state.steps + 1) / WARM_UP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.state.steps += 1

    @property
    def _share(self) -> float:
        """The share of training that is over."""
        return self._bounds.share(self.state.seconds, self.state.num_tokens)

    def _next_texts(self) -> list[StoredText]:
        """Return the texts of a step: all texts come once in a random order, then in another one."""
        chosen = []
        for number in range(self.state.steps * TEXTS_A_STEP, (self.state.steps + 1) * TEXTS_A_STEP):
            epoch, place = divmod(number, len(self._texts))
            order = random.Random(epoch).sample(range(len(self._texts)), len(self._texts))  # noqa: S311 - can be repeated
            chosen.append(self._texts[order[place]])
        return chosen

    def _check(self) -> None:
        """Measure the accepted length, and write a checkpoint."""
        self._head.eval()
        with self._accelerator.autocast():
            length = mean_accepted(self._replay, self._held_out)
        is_best = all(length > before for *_, before in self.state.curve)
        self.state.curve.append((self.state.seconds, self.state.num_tokens, length))
        self._save(is_best=is_best)

    def _save(self, *, is_best: bool) -> None:
        """Write the weights if they are the best, then weights, moments and state as one file."""
        tensors = {f"weights.{name}": weight.detach() for name, weight in self._parameters.items()}
        for name, weight in self._parameters.items():
            for moment, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"{moment}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        if is_best:
            weights = {name: weight.detach().contiguous() for name, weight in self._parameters.items()}
            write_at_once(self._folder / "best.safetensors", lambda file: save_file(weights, file))
        state = {"state": json.dumps(asdict(self.state))}
        write_at_once(self._folder / WEIGHTS, lambda file: save_file(tensors, file, state))
        self._saved = self.state.seconds

    def load(self) -> None:
        """Go on from the checkpoint in the folder, if there is one."""
        if not (self._folder / WEIGHTS).exists():
            return
        with safe_open(self._folder / WEIGHTS, "pt") as file:
            values: dict[str, Any] = json.loads(file.metadata()["state"])
        self.state = TrainingState(**values | {"curve": [tuple(point) for point in values["curve"]]})
        tensors = load_file(self._folder / WEIGHTS)
        with torch.no_grad():
            for name, weight in self._parameters.items():
                weight.copy_(tensors.pop(f"weights.{name}"))
        for key, value in tensors.items():
            moment, _, name = key.partition(".")
            self._optimizer.state[self._parameters[name]][moment] = value

    def _load_best(self) -> None:
        best = load_file(self._folder / "best.safetensors")
        with torch.no_grad():
            for name, weight in self._parameters.items():
                weight.copy_(best[name])
        self._head.eval()


def _multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16, which are twice as fast as float32."""
    from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]

    features = get_host_cpu_features()
    return any(features.get(name, False) for name in BF16_FEATURES)


def write_at_once(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file at once or not at all; its folder is made if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    write(temporary)
    temporary.replace(file)
