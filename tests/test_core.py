"""The pure core: tree, walk, and the protocol under random schedules with lost and repeated messages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from langchain_card.config import Limits
from langchain_card.core import messages as m
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.controller import Controller, CostModel
from langchain_card.core.coordinator import Coordinator, Source
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.core.walk import walk
from langchain_card.ports import Budget

VOCAB, EOS, SEEDS = 5, 99, 40


def target_token(prefix: Sequence[int]) -> int:
    """A target whose choice depends on the whole prefix, so that a candidate under a wrong prefix shows."""
    state = 7
    for token in prefix:
        state = (state * 31 + token * 17 + 3) % 10_007
    return state % VOCAB


def reference(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target_token(tokens))
    return tokens[len(prompt) :]


class ToyDrafter:
    """Knows the target's token with a chance, adds a wrong sibling, and checks that its own prefix is right."""

    name, paced = "toy", True

    def __init__(self, rng: random.Random, chance: float) -> None:
        self.rng, self.chance = rng, chance
        self.requests: dict[int, dict] = {}

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        self.requests[request_id] = {"prompt": list(prompt_ids), "out": [], "epoch": -1}
        self._restart(self.requests[request_id])

    def _restart(self, r: dict) -> None:
        r.update(epoch=r["epoch"] + 1, base=len(r["out"]), parents=[-1], tokens=[None], open=[0], root=0)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        r = self.requests.get(request_id)
        if r is None or len(r["out"]) < start:
            return
        for token in token_ids[len(r["out"]) - start :]:
            r["out"].append(token)
            child = [n for n, p in enumerate(r["parents"]) if p == r["root"] and r["tokens"][n] == token]
            if child and self.rng.random() < 0.9:
                r["root"] = child[0]
            else:
                self._restart(r)

    def _prefix(self, r: dict, node: int) -> list[int]:
        tokens = []
        while node:
            tokens.append(r["tokens"][node])
            node = r["parents"][node]
        return r["prompt"] + r["out"][: r["base"]] + tokens[::-1]

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        return [self._step(b.request_id) for b in budgets if b.request_id in self.requests]

    def _step(self, request_id: int) -> m.Proposal:
        r = self.requests[request_id]
        node = r["open"].pop(0) if r["open"] else 0
        right = target_token(self._prefix(r, node))
        wrong = (right + 1 + self.rng.randrange(VOCAB - 1)) % VOCAB
        tokens = [right, wrong] if self.rng.random() < self.chance else [wrong]
        first = len(r["tokens"])
        for token in tokens:
            r["open"].append(len(r["tokens"]))
            r["parents"].append(node)
            r["tokens"].append(token)
        scores = tuple(-0.1 - self.rng.random() for _ in tokens)
        return m.Proposal(
            self.name, request_id, r["epoch"], r["root"], len(r["out"]), first, (node,) * len(tokens),
            tuple(tokens), scores, (node,), 0.01,
        )  # fmt: skip

    def end(self, request_id: int) -> None:
        self.requests.pop(request_id, None)


