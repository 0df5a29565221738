"""Read GGUF files: integrity, config, tokenizer and full-precision tensors under transformers' names."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from langchain_card.errors import CorruptModelError, ModelStoreError
from langchain_card.models.headers import weights_by_type

# Texts of tokens that end an answer even if the metadata does not list them (as in llama.cpp).
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
FLOATS = ("F32", "F16", "BF16")  # tensors that are numbers
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # those with a kernel
_CONTROL = 3  # GGUF's token type for control tokens
_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Any:
    """Open a GGUF file; raise unless every tensor lies inside it.

    Returns:
        A `gguf.GGUFReader` over a read-only memory map.

    Raises:
        CorruptModelError: the file is truncated or not a GGUF file.
        UnsafeModelError: one of its dimensions is out of bounds.
    """
    from gguf import GGUFReader

    with _whole(path):
        weights_by_type(path)  # the reader trusts what the file states, and takes seconds
        return GGUFReader(path)


def is_in_blocks(path: Path) -> bool:
    """Return whether a file's tensors all are numbers or blocks with a kernel, and blocks for the most part.

    Raises:
        CorruptModelError, UnsafeModelError: see `open_gguf`.
    """
    with _whole(path):
        weights = weights_by_type(path)
    return weights.keys() <= {*BLOCKS, *FLOATS} and 2 * sum(weights[kind] for kind in BLOCKS) > weights.total()


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raise a `CorruptModelError` for an error of reading a file."""
    try:
        yield
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError, struct.error) as error:
        reason = f"not a whole GGUF file ({type(error).__name__}: {str(error)[:200]})"
        raise CorruptModelError("GGUF file", str(path), reason, "download the file again") from error


def form_of(reader: Any) -> str:
    """Return the number format of most weights of a reader, such as "Q4_K_M"; "GGUF" if the file does not state it."""
    from gguf import LlamaFileType

    field = reader.fields.get("general.file_type")
    known = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    return known.get(field.contents(), "GGUF") if field is not None else "GGUF"


def load_config(path: Path, reader: Any = None) -> Any:
    """Load the transformers config of a folder, or of a GGUF file and its reader.

    Raises:
        ModelStoreError: transformers does not support the architecture, or its scaling of rotations is not known.
    """
    from transformers import AutoConfig

    try:
        if reader is None:
            return AutoConfig.from_pretrained(path)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        reason = f"transformers cannot read its config ({str(error)[:200]})"
        raise ModelStoreError("model", str(path), reason, "update transformers, or use another model") from error
    if scaling := _rope_scaling(config, reader):
        config.rope_parameters = {**config.rope_parameters, **scaling}
    return config


_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rope_scaling(config: Any, reader: Any) -> dict[str, Any]:
    """Return the scaling of rotations that a file states and transformers' reader of it leaves out."""
    architecture = reader.fields["general.architecture"].contents()
    prefix = f"{architecture}.rope.scaling."
    stated = {name.removeprefix(prefix): field for name, field in reader.fields.items() if name.startswith(prefix)}
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), np.ones(1))
    kind = stated["type"].contents() if "type" in stated else "none"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or (kind == "none" and np.all(factors == 1)):
        return {}
    if kind == "none":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        own: dict[str, Any] = {"factor": float(factors.max()), **_LLAMA3}
        wanted = _llama3_factors(size, rope["rope_theta"], **own)
        if factors.shape == wanted.shape and np.allclose(factors, wanted, rtol=1e-4):
            return {"rope_type": "llama3", **own}
        kind = _ROPE_FACTORS
    elif np.all(factors == 1) and stated.keys() <= {"type", "factor", "original_context_length", "finetuned"}:
        own = {"rope_type": kind, "factor": float(stated["factor"].contents())}
        if kind == "linear":
            return own
        if kind == "yarn" and "original_context_length" in stated:
            return {**own, "original_max_position_embeddings": int(stated["original_context_length"].contents())}
    hint = "use the safetensors release of the model"
    raise ModelStoreError("scaling of rotations", kind, f"is not known in {architecture} GGUF files", hint)


