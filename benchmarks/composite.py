"""Combinations of n-grams and a draft model on a virtual clock: each alone, side by side, and stacked.

    python benchmarks/composite.py [--device NAME] [--draft-ms MS] [--traces DIR] [--two-devices]

Target and draft model replay recorded texts (`benchmarks/contest/record.py`) with the step times of a measured device.
The n-gram drafter, the coordinator and its controller are the real ones; the controller learns from text to text. Each
text is a separate tenant, so that n-grams know only its prompt and answer. The figures are speedups over plain decoding
and do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contest.contenders import Costs
from benchmarks.contest.contest import CPU_SLOTS, controller
from benchmarks.contest.devices import costs_of, load_device
from benchmarks.contest.traces import Trace, TraceScript, shipped
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.limits import Limits
from langchain_card.ports import Setting
from tests.simulation.simulated import Simulation
from tests.simulation.toy import ToyDrafter, ToyTarget

METHODS = {
    "n-grams": (False, True, False),
    "model": (True, False, False),
    "both": (True, True, False),
    "model above n-grams": (True, False, True),
    "the same, and n-grams beside": (True, True, True),
}
"""Drafters of each method: (a draft model, n-grams beside it, n-grams below it)."""

BLOCK = 8
"""Candidates that the draft model requests from n-grams at a time, the default of `stack=("ngram",)`."""


def seconds(
    traces: list[Trace], slowdown: tuple[float, float] | None, costs: Costs, model: bool, beside: bool, below: bool
) -> float:
    """Return the virtual seconds of all texts, one after the other. `slowdown` None: each model has its own device."""
    policy, limits, spent = controller(shared_device=slowdown is not None, limits=Limits()), Limits(), 0.0
    ngrams = [NgramDrafter(Setting(limits=limits)) for _ in range(2)]
    for number, trace in enumerate(traces):
        script, drafter = TraceScript(trace, traces), None
        if model:
            level = LowerLevel(ngrams[1], BLOCK) if below else None
            drafter = ToyDrafter(script, step_time=costs.draft, num_slots=CPU_SLOTS, lower=level)
        simulation = Simulation(
            ToyTarget(script, costs.target),
            drafter,
            policy,
            limits,
            slowdown or (1.0, 1.0),
            ngrams[:1] if beside else (),
        )
        params = SamplingParams(max_tokens=len(trace.token_ids), tenant=str(number))
        (answer,) = simulation.run([Request(number, trace.prompt_ids, params)])
        assert tuple(answer.token_ids) == trace.token_ids, "a simulated answer is not the recorded one"
        spent += simulation.now
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="step times: a name or a file")
    parser.add_argument("--draft-ms", type=float, default=43.0, help="of a draft step: 43, of the draft in four bits")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="traces of your own")
    parser.add_argument("--two-devices", action="store_true", help="draft and target do not share one")
    args = parser.parse_args()
    device, kinds = load_device(args.device), shipped(args.traces)
    costs = costs_of(device, 1e3 * costs_of(device).target(1) / args.draft_ms)
    slowdown = None if args.two_devices else device.slowdown
    print(f"{'':30}" + "".join(f"{kind:>8}" for kind in kinds))
    for name, parts in METHODS.items():
        speedups = []
        for traces in kinds.values():
            tokens = sum(len(trace.token_ids) for trace in traces)
            speedups.append(tokens * costs.target(1) / seconds(traces, slowdown, costs, *parts))
        print(f"{name:30}" + "".join(f"{speedup:8.2f}" for speedup in speedups), flush=True)


if __name__ == "__main__":
    main()