class Simulation:
    """Completes effects in random order, loses and repeats messages, and checks the invariants after every event."""

    def __init__(self, seed: int, schedule: str, chance: float, limits: Limits | None = None) -> None:
        self.rng = random.Random(seed)
        self.limits = limits or Limits(max_num_seqs=2, max_window=6, max_tree_nodes=40)
        self.drafter = ToyDrafter(self.rng, chance)
        self.core = Coordinator([Source("toy", True)], self.limits, Controller(shared_device=False))
        self.schedule, self.now = schedule, 0.0
        self.to_draft: list[m.Effect] = []
        self.to_core: list[m.Proposal] = []
        self.windows: list[m.Window] = []
        self.verdicts: list[m.Verdict] = []
        self.kept: dict[int, list[int]] = {}
        self.last: dict[int, m.Window] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.emitted: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}

    def submit(self, request_id: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, schedule=self.schedule)  # type: ignore[arg-type]
        self.prompts[request_id], self.emitted[request_id] = prompt, []
        self.handle(m.Submitted(Request(request_id, prompt, params, (EOS,)), self.now))

    def handle(self, event: m.Event) -> None:
        for effect in self.core.handle(event):
            match effect:
                case m.Verify(windows):
                    self.windows += windows
                case m.Emit(request_id, tokens):
                    self.emitted[request_id] += tokens
                case m.Finish(request_id, reason):
                    assert request_id not in self.finished, "ended twice"
                    self.finished[request_id] = reason
                case m.Wait(until):
                    self.now = max(self.now, until) if self.rng.random() < 0.3 else self.now
                case _:
                    self.to_draft.append(effect)
        self.check()

    def check(self) -> None:
        for request_id, tokens in self.emitted.items():
            assert tokens == reference(self.prompts[request_id], len(tokens)), "a token is not the target's"
        for state in self.core.scheduler.running.values():
            tree, prompt = state.tree, state.request.prompt_ids
            assert [tree.tokens[n] for n in tree.path[1:]] == state.output_ids
            assert len(tree) <= len(tree.path) + 2 * self.limits.max_tree_nodes
            for name, source in state.sources.items():
                r = self.drafter.requests.get(state.request.request_id)
                if r is None or r["epoch"] != source.epoch:
                    continue
                for number, node in enumerate(source.nodes):
                    if node != DEAD and tree.is_alive(node):
                        seen = []
                        while node != tree.path[0]:
                            seen.append(tree.tokens[node])
                            node = tree.parents[node]
                        assert list(prompt) + seen[::-1] == self.drafter._prefix(r, number), (name, "wrong prefix")

    def verify(self, window: m.Window) -> None:
        kept = self.kept.setdefault(window.request_id, list(self.prompts[window.request_id][:-1]))
        last = self.last.get(window.request_id)
        kept += [last.token_ids[row] for row in window.kept_rows] if last is not None else []
        assert len(kept) == window.start_position, "the target's KV does not end where the window starts"
        self.last[window.request_id] = window
        if self.verdicts and self.rng.random() < 0.1:  # an old verdict, repeated while a window is in flight
            self.handle(m.Verified(self.rng.choice(self.verdicts), self.now))
        prefixes: list[list[int]] = []
        for token, parent in zip(window.token_ids, window.parents):  # noqa: B905
            prefixes.append([*(kept if parent == m.ROOT else prefixes[parent]), token])
        verdict = m.Verdict(window.request_id, window.step_id, tuple(map(target_token, prefixes)), 0.03)
        self.handle(m.Verified(verdict, self.now))
        self.verdicts.append(verdict)

    def deliver(self, command: m.Effect) -> None:
        match command:
            case m.Begin(request):
                self.drafter.begin(request.request_id, request.prompt_ids)
            case m.End(request_id):
                self.drafter.end(request_id)
            case m.Correct(_, request_id, start, tokens):
                for _ in range(self.rng.choice((0, 1, 1, 1, 2))):  # lost, delivered, repeated
                    self.drafter.correct(request_id, start, tokens)
            case m.Grow(_, request_id, steps):
                for _ in range(min(steps, 4)):
                    self.to_core += self.drafter.step([Budget(request_id)])

    def step(self) -> None:
        """One side does some of what it has to do."""
        self.now += self.rng.random() * 0.02
        choice = self.rng.random()
        if choice < 0.35 and self.to_draft:
            for command in self.to_draft[: (n := self.rng.randint(1, 8))]:
                self.deliver(command)
            del self.to_draft[:n]
        elif choice < 0.65 and self.to_core:
            if self.rng.random() < 0.1:
                self.rng.shuffle(self.to_core)
            for proposal in self.to_core[: (n := self.rng.randint(1, 8))]:
                for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
                    self.handle(m.Proposed(proposal, self.now))
            del self.to_core[:n]
        elif self.windows:
            self.verify(self.windows.pop(0))
        else:
            self.handle(m.TargetReady(self.now))


