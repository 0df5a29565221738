"""From a model's name to a model that runs: which device, which form, and do the two models fit together?"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from langchain_card.config import NGRAM, EngineConfig
from langchain_card.errors import DeviceError, InvalidInputError, VocabularyMismatchError
from langchain_card.runtime import draft_form
from langchain_card.runtime.attention import ATTENTION_NAME
from langchain_card.runtime.download import BUILTINS
from langchain_card.runtime.families import check_family, context_length, empty_model, read_config
from langchain_card.runtime.files import Progress
from langchain_card.runtime.graphs import compile_layers
from langchain_card.runtime.headers import DEFAULT_MAX_LEN
from langchain_card.runtime.placement import capacity, place
from langchain_card.runtime.quantization import find_quantizer
from langchain_card.runtime.registry import Registry
from langchain_card.runtime.store import ModelStore
from langchain_card.runtime.threads import single_threaded
from langchain_card.runtime.tokenizer import read_tokenizer

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
_INT8_DTYPES = ("auto", "float32")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to load, resolved: equal specs are one set of weights in a process.

    Attributes:
        name: as the user gave it.
        folder: with config, tokenizer and weights.
        form: of the weights on disk.
        device: a torch device.
        dtype: of activations and KV, and of weights in the float form.
        quantization: JSON of a transformers quantization config for float weights; None to leave them as they are.
        others: devices that hold layers beside `device`, which is the first.
        compiled: whether its layers are compiled.
        draft: whether it has the form of a draft (`draft_form`).
    """

    name: str
    folder: Path
    form: Literal["float", "int8"]
    device: torch.device
    dtype: torch.dtype
    quantization: str | None = None
    others: tuple[torch.device, ...] = ()
    compiled: bool = False
    draft: bool = False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that hold a part of it, in the order of its layers."""
        return (self.device, *self.others)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in `dtype`."""
        return int(self.dtype.itemsize)


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
        UnsupportedModelError: a model cannot be run exactly.
        VocabularyMismatchError: the tokenizers differ.
        CARDError: whatever the model store raises.
    """
    devices = find_devices("device", config.device)
    draft_device = _draft_device(config, devices) if config.has_draft else devices[0]
    target = _spec(config, "model", devices, progress)
    draft = None
    tokenizer = read_tokenizer(target.folder)
    model_config = _text_config(target)
    vocab_size, max_len = model_config.vocab_size, context_length(model_config)
    if config.has_draft:
        draft = _spec(config, "draft_model", [draft_device], progress)
        if draft != target:
            draft = replace(draft, draft=draft_form.changes(_text_config(draft), draft.form))
        _check_vocabulary(config, tokenizer, target, draft)
        vocab_size = min(vocab_size, _text_config(draft).vocab_size)
    wanted = config.max_model_len or min(max_len, DEFAULT_MAX_LEN)
    if wanted > max_len:
        raise InvalidInputError("max_model_len", wanted, f"{config.model} was trained for {max_len:,} positions")
    return Pair(target, draft, tokenizer, _eos_ids(target, tokenizer), vocab_size, wanted)


def find_device(name: str, asked: str) -> torch.device:
    """The device that `asked` means here; `"auto"` is CUDA when there is one, else the CPU."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise DeviceError(name, asked, "is not a device", 'use "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise DeviceError(name, asked, f"this machine has {count} CUDA devices", 'use "auto" or "cpu"')
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(name, asked, "only CPU and CUDA devices are supported", 'use "auto" or "cpu"')
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device  # equal when they are one


def find_devices(name: str, asked: str) -> list[torch.device]:
    """The device, or the CUDA devices between commas, that `asked` means here."""
    devices = [find_device(name, part.strip()) for part in asked.split(",")]
    if len(devices) > 1 and (len(set(devices)) < len(devices) or any(device.type != "cuda" for device in devices)):
        raise DeviceError(name, asked, "layers spread over CUDA devices that are all different", 'use "cuda:0,cuda:1"')
    return devices


def _draft_device(config: EngineConfig, target: Sequence[torch.device]) -> torch.device:
    if config.draft_device != "auto":
        return find_device("draft_device", config.draft_device)
    if target[0].type == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return next((device for device in devices if device not in target), target[-1])
    return target[0]


