"""From a model's name to a model that runs: which device, which form, and do the two models fit together?"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from langchain_card.config import NGRAM, EngineConfig
from langchain_card.errors import CorruptModelError, DeviceError, InvalidInputError, VocabularyMismatchError
from langchain_card.runtime.attention import ATTENTION_NAME
from langchain_card.runtime.download import BUILTINS
from langchain_card.runtime.files import Progress
from langchain_card.runtime.int8 import Int8Linear, fuse_norm, kernel_name, split_by_layer
from langchain_card.runtime.registry import Registry
from langchain_card.runtime.store import ModelStore
from langchain_card.runtime.threads import num_cores, single_threaded, use_threads

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEFAULT_MAX_LEN = 8192
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to load, resolved: equal specs are one set of weights in a process.

    Attributes:
        name: as the user gave it.
        folder: with config, tokenizer and weights.
        form: of the weights on disk.
        device: a torch device.
        dtype: of activations and KV, and of weights in the float form.
    """

    name: str
    folder: Path
    form: Literal["float", "int8"]
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and, perhaps, a draft, with the tokenizer they share.

    Attributes:
        target: spec of the target.
        draft: spec of the draft, or None.
        tokenizer: of the target.
        eos_ids: tokens that end an answer.
        vocab_size: ids below it mean the same to both.
        max_len: positions per sequence.
    """

    target: ModelSpec
    draft: ModelSpec | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_len: int


def resolve(config: EngineConfig, progress: Progress | None = None) -> Pair:
    """Finds both models on disk and checks that they fit, before any weights are read.

    Raises:
        DeviceError: a device is not there.
        VocabularyMismatchError: the tokenizers differ.
        CARDError: whatever the model store raises.
    """
    device = find_device("device", config.device)
    draft_device = device if not config.has_draft else _draft_device(config, device)
    target = _spec(config, config.model, device, progress)
    draft = None
    tokenizer = AutoTokenizer.from_pretrained(target.folder, local_files_only=True)
    model_config = _model_config(target)
    vocab_size, max_len = model_config.vocab_size, model_config.max_position_embeddings
    if config.has_draft and config.draft_model is not None:
        draft = _spec(config, config.draft_model, draft_device, progress)
        _check_vocabulary(config, tokenizer, target, draft)
        vocab_size = min(vocab_size, _model_config(draft).vocab_size)
    wanted = config.max_model_len or min(max_len, DEFAULT_MAX_LEN)
    if wanted > max_len:
        raise InvalidInputError("max_model_len", wanted, f"{config.model} was trained for {max_len:,} positions")
    return Pair(target, draft, tokenizer, _eos_ids(target, tokenizer), vocab_size, wanted)


def find_device(name: str, asked: str) -> torch.device:
    """The device that `asked` means here; `"auto"` is CUDA when there is one, else the CPU."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise DeviceError(name, asked, "is not a device", 'use "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise DeviceError(name, asked, f"this machine has {count} CUDA devices", 'use "auto" or "cpu"')
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(name, asked, "only CPU and CUDA devices are supported", 'use "auto" or "cpu"')
    return device


def _draft_device(config: EngineConfig, target: torch.device) -> torch.device:
    if config.draft_device != "auto":
        return find_device("draft_device", config.draft_device)
    if target.type == "cuda" and torch.cuda.device_count() > 1:
        return torch.device("cuda", 1 if (target.index or 0) == 0 else 0)
    return target


def _spec(config: EngineConfig, name: str, device: torch.device, progress: Progress | None) -> ModelSpec:
    quantization = config.quantization
    if quantization == "auto":
        quantization = "int8" if name in BUILTINS and _int8_runs(config, device) else None
    elif quantization == "int8" and not _int8_runs(config, device):
        why = f"int8 runs on a CPU in float32, not on {device} in {config.dtype}"
        raise InvalidInputError("quantization", "int8", why, 'use quantization=None, or device="cpu"')
    if config.dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    else:
        dtype = _DTYPES[config.dtype]
    form: Literal["float", "int8"] = "int8" if quantization == "int8" else "float"
    return ModelSpec(name, ModelStore().prepare(name, form, progress), form, device, dtype)


def _int8_runs(config: EngineConfig, device: torch.device) -> bool:
    return device.type == "cpu" and config.dtype in ("auto", "float32") and kernel_name() is not None


def _model_config(spec: ModelSpec) -> Any:
    config = AutoConfig.from_pretrained(spec.folder, local_files_only=True).get_text_config()
    if getattr(config, "use_bidirectional_attention", False):
        limit = "its tokens attend to later ones, so it cannot decode token by token"
        raise InvalidInputError("model", spec.name, limit, "use a causal language model")
    return config


