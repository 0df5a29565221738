"""A draft of another vocabulary: what the map says, and answers that stay the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from langchain_card.config import EngineConfig
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.model import ModelDrafter
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.errors import VocabularyMismatchError
from langchain_card.models.loader import resolve
from langchain_card.models.tokenizer import token_bytes
from langchain_card.models.vocabulary import VocabularyMap
from langchain_card.ports import Budget
from langchain_card.runtime.runner import ModelRunner
from tests.simulation import FixedPolicy
from tests.support import naive, tiny, vocabularies
from tests.support.exactness import Figures, Reference, compare
from tests.support.vocabulary_pair import OTHER_TEXT, PAIR, SAID, SETTINGS, TEXT, ask, make_pair, wanted_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("pair"), noise=0.005)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models draft at a loss: what a controller that measures would verify depends on the hour."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(4,) * 4))


# The map


def mapped(target: Any, draft: Any) -> VocabularyMap:
    ends = [[number for number in [one.eos_token_id] if number is not None] for one in (target, draft)]
    return VocabularyMap(target, draft, (len(target), len(draft)), [(ends[0], ends[1])])


def said(tokenizer: Any, token_ids: Sequence[int]) -> bytes:
    return b"".join(token_bytes(tokenizer, token) for token in token_ids)


def check_reading(target: Any, draft: Any, text: str) -> VocabularyMap:
    """The draft reads the very bytes that the target says, of every beginning and every end of a text."""
    found, token_ids = mapped(target, draft), target(text, add_special_tokens=False).input_ids
    assert any(len(found.read([token])) > 1 for token in token_ids), "some token has no partner"
    for token in token_ids:
        assert said(draft, found.read([token])) == token_bytes(target, token)
    assert said(draft, found.read(token_ids)) == text.encode()
    return found


def test_byte_pairs_of_two_texts() -> None:
    target, draft = vocabularies.byte_pairs(TEXT, 300, "<|end|>"), vocabularies.byte_pairs(OTHER_TEXT, 352, "</s>")
    found = check_reading(target, draft, SAID)
    both = {said(target, [i]) for i in range(len(target))} & {said(draft, [i]) for i in range(len(draft))}
    assert 256 < found.num_shared == len(both) + 1 < len(target), "the ends of text, and what says the same"
    assert found.coverage == found.num_shared / len(draft) < 1 and found.useful
    assert found.read([target.eos_token_id]) == [draft.eos_token_id]
    assert len(found.read([5000])) == 1, "an id of a padded head is read as something"


def test_logits_come_in_the_targets_ids() -> None:
    target, draft = vocabularies.byte_pairs(TEXT, 300, "<|end|>"), vocabularies.byte_pairs(OTHER_TEXT, 352, "</s>")
    logits = torch.randn(3, len(draft), generator=torch.Generator().manual_seed(0))
    for head in (len(draft), 262):
        found = mapped(target, draft)
        own, shared = found.to_target(logits[:, :head]), 0
        for token in range(len(target)):
            read = found.read([token])
            same = said(draft, read) == said(target, [token]) or token == target.eos_token_id
            if same and len(read) == 1 and read[0] < head:
                assert torch.equal(own[:, token], logits[:, read[0]])
                shared += 1
            else:
                assert (own[:, token] == -torch.inf).all()
        assert shared == found.num_shared if head == len(draft) else 256 < shared < found.num_shared
        share = own.exp().sum(-1) / logits[:, :head].exp().sum(-1)
        assert torch.allclose(found.share(logits[:, :head])[:, 0].exp(), share) and (share < 1).all()


@pytest.mark.parametrize("make", vocabularies.MAKES)
def test_tokenizers_of_other_makes(make: str) -> None:
    """As a draft for byte pairs: pieces with their own spaces, bytes by their numbers, no token for some characters."""
    target, draft = vocabularies.byte_pairs(TEXT, 300, "<|end|>"), vocabularies.MAKES[make]()
    found = mapped(target, draft)
    plain = "quick" if make == "unigram" else "the quick"
    assert said(draft, found.read(target(plain).input_ids)) == plain.encode()
    assert all(found.read([token]) for token in range(300)), "every token is read as something"
    assert found.read([target.eos_token_id]) == [draft.eos_token_id] != target.eos_token_id


def test_real_tokenizers() -> None:
    found = check_reading(vocabularies.deepseek(), vocabularies.smollm2(), SAID)
    assert found.num_shared > 30_000 and found.useful


@pytest.mark.pair
def test_the_built_in_models() -> None:
    qwen, smollm2 = vocabularies.qwen(), vocabularies.smollm2()
    found = check_reading(qwen, smollm2, SAID)
    assert found.num_shared == 39_237 and round(found.coverage, 3) == 0.798
    for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert found.read([qwen.convert_tokens_to_ids(name)]) == [smollm2.convert_tokens_to_ids(name)]
    turn = "<|im_start|>user\nHi.<|im_end|>\n"
    assert found.read(qwen(turn).input_ids) == smollm2(turn).input_ids
    other = mapped(smollm2, qwen)
    assert other.num_shared == found.num_shared and other.useful


# Which pairs need one


@pytest.mark.slow
def test_one_vocabulary_under_padded_heads(tmp_path: Path) -> None:
    """As Qwen2.5's 0.5B and 7B: 151,936 and 152,064 rows. One knows a token more, at the end."""
    sizes = {"small": 320, "large": 352}
    for name, size in sizes.items():
        tiny.save_random(tiny.t.LlamaConfig(**{**tiny.SHAPE, "vocab_size": size}), tmp_path / name)
    more = tiny.byte_tokenizer()
    more.add_tokens(["<extra>"])
    more.save_pretrained(tmp_path / "large")
    for model, draft_model in (sizes, [*sizes][::-1]):
        config = EngineConfig(str(tmp_path / model), str(tmp_path / draft_model), **PAIR)
        pair = resolve(config)
        assert pair.vocabulary is None and pair.vocab_size == 320
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, schedule="sequential")
        with Engine(config) as engine:
            done = engine.submit(list(range(40, 60)), params).result()
            assert engine.coverage == 1 and done.stats.verified_by_source["model"] > 0
            assert not [text for text, worker in engine.health().items() if not worker.ok]
        wanted = Reference(config).answer(list(range(40, 60)), params, pair.eos_ids)
        assert list(done.token_ids) == wanted.token_ids
        assert sizes[model] == 320 or max(done.token_ids) >= 320, "what the draft has no row for was read"


