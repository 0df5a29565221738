"""A tiny target and a draft of another vocabulary: the models, prompts for them, and the reference's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.models.loader import resolve
from langchain_card.models.vocabulary import VocabularyMap
from tests.support import naive, tiny, vocabularies
from tests.support.exactness import Reference

TEXT = "the quick brown fox thinks that the other foxes thought; def quick(the, other): return the + other\n" * 3
OTHER_TEXT = "while another thing returns, nothing else is quicker than the thing that is not there; else return\n" * 3
SAID = "the other 🙂 thing: caf\u00e9, 你好\n\treturn quick"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": ((40, 1.5),)},
    "0.7": {"temperature": 0.7, "seed": 4},
    "1.0, all": {"temperature": 1.0, "seed": 9, "top_k": 100, "top_p": 0.9, "presence_penalty": 0.3},
}
PAIR: dict[str, Any] = {"drafters": (), "dtype": "float64", "max_model_len": 512}


def make_pair(
    folder: Path, noise: float, positions: int = 2048, tokenizer: Any = None, size: int = tiny.VOCAB
) -> tuple[str, str]:
    """A target, and a draft of another vocabulary that has the target's rows for what both know, and noise."""
    tokenizer = tokenizer or vocabularies.byte_pairs(TEXT, 300, "<|end|>")
    shape = {**tiny.SHAPE, "vocab_size": size, "tie_word_embeddings": True}
    torch.manual_seed(0)
    target = tiny.save_random(tiny.t.LlamaConfig(**shape), folder / "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:  # what came before matters less: one text is read in other tokens
            layer.self_attn.o_proj.weight *= 0.2
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    other = vocabularies.byte_pairs(OTHER_TEXT, 352, "</s>")
    ends = [((tokenizer.eos_token_id,), (other.eos_token_id,))]
    columns = VocabularyMap(tokenizer, other, (size, 352), ends)._columns
    known = columns < 352
    config = type(model.config)(**{**model.config.to_dict(), "vocab_size": 352, "max_position_embeddings": positions})
    config.eos_token_id = other.eos_token_id
    torch.manual_seed(3)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed" not in name}
    draft.load_state_dict({name: tensor for name, tensor in weights.items() if "lm_head" not in name}, strict=False)
    with torch.no_grad():
        rows = draft.get_input_embeddings().weight
        rows[columns[known]] = model.get_input_embeddings().weight[known]
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, dtype=parameter.dtype)
    draft.save_pretrained(folder / "draft")
    other.save_pretrained(folder / "draft")
    return target, str(folder / "draft")


def ask(engine_tokenizer: Any) -> dict[str, Any]:
    """Prompts with text that the draft reads in several tokens, emojis, and half a character at the end."""
    encode = lambda text: engine_tokenizer(text).input_ids  # noqa: E731
    half = encode("the \U0001f642")[:-2]
    texts = {
        "greedy": encode(SAID),
        "greedy, penalties": half,
        "0.7": encode(TEXT[:90]),
        "1.0, all": encode("def quick"),
    }
    return {name: (texts[name], {**options, "max_tokens": 40}) for name, options in SETTINGS.items()}


def wanted_of(config: EngineConfig, asked: dict[str, Any]) -> dict[str, naive.PlainAnswer]:
    reference, eos_ids = Reference(config), resolve(config).eos_ids
    return {name: reference.answer(ids, SamplingParams(**options), eos_ids) for name, (ids, options) in asked.items()}
