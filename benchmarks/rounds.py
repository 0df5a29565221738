"""What a round costs besides its steps.

    python benchmarks/rounds.py [--no-logits] (some minutes; one without logits)
    python benchmarks/rounds.py --pair SET [--count N] (a minute)
    python benchmarks/rounds.py --predict SET [--count N] (two minutes)

The first prints the thread time of a draft step and a pass besides the two forward passes, and that of a round, which
has several steps. Recorded text is replayed through the real coordinator and the real draft tree. The draft expands as
many nodes as it may, however unlikely. Three runs do the same, and the fastest time of each operation counts, because
hosts are noisy. The draft worker's checks of a proposal are not included.

The second prints the time of a round of the built-in pair beside that of its steps, under `plain` and `sequential`. A
round goes from one verdict to the next; those in which a text was read are left out.

The third compares the speed of `sequential` with that on the virtual clock, which runs the same texts with the step
times that were measured in the same answers. It knows no other drafters than the model, so they are left out.
"""

import argparse
import contextlib
import gc
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import thread_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contest.contenders import Costs
from benchmarks.contest.contest import GPU_LIMITS, GPU_SLOTS, Library, joined
from benchmarks.contest.devices import costs_of, load_device
from benchmarks.contest.traces import shipped
from langchain_card.config import Schedule
from langchain_card.core import messages as m
from langchain_card.core.controller import Controller
from langchain_card.core.costs import StepTimes
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.draft_step import DraftStep
from langchain_card.limits import Limits
from tests.simulation.simulated import Simulation
from tests.simulation.toy import ToyDrafter, ToyTarget

LIMITS = {"default": Limits(), "GPU": GPU_LIMITS}
SCHEDULES: tuple[Schedule, ...] = ("plain", "sequential")
EVENTS = {m.Proposed: "take in", m.TargetReady: "query", m.Verified: "commit"}
PARTS = {"draft tree": "step", "take in": "step", "correct the tree": "pass", "query": "pass", "commit": "pass"}


class Eager(Controller):
    def grant(self, load, *, hit):
        return super().grant(load, hit=hit)._replace(min_chance=0.0)


class Meter(defaultdict[str, list[float]]):
    part = ""

    def __call__(self, part, function, *args):
        self.part, started = part, thread_time()
        result = function(*args)
        self[part].append(thread_time() - started)
        return result


class MeteredDrafter(ToyDrafter):
    """A drafter whose tree operations are metered and whose script is not."""

    meter: Meter

    def correct(self, *args):
        self.meter("correct the tree", super().correct, *args)

    def step(self, budgets):
        tree = self.trees[budgets[0].request_id]
        step = self.meter("choose", DraftStep.plan, tree, budgets[0], (tree.tokens[tree.root],), lambda token_id: True)
        children = [self._children(tree, way) for way in self.meter("choose", lambda: step.token_paths)]
        return [self.meter("draft tree", self._grow, step, children)]

    def _grow(self, step, children):
        step.place(tuple)
        step.settle(children)
        return step.publish(self.name, step.expanded, self.step_time(step.num_rows))


def replay(limits):
    """Return the seconds of each operation by part, and the statistics of the answer."""
    text, costs = joined(shipped()["code"]), costs_of(load_device("h200"))
    library, meter = Library([text]), Meter(list)
    drafter = MeteredDrafter(library, num_slots=GPU_SLOTS, step_time=costs.draft)
    simulation = Simulation(
        ToyTarget(library, costs.target), drafter, Eager(shared_device=False, limits=limits), limits
    )
    core, drafter.meter = simulation._core, meter
    handle, take_in = core.handle, core.intake.absorb
    core.handle = lambda event: meter(EVENTS.get(type(event), ""), handle, event)  # type: ignore[method-assign]
    core.intake.absorb = lambda state: meter("in " + meter.part, take_in, state)  # type: ignore[method-assign]
    gc.freeze()  # objects from before must not lengthen collections
    (answer,) = simulation.run([Request(0, (0,), SamplingParams(max_tokens=len(text.token_ids)))])
    return meter, answer.stats


