"""Read GGUF files: integrity, config, tokenizer and full-precision tensors under transformers' names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_card.errors import CorruptModelError, ModelStoreError

# Texts of tokens that end an answer even if the metadata does not list them (as in llama.cpp).
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
FLOATS = ("F32", "F16", "BF16")  # tensors that are numbers
_CONTROL = 3  # GGUF's token type for control tokens


def open_gguf(path: Path) -> Any:
    """Open a GGUF file; raise unless every tensor lies inside it.

    Returns:
        A `gguf.GGUFReader` over a read-only memory map.

    Raises:
        CorruptModelError: the file is truncated or not a GGUF file.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError) as error:
        reason = f"not a whole GGUF file ({type(error).__name__}: {str(error)[:200]})"
        raise CorruptModelError("GGUF file", str(path), reason, "download the file again") from error


def form_of(reader: Any) -> str:
    """Return the number format of most weights of a reader, such as "Q4_K_M"; "GGUF" if the file does not state it."""
    from gguf import LlamaFileType

    field = reader.fields.get("general.file_type")
    known = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    return known.get(field.contents(), "GGUF") if field is not None else "GGUF"


def load_config(path: Path) -> Any:
    """Load the transformers config of a GGUF file or a folder.

    Raises:
        ModelStoreError: transformers does not support the architecture.
    """
    from transformers import AutoConfig

    try:
        if path.is_dir():
            return AutoConfig.from_pretrained(path)
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        reason = f"transformers cannot read its config ({str(error)[:200]})"
        raise ModelStoreError("model", str(path), reason, "update transformers, or use another model") from error


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
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_token_ids(reader),
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = json.dumps({key: value for key, value in generation.items() if value is not None}, indent=2)
    (out / "generation_config.json").write_text(text + "\n")


def tensors(reader: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield dequantized tensors, one at a time, in file order.

    Args:
        reader: a result of `open_gguf`.
        model: the transformers model on the meta device, for names and head counts.

    Yields:
        transformers' parameter name and a float32 array of the parameter's shape. Tensors that the model does not
        have, such as rope tables, are left out.
    """
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        if tensor.name in names:
            weights = dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(weights=weights, name=tensor.name, tensor_key_mapping=names)
            yield names[result.name], result.weights if result.weights.flags.writeable else result.weights.copy()


def blocks_and_numbers(reader: Any, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where a file's matrices lie, and its other tensors, under transformers' names.

    Args:
        reader: a result of `open_gguf`.
        model: the transformers model on the meta device, for names and head counts.

    Returns:
        For each matrix in blocks its format, rows, bytes of a row, offset in the file, and the order of its rows, which
        is empty if transformers has the same; and arrays of float32.

    Raises:
        ModelStoreError: a matrix has blocks of an unknown format, or transformers stores it otherwise.
    """
    import numpy as np
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    from langchain_card.runtime.cpu.block_formats import FORMATS

    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names, forms = get_gguf_hf_weights_map(model, processor), [form.name for form in FORMATS]
    hint = 'use quantization=None, or "int8"'
    blocks, numbers = dict[str, Any](), dict[str, Any]()
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        kind = tensor.tensor_type.name
        if kind not in (*forms, *FLOATS):
            raise ModelStoreError(tensor.name, kind, f"must be one of {', '.join(forms)}", hint)
        if kind in FLOATS:
            weights = dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(weights=weights, name=tensor.name, tensor_key_mapping=names)
            numbers[names[result.name]] = np.array(result.weights, np.float32)
            continue
        # Some files have the rows of queries and keys in another order. The processor shows it on the rows' numbers.
        before = np.arange(len(tensor.data), dtype=np.float32)[:, None]
        result = processor.process(weights=before.copy(), name=tensor.name, tensor_key_mapping=names)
        after = np.asarray(result.weights)
        if after.shape != before.shape or not np.array_equal(np.sort(after, axis=0), before):
            raise ModelStoreError(tensor.name, kind, f"blocks of {architecture} files cannot be run as they are", hint)
        order = [] if np.array_equal(after, before) else after[:, 0].astype(int).tolist()
        rows, size = tensor.data.shape
        blocks[names[result.name]] = [kind, int(rows), int(size), int(tensor.data_offset), order]
    return blocks, numbers
