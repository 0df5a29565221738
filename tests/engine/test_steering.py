"""Steering: the answer is that of the steered target, whatever the schedule and the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from langchain_card import CARDChatModel, plugins
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build, target_worker
from langchain_card.engine.engine import Engine
from langchain_card.engine.target_worker import TokenHistory
from langchain_card.errors import EngineError, InvalidInputError
from langchain_card.limits import Limits
from langchain_card.ports import Setting, Steering
from langchain_card.runtime.sampling import token_logprobs
from tests.simulation import FixedPolicy
from tests.support import naive, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Pairs = dict[str, tuple[str, str]]
PROMPTS = ("def add(a, b):\n    return a + b\n\ndef add(", "the quick brown fox; the quick brown")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "banned_ids": (7, 50)},
}
DRAFTERS: dict[str, dict[str, Any]] = {"both": {}, "model": {"drafters": ()}, "ngram": {"draft_model": "ngram"}}


class Rhyme:
    """Favours what stands some places earlier: a function of the whole text, its length and its last token."""

    def __init__(self, setting: Setting, by: float = 3.0) -> None:
        self._by = by

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        found = logits.clone()
        for row, text in zip(found, texts, strict=True):
            favoured = text[-2 - text[-1] % 8], sum(text) % 251, *text[-3:-1]
            row[list(favoured)] += self._by
        return found


class Proxies:
    """The difference of two small models' logits, one more of what is wanted than the other (DSCC-HS, 2509.13702)."""

    def __init__(self, setting: Setting, liked: str, disliked: str, by: float = 0.5) -> None:
        self._by, self._models = by, [naive.load(folder, torch.float64) for folder in (liked, disliked)]

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        return logits + self._by * torch.stack([self._difference(text) for text in texts])

    def _difference(self, text: Sequence[int]) -> Tensor:
        """Of one text alone, so that it does not depend on the rows beside it."""
        ids = torch.tensor([[*text]])
        liked, disliked = (model(ids, logits_to_keep=1).logits[0, -1] for model in self._models)
        return liked - disliked


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    for name, factory in (("rhyme", Rhyme), ("proxies", Proxies), ("failing", Failing), ("narrow", Narrow)):
        plugins.register("steering", name, factory)
    # Tiny models draft at a loss: a policy that measures would hardly look deep.
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(2,) * 4))


def reading(model: Any, steering: Steering) -> naive.Forward:
    forward = naive.reading(model)
    return lambda known: steering(forward(known)[None], [known])[0]


def encode(text: str) -> list[int]:
    return list(tiny.byte_tokenizer()(text).input_ids)


def check_equal(config: EngineConfig, wanted: dict[tuple[str, str], list[int]], max_tokens: int) -> int:
    """Compares every setting, prompt and schedule; how many candidates were accepted."""
    accepted = 0
    with Engine(config) as engine:
        for schedule in ("plain", "sequential", "parallel"):
            params = {
                name: SamplingParams(max_tokens=max_tokens, schedule=schedule, **options)  # type: ignore[arg-type]
                for name, options in SETTINGS.items()
            }
            asked = {key: engine.submit(encode(key[1]), params[key[0]]) for key in wanted}
            for key, generation in asked.items():
                done = generation.result()
                assert list(done.token_ids) == wanted[key], (schedule, key)
                accepted += done.stats.accepted
    return accepted


def answers(folder: str, steering: Steering, names: Sequence[str], max_tokens: int) -> dict[tuple[str, str], list[int]]:
    model, eos = naive.load(folder, torch.float64), (tiny.byte_tokenizer().eos_token_id,)
    params = {name: SamplingParams(max_tokens=max_tokens, **SETTINGS[name]) for name in names}
    return {
        (name, text): naive.generate(reading(model, steering), encode(text), params[name], eos).token_ids
        for name in names
        for text in PROMPTS
    }


