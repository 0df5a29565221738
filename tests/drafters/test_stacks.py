"""Stacks of drafters: exact whatever is below, and a path of nodes for one step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from langchain_card import CARDChatModel, plugins
from langchain_card.config import EngineConfig
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.draft_step import likeliest
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.model import ModelDrafter
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.drafters.tree import DraftTree
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.engine.plugin_drafters import choose
from langchain_card.errors import CARDError, InvalidInputError
from langchain_card.limits import Limits
from langchain_card.ports import Budget, Setting
from langchain_card.testing.hostile import FAILURES, FailingDrafter
from tests.simulation import FixedPolicy, ToyDrafter, ToyModel, invariants
from tests.support import tiny
from tests.support.exactness import Figures, Reference, compare

pytestmark = pytest.mark.usefixtures("one_thread")

Models = dict[str, str]
TOKENS = 30
PROMPT = "the quick brown fox; the quick brown"
GRAMMAR = 'start: /[ab ]+/ "c" /[a-z]+/'
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "banned_ids": (7, 50)},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def models(tiny_pairs: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target, a draft, and a worse one."""
    target, draft = tiny_pairs["llama"]
    return {"target": target, "draft": draft, "lower": tiny.make_draft(target, tmp_path_factory.mktemp("low"), 0.04, 3)}


@pytest.fixture
def all_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models draft at a loss: what a controller that measures would verify depends on the hour."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(2, 1, 1, 1)))


def configured(models: Models, *stack: str, **options: Any) -> EngineConfig:
    fields = {"dtype": "float64", "drafters": (), "max_model_len": 512, **options}
    return EngineConfig(models["target"], models["draft"], stack=stack, **fields)


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize(
    "stack", [("ngram",), ("lower?block=3", "ngram?block=5"), pytest.param(("lower", "lower"), marks=pytest.mark.slow)]
)
def test_equal_to_the_naive_loop(models: Models, stack: tuple[str, ...]) -> None:
    config = configured(models, *(level.replace("lower", models["lower"]) for level in stack))
    prompt_ids, reference, figures = tiny.byte_tokenizer()(PROMPT).input_ids, Reference(config), Figures()
    asked = {name: (prompt_ids, {**options, "max_tokens": TOKENS}) for name, options in ASKED.items()}
    eos_ids = (tiny.byte_tokenizer().eos_token_id,)
    wanted = {name: reference.answer(ids, SamplingParams(**how), eos_ids) for name, (ids, how) in asked.items()}
    compare(config, asked, wanted, ("plain", "sequential", "parallel"), figures)
    assert figures.different == 0 and figures.compared == 3 * 3 * TOKENS, figures
    assert all(rate > 0.02 for rate in figures.rates().values()), figures.rates()


@pytest.mark.usefixtures("all_verified")
@pytest.mark.slow
def test_several_answers_at_once_with_a_grammar_in_one(models: Models) -> None:
    """What is asked of the lower levels is asked for all requests together."""
    prompts = [tiny.byte_tokenizer()(PROMPT[: 9 * i]).input_ids for i in (1, 2, 3)]
    how = [{}, {"temperature": 0.8, "seed": 3}, {"grammar": GRAMMAR}]
    limits = Limits(max_num_seqs=3)
    with Engine(configured(models, models["lower"], "ngram", limits=limits, exact="default")) as engine:
        for schedule in ("sequential", "parallel"):
            params = [SamplingParams(max_tokens=TOKENS, **each) for each in how]  # type: ignore[arg-type]
            plain = [
                engine.submit(ids, replace(p, schedule="plain")).result()
                for ids, p in zip(prompts, params, strict=True)
            ]
            running = [
                engine.submit(ids, replace(p, schedule=schedule)) for ids, p in zip(prompts, params, strict=True)
            ]
            assert [each.result().token_ids for each in running] == [each.token_ids for each in plain]


