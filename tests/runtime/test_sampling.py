"""Processors, noise, log-probabilities, bounds; whole answers are compared in `test_exactness.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.messages import NO_TOKEN
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.model import RANK_PRIOR, ModelDrafter, RankChances
from langchain_card.drafters.tree import DraftTree
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.ports import Budget
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import NUCLEUS_WIDTH, Sampler, choose, gumbel_noise, likeliest, token_logprobs
from tests.support import naive, tiny

VOCAB = 5000
PROMPT = [5, 17, 17, 4999, 0]
OUTPUT = [3, 17, 3, 3, 4000]
PATHS = [[], [3], [3, 9], [8], [8, 8, 8, 5], [1234, 17]]
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -1.1},
    {"logit_bias": ((3, 2.5), (4999, -50.0))},
    {"banned_ids": (0, 8, 17)},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_k": VOCAB + 7},
    {"temperature": 0.2, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 3.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {
        "temperature": 1.7,
        "top_k": 300,
        "top_p": 0.8,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": ((9, 3.0),),
        "banned_ids": (1, 2, 3),
    },
]


def random_logits(rows: int = len(PATHS), vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def sampler(**options: Any) -> Sampler:
    made = Sampler(SamplingParams(**options), PROMPT)
    made.commit(OUTPUT[:2])
    made.commit(OUTPUT[2:])
    return made


def with_noise(scores: torch.Tensor, path: list[int], params: SamplingParams) -> torch.Tensor:
    if not params.temperature:
        return scores
    return scores + gumbel_noise(params.seed, len(PROMPT + OUTPUT + path), len(scores), scores.device)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_every_row_is_processed_as_transformers_would_alone(options: dict[str, Any]) -> None:
    logits, params = random_logits(), SamplingParams(**options)
    before = logits.clone()
    scores = sampler(**options).scores(logits, PATHS)
    assert torch.equal(logits, before), "log-probabilities are taken from them afterwards"
    for row, path in enumerate(PATHS):
        wanted = with_noise(naive.process(logits[row], PROMPT, OUTPUT + path, params), path, params)
        assert torch.equal(scores[row] == -math.inf, wanted == -math.inf)
        torch.testing.assert_close(scores[row], wanted, rtol=1e-12, atol=1e-12)
    if "top_p" in options and options["temperature"] == 3.0:
        assert (scores[0] > -math.inf).sum() > NUCLEUS_WIDTH, "the wide case was not met"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", SETTINGS[-5:], ids=str)
def test_a_row_has_the_same_bits_beside_any_other_rows(options: dict[str, Any], threads: int) -> None:
    """Also in vocabularies so large that torch splits the sum over a single row among threads."""
    logits, before = random_logits(vocab=70_000), torch.get_num_threads()
    logits[3] *= 0.1  # a row with a wide nucleus beside narrow ones
    torch.set_num_threads(threads)
    try:
        together = sampler(**options).scores(logits, PATHS)
        for row, path in enumerate(PATHS):
            assert torch.equal(sampler(**options).scores(logits[row : row + 1], [path])[0], together[row])
    finally:
        torch.set_num_threads(before)


def test_nothing_is_computed_when_everything_is_off() -> None:
    logits = random_logits()
    assert sampler().scores(logits, PATHS) is logits
    assert sampler(top_k=5, top_p=0.5, min_p=0.5).scores(logits, PATHS) is logits, "the argmax survives these"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_would_lose_all_tokens_keeps_the_best(temperature: float) -> None:
    logits = random_logits(vocab=6)
    options = {"temperature": temperature, "banned_ids": (0, 1, 2, 3, 4, 5), "logit_bias": ((2, 99.0),)}
    scores = Sampler(SamplingParams(**options), [1]).scores(logits, PATHS[:1] * len(logits))
    assert scores.argmax(-1).tolist() == [2] * len(logits)
    assert (scores > -math.inf).sum(-1).tolist() == [1] * len(logits)


def test_draws_follow_the_processed_distribution() -> None:
    params = {"temperature": 0.8, "top_k": 5}
    logits = random_logits(1, 50)
    chances = (naive.process(logits[0], [1], [], SamplingParams(**params))).softmax(-1)
    drawn = [Sampler(SamplingParams(seed=s, **params), [1]).scores(logits, [[]]).argmax().item() for s in range(4000)]
    for token, chance in enumerate(chances.tolist()):
        assert abs(drawn.count(token) / 4000 - chance) < 5 * math.sqrt(chance * (1 - chance) / 4000) + 1e-12


def test_noise_is_one_row_per_position() -> None:
    device = torch.device("cpu")
    row = gumbel_noise(7, 3, 1000, device)
    assert gumbel_noise(7, 3, 1000, device) is row, "computed once"
    assert torch.equal(gumbel_noise(7, 3, 400, device), row[:400]), "vocabularies of two sizes share it"
    others = [gumbel_noise(7, 4, 1000, device), gumbel_noise(8, 3, 1000, device)]
    assert all(abs(torch.corrcoef(torch.stack([row, other]))[0, 1]) < 0.15 for other in others)
    assert row.mean().item() == pytest.approx(0.5772, abs=0.15)


def test_token_logprobs() -> None:
    logits = random_logits(3, 9)
    wanted = logits.double().log_softmax(-1)
    for row, found in enumerate(token_logprobs(logits, [4, 0, 8], 3)):
        assert found.logprob == pytest.approx(wanted[row, [4, 0, 8][row]].item(), abs=1e-12)
        best = wanted[row].topk(3)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-12)
    assert token_logprobs(logits, [1, 1, 1], 0)[0].top == ()
    assert len(token_logprobs(logits, [1, 1, 1], 20)[0].top) == 9, "no more than there are"


# Bounds.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": -1}, "top_k = -1: must be a whole number between 0 and .*0 turns it off"),
        ({"top_k": 2.5}, "top_k = 2.5: must be a whole number"),
        ({"top_p": 1.5}, "top_p = 1.5: must be a number between 0.0 and 1.0.*1 turns it off"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"min_p": -0.1}, "min_p = -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0.*1 turns it off"),
        ({"presence_penalty": 2.1}, "presence_penalty = 2.1: must be a number between -2.0 and 2.0"),
        ({"frequency_penalty": "high"}, "frequency_penalty = 'high'"),
        ({"logit_bias": ((5, 101.0),)}, r"logit_bias\[5\] = 101.0.*between -100.0 and 100.0"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias = -1"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias .*names a token twice"),
        ({"logit_bias": tuple((i, 1.0) for i in range(301))}, "logit_bias = 301: at most 300"),
        ({"banned_ids": tuple(range(1025))}, "banned_ids = 1025: at most 1,024"),
        ({"banned_ids": ("a",)}, "banned_ids = 'a'"),
        ({"logprobs": 21}, "logprobs = 21: must be a whole number between 0 and 20.*None turns them off"),
        ({"logprobs": True}, "logprobs = True"),
    ],
)
def test_bounds(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        SamplingParams(**options).check(Limits())


# With models.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("gemma2", folder / "target")
    return target, tiny.make_draft(target, folder / "draft", noise=0.05)


def test_ids_outside_the_vocabulary(pair: tuple[str, str]) -> None:
    with Engine(EngineConfig(model=pair[0], draft_model=pair[1])) as engine:
        for name, value in (("logit_bias", ((tiny.VOCAB, 1.0),)), ("banned_ids", (tiny.VOCAB,))):
            with pytest.raises(InvalidInputError, match=f"{name} = {tiny.VOCAB}.*between 0 and {tiny.VOCAB - 1}.*Hint"):
                engine.submit([1, 2], SamplingParams(**{name: value}))
        everything = tuple(range(tiny.VOCAB))
        assert len(engine.submit([1, 2], SamplingParams(max_tokens=3, banned_ids=everything)).result().token_ids) == 3
        last = SamplingParams(max_tokens=4, logit_bias=((tiny.VOCAB - 1, 100.0),))
        assert engine.submit([1, 2], last).result().token_ids == (tiny.VOCAB - 1,) * 4


CLOSE = 3e-6
"""For log-probabilities: transformers' attention with capped scores takes its softmax in float32, even in float64."""


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("schedule", ["plain", "sequential"])
def test_logprobs_are_the_naive_loops(pair: tuple[str, str], options: dict[str, Any], schedule: str) -> None:
    prompt_ids = list(range(40, 60))
    params = SamplingParams(max_tokens=40, seed=5, schedule=schedule, logprobs=4, **options)  # type: ignore[arg-type]
    wanted = naive.generate(naive.reading(naive.load(pair[0], torch.float64)), prompt_ids, params)
    with Engine(EngineConfig(model=pair[0], draft_model=pair[1], dtype="float64")) as engine:
        generation = engine.submit(prompt_ids, params)
        pieces = list(generation)
        answer = generation.result()
        assert not engine.submit(prompt_ids, SamplingParams(max_tokens=2)).result().logprobs
    assert answer.token_ids == tuple(wanted.token_ids[: len(answer.token_ids)])
    assert answer.logprobs == tuple(piece.logprob for piece in pieces) and len(answer.logprobs) == len(answer.token_ids)
    for token, found, logits in zip(answer.token_ids, answer.logprobs, wanted.logits, strict=False):
        logprobs = logits.log_softmax(-1)
        assert found.logprob == pytest.approx(logprobs[token].item(), abs=CLOSE)
        best = logprobs.topk(4)
        assert [t for t, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=CLOSE)
    if schedule == "sequential":
        assert answer.stats.accepted > 0, "a window with candidates must be among them"


