"""Several requests in one pass: each gets what it would get alone, and what was read once is not read again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.request import FinishReason, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits, Pins
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.kv_cache import KVCache, KVPool, TensorKV
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Pairs = dict[str, tuple[str, str]]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "def", "add", "return", "for", "in", "x"]


class PassCounter:
    """Which requests' rows each pass of the target's runner held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_scratch: int) -> None:
        self.windows: list[int] = []  # requests verified together
        self.rows: list[int] = []
        self.read: list[int] = []  # tokens of texts
        step = ModelRunner.step

        def counting(runner: ModelRunner, batch: list[Rows]) -> Any:
            if runner.num_scratch == num_scratch:
                self.windows.append(len({id(rows.cache) for rows in batch if rows.paths is not None}))
                self.rows.append(sum(len(rows.token_ids) for rows in batch))
                self.read.append(sum(len(rows.token_ids) for rows in batch if rows.paths is None))
            return step(runner, batch)

        monkeypatch.setattr(ModelRunner, "step", counting)


def config(pair: tuple[str, str], form: dict[str, Any], **limits: Any) -> EngineConfig:
    return EngineConfig(*pair, max_model_len=512, limits=Limits(max_window=12, **limits), **form)


def asked(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, half of them with a common beginning, and ways to decode."""
    rng, encode = random.Random(seed), tiny.byte_tokenizer()
    requests = []
    for i in range(count):
        text = "You are a helpful assistant. " * (i % 2) + " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
        schedule = rng.choice(["sequential", "parallel", "plain", "sequential"])
        options: Any = rng.choice([{}, {"temperature": 0.8, "seed": i, "top_p": 0.9}, {"repetition_penalty": 1.2}])
        params = SamplingParams(max_tokens=rng.randint(5, 40), schedule=schedule, **options)
        requests.append((encode(text).input_ids, params))
    return requests


@pytest.mark.parametrize("arch", ["gemma2", pytest.param("qwen2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"dtype": "float64"}, id="float64"),
        pytest.param({"quantization": "int8"}, id="int8", marks=pytest.mark.slow),
    ],
)
def test_a_batch_of_eight_equals_single_runs(
    tiny_pairs: Pairs, arch: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come at random times, prompts are read in small chunks beside them, and a quarter is broken off."""
    requests = asked(7, 32)
    with Engine(config(tiny_pairs[arch], form)) as engine:
        alone = []
        for prompt_ids, params in requests:
            engine.backend._target._runner.pool.forget()  # type: ignore[attr-defined]
            alone.append(engine.submit(prompt_ids, params).result().token_ids)
    counter, rng = PassCounter(monkeypatch, num_scratch=12), random.Random(1)
    with Engine(config(tiny_pairs[arch], form, max_num_seqs=8, max_step_rows=64)) as engine:
        running: list[tuple[int, Any]] = []
        for number, (prompt_ids, params) in enumerate(requests):
            running.append((number, engine.submit(prompt_ids, params)))
            if rng.random() < 0.4:
                _, watched = rng.choice(running)
                next(iter(watched), None)  # which breaks it off: an iterator that is left aborts
        ended = Counter()
        for number, generation in running:
            completion = generation.result()
            ended[completion.finish_reason] += 1
            got = completion.token_ids
            assert got == alone[number][: len(got)], number
            assert completion.finish_reason is FinishReason.ABORT or len(got) == len(alone[number])
        assert engine.num_running == 0
        pool = engine.backend._target._runner.pool  # type: ignore[attr-defined]
        assert pool.num_free == 8
    assert ended[FinishReason.ABORT] >= 4 and ended[FinishReason.LENGTH] >= 16
    assert max(counter.windows) == 8 and max(counter.rows) <= 64
    both = [read for read, windows in zip(counter.read, counter.windows, strict=True) if windows and read]
    assert len(both) >= 5, "texts were read beside windows"


def test_eight_requests_share_passes(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = PassCounter(monkeypatch, num_scratch=12)
    limits = {"max_num_seqs": 8}
    with Engine(config(tiny_pairs["llama"], {}, **limits)) as engine:
        params = SamplingParams(max_tokens=30, schedule="plain", banned_ids=tuple(range(256, tiny.VOCAB)))
        together = [engine.submit(ids, params) for ids, _ in asked(3, 8)]
        rounds = [generation.result().stats.rounds for generation in together]
    assert rounds == [30] * 8
    assert sum(windows == 8 for windows in counter.windows) >= 25
    assert len(counter.windows) <= 40


@pytest.mark.slow
def test_a_second_turn_reads_only_what_is_new(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a conversation of 1,000 tokens; the same turn without it gives the same answer."""
    encode = tiny.byte_tokenizer()
    first = encode("Tell me a story. " * 55).input_ids
    counter = PassCounter(monkeypatch, num_scratch=12)
    pair = EngineConfig(*tiny_pairs["llama"], dtype="float64", limits=Limits(max_window=12))
    params = SamplingParams(max_tokens=80, banned_ids=tuple(range(256, tiny.VOCAB)))  # not all are the tokenizer's
    with Engine(pair) as engine:
        answer = engine.submit(first, params).result()
        assert answer.stats.cached_tokens == 0 and sum(counter.read) == len(first) - 1
        second = [*first, *answer.token_ids, *encode(" And then?").input_ids]
        counter.read.clear()
        again = engine.submit(second, params).result()
        assert sum(counter.read) + again.stats.cached_tokens == len(second) - 1
        assert len(second) > 1000 and sum(counter.read) <= 10 + 12
    with Engine(pair) as engine:
        assert engine.submit(second, params).result().token_ids == again.token_ids


def pool(num_seqs: int) -> KVPool[TensorKV]:
    cpu = torch.device("cpu")
    store = partial(TensorKV, devices=[cpu], kv_heads=1, head_dim=1, dtype=torch.float32)
    return KVPool(store, max_len=16, num_scratch=2, num_seqs=num_seqs)


def test_prefixes_are_taken_over_from_running_and_ended_texts() -> None:
    kv = pool(3)
    a = kv.open([1, 2, 3])
    a.token_ids = [1, 2, 3, 4]
    kv.kv.layers[0][:, :, a.first_position : a.first_position + 4] = 7.0
    b = kv.open([1, 2, 9])
    assert b is not a and b.token_ids == [1, 2]
    assert (kv.kv.layers[0][:, :, b.first_position : b.first_position + 2] == 7.0).all()
    kv.close(a)
    c = kv.open([1, 2, 3, 4, 5])
    assert c is a and c.token_ids == [1, 2, 3, 4], "continued where it lies"
    kv.close(c)
    c.token_ids = [1, 2, 3, 4, 5, 6]
    d = kv.open([1, 2, 3, 8])
    assert d is not c and d.token_ids == [1, 2, 3], "the longer text stays for whoever goes on with it"
    assert c.token_ids == [1, 2, 3, 4, 5, 6]
    e = kv.open([1, 2, 3, 4, 5, 6, 7])
    assert e is c and e.length == 6


def test_prefixes_are_taken_over_from_the_same_tenant_alone() -> None:
    kv = pool(3)
    a = kv.open([1, 2, 3], "one")
    a.token_ids = [1, 2, 3]
    b = kv.open([1, 2, 3, 4], "other")
    assert b.length == 0, "while it runs"
    kv.close(a)
    assert kv.open([1, 2, 3, 4], "other").length == 0, "nor when it has ended"
    assert kv.open([1, 2, 3, 4], "one") is a and a.length == 3


@pytest.mark.parametrize("draft", [True, False])
def test_no_key_learns_what_another_read(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch, draft: bool) -> None:
    """Neither from the count of tokens that were known, nor from passes of either model."""
    opened = list[tuple[str, int]]()
    open_ = KVPool.open

    def recorded(self: KVPool[Any], token_ids: Sequence[int] = (), tenant: str = "") -> KVCache:
        cache = open_(self, token_ids, tenant)
        opened.append((tenant, cache.length))
        return cache

    monkeypatch.setattr(KVPool, "open", recorded)
    target, small = tiny_pairs["llama"]
    cached = {}
    config = EngineConfig(target, small if draft else None, drafters=(), dtype="float64", pins=Pins(lead=2))
    with Engine(config) as engine:
        for tenant in ("one", "other", "one "):
            params = SamplingParams(max_tokens=8, schedule="sequential" if draft else "plain", tenant=tenant)
            cached[tenant] = engine.submit([*range(40)], params).result().stats.cached_tokens
        again = engine.submit([*range(40)], params).result().stats.cached_tokens
    assert set(cached.values()) == {0} and again == 39
    first = dict(reversed(opened))
    assert set(first.values()) == {0} and {*first} == {*cached} and len(opened) == (8 if draft else 4)


@pytest.mark.parametrize("kv_dtype", ["int8", "float"])
@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_int8_after_are_a_function_of_the_text(tiny_pairs: Pairs, arch: str, kv_dtype: str) -> None:
    """The same bits whether a text is read token by token, in chunks, beside another one, or decoded in windows."""
    config = EngineConfig(tiny_pairs[arch][0], None, quantization="int8", kv_dtype=kv_dtype, max_model_len=512)
    spec = resolve(config).target
    runner = ModelRunner(load_model(spec), max_len=512, num_scratch=16, num_seqs=2, integer_kv=spec.integer_kv)
    rng = random.Random(0)
    text, other = ([rng.randrange(256) for _ in range(230)] for _ in range(2))

    def after(chunks: list[int], *, windows: bool = False, beside: bool = False) -> torch.Tensor:
        runner.pool.forget()
        cache, neighbour = runner.open(), runner.open()
        for size in chunks:
            own, start = text[cache.length : cache.length + size], cache.length
            if not own:
                break
            paths = [tuple(range(15, 14 - row, -1)) for row in range(len(own))] if windows else None
            batch = [Rows(cache, own, start, paths)]
            if beside:
                batch.insert(0, Rows(neighbour, other[neighbour.length : neighbour.length + 2], neighbour.length))
            runner.step(batch)
            if windows:
                cache.keep([path[-1] for path in paths or ()], own)
        return runner.step([Rows(cache, [7], cache.length, [(0,)])])  # all of the text goes into it

    wanted = after([1] * 230)
    for chunks in ([230], [2] * 115, [17] * 14, [64, 1, 100, 65]):
        assert torch.equal(after(chunks), wanted), chunks
    assert torch.equal(after([7] * 33, beside=True), wanted)
    assert torch.equal(after([rng.randint(1, 12) for _ in range(60)], windows=True), wanted)