def _llama3_factors(
    size: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Any:  # fmt: skip
    """Return what the wavelengths of Llama 3.1's rotations are multiplied with: [size / 2]."""
    turns = original_max_position_embeddings / (2 * math.pi * theta ** (np.arange(0, size, 2) / size))
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def end_token_ids(reader: Any) -> list[int]:
    """Return the ids that end an answer: those of the metadata, then control tokens with a text in `END_TOKENS`."""
    fields = reader.fields
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [int(fields[key].contents()) for key in keys if key in fields]
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type")
    for position in types.data if types is not None else ():
        if types.parts[position][0] != _CONTROL:
            continue
        index = position - types.data[0]
        if bytes(tokens.parts[tokens.data[index]]).decode("utf-8", "replace") in END_TOKENS:
            ids.append(index)
    return list(dict.fromkeys(ids))


def save_tokenizer(path: Path, reader: Any, out: Path) -> None:
    """Write the tokenizer and the generation_config.json of a GGUF file to a folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(out)
    # Else transformers would read tokenizer.json, of some 10 MB, once more for these tokens at each start.
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = tokenizer.added_tokens_decoder.items()
    tokens = {number: {key: getattr(token, key) for key in fields} for number, token in added}
    config = out / "tokenizer_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text(encoding="utf-8")), "added_tokens_decoder": tokens}, indent=2) + "\n"
    )
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_token_ids(reader),
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = json.dumps({key: value for key, value in generation.items() if value is not None}, indent=2)
    (out / "generation_config.json").write_text(text + "\n")


class BlockPlace(NamedTuple):
    """The place of a matrix's blocks in a file.

    Attributes:
        kind: name of the blocks' format.
        rows: number of rows.
        size: bytes of a row.
        offset: first byte.
        order: the file's number of each row, in transformers' order; empty if that is the file's.
    """

    kind: str
    rows: int
    size: int
    offset: int
    order: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        features, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return self.rows, self.size // size * features


def tensors(reader: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield dequantized tensors, one at a time, in file order.

    Args:
        reader: a result of `open_gguf`.
        model: the transformers model on the meta device, for names and head counts.

    Yields:
        transformers' parameter name and a float32 array of the parameter's shape.

    Raises:
        ModelStoreError: the model has no place for a tensor.
    """
    named = _Names(reader, model)
    for tensor in named.tensors():
        yield named.translate(tensor, _numbers(tensor))


def blocks_and_numbers(reader: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield where a file's matrices in blocks lie, and its other tensors, one at a time, in file order.

    Args:
        reader: a result of `open_gguf`.
        model: the transformers model on the meta device, for names and head counts.

    Yields:
        transformers' parameter name, and a `BlockPlace` or an array of float16 or float32. Blocks that transformers
        does not store as one matrix, such as those of experts, become float16.

    Raises:
        ModelStoreError: blocks have a format without a kernel, or the model has no place for a tensor.
    """
    named = _Names(reader, model)
    for tensor in named.tensors():
        kind = tensor.tensor_type.name
        if kind in FLOATS:
            name, weights = named.translate(tensor, _numbers(tensor))
            yield name, weights.astype(np.float16) if kind == "F16" else weights
            continue
        if kind not in BLOCKS:
            hint = 'use quantization="int8", or another file'
            raise ModelStoreError(f"format of {tensor.name}", kind, f"must be one of {', '.join(BLOCKS)}", hint)
        rows = tensor.data.shape[0]
        if tensor.data.ndim == 2:  # some files have the rows of queries and keys in another order
            name, order = named.translate(tensor, np.arange(rows, dtype=np.float32)[:, None])
            if order.shape == (rows, 1) and np.array_equal(np.sort(order, axis=0)[:, 0], np.arange(rows)):
                moved = order[:, 0].astype(int).tolist()
                moved = [] if moved == [*range(rows)] else moved
                yield name, BlockPlace(kind, rows, tensor.data.shape[1], int(tensor.data_offset), moved)
                continue
        name, weights = named.translate(tensor, _numbers(tensor))
        yield name, weights.astype(np.float16)


class _Names:
    """transformers' names of a file's tensors, and the changes that it makes to them."""

    def __init__(self, reader: Any, model: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        architecture = reader.fields["general.architecture"].contents()
        self._model_type = model.config.model_type
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        self._reader, self._names = reader, get_gguf_hf_weights_map(model, self._processor)

    def tensors(self) -> Iterator[Any]:
        """Yield the file's tensors, in its order; the config has the rope tables (`load_config`)."""
        known = {*self._names, _ROPE_FACTORS}
        unknown = [tensor.name for tensor in self._reader.tensors if tensor.name not in known]
        if unknown:
            limit = f"{len(unknown)} tensors of the file have no place in a {self._model_type} model"
            hint = "answers would not be those of the model: update transformers, or use its safetensors release"
            raise ModelStoreError("tensors", ", ".join(unknown[:3]), limit, hint)
        return (tensor for tensor in self._reader.tensors if tensor.name in self._names)

    def translate(self, tensor: Any, weights: Any) -> tuple[str, Any]:
        """Return the name and the numbers of a tensor's parameter; the numbers may be written."""
        result = self._processor.process(weights=weights, name=tensor.name, tensor_key_mapping=self._names)
        return self._names[result.name], result.weights if result.weights.flags.writeable else result.weights.copy()


def _numbers(tensor: Any) -> Any:
    from gguf import dequantize

    return dequantize(tensor.data, tensor.tensor_type)
