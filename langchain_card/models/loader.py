"""From a model's name to a model that runs: which device, which form, and do the two models fit together?"""

from __future__ import annotations

import gc
import logging
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
from langchain_card.models import draft_form
from langchain_card.models.devices import draft_device, find_devices
from langchain_card.models.download import BUILTINS
from langchain_card.models.files import Progress
from langchain_card.models.headers import DEFAULT_MAX_LEN
from langchain_card.models.placement import capacity, place
from langchain_card.models.quantization import find_quantizer
from langchain_card.models.registry import Registry
from langchain_card.models.safety import weight_files
from langchain_card.models.store import ModelStore
from langchain_card.models.tokenizer import read_tokenizer
from langchain_card.models.vocabulary import VocabularyMap, end_ids, read_map
from langchain_card.runtime.attention import ATTENTION_NAME
from langchain_card.runtime.families import check_family, context_length, empty_model, read_config
from langchain_card.runtime.grid_steps import compile_layers
from langchain_card.runtime.threads import single_threaded

log = logging.getLogger(__name__)

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
    """A target and, perhaps, a draft.

    Attributes:
        target: spec of the target.
        draft: spec of the draft, or None.
        stack: specs of the models below it.
        tokenizer: of the target.
        eos_ids: tokens that end an answer.
        vocab_size: the target's ids are below it; those of both, where they have one vocabulary.
        max_len: positions per sequence.
        vocabularies: of the draft and of the models below it, how each understands the target's ids; None where they
            have one vocabulary.
    """

    target: ModelSpec
    draft: ModelSpec | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_len: int
    vocabularies: tuple[VocabularyMap | None, ...] = ()
    stack: tuple[ModelSpec, ...] = ()

    @property
    def vocabulary(self) -> VocabularyMap | None:
        """The draft's."""
        return self.vocabularies[0] if self.vocabularies else None


def resolve(config: EngineConfig, progress: Progress | None = None) -> Pair:
    """Finds both models on disk and checks that they fit, before any weights are read.

    Raises:
        DeviceError: a device is not there.
        UnsupportedModelError: a model cannot be run exactly.
        VocabularyMismatchError: the tokenizers have too little in common, or cannot be compared.
        CARDError: whatever the model store raises.
    """
    devices = find_devices("device", config.device)
    target = _spec(config, "model", config.model, devices, progress)
    tokenizer = read_tokenizer(target.folder)
    model_config = _text_config(target)
    max_len = context_length(model_config)
    drafts = _drafts(config, target, draft_device(config, devices), progress) if config.has_draft else []
    alike = [target, *(spec for spec, vocabulary in drafts if vocabulary is None)]
    vocab_size = min(_text_config(spec).vocab_size for spec in alike)
    wanted = config.max_model_len or min(max_len, DEFAULT_MAX_LEN)
    if wanted > max_len:
        raise InvalidInputError("max_model_len", wanted, f"{config.model} was trained for {max_len:,} positions")
    ends, specs = end_ids(target.folder, tokenizer), [spec for spec, _ in drafts]
    draft, vocabularies = specs[0] if specs else None, tuple(vocabulary for _, vocabulary in drafts)
    return Pair(target, draft, tokenizer, ends, vocab_size, wanted, vocabularies, tuple(specs[1:]))


def _drafts(
    config: EngineConfig, target: ModelSpec, device: torch.device, progress: Progress | None
) -> list[tuple[ModelSpec, VocabularyMap | None]]:
    """The draft model, and those of the stack below it; how each understands the target's ids."""
    found = list[tuple[ModelSpec, VocabularyMap | None]]()
    for field, name in (
        ("draft_model", config.draft_model or ""),
        *(("stack", level.spec) for level in config.levels if level.is_model),
    ):
        spec = _spec(config, field, name, [device], progress)
        if spec != target:
            spec = replace(spec, draft=draft_form.changes(_text_config(spec), spec.form))
        found.append((spec, _vocabulary(config, field, target, spec)))
    return found


def _spec(
    config: EngineConfig, field: str, name: str, devices: Sequence[torch.device], progress: Progress | None
) -> ModelSpec:
    quantization, device = config.quantization, devices[0]
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
    from langchain_card.runtime.cpu.matmul_kernel import instructions  # a compiler, which float weights do not need

    return instructions() is not None


def _text_config(spec: ModelSpec) -> Any:
    return read_config(spec.folder).get_text_config()


def _vocabulary(config: EngineConfig, field: str, target: ModelSpec, draft: ModelSpec) -> VocabularyMap | None:
    try:
        found = read_map(target.folder, draft.folder)
    except TypeError as error:
        shared = f"cannot be compared with that of {config.model} ({error})"
    else:
        if found is None:
            return None
        shared = f"shares {found.num_shared:,} tokens with {config.model}"
        if found.useful:
            log.info("the tokenizer of %s %s, %.0f %% of its own", draft.name, shared, 100 * found.coverage)
            return found
    hint = f'beside model name a draft of its family, or draft_model="{NGRAM}"; in a call, too'
    raise VocabularyMismatchError(field, draft.name, f"its tokenizer {shared}", hint)


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


def load_model(spec: ModelSpec, *, fused: bool = True) -> Any:
    """A causal LM of transformers in evaluation mode, with our attention.

    Args:
        spec: of the model.
        fused: whether layers of an int8 model may be ours; those of transformers are what its own loops can run.
    """
    with single_threaded():
        model = _load_int8(spec, fused=fused) if spec.form == "int8" else _load_float(spec)
    if spec.compiled:
        compile_layers(model)
    if spec.draft:
        draft_form.make_draft(model, spec.form)
    if spec.form == "int8" and fused:
        from langchain_card.runtime.cpu.fused_layers import (
            stack_layers,  # with a compiler, which float weights do not need
        )

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


def _load_int8(spec: ModelSpec, *, fused: bool) -> Any:
    from langchain_card.runtime.cpu.int8_weights import read_int8  # with a compiler, which nothing else needs

    config = read_config(spec.folder)
    empty: AbstractContextManager[Any] = init_empty_weights(include_buffers=False)
    with empty:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=spec.dtype)
    read_int8(model, weight_files(spec.folder), spec.dtype, fused=fused)
    return model
