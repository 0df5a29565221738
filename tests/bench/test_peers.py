"""Peers of `langchain-card bench` that read the target's GGUF file; CI does not install their packages."""

from __future__ import annotations

import contextlib

import pytest

from langchain_card.bench import peers
from langchain_card.bench.methods import DecodeOptions, EngineMethod
from langchain_card.bench.peer_process import _cut
from langchain_card.bench.peers import Peer
from langchain_card.bench.prompts import user_prompt
from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("one_thread")
ENDING = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\nYes."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "alike"), [("llama-cpp", "llama_cpp", 3), ("openvino", "openvino_genai", 1)]
)
def test_peers_that_read_the_file_that_a_model_came_from(
    tiny_pairs: dict[str, tuple[str, str]], name: str, module: str, alike: int
) -> None:
    small = EngineConfig("smollm2-135m", None)
    assert peers._weights(name, small)[0] == "Q4_1 of the file"
    with pytest.raises(InvalidInputError, match=f"{name}.*reads GGUF files"):
        Peer(name, EngineConfig(tiny_pairs["llama"][0], None))
    pytest.importorskip(module)
    with contextlib.closing(Peer(name, small)) as peer, Engine(small) as engine:
        prompt = engine.tokenizer.encode("def fibonacci(n):")
        first, again = (peer.run([prompt], 16, number) for number in range(2))
        plain = EngineMethod("plain", "", engine, DecodeOptions()).run([prompt], 16, 0)
        endings = user_prompt(engine, "Say yes."), engine.tokenizer.encode(ENDING)  # each peer soon ends one
        ended, ends = [peer.run([ids], 24, 0).token_ids[0] for ids in endings], engine.eos_ids
    assert first.token_ids == again.token_ids and len(first.token_ids[0]) == 16 and first.tokens == 15
    assert first.first > 0 and first.seconds / 15 <= first.gap < first.seconds
    assert first.token_ids[0][:alike] == plain.token_ids[0][:alike]
    with contextlib.closing(Peer(name, small, ignore_end=True)) as peer:
        whole = [peer.run([ids], 24, 0).token_ids[0] for ids in endings]
    assert [len(ids) for ids in whole] == [24, 24] and min(map(len, ended)) < 24
    assert [_cut(ids, ends) for ids in whole] == ended