@pytest.mark.parametrize("schedule", ["plain", "sequential", "parallel"])
def test_invariants_hold_under_random_schedules(schedule: str) -> None:
    accepted = hits = rounds = dropped = 0
    for seed in range(SEEDS):
        sim = Simulation(seed, schedule, chance=random.Random(seed).choice((0.3, 0.7, 0.95)))
        for request_id in range(3):
            sim.submit(request_id, tuple(random.Random(seed + request_id).choices(range(VOCAB), k=4)), 40)
        stats = {}
        for _ in range(5000):
            stats |= {k: s.stats for k, s in sim.core.scheduler.running.items()}
            if len(sim.finished) == 3:
                break
            sim.step()
        assert set(sim.finished.values()) == {FinishReason.LENGTH}, f"seed {seed}: no end was reached"
        assert all(len(tokens) == 40 for tokens in sim.emitted.values())
        assert sim.core.idle and sim.core.scheduler.ended == 3
        accepted += sum(s.accepted for s in stats.values())
        hits += sum(s.hits for s in stats.values())
        rounds += sum(s.rounds for s in stats.values())
        dropped += sum(s.dropped for s in stats.values())
    if schedule == "plain":
        assert accepted == 0 and rounds == SEEDS * 3 * 40
    else:
        assert accepted > rounds * 0.05 and hits > 0 and rounds < SEEDS * 3 * 38
    if schedule == "parallel":
        assert dropped > 0, "no proposal ever came too late: the fence was not tested"


def test_walk_follows_the_branch_that_the_target_chose() -> None:
    window = m.Window(0, 0, 5, token_ids=(1, 10, 11, 12, 13), parents=(m.ROOT, 0, 0, 2, 3))
    assert walk(window, (11, 0, 12, 13, 14)) == ([0, 2, 3, 4], [11, 12, 13, 14])
    assert walk(window, (12, 10, 0, 0, 0)) == ([0], [12])
    assert walk(window, (10, 7, 0, 0, 0)) == ([0, 1], [10, 7])


def test_tree_re_roots_and_keeps_what_survives() -> None:
    tree = CandidateTree(0)
    a, b = tree.insert(0, 1, -0.1, "s"), tree.insert(0, 2, -2.0, "s")
    aa, ab, ba = tree.insert(a, 3, -0.1, "s"), tree.insert(a, 4, -1.5, "s"), tree.insert(b, 5, -0.1, "s")
    assert tree.best_subtree(2)[0] == [a, aa]
    nodes, chances = tree.best_subtree(9)
    assert nodes[:3] == [a, aa, ab] and len(nodes) == 5
    assert chances == sorted(chances, reverse=True) and chances[1] == pytest.approx(math.exp(-0.2))
    assert tree.advance(1) is True
    assert tree.insert(b, 6, -0.1, "s") == DEAD and tree.insert(ba, 6, -0.1, "s") == DEAD
    assert tree.best_subtree(9)[0] == [aa, ab] and tree.lead() == 1
    assert tree.insert(0, 1, -0.1, "late") == a, "a committed token proposed late is found, not doubled"
    assert tree.advance(77) is False
    assert tree.best_subtree(9) == ([], []) and not tree.is_alive(aa)
    new = tree.sweep()
    assert set(new) == {0, a, tree_root_before := max(new)} and tree.root == new[tree_root_before]
    assert [tree.tokens[n] for n in tree.path] == [0, 1, 77]


def coordinator(**limits: int) -> Coordinator:
    return Coordinator([Source("toy", False)], Limits(**limits), Controller(shared_device=True))


def run_round(core: Coordinator, target_ids: Sequence[int], now: float) -> list[m.Effect]:
    verify = next(e for e in core.handle(m.TargetReady(now)) if isinstance(e, m.Verify))
    window = verify.windows[0]
    ids = (*target_ids, *[0] * (len(window.token_ids) - len(target_ids)))
    return core.handle(m.Verified(m.Verdict(window.request_id, window.step_id, ids, 0.1), now))


def propose(core: Coordinator, tokens: Sequence[int], epoch: int, base: int) -> None:
    chain = m.Proposal("toy", 0, epoch, 0, base, 1, tuple(range(len(tokens))), tuple(tokens), (-0.1,) * len(tokens))
    core.handle(m.Proposed(chain, 0.0))