def measure(limits):
    """Return nodes and rows; milliseconds of each part of a step and of a pass, of all parts, and of a round."""
    (meter, stats), *more = [replay(limits) for _ in range(3)]
    ms = {part: 1e3 * sum(map(min, meter[part], *(again[part] for again, _ in more))) for part in meter}
    ms["draft tree"] += ms["choose"]
    ms["take in"] += ms["in commit"]
    ms["commit"] -= ms["in commit"]
    parts = [ms[part] / (stats.draft_steps if of == "step" else stats.rounds) for part, of in PARTS.items()]
    a_round = sum(ms[part] for part in PARTS) / stats.rounds
    return stats.mean_draft_width, stats.mean_window, *parts, sum(parts), a_round


def logits_to_ids(rows, params):
    """Return the milliseconds of scores and argmax of logits on this CPU, which are not part of a round."""
    meter, sampler, logits = Meter(list), Sampler(params, (0,)), 4 * torch.randn(rows, 151_936)
    for _ in range(3):
        meter("", lambda: sampler.scores(logits, [()] * rows).argmax(dim=-1).tolist())
    return 1e3 * min(meter[""])


def pair_rounds(prompts, schedule, engine, events):
    """Return rounds, rows and draft steps a round, and milliseconds of a round, its pass and its draft steps."""
    count = rows = steps = 0
    seconds = passes = drafts = 0.0
    for prompt in prompts:
        events.clear()
        engine.submit(prompt, SamplingParams(max_tokens=96, schedule=schedule)).result()
        own, last = [], None
        for event in events:
            if isinstance(event, m.Proposed):
                own.append(event.proposal)
                continue
            reads = event.verdict.read or any(proposal.read for proposal in own)
            if last is not None and not reads:
                steps += sum(bool(proposal.forwarded) for proposal in own)
                drafts += sum(proposal.elapsed for proposal in own)
                count, rows = count + 1, rows + len(event.verdict.target_ids)
                seconds, passes = seconds + event.now - last, passes + event.verdict.elapsed
            own, last = [], event.now
    return count, rows / count, steps / count, *(1e3 * total / count for total in (seconds, passes, drafts))


def answer_rounds(engine, events, prompt, schedule, target, draft):
    """Return the seconds and tokens of an answer's rounds, and observe its steps in two `StepTimes`."""
    events.clear()
    engine.submit(prompt, SamplingParams(max_tokens=96, schedule=schedule)).result()
    seconds, tokens, own, last = 0.0, 0, [], None
    for event, committed in events:
        if isinstance(event, m.Proposed):
            own.append(event.proposal)
            continue
        if last is not None and not event.verdict.read and not any(proposal.read for proposal in own):
            seconds, tokens = seconds + event.now - last, tokens + committed
            target.observe(len(event.verdict.target_ids), event.verdict.elapsed)
            for proposal in own:
                if proposal.forwarded:
                    draft.observe(proposal.together, proposal.elapsed)
        own, last = [], event.now
    return seconds, tokens