def _spec(config: EngineConfig, field: str, devices: Sequence[torch.device], progress: Progress | None) -> ModelSpec:
    name, quantization, device = getattr(config, field), config.quantization, devices[0]
    if quantization == "auto":
        quantization = "int8" if name in BUILTINS and _int8_runs(config, device) else None
    elif quantization == "int8" and not _int8_runs(config, device):
        why = f"int8 runs on a CPU with AVX2 in float32, not on {device} in {config.dtype}"
        if device.type == "cpu" and config.dtype in _INT8_DTYPES:
            why = "int8 runs on CPUs with AVX2, which this one lacks"
        raise InvalidInputError("quantization", "int8", why, 'use quantization=None, or device="cpu"')
    if config.dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    else:
        dtype = _DTYPES[config.dtype]
    form: Literal["float", "int8"] = "int8" if quantization == "int8" else "float"
    passed = quantization if quantization != form else None
    folder, compiled = (
        ModelStore().prepare(name, form, progress),
        config.execution == "compiled" and device.type == "cuda",
    )
    spec = ModelSpec(name, folder, form, device, dtype, passed, tuple(devices[1:]), compiled)
    check_family(name, spec.folder, field)
    if form == "float":
        find_quantizer(read_config(spec.folder), passed, device)
    return spec


def _int8_runs(config: EngineConfig, device: torch.device) -> bool:
    if device.type != "cpu" or config.dtype not in _INT8_DTYPES:
        return False
    from langchain_card.runtime.product_kernel import instructions  # a compiler, which float weights do not need

    return instructions() is not None


def _text_config(spec: ModelSpec) -> Any:
    return read_config(spec.folder).get_text_config()


def _check_vocabulary(config: EngineConfig, tokenizer: Any, target: ModelSpec, draft: ModelSpec) -> None:
    files = [spec.folder / "tokenizer.json" for spec in (target, draft)]
    if all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    ours, theirs = tokenizer.get_vocab(), read_tokenizer(draft.folder).get_vocab()
    if ours != theirs:
        differing = len(set(ours.items()) ^ set(theirs.items()))
        raise VocabularyMismatchError(
            "draft_model",
            config.draft_model,
            f"its tokenizer differs from that of {config.model} in {differing:,} entries",
            f'beside model name a draft of its family, or draft_model="{NGRAM}"; in a call, too',
        )


def _eos_ids(target: ModelSpec, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text tokens of the generation config, the config and the tokenizer together."""
    from transformers import GenerationConfig

    ids: list[int] = []
    found = [tokenizer.eos_token_id, _text_config(target).eos_token_id]
    if (target.folder / "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(target.folder, local_files_only=True).eos_token_id)
    for value in found:
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))


_models: Registry[Any] = Registry(close=lambda model: None)


def acquire_model(spec: ModelSpec) -> Any:
    """The model of a spec, loaded when nobody in the process holds it. Give it back with `release_model`."""
    return _models.acquire(spec, lambda: load_model(spec))


def release_model(spec: ModelSpec) -> None:
    """Gives one use of a model back; the last one frees the weights."""
    _models.release(spec)
    if spec not in _models:
        gc.collect()  # modules refer to themselves in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what torch keeps counts as taken


def is_loaded(spec: ModelSpec) -> bool:
    """Whether somebody in the process holds the model of a spec."""
    return spec in _models


def num_loaded_models() -> int:
    """Sets of weights in this process."""
    return len(_models)


def load_model(spec: ModelSpec) -> Any:
    """A causal LM of transformers in evaluation mode, with our attention."""
    with single_threaded():
        model = _load_int8(spec) if spec.form == "int8" else _load_float(spec)
    if spec.compiled:
        compile_layers(model)
    if spec.draft:
        draft_form.make_draft(model, spec.form)
    if spec.form == "int8":
        from langchain_card.runtime.fused_layers import stack_layers  # with a compiler, which float weights do not need

        stack_layers(model.get_decoder())
    return model.requires_grad_(False).eval()


def device_map(spec: ModelSpec) -> dict[str, torch.device]:
    """Where each part of a model goes, by its name; see `placement.place`."""
    if not spec.others:
        return {"": spec.device}
    return place(empty_model(read_config(spec.folder)), spec.devices, [capacity(device) for device in spec.devices])


def _load_float(spec: ModelSpec) -> Any:
    quantizer = find_quantizer(read_config(spec.folder), spec.quantization, spec.device)
    passed = {"quantization_config": quantizer.quantization_config} if quantizer and not quantizer.pre_quantized else {}
    try:
        return AutoModelForCausalLM.from_pretrained(
            spec.folder,
            dtype=spec.dtype,
            device_map=device_map(spec),
            attn_implementation=ATTENTION_NAME,
            # Grouped matrix products of experts know no float64.
            experts_implementation="eager" if spec.dtype == torch.float64 else None,
            local_files_only=True,
            use_safetensors=True,
            **passed,
        )
    except torch.OutOfMemoryError as error:
        raise DeviceError("device", str(spec.device), f"{spec.name} does not fit", "use a smaller model") from error


def _load_int8(spec: ModelSpec) -> Any:
    from langchain_card.runtime.int8_weights import read_int8  # with a compiler, which nothing else needs

    config = read_config(spec.folder)
    empty: AbstractContextManager[Any] = init_empty_weights(include_buffers=False)
    with empty:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=spec.dtype)
    read_int8(model, spec.folder / "model.safetensors", spec.dtype)
    return model