@pytest.mark.parametrize(
    ("max_tokens", "eos", "emitted", "reason"),
    [
        (10, 12, (11, 12), FinishReason.STOP),
        (3, 99, (11, 12, 13), FinishReason.LENGTH),
        (1, 99, (11,), FinishReason.LENGTH),
        (3, 13, (11, 12, 13), FinishReason.STOP),
    ],
)
def test_a_window_is_cut_at_end_of_text_and_at_max_tokens(
    max_tokens: int, eos: int, emitted: tuple[int, ...], reason: FinishReason
) -> None:
    core = coordinator()
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=max_tokens + 1), (eos,)), 0.0))
    run_round(core, [10], 0.0)
    propose(core, [11, 12, 13, 14], 0, 1)
    effects = run_round(core, [11, 12, 13, 14, 15], 1.0)
    emit = next(e for e in effects if isinstance(e, m.Emit))
    finish = next(e for e in effects if isinstance(e, m.Finish))
    assert emit.token_ids == emitted and finish.reason is reason
    assert finish.stats.output_tokens == 1 + len(emitted) and finish.stats.accepted <= len(emitted)
    assert core.idle


def test_a_stop_takes_back_what_lies_behind_it() -> None:
    core = coordinator()
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9), ()), 0.0))
    run_round(core, [5], 0.0)
    propose(core, [6, 7], 0, 1)
    run_round(core, [6, 7, 8], 1.0)
    effects = core.handle(m.Stopped(0, FinishReason.STOP, 2.0, num_tokens=2))
    finish = next(e for e in effects if isinstance(e, m.Finish))
    assert finish.stats.output_tokens == 2 and core.idle
    assert core.handle(m.Stopped(0, FinishReason.ABORT, 3.0)) == []


def test_a_dead_drafter_ends_the_wait_at_once() -> None:
    core = Coordinator([Source("toy", True)], Limits(), Controller(shared_device=True))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="sequential"), ()), 0.0))
    run_round(core, [5], 0.0)
    effects = core.handle(m.TargetReady(1.0))
    assert isinstance(effects[0], m.Grow) and isinstance(effects[1], m.Wait)
    core.handle(m.SourceDied("toy", 1.1))
    assert isinstance(core.handle(m.TargetReady(1.2))[0], m.Verify)


def test_waiting_requests_are_forgotten_when_stopped() -> None:
    core = coordinator(max_num_seqs=1)
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(), ()), 0.0))
    core.handle(m.TargetReady(0.0))
    effects = core.handle(m.Stopped(1, FinishReason.ABORT, 0.1))
    assert any(isinstance(e, m.Finish) and e.request_id == 1 for e in effects), "a waiting request must end too"
    assert not core.scheduler.waiting


def test_draft_steps_must_pay() -> None:
    costs = CostModel()
    assert costs.draft_pays(0.5), "nothing is known yet: measure"
    costs.draft_step.add(0.06)
    for rows, elapsed in ((1, 0.10), (4, 0.13), (8, 0.17), (1, 0.10), (4, 0.13)):
        costs.observe_target(rows, elapsed)
    costs.observe_round(1, 0.10)
    assert costs.draft_pays(0.9) and not costs.draft_pays(0.5)


def test_a_window_is_as_wide_as_its_rows_pay() -> None:
    costs = CostModel()
    assert costs.best_width([0.9, 0.1]) == 1, "nothing is known yet: the likely ones"
    for rows, elapsed in ((1, 0.10), (4, 0.106), (8, 0.18)):
        costs.observe_target(rows, elapsed)
    costs.observe_round(1, 0.10)
    assert costs.target_step(2) == pytest.approx(0.102) and costs.target_step(6) == pytest.approx(0.143)
    assert costs.best_width([0.9, 0.05, 0.05, 0.05]) == 3, "rows are nearly free up to the knee"
    assert costs.best_width([0.9, 0.8, 0.7, 0.6, 0.5, 0.1]) == 5, "behind it they must pay"
    assert costs.best_width([0.01]) == 0