@pytest.mark.usefixtures("all_verified")
@pytest.mark.slow
def test_a_step_brings_a_path_of_nodes(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target's own weights below, a pass of the draft expands nearly all that it is told, and no pass is
    larger than it may be."""
    sizes = list[int]()
    forward = ModelDrafter._forward

    def watching(drafter: ModelDrafter, parts: Any) -> torch.Tensor:
        if drafter._lower is not None:
            sizes.extend(part.step.num_rows for part in parts)
        return forward(drafter, parts)

    monkeypatch.setattr(ModelDrafter, "_forward", watching)
    params = SamplingParams(max_tokens=TOKENS, schedule="sequential")
    nodes = dict[tuple[str, ...], float]()
    for stack in ((), (f"{models['draft']}?block=4",)):
        with Engine(configured(models, *stack)) as engine:
            stats = engine.submit(tiny.byte_tokenizer()(PROMPT).input_ids, params).result().stats
        assert stats.accepted > 0
        nodes[stack] = stats.draft_nodes / stats.draft_steps
    assert nodes[()] <= 2 and nodes[stack] > 4, nodes
    assert max(sizes) == 1 + 4, "a node, and a block of four"


LIES = {"root": 7, "first": 0, "parents": (5,), "token_ids": (10**9,), "scores": (float("nan"),), "epoch": "1"}


class Liar:
    """Says what no drafter should."""

    name, paced, looks_ahead = "liar", False, True

    def __init__(self, setting: Setting) -> None:
        self._lengths, self._asked = dict[int, int](), 0

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        self._lengths[request.request_id] = len(output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        self._lengths[request_id] = start + len(token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return [proposal for budget in budgets for proposal in self._lies(budget.request_id)]

    def _lies(self, request_id: int) -> list[Proposal]:
        self._asked += 1
        true = Proposal("liar", request_id, self._asked, 0, self._lengths[request_id], 1, (0,), (65,), (-0.1,))
        lies = [[replace(true, **{name: value})] for name, value in LIES.items()]  # type: ignore[arg-type]
        many, count = tuple(range(300)), 5000
        lies += [
            [],
            [true] * 5,
            [replace(true, request_id=request_id + 1), replace(true, applied_len=true.applied_len + 1)],
            [replace(true, parents=(0,) * 300, token_ids=many, scores=(-5.0,) * 300)],
            [replace(true, parents=(*range(count),), token_ids=(66,) * count, scores=(-0.001,) * count)],
        ]
        return lies[request_id % len(lies)]

    def end(self, request_id: int) -> None:
        self._lengths.pop(request_id, None)

    def close(self) -> None:
        self._lengths.clear()


@pytest.mark.usefixtures("all_verified")
@pytest.mark.slow
def test_a_lower_drafter_that_lies_costs_rows_and_nothing_else(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is told another lie."""
    monkeypatch.setattr(plugins, "_registered", {("drafters", "liar"): Liar})
    prompt_ids, params = tiny.byte_tokenizer()(PROMPT).input_ids, SamplingParams(max_tokens=16, schedule="sequential")
    with Engine(configured(models, "liar?block=6")) as engine:
        plain = engine.submit(prompt_ids, replace(params, schedule="plain")).result().token_ids
        for lie in range(len(LIES) + 5):
            done = engine.submit(prompt_ids, params).result()
            assert done.token_ids == plain and done.stats.accepted > 0, lie
        assert all(health.state == "up" for health in engine.health().values())


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize("where", [*FAILURES])
@pytest.mark.slow
def test_a_lower_drafter_that_fails_is_left_out_alone(
    models: Models, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft model above it lives on, with its one life."""
    made, accepted = list[FailingDrafter](), 0

    def failing(setting: Setting) -> FailingDrafter:
        made.append(FailingDrafter(NgramDrafter(setting), where))
        return made[-1]

    failing.name, failing.paced, failing.looks_ahead = "failing", False, True  # type: ignore[attr-defined]
    monkeypatch.setattr(plugins, "_registered", {("drafters", "failing"): failing})
    prompt_ids, params = tiny.byte_tokenizer()(PROMPT).input_ids, SamplingParams(max_tokens=16)
    with Engine(configured(models, "failing?block=6")) as engine:
        plain = engine.submit(prompt_ids, replace(params, schedule="plain")).result().token_ids
        for schedule in ("sequential", "parallel") * 4:
            done = engine.submit(prompt_ids, replace(params, schedule=schedule)).result()
            assert done.token_ids == plain and done.stats.draft_nodes > 0
            accepted += done.stats.accepted
        assert accepted > 0 or where == "memory", "the draft model works on; without memory, for its first steps"
        assert all(health.state == "up" for health in engine.health().values())
    assert not [record for record in caplog.records if "died" in record.message] and len(made) == 1
    left_out = any("below another one" in record.message for record in caplog.records)
    assert left_out == (where != "memory"), "without memory it is asked again"


def fresh(lower: LowerLevel | None = None, *, slots: int = 12, top: float = 0.5) -> ToyDrafter:
    return ToyDrafter(ToyModel(vocab_size=7, top=top, stated=0.6), num_slots=slots, lower=lower)


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_is_lost_whatever_comes_true(seed: int) -> None:
    """Two levels over a third, few slots, corrections in and beside the trees, at random."""
    draw = random.Random(seed)
    lowest = fresh(top=0.4)
    middle = fresh(LowerLevel(lowest, 3), top=0.6)
    upper = fresh(LowerLevel(middle, 4), slots=9)
    request, said = Request(0, (1, 2), SamplingParams(), ()), list[int]()
    upper.begin(request, ())
    for _ in range(60):
        for _ in range(draw.randint(0, 3)):
            (proposal,) = upper.step([Budget(0, draw.randint(1, 3))])
            assert proposal.forwarded <= 3 + 4
        tree = upper.trees[0]
        node = draw.choice([tree.root, *likeliest(tree, tree.root)])
        path = [*tree.token_path(node)] or [draw.randrange(7)]
        upper.correct(0, len(said), path)
        said += path
        for drafter in (upper, middle, lowest):
            invariants._check_slots(drafter.trees[0])
            assert drafter.trees[0].output_ids == said
    upper.end(0)
    assert not (upper.trees or middle.trees or lowest.trees)


def test_what_is_ahead_is_believed() -> None:
    """A drafter asked what follows some tokens answers for these, whether they are in its tree or not."""
    script = ToyModel(vocab_size=7, top=1.0)
    drafter = ToyDrafter(script, num_slots=12)
    drafter.begin(Request(0, (1, 2), SamplingParams(), ()), ())
    for ahead in ((), (3,), (3, 5, 6), (script.target_token((1, 2)),), (3, 5)):
        (proposal,) = drafter.step([Budget(0, ahead=ahead, whole=True)])
        first = [
            token for parent, token in zip(proposal.parents, proposal.token_ids, strict=True) if parent == proposal.root
        ]
        assert first[0] == script.target_token((1, 2, *ahead)), ahead
        assert (proposal.first, proposal.applied_len) == (1, 0)
    (proposal,) = drafter.step([Budget(0, ahead=(3, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5), whole=True)])
    assert not proposal.token_ids, "more than there are slots for"


def test_a_child_that_was_adopted_is_made_once() -> None:
    tree = DraftTree((1,), (), 4)
    tree.expand(tree.root, [5], [-8.0])
    tree.expand(tree.children[0][5], [7, 8], [-0.1, -3.0])
    assert tree.known(1, 8) is None, "held back"
    node = tree.adopt(1, 8)
    tree.apply(0, [5])
    assert tree.known(1, 8) == node and tree.tokens.count(8) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_model": "ngram", "stack": ("ngram",)}, "works below a draft model"),
        ({"stack": ("ngram", "smollm2-135m")}, "ngram.*nothing can work below it.*name it last"),
        ({"stack": ("ngram?block=0",)}, "stack = 0.*between 1 and 32"),
        ({"stack": ("ngram?block=four",)}, "stack = 'four'"),
        ({"stack": ("ngram",), "draft_transport": "process"}, "draft_transport = 'process'.*runs on a thread"),
    ],
)
def test_a_stack_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        EngineConfig(**options)


def test_ngrams_work_below_the_draft_model_where_nobody_says_otherwise(models: Models) -> None:
    def settled(*, apart: bool = False, **options: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        config = EngineConfig(models["target"], **{"draft_model": models["draft"], **options}).settled(apart=apart)
        return config.modelless_drafters, config.stack

    assert settled() == (("ngram",), ("ngram",)), "below it as well"
    assert settled(apart=True) == (("ngram",), ()), "a process has room for one drafter"
    assert settled(drafters=()) == ((), ())
    assert settled(drafters=("ngram",)) == (("ngram",), ())
    assert settled(stack=("ngram?block=3",)) == (("ngram",), ("ngram?block=3",))
    assert settled(stack=(models["lower"],)) == (("ngram",), (models["lower"],))
    assert settled(draft_model="ngram") == (("ngram",), ())
    assert settled(draft_model=None) == ((), ())
    with Engine(EngineConfig(models["target"], models["draft"], max_model_len=512)) as engine:
        assert engine.health().keys() == {"target", "model", "ngram", "forced"}


def test_both_keep_to_one_bound_of_memory(models: Models) -> None:
    config, setting = EngineConfig(models["target"], models["draft"]).settled(apart=False), Setting()
    with contextlib.ExitStack() as held:
        beside, below = choose(config, setting, held)
        assert below is not None
        made = [each.make() for each in (*beside, below) if each.source.name == "ngram"]
        bounds = [each._tenants._max_bytes for each in made if isinstance(each, NgramDrafter)]
    assert len(bounds) == 2 and sum(bounds) == setting.limits.max_ngram_bytes


def test_little_memory_for_n_grams(models: Models) -> None:
    """Two tables need twice the least; where nobody asked for two, there is one."""
    config = EngineConfig(models["target"], models["draft"], max_model_len=512, limits=Limits(max_ngram_bytes=131_071))
    with Engine(config) as engine:
        assert engine.submit([65, 66, 65, 66], SamplingParams(max_tokens=4)).result().token_ids
    assert config.settled(apart=False) == config
    with pytest.raises(InvalidInputError, match=r"max_ngram_bytes = 131071: is too little for 2 n-gram drafters"):
        Engine(replace(config, stack=("ngram",)))


def test_what_a_stack_names_is_looked_for(models: Models) -> None:
    with pytest.raises(InvalidInputError, match="option of stack ngram = 'tble'"):
        Engine(configured(models, "ngram?tble=5&block=3"))
    with pytest.raises(InvalidInputError, match=r"stack = 'forced'.*beside the draft model"):
        Engine(configured(models, "forced"))
    with pytest.raises(CARDError, match="'no-such-model': neither"):
        Engine(configured(models, "no-such-model"))
    assert [level.block for level in configured(models, "m", "m?block=2", "ngram").levels] == [4, 2, 8]
    chat = CARDChatModel(model=models["target"], draft_model=models["draft"], stack=("ngram",))
    assert chat.engine_config().stack == ("ngram",)
