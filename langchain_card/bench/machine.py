"""A description of this machine and of the models on it, for reports of measurements."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from langchain_card import __version__
from langchain_card.models.gguf import open_gguf
from langchain_card.models.loader import ModelSpec
from langchain_card.runtime.draft_form import HEAD
from langchain_card.runtime.families import read_config
from langchain_card.runtime.threads import num_cores, processor

PACKAGES = ("torch", "transformers", "langchain-core", "numba", "llguidance")
_GIB = 1 << 30


def describe() -> dict[str, Any]:
    """Return processor, cores, memory, GPUs and versions, as they are printed and written to files."""
    return {
        "langchain-card": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": num_cores(),
        "memory": f"{psutil.virtual_memory().total / _GIB:.0f} GiB",
        "gpus": gpus(),
    }


def version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def gpus() -> list[str]:
    """Return name and memory of every CUDA device."""
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{device.name}, {device.total_memory / _GIB:.0f} GiB" for device in devices]


def number_format(spec: ModelSpec) -> str:
    """Return the number format of a model's weights, in words."""
    if spec.form != "float":
        words = {"file": "the blocks of its file", "int8": "int8", "int4": "4 bits"}
        return "4 bits" if spec.draft else words[spec.form]
    return str(spec.dtype).removeprefix("torch.") + (", quantized" if spec.quantization else "")


def proposed_tokens(spec: ModelSpec) -> str:
    """Return how much of its vocabulary a draft proposes, in words; "" if all of it."""
    tokens = read_config(spec.folder).get_text_config().vocab_size
    return f"{HEAD:,} of {tokens:,} tokens" if spec.draft and tokens > HEAD else ""


def bytes_a_pass(file: Path) -> int:
    """Return the bytes of a GGUF file that one pass of its model reads.

    These are all tensors but the table of embeddings, of which a pass reads one row for each token. A table that is the
    head, too, is read as a whole.
    """
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in open_gguf(file).tensors}
    table = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    return sum(sizes.values()) - table