def drafted(pair: tuple[str, str], params: SamplingParams, steps: int) -> list[Any]:
    """Proposals of the target's own weights as a draft."""
    drafter = ModelDrafter(
        ModelRunner(naive_card_model(pair[0]), max_len=256, num_scratch=32), vocab_size=tiny.VOCAB, num_children=4
    )
    drafter.begin(Request(0, tuple(range(40, 60)), params), ())
    return [proposal for _ in range(steps) for proposal in drafter.step([Budget(0)])]


def naive_card_model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="card").eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.9, "frequency_penalty": 0.5, "banned_ids": (9,)}],
    ids=str,
)
def test_a_draft_that_equals_the_target_ranks_its_token_first(pair: tuple[str, str], options: dict[str, Any]) -> None:
    """Whatever the noise and the processors: the draft adds the same of both, node by node."""
    params = SamplingParams(max_tokens=8, seed=11, **options)
    wanted = naive.generate(naive.reading(naive.load(pair[0], torch.float64)), list(range(40, 60)), params).token_ids
    children: dict[int, list[int]] = {}
    tokens = {}
    for proposal in drafted(pair, params, 30):
        for number, (parent, token) in enumerate(zip(proposal.parents, proposal.token_ids, strict=True)):
            children.setdefault(parent, []).append(proposal.first + number)
            tokens[proposal.first + number] = token
    node, path = 0, []
    while node in children:
        node = children[node][0]
        path.append(tokens[node])
    assert len(path) >= 3 and path[:8] == wanted[: len(path)]