def compare_with_clock(name, count):
    """Print the speed of `sequential` over plain for each text, measured and on the virtual clock."""
    from benchmarks.contest.contest import CPU_SLOTS, card
    from benchmarks.contest.record import record
    from langchain_card.bench import prompts
    from langchain_card.bench.teacher_forced import shared_model
    from langchain_card.config import EngineConfig
    from langchain_card.engine.engine import Engine
    from langchain_card.models.loader import resolve
    from langchain_card.runtime.runner import ModelRunner

    config, events, found = EngineConfig(drafters=(), stack=()), [], []
    pair = resolve(config)
    assert pair.draft is not None

    def note(event, effects):
        if isinstance(event, m.Verified) or (isinstance(event, m.Proposed) and event.proposal.source == "model"):
            events.append((event, sum(len(effect.token_ids) for effect in effects if isinstance(effect, m.Emit))))

    print("| text | plain, ms a token | sequential | times plain | on the virtual clock | measured / clock |")
    print("| --- " * 6 + "|")
    with Engine(config, pair=pair, observe=note) as engine, shared_model(pair.draft) as model:
        runner = ModelRunner(model, max_len=engine.max_model_len, num_scratch=16)
        texts = [prompts.user_prompt(engine, text) for text in prompts.find(name, count)]
        answer_rounds(engine, events, texts[0], "sequential", StepTimes(), StepTimes())  # learns the speeds
        policy = Controller(shared_device=True)
        for number, prompt in enumerate(texts):
            target, draft, ms = StepTimes(), StepTimes(), []
            for schedule in SCHEDULES:
                seconds, tokens = answer_rounds(engine, events, prompt, schedule, target, draft)
                ms.append(1e3 * seconds / max(tokens, 1))
            if not all((*ms, draft.at(1))):
                continue  # too short, or not worth a draft
            trace, costs = record(engine, runner, prompt, 96), Costs(draft.at, target.at)
            plain, drafted = (
                card([trace], costs, schedule, policy, limits=Limits(), num_slots=CPU_SLOTS) for schedule in SCHEDULES
            )
            measured, clock = ms[0] / ms[1], drafted / plain
            found.append(measured / clock)
            figures = (*(f"{x:.1f}" for x in ms), *(f"{x:.2f}" for x in (measured, clock, found[-1])))
            print(f"| {number} | " + " | ".join(figures) + " |", flush=True)
    print(f"\nmeasured / clock: median {statistics.median(found):.3f}, {min(found):.3f} to {max(found):.3f}")


def measure_pair(name, count):
    """Print the table of the built-in pair."""
    from langchain_card.bench import prompts
    from langchain_card.engine.engine import Engine

    events = []

    def note(event, effects):
        if isinstance(event, m.Verified) or (isinstance(event, m.Proposed) and event.proposal.source == "model"):
            events.append(event)

    titles = (
        "schedule",
        "rounds",
        "rows",
        "draft steps",
        "a round, ms",
        "its pass",
        "its draft steps",
        "round / steps",
    )
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    with Engine(observe=note) as engine:
        texts = [prompts.user_prompt(engine, text) for text in prompts.find(name, count)]
        pair_rounds(texts[:1], "sequential", engine, events)  # kernels are loaded, speeds learned
        for schedule in SCHEDULES:
            rounds, rows, steps, whole, one, drafts = pair_rounds(texts, schedule, engine, events)
            row = (rounds, f"{rows:.1f}", f"{steps:.1f}", *(f"{ms:.1f}" for ms in (whole, one, drafts)))
            print(f"| {schedule} | " + " | ".join(map(str, row)) + f" | {whole / (one + drafts):.3f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--pair", metavar="SET", help="measure the built-in pair on prompts of this set or file")
    pair.add_argument("--predict", metavar="SET", help="compare the built-in pair with the virtual clock")
    parser.add_argument("--count", type=int, default=6, help="prompts (6)")
    parser.add_argument("--no-logits", action="store_true", help="leave out logits -> ids, which take most of the time")
    args = parser.parse_args()
    if args.pair or args.predict:
        measure_pair(args.pair, args.count) if args.pair else compare_with_clock(args.predict, args.count)
        sys.exit()
    parts = [f"{part}, a {of}" for part, of in PARTS.items()]
    titles = ("limits", "nodes", "rows", *parts, "together, ms", "a round, ms")
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for name, n in product(LIMITS, (8, 16, 64)):
        nodes, rows, *figures = measure(replace(LIMITS[name], max_window=n, max_draft_width=n))
        print(
            f"| {name}, {n} | {nodes:.0f} | {rows:.0f} | " + " | ".join(f"{ms:.3f}" for ms in figures) + " |",
            flush=True,
        )
    if args.no_logits:
        sys.exit()
    with contextlib.suppress(ImportError):
        import torch

        from langchain_card.runtime.sampling import Sampler

        for rows, top_p in product((1, 8, 64), (0.0, 0.9)):
            params = SamplingParams(temperature=float(top_p > 0), top_p=top_p or 1.0)
            print(f"{rows} rows of logits -> ids, top-p {top_p}: {logits_to_ids(rows, params):.2f} ms", flush=True)