def test_a_vocabulary_with_nothing_in_common_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    stranger = tiny.make_target("llama", tmp_path)
    vocabularies.words().save_pretrained(stranger)
    with pytest.raises(VocabularyMismatchError, match=r"its tokenizer shares \d tokens with .*target.*Hint: .*ngram"):
        resolve(EngineConfig(pair[0], stranger, **PAIR))


# Answers


@pytest.mark.usefixtures("drafting")
@pytest.mark.slow
def test_answers_are_the_targets_own(pair: tuple[str, str], say: Any) -> None:
    config, figures = EngineConfig(*pair, **PAIR), Figures()
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    asked = ask(tokenizer)
    compare(config, asked, wanted_of(config, asked), ("plain", "sequential", "parallel"), figures)
    say(f"two vocabularies: {figures}")
    assert figures.different == 0 and figures.compared > 3 * 40 * len(SETTINGS) / 2
    assert all(figures.accepted[f"{name} sequential"] > 0 for name in SETTINGS), figures.rates()


@pytest.mark.usefixtures("drafting")
@pytest.mark.slow
def test_a_process_and_several_at_once(pair: tuple[str, str]) -> None:
    config = EngineConfig(*pair, **PAIR, draft_transport="process")
    asked = ask(AutoTokenizer.from_pretrained(pair[0]))
    wanted = wanted_of(config, asked)
    with Engine(config) as engine:
        assert 0.5 < engine.coverage < 1
        for schedule in ("sequential", "parallel"):
            running = {
                name: engine.submit(ids, SamplingParams(**options, schedule=schedule))  # type: ignore[arg-type]
                for name, (ids, options) in asked.items()
            }
            done = {name: generation.result() for name, generation in running.items()}
            assert {name: list(one.token_ids) for name, one in done.items()} == {
                name: answer.token_ids for name, answer in wanted.items()
            }
            by_source = [(one.stats.verified_by_source, one.stats.accepted_by_source) for one in done.values()]
            assert sum(accepted.get("model", 0) for _, accepted in by_source) > 0
            assert all(accepted.get("model", 0) <= verified.get("model", 0) for verified, accepted in by_source)
            assert all(sum(one.stats.verified_by_source.values()) == one.stats.verified for one in done.values())


