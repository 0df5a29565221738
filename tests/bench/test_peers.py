"""Peers of `langchain-card bench` that read the target's GGUF file; CI does not install what they need."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from dataclasses import replace

import pytest

from langchain_card.bench.method_table import PEERS
from langchain_card.bench.methods import DecodeOptions, EngineMethod
from langchain_card.bench.peers.peer import Peer, open_peer
from langchain_card.bench.peers.process import _cut
from langchain_card.bench.peers.weights import peer_weights
from langchain_card.bench.prompts import user_prompt
from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = EngineConfig("smollm2-135m", None, max_model_len=512)
ENDING = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\nYes."


def skip_unless_installed(name: str) -> None:
    kind = PEERS[name]
    if kind.program and shutil.which(os.environ.get("LLAMA_SERVER") or kind.program) is None:
        pytest.skip(f"{kind.program} is not installed")
    if kind.package and importlib.util.find_spec(kind.package.replace("-", "_")) is None:
        pytest.skip(f"{kind.package} is not installed")


@pytest.mark.parametrize("name", ["llama-server-draft", "openvino"])
def test_peers_that_read_the_file_that_a_model_came_from(tiny_pairs: dict[str, tuple[str, str]], name: str) -> None:
    config = replace(SMALL, draft_model="smollm2-135m" if PEERS[name].drafts else None)
    assert peer_weights(name, config)[0].split(",")[0] == "Q4_1 of the file"
    with pytest.raises(InvalidInputError, match=f"{name}.*reads GGUF files"):
        peer_weights(name, EngineConfig(tiny_pairs["llama"][0], None))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "alike"), [("llama-server", 3), ("openvino", 1)])
def test_peers_decode_what_this_engine_does(name: str, alike: int) -> None:
    skip_unless_installed(name)
    with contextlib.closing(open_peer(name, SMALL)) as peer, Engine(SMALL) as engine:
        prompt = engine.tokenizer.encode("def fibonacci(n):")
        first, again = (peer.run([prompt], 16, number) for number in range(2))
        plain = EngineMethod("plain", "", engine, DecodeOptions()).run([prompt], 16, 0)
        endings = user_prompt(engine, "Say yes."), engine.tokenizer.encode(ENDING)  # each peer soon ends one
        ended, ends = [peer.run([ids], 24, 0).token_ids[0] for ids in endings], engine.eos_ids
    assert first.token_ids == again.token_ids and len(first.token_ids[0]) == 16 and first.tokens == 15
    assert first.first > 0 and first.seconds / 15 <= first.gap < first.seconds and first.peak > 1 << 26
    assert first.token_ids[0][:alike] == plain.token_ids[0][:alike]
    with contextlib.closing(open_peer(name, SMALL, ignore_end=True)) as peer:
        whole = [peer.run([ids], 24, 0).token_ids[0] for ids in endings]
    assert [len(ids) for ids in whole] == [24, 24] and min(map(len, ended)) < 24
    if isinstance(peer, Peer):
        assert [_cut(ids, ends) for ids in whole] == ended
    else:  # it never chooses a token that ends an answer
        assert not {*ends} & {*whole[0], *whole[1]}
        assert all(ids[: len(cut) - 1] == cut[:-1] for ids, cut in zip(whole, ended, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in PEERS.items() if kind.base])
def test_peers_that_speculate_say_what_they_say_plainly(name: str) -> None:
    """A text that repeats itself, so that n-grams find something. Its own draft is always right."""
    skip_unless_installed(name)
    config = replace(SMALL, draft_model="smollm2-135m" if PEERS[name].drafts else None)
    with Engine(SMALL) as engine:
        prompt = engine.tokenizer.encode("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, " * 4)
    runs = []
    for each in (PEERS[name].base, name):
        with contextlib.closing(open_peer(each, config)) as peer:
            runs.append(peer.run([prompt], 48, 0))
    plain, own = runs
    assert own.token_ids[0][:8] == plain.token_ids[0][:8] and len(own.token_ids[0]) == 48
    if name.startswith("llama-server"):
        assert own.figures["acceptance"] > 0 and own.figures["accepted_length"] > 1.2, own.figures
