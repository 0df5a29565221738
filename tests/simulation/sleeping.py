"""Sleeping devices: the real driver, workers, transports and threads, over models that only sleep.

They test real concurrency on a machine without a second device: a sleeping step occupies neither a core nor the
interpreter, as on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Self

from langchain_card.core import messages as m
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.policy import Policy
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.engine.driver import Driver
from langchain_card.engine.generation import Generation
from langchain_card.engine.transports.thread import ThreadTransport
from langchain_card.limits import Limits
from langchain_card.ports import Budget, Transport
from langchain_card.testing.tokenizer import byte_tokenizer
from langchain_card.text.detokenizer import Detokenizer
from tests.simulation.simulated import simulate
from tests.simulation.toy import StepTime, ToyDrafter, ToyModel, ToyTarget


class SleepingTarget(ToyTarget):
    """A target whose passes sleep for their step time.

    Attributes:
        taken: seconds that each pass took; more than its step time, as the operating system wakes threads late.
    """

    def __init__(self, model: ToyModel, step_time: StepTime) -> None:
        super().__init__(model, step_time)
        self.taken: list[float] = []

    def verify(self, windows: Sequence[m.Window]) -> list[m.Verdict]:
        """Return the scripted tokens, after a sleep."""
        begun = time.perf_counter()
        verdicts = super().verify(windows)
        self.taken.append(_sleep_until(begun, sum(verdict.elapsed for verdict in verdicts)))
        return verdicts


class SleepingDrafter(ToyDrafter):
    """A drafter whose steps sleep for their step time.

    Attributes:
        stall: additional seconds of the next step.
        taken: seconds that each step took.
    """

    def __init__(self, model: ToyModel, step_time: StepTime) -> None:
        super().__init__(model, step_time=step_time)
        self.stall = 0.0
        self.taken: list[float] = []

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        """Return the scripted candidates, after a sleep."""
        begun = time.perf_counter()
        proposals = super().step(budgets)
        stall, self.stall = self.stall, 0.0
        self.taken.append(_sleep_until(begun, stall + sum(proposal.elapsed for proposal in proposals)))
        return proposals


def _sleep_until(begun: float, seconds: float) -> float:
    """Sleep until a step has lasted for `seconds`; return the seconds that it took."""
    time.sleep(max(0.0, begun + seconds - time.perf_counter()))
    return time.perf_counter() - begun


class SleepingEngine:
    """An engine over a toy pair whose steps sleep; a context manager.

    Args:
        model: scripts both.
        target_time: seconds of a target's pass by its number of rows.
        draft_time: seconds of a draft step by its number of rows; ignored with `transport`.
        limits: bounds.
        policy: of the coordinator; a `Controller` by default.
        transport: makes the transport of a drafter "toy" that is not made here.
    """

    def __init__(
        self,
        model: ToyModel,
        target_time: StepTime,
        draft_time: StepTime,
        limits: Limits | None = None,
        policy: Policy | None = None,
        transport: Callable[[Driver], Transport] | None = None,
    ) -> None:
        limits = limits or Limits()
        policy = policy or Controller(shared_device=False, limits=limits)
        self.drafters: list[SleepingDrafter] = []
        self.target_time = target_time
        self._ids = itertools.count()
        self._tokenizer = byte_tokenizer()
        make_draft = functools.partial(SleepingDrafter, model, step_time=draft_time)
        self.driver = Driver(
            Coordinator([DrafterTraits("toy", paced=True, from_model=True)], limits, policy),
            lambda: SleepingTarget(model, target_time),
            {"toy": transport or functools.partial(self._transport, make_draft)},
        )
        self.driver.transports["toy"].wait_ready()
        self._thread = threading.Thread(target=self.driver.run, name="card-target", daemon=True)
        self._thread.start()

    def _transport(self, make_draft: Callable[[], SleepingDrafter], driver: Driver) -> Transport:
        self.drafters.append(make_draft())
        worker = DraftWorker(self.drafters[-1], driver.publish, functools.partial(driver.report_out_of_memory, "toy"))
        return ThreadTransport(worker, name="toy", on_death=functools.partial(driver.report_death, "toy"))

    def submit(self, prompt_ids: Sequence[int], **params: Any) -> Generation:
        """Submit a request."""
        request = Request(next(self._ids), tuple(prompt_ids), SamplingParams(**params))

        def abort() -> None:
            self.driver.post(lambda now: m.Stopped(request.request_id, FinishReason.ABORT, now))

        def pause(paused: bool) -> None:
            self.driver.post(lambda now: m.Paused(request.request_id, paused, now))

        max_unread = self.driver.coordinator.limits.max_unread
        generation = Generation(request, Detokenizer(self._tokenizer), abort, pause, max_unread)
        self.driver.submit(generation)
        return generation

    def close(self) -> None:
        """Stop both threads."""
        self.driver.close()
        self._thread.join()
        for transport in self.driver.transports.values():
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


TOKENS = 80
TRIES = 8
"""Measurements of which the best counts: the machine may be busy for a while."""


def virtual(model: ToyModel, t_target: float, t_draft: float, schedule: str) -> float:
    """Return the tokens per second that the virtual clock gives for steps of these seconds."""
    params = SamplingParams(max_tokens=TOKENS, schedule=schedule)  # type: ignore[arg-type]
    target = ToyTarget(model, lambda rows: t_target)
    drafter = ToyDrafter(model, step_time=lambda rows: t_draft)
    prompt_ids, limits = (1, 2), Limits()
    policy = Controller(shared_device=False, limits=limits)
    token_ids, stats = simulate(Request(0, prompt_ids, params), target, drafter, policy, limits)
    assert tuple(token_ids) == model.answer(prompt_ids, TOKENS)
    return stats.tokens_per_second