def _check_vocabulary(config: EngineConfig, tokenizer: Any, target: ModelSpec, draft: ModelSpec) -> None:
    files = [spec.folder / "tokenizer.json" for spec in (target, draft)]
    if all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    ours, theirs = tokenizer.get_vocab(), AutoTokenizer.from_pretrained(draft.folder, local_files_only=True).get_vocab()
    if ours != theirs:
        differing = len(set(ours.items()) ^ set(theirs.items()))
        raise VocabularyMismatchError(
            "draft_model",
            config.draft_model,
            f"its tokenizer differs from that of {config.model} in {differing:,} entries",
            f'use a draft of the same family, or draft_model="{NGRAM}"',
        )


def _eos_ids(target: ModelSpec, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text tokens of the generation config, the config and the tokenizer together."""
    from transformers import GenerationConfig

    ids: list[int] = []
    found = [tokenizer.eos_token_id, _model_config(target).eos_token_id]
    if (target.folder / "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(target.folder, local_files_only=True).eos_token_id)
    for value in found:
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))


def _collect(model: Any) -> None:
    """Modules refer to themselves in cycles; without this the memory would be freed much later."""
    del model
    gc.collect()


_models: Registry[Any] = Registry(close=_collect)


def acquire_model(spec: ModelSpec) -> Any:
    """The model of a spec, loaded when nobody in the process holds it. Give it back with `release_model`."""
    return _models.acquire(spec, lambda: load_model(spec))


def release_model(spec: ModelSpec) -> None:
    """Gives one use of a model back; the last one frees the weights."""
    _models.release(spec)


def num_loaded_models() -> int:
    """Sets of weights in this process."""
    return len(_models)


def load_model(spec: ModelSpec) -> Any:
    """A causal LM of transformers in evaluation mode, with our attention."""
    with single_threaded():
        model = _load_int8(spec) if spec.form == "int8" else _load_float(spec)
    return model.requires_grad_(False).eval()


def _load_float(spec: ModelSpec) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        spec.folder,
        dtype=spec.dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
    )
    try:
        return model.to(spec.device)
    except torch.OutOfMemoryError as error:
        raise DeviceError("device", str(spec.device), f"{spec.name} does not fit", "use a smaller model") from error


def _load_int8(spec: ModelSpec) -> Any:
    config = AutoConfig.from_pretrained(spec.folder, local_files_only=True)
    empty: AbstractContextManager[Any] = init_empty_weights(include_buffers=False)
    with empty:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=spec.dtype)
    with safe_open(spec.folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        stacks = _stacks([name for name, _ in model.named_modules() if f"{name}.weight_int8" in names])
        # Packing for the kernel is most of the time, and runs on one core.
        with ThreadPoolExecutor(num_cores(), initializer=use_threads, initargs=(1,)) as pool:
            packed = pool.map(lambda stack: _int8_layers(weights, stack, names), stacks)
            for stack, layers in zip(stacks, packed, strict=True):
                for name, layer in zip(stack, layers, strict=True):
                    model.set_submodule(name, layer)
        for name, module in list(model.named_modules()):
            _fill(module, name, weights, names, spec.dtype)
            if (fused := fuse_norm(module)) is not None:
                model.set_submodule(name, fused)
    return model


def _stacks(names: list[str]) -> list[tuple[str, ...]]:
    """The layers, those that read the same input together."""
    stacks = []
    for name in names:
        parent, _, own = name.rpartition(".")
        group = next((group for group in _SAME_INPUT if own in group), (own,))
        members = tuple(f"{parent}.{member}" if parent else member for member in group)
        stack = members if all(member in names for member in members) else (name,)
        if name == stack[0]:
            stacks.append(stack)
    return stacks


def _int8_layers(weights: Any, stack: tuple[str, ...], names: set[str]) -> Sequence[nn.Module]:
    parts = [weights.get_tensor(f"{name}.weight_int8") for name in stack]
    scale = torch.cat([weights.get_tensor(f"{name}.weight_scale") for name in stack])
    biases = [weights.get_tensor(f"{name}.bias").float() for name in stack if f"{name}.bias" in names]
    if len(biases) not in (0, len(stack)):
        raise CorruptModelError("weights", stack, "some of these layers have a bias and some have none")
    whole = Int8Linear(torch.cat(parts), scale, torch.cat(biases) if biases else None)
    return [whole] if len(stack) == 1 else split_by_layer(whole, [len(part) for part in parts])


def _fill(module: nn.Module, name: str, weights: Any, names: set[str], dtype: torch.dtype) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}" if name else key
        if full not in names:
            raise CorruptModelError(
                "weights", full, "is missing from the int8 file", "remove the model and pull it again"
            )
        # A copy: a view would keep the whole file mapped, and counted as memory.
        tensor: Tensor = weights.get_tensor(full).to(dtype, copy=True)
        if tensor.shape != parameter.shape:
            raise CorruptModelError("weights", full, f"has shape {list(tensor.shape)}, not {list(parameter.shape)}")
        setattr(module, key, nn.Parameter(tensor, requires_grad=False))