@pytest.mark.parametrize("drafters", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.slow
def test_equal_to_a_naive_loop_that_is_steered_alike(tiny_pairs: Pairs, drafters: dict[str, Any]) -> None:
    target, draft = tiny_pairs["llama"]
    wanted = answers(target, Rhyme(Setting()), [*SETTINGS], 24)
    assert wanted != answers(target, Rhyme(Setting(), by=0.0), [*SETTINGS], 24), "it changes what is said"
    fields = {"draft_model": draft, "limits": Limits(max_num_seqs=3), **drafters}
    config = EngineConfig(target, dtype="float64", max_model_len=512, steering="rhyme?by=3.0", **fields)
    assert check_equal(config, wanted, 24) > 20


@pytest.mark.slow
def test_the_difference_of_two_small_models(tiny_pairs: Pairs, tmp_path: Any) -> None:
    """They stand after the candidates of each row, and may be any models of the same vocabulary."""
    (target, draft), (liked, disliked) = tiny_pairs["llama"], tiny_pairs["qwen2"]
    disliked = tiny.make_target("qwen2", tmp_path / "other", seed=9)
    wanted = answers(target, Proxies(Setting(), liked, disliked), ["greedy", "seeded"], 16)
    assert wanted != answers(target, Rhyme(Setting(), by=0.0), ["greedy", "seeded"], 16)
    spec = f"proxies?liked={liked}&disliked={disliked}"
    config = EngineConfig(target, draft, dtype="float64", max_model_len=512, steering=spec)
    assert check_equal(config, wanted, 16) > 5


@pytest.mark.slow
def test_strict_windows_are_steered_alike(tiny_pairs: Pairs) -> None:
    target, draft = tiny_pairs["llama"]
    wanted = answers(target, Rhyme(Setting()), ["greedy", "seeded"], 16)
    limits = Limits(max_num_seqs=2, max_window=6)
    config = EngineConfig(target, draft, dtype="float64", max_model_len=256, steering="rhyme", limits=limits)
    assert check_equal(config, wanted, 16) > 5
    assert check_equal(EngineConfig(**{**fields_of(config), "exact": "strict"}), wanted, 16) > 5


def fields_of(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


def test_logprobs_are_those_of_the_steered_target(tiny_pairs: Pairs) -> None:
    target, _ = tiny_pairs["llama"]
    ids, steering, model = encode(PROMPTS[0]), Rhyme(Setting()), naive.load(target, torch.float64)
    with torch.inference_mode():
        wanted = steering(model(torch.tensor([ids])).logits[:, -1], [ids])
    with Engine(EngineConfig(target, None, dtype="float64", max_model_len=512, steering="rhyme")) as engine:
        done = engine.submit(ids, SamplingParams(max_tokens=1, logprobs=3)).result()
    (expected,) = token_logprobs(wanted, done.token_ids, 3)
    assert done.logprobs[0].logprob == pytest.approx(expected.logprob, abs=1e-6)  # rotary angles are float32
    assert [token for token, _ in done.logprobs[0].top] == [token for token, _ in expected.top]


def test_a_chat_model_takes_one(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as plain, CARDChatModel(**toy, steering="rhyme?by=9") as steered:
        assert plain.invoke("hi").content != steered.invoke("hi").content
        assert plain._get_llm_string() != steered._get_llm_string()


# What fails.


class Failing(Rhyme):
    """Fails with texts that hold a byte."""

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        if any(encode("!")[0] in text[:3] for text in texts):
            raise ZeroDivisionError("it cannot be steered")
        return super().__call__(logits, texts)


class Narrow(Rhyme):
    """Loses the last token of the vocabulary."""

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        return super().__call__(logits, texts)[:, :-1]


@pytest.mark.slow
def test_a_request_that_cannot_be_steered_fails_alone(tiny_pairs: Pairs) -> None:
    target, draft = tiny_pairs["llama"]
    wanted = answers(target, Rhyme(Setting()), ["greedy"], 24)
    config = EngineConfig(target, draft, dtype="float64", max_model_len=512, steering="failing")
    with Engine(config) as engine:
        bad = [engine.submit(encode(text), SamplingParams(max_tokens=24)) for text in ("!abcdefghij", "!klmnopqrst")]
        good = {key: engine.submit(encode(key[1]), SamplingParams(max_tokens=24)) for key in wanted}
        for generation in bad:
            with pytest.raises(EngineError, match="it cannot be steered"):
                generation.result()
        assert {key: list(generation.result().token_ids) for key, generation in good.items()} == wanted
        again = engine.submit(encode(PROMPTS[0]), SamplingParams(max_tokens=24))
        assert list(again.result().token_ids) == wanted["greedy", PROMPTS[0]]


def test_another_shape_is_named(tiny_pairs: Pairs) -> None:
    config = EngineConfig(tiny_pairs["llama"][0], None, dtype="float64", steering="narrow")
    said = r"must return logits of the shape \(1, 320\)"
    with Engine(config) as engine, pytest.raises(EngineError, match=said):
        engine.submit(encode(PROMPTS[0]), SamplingParams(max_tokens=2)).result()


def test_what_a_configuration_refuses() -> None:
    with pytest.raises(InvalidInputError, match=r"steering = 'rime'.*did you mean rhyme"):
        EngineConfig(steering="rime")


def test_a_text_is_a_sequence_that_stays_as_it_was() -> None:
    committed = [3, 1, 4]
    text, whole = TokenHistory(committed, (1, 5, 9)), [3, 1, 4, 1, 5, 9]
    committed += [2, 6]
    assert [*text] == whole and len(text) == 6 and text.count(1) == 2 and 2 not in text and text.index(9) == 5
    cuts = [slice(*bounds) for bounds in [(None,), (2, 5), (-2, None), (None, None, -1), (7, 9), (-9, 2)]]
    assert all(text[cut] == whole[cut] for cut in cuts)
    assert [text[place] for place in (*range(6), *range(-6, 0))] == [*whole, *whole]
    for place in (6, -7):
        with pytest.raises(IndexError):
            text[place]


# Planted bugs: each must be caught by the comparison above.


def planted_path(text: Callable[..., TokenHistory]) -> Callable[..., TokenHistory]:
    return lambda committed, path: text(committed, path[:1])


def test_planted_rows_without_their_paths(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a window stands, for the transform, where the window begins."""
    target, draft = tiny_pairs["llama"]
    wanted = answers(target, Rhyme(Setting()), ["greedy"], 24)
    config = EngineConfig(target, draft, dtype="float64", max_model_len=512, steering="rhyme")
    monkeypatch.setattr(target_worker, "TokenHistory", planted_path(TokenHistory))
    with pytest.raises(AssertionError):
        check_equal(config, wanted, 24)