def test_acceptance_is_learnt_by_rank() -> None:
    ranks = RankChances(4)
    assert [math.exp(log) for log in ranks.log_chances()] == pytest.approx(RANK_PRIOR)
    for i in range(600):
        ranks.learn((0, 0, 1, None)[i % 4])
    first, second, *others = (math.exp(log) for log in ranks.log_chances())
    assert first == pytest.approx(0.5, abs=0.02) and second == pytest.approx(0.25, abs=0.02)
    assert all(0 < chance < 0.01 for chance in others), "rare, and still published"


def test_a_committed_node_tells_the_rank_of_its_child() -> None:
    tree = DraftTree((1, 2, 3), (), 32)
    tree.expand(0, [7, 8, 9], [-1.0, -2.0, -3.0])
    tree.expand(2, [7, 5], [-1.0, -2.0])
    assert tree.apply(0, [8]).ranks == [1]
    assert tree.apply(1, [6]).ranks == [None], "expanded, and none of its children came true"
    assert tree.apply(2, [6, 7]).ranks == [], "nothing was expanded"


@pytest.mark.parametrize("vocabulary", [1000, 128 * 24, 128 * 24 + 77, 151_936])
@pytest.mark.parametrize("count", [1, 4])
def test_the_likeliest_are_those_of_the_whole_row(vocabulary: int, count: int) -> None:
    scores = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    scores[1, :5], scores[2, -5:], scores[3, 200:208] = 9.0, torch.arange(5) + 8.0, 7.0
    scores[4] = -math.inf
    scores[4, 300] = 1.0  # a grammar that leaves one
    values, token_ids = likeliest(scores, count)
    assert torch.equal(values, scores.topk(count, dim=-1).values)
    assert torch.equal(scores.gather(-1, token_ids), values)
    assert all(len({*row}) == count for row in token_ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_of_equal_scores_is_chosen(dtype: torch.dtype) -> None:
    scores = [torch.zeros(2, 300, dtype=dtype), torch.full((1, 300), -math.inf, dtype=dtype)]
    scores[0][1, [70, 200]] = 1.0
    assert choose(scores) == [0, 70, 0] and choose([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_token_is_chosen_by_scores_that_are_no_finite_numbers(dtype: torch.dtype) -> None:
    scores = torch.zeros(4, 300, dtype=dtype)
    scores[0, 7], scores[1, 9], scores[2, 70] = math.nan, math.inf, 1.0
    scores[3, 5:] = -math.inf
    assert choose([scores]) == [NO_TOKEN, NO_TOKEN, 70, 0]