@pytest.mark.usefixtures("drafting")
@pytest.mark.slow
def test_under_a_grammar_and_in_a_shorter_context(tmp_path: Path) -> None:
    """Masks are in the target's ids; a draft whose context is full says no more."""
    config = EngineConfig(*make_pair(tmp_path, noise=0.005, positions=160), **PAIR)
    with Engine(config) as engine:
        prompt_ids, accepted = engine.tokenizer("the other").input_ids, 0
        for options in ({"grammar": "start: /[a-z ]{20,}/"}, {"grammar": 'start: ("the" | "other" | " ")+'}, {}):
            params = SamplingParams(max_tokens=150, **options)
            done, plain = (
                engine.submit(prompt_ids, replace(params, schedule=name)).result() for name in ("sequential", "plain")
            )
            assert done.token_ids == plain.token_ids
            accepted += done.stats.accepted_by_source.get("model", 0)
            text = engine.tokenizer.decode(done.token_ids)
            assert len(text) > 100 or options, "longer than the draft's context"
        assert accepted > 0 and all(worker.ok for worker in engine.health().values())


# The draft's own text and keys


class Script:
    """A drafter whose answers are dictated."""

    def __init__(self, pair: tuple[str, str], params: SamplingParams | None = None) -> None:
        self.pair = resolve(EngineConfig(*pair, **PAIR))
        model = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float64, attn_implementation="card").eval()
        self.runner = ModelRunner(model, max_len=400, num_scratch=16, num_seqs=2)
        self.drafter = ModelDrafter(
            self.runner, vocab_size=self.pair.vocab_size, vocabulary=self.pair.vocabulary, num_children=4
        )
        self.draft_tokenizer = AutoTokenizer.from_pretrained(pair[1])
        self.prompt_ids = tuple(self.pair.tokenizer(SAID).input_ids)
        self.output_ids: list[int] = []
        self.drafter.begin(Request(0, self.prompt_ids, params or SamplingParams()), ())

    def grow(self, steps: int) -> None:
        for _ in range(steps):
            self.drafter.step([Budget(0, 2)])

    def best(self) -> list[int]:
        """The likeliest candidates, one below the other."""
        tree, found = self.drafter._sequences[0].tree, list[int]()
        node = tree.root
        while tree.children.get(node):
            token, node = next(iter(tree.children[node].items()))
            found.append(token)
            if node < 0:
                break
        return found

    def commit(self, token_ids: Sequence[int]) -> None:
        self.drafter.correct(0, len(self.output_ids), token_ids)
        self.output_ids += token_ids


def test_what_is_kept_is_what_would_be_read(pair: tuple[str, str]) -> None:
    """After hits, misses, tokens that only the target has and half characters: text and keys are those of the text."""
    script = Script(pair)
    tokenizer, hits = script.pair.tokenizer, 0
    lonely = [token for token in range(300) if len(script.pair.vocabulary.read([token])) > 1]  # type: ignore[union-attr]
    halves = tokenizer("\U0001f642\U0001f643").input_ids
    for turn in range(8):
        script.grow(6)
        likely = script.best()[:3]
        hits += len(likely)
        script.commit([*likely, lonely[turn], *halves[turn : turn + 1], *([lonely[-turn]] * (turn % 2))])
    script.grow(1)
    cache, text = script.drafter._sequences[0].cache, [*script.prompt_ids, *script.output_ids]
    assert hits > 8 and cache is not None
    assert said(script.draft_tokenizer, cache.token_ids) == said(tokenizer, text)
    fresh = script.runner.pool._free[0]
    fresh.token_ids = []
    script.runner.prefill(fresh, cache.token_ids)
    for layer in script.runner.pool.kv.layers:
        kept, read = (layer[:, :, at.first_position : at.first_position + cache.length] for at in (cache, fresh))
        assert torch.allclose(kept, read, atol=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_targets_own_weights_are_always_right(tmp_path: Path, name: str) -> None:
    """Its rows in another order, among others: what the draft ranks first, by all processors and noise, comes true."""
    tokenizer = tiny.byte_tokenizer()
    pair = make_pair(tmp_path, noise=0.0, tokenizer=tokenizer, size=len(tokenizer))
    params = SamplingParams(max_tokens=24, **SETTINGS[name])
    script = Script(pair, params)
    wanted = naive.generate(naive.reading(naive.load(pair[0], torch.float64)), script.prompt_ids, params).token_ids
    while len(script.output_ids) < len(wanted):
        script.grow(3)
        likely = script.best()
        left = wanted[len(script.output_ids) :]
        assert likely and likely[: len(left)] == left[: len(likely)]
        script.commit(left[:2])
