"""Resolve the models of a configuration (files, devices, forms, vocabularies) and load their weights."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from langchain_card.config import NGRAM, QUANTIZATIONS, EngineConfig
from langchain_card.errors import DeviceError, InvalidInputError, VocabularyMismatchError
from langchain_card.models.adapter import adapters_bytes
from langchain_card.models.download import BUILTINS
from langchain_card.models.files import Progress
from langchain_card.models.headers import DEFAULT_MAX_LEN
from langchain_card.models.placement import capacity, draft_device, find_devices, place
from langchain_card.models.quantization import find_quantizer, stored_settings
from langchain_card.models.registry import Registry
from langchain_card.models.store import Form, ModelStore
from langchain_card.models.tokenizer import read_tokenizer
from langchain_card.models.vocabulary import VocabularyMap, end_ids, read_map
from langchain_card.runtime import draft_form
from langchain_card.runtime.attention import ATTENTION_NAME, register
from langchain_card.runtime.families import building, check_family, context_length, empty_model, is_common, read_config
from langchain_card.runtime.grid_steps import compile_layers
from langchain_card.runtime.heads import NO_OBSERVER, ObserverNeeds, observer_needs
from langchain_card.runtime.threads import single_threaded

if TYPE_CHECKING:
    from langchain_card.runtime.cpu.quantized_weights import Packing

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BLOCK_DTYPES = ("auto", "float32")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A resolved model to load. Equal specs share one set of weights in a process.

    Attributes:
        name: the user's name of the model.
        folder: folder with config, tokenizer and weights.
        form: how weights are held (`store.ModelStore.prepare`).
        device: the first device.
        dtype: type of activations, and of weights in the float form.
        quantization: JSON of a transformers quantization config for float weights; None to load them unchanged.
        others: further devices that hold layers.
        compiled: whether its layers are compiled.
        draft: whether it is loaded in the form of a draft (`draft_form`).
        integer_kv: whether keys and values are integers, of 16 and 8 bits; else they have the type of the activations.
            The weights are the same.
    """

    name: str
    folder: Path
    form: Form
    device: torch.device
    dtype: torch.dtype
    quantization: str | None = None
    others: tuple[torch.device, ...] = ()
    compiled: bool = False
    draft: bool = False
    integer_kv: bool = field(default=False, compare=False)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that hold a part of the model, in the order of its layers."""
        return (self.device, *self.others)

    @property
    def itemsize(self) -> int:
        """Bytes of one number in `dtype`."""
        return int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, its optional draft, and the models below the draft.

    Attributes:
        target: the target's spec.
        draft: the draft's spec, or None.
        stack: specs of the models below the draft.
        tokenizer: the target's tokenizer.
        eos_ids: tokens that end an answer.
        vocab_size: upper bound of the ids of the target and of the models with its vocabulary.
        max_len: positions per sequence.
        vocabularies: for the draft and each model below it, the map from the target's ids; None if they share them.
        adapter_bytes: memory of the target's adapters.
        observers: memory of what reads the target's states.
    """

    target: ModelSpec
    draft: ModelSpec | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_len: int
    vocabularies: tuple[VocabularyMap | None, ...] = ()
    stack: tuple[ModelSpec, ...] = ()
    adapter_bytes: int = 0
    observers: ObserverNeeds = NO_OBSERVER

    @property
    def vocabulary(self) -> VocabularyMap | None:
        """The draft's vocabulary map, or None."""
        return self.vocabularies[0] if self.vocabularies else None

    @property
    def share_device(self) -> bool:
        """Whether the draft lies on a device that holds a part of the target."""
        return self.draft is not None and self.draft.device in self.target.devices


def resolve(
    config: EngineConfig, progress: Progress | None = None, begin: Callable[[ModelSpec], None] | None = None
) -> Pair:
    """Find the models on disk and check that they fit together. Weights are not read.

    Args:
        config: names the models.
        progress: receives the progress of downloads and conversions.
        begin: called with each model that this process will load, as soon as it is found; some checks take seconds.

    Raises:
        DeviceError: this machine lacks a device.
        UnsupportedModelError: a model cannot be run exactly.
        VocabularyMismatchError: the tokenizers have too little in common, or cannot be compared.
        CARDError: any error of the model store.
    """
    devices = find_devices("device", config.device)
    target = _spec(config, "model", config.model, devices, progress)
    if begin is not None:
        begin(target)
    _check(target, "model")
    model_config = _text_config(target)
    max_len = context_length(model_config)
    found = find_drafts(config, target, draft_device(config, devices), progress, begin) if config.has_draft else []
    tokenizer = read_tokenizer(target.folder)
    drafts = [(spec, _vocabulary(config, setting, target, spec)) for setting, spec in found]
    alike = [target, *(spec for spec, vocabulary in drafts if vocabulary is None)]
    vocab_size = min(_text_config(spec).vocab_size for spec in alike)
    wanted = config.max_model_len or min(max_len, DEFAULT_MAX_LEN)
    if wanted > max_len:
        raise InvalidInputError("max_model_len", wanted, f"{config.model} was trained for {max_len:,} positions")
    ends, specs = end_ids(target.folder, tokenizer), [spec for spec, _ in drafts]
    draft, vocabularies = specs[0] if specs else None, tuple(vocabulary for _, vocabulary in drafts)
    more = adapters_bytes(config.adapters), observer_needs(config.modelless_drafters)
    return Pair(target, draft, tokenizer, ends, vocab_size, wanted, vocabularies, tuple(specs[1:]), *more)


def find_drafts(
    config: EngineConfig,
    target: ModelSpec,
    device: torch.device,
    progress: Progress | None,
    begin: Callable[[ModelSpec], None] | None = None,
) -> list[tuple[str, ModelSpec]]:
    """Return the draft model and the models of the stack below it, each with the setting that names it."""
    drafts = list[tuple[str, ModelSpec]]()
    levels = [("stack", level.spec) for level in config.levels if level.is_model]
    for setting, name in [("draft_model", config.draft_model or ""), *levels]:
        apart = target.device.type != "cpu" == device.type
        spec = _spec(_for_cpu(config, name, progress) if apart else config, setting, name, [device], progress)
        if spec != target:
            spec = replace(spec, draft=draft_form.changes(_text_config(spec), spec.form))
        if begin is not None and config.draft_transport != "process":
            begin(spec)
        _check(spec, setting)
        drafts.append((setting, spec))
    return drafts


def _for_cpu(config: EngineConfig, draft: str, progress: Progress | None) -> EngineConfig:
    """Return the configuration of a draft on the CPU beside a target on a GPU: in blocks where its kind has kernels."""
    config = replace(config, dtype="auto" if config.dtype in ("float16", "bfloat16") else config.dtype)
    if config.quantization != "auto" or config.dtype not in _BLOCK_DTYPES or _is_gguf(draft):
        return config
    found = read_config(ModelStore().prepare(draft, "float", progress))
    plain = stored_settings(found) is None and is_common(found.get_text_config())
    return replace(config, quantization="int8") if plain else config


def _is_gguf(name: str) -> bool:
    return name in BUILTINS or name.endswith(".gguf")


def _spec(
    config: EngineConfig, field: str, name: str, devices: Sequence[torch.device], progress: Progress | None
) -> ModelSpec:
    quantization, device = config.quantization, devices[0]
    runs, store = _blocks_run(config, device), ModelStore()
    if quantization == "auto":
        quantization = None if not (_is_gguf(name) and runs) else "file" if store.is_in_blocks(name) else "int8"
    elif quantization in QUANTIZATIONS and not runs:
        why = f"blocks run on a CPU in float32, not on {device} in {config.dtype}"
        raise InvalidInputError("quantization", quantization, why, 'use quantization=None, or device="cpu"')
    if config.dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    else:
        dtype = _DTYPES[config.dtype]
    form: Form = quantization if quantization in QUANTIZATIONS else "float"  # type: ignore[assignment]
    passed = quantization if quantization != form else None
    folder = store.prepare(name, form, progress)
    compiled = config.execution == "compiled" and device.type == "cuda"
    in_int8 = {"auto": form != "float", "int8": runs, "float": False}[config.kv_dtype]
    if field == "model" and config.kv_dtype == "int8" and not in_int8:  # drafts fall back to floats
        why = f"int8 runs on a CPU in float32, not on {device} in {config.dtype}"
        raise InvalidInputError("kv_dtype", "int8", why, 'use kv_dtype="auto"')
    return ModelSpec(
        name, folder, form, device, dtype, passed, tuple(devices[1:]), compiled,
        integer_kv=in_int8 and config.exact != "strict",
    )  # fmt: skip


def _check(spec: ModelSpec, field: str) -> None:
    """Raise unless the engine can run a model, which `field` names."""
    check_family(spec.name, spec.folder, field)
    if spec.form == "float":
        find_quantizer(read_config(spec.folder), spec.quantization, spec.device)


def _blocks_run(config: EngineConfig, device: torch.device) -> bool:
    return device.type == "cpu" and config.dtype in _BLOCK_DTYPES


def _text_config(spec: ModelSpec) -> Any:
    return read_config(spec.folder).get_text_config()


def _vocabulary(config: EngineConfig, field: str, target: ModelSpec, draft: ModelSpec) -> VocabularyMap | None:
    try:
        vocabulary = read_map(target.folder, draft.folder)
    except TypeError as error:
        shared = f"cannot be compared with that of {config.model} ({error})"
    else:
        if vocabulary is None:
            return None
        shared = f"shares {vocabulary.num_shared:,} tokens with {config.model}"
        if vocabulary.useful:
            log.info("the tokenizer of %s %s, %.0f %% of its own", draft.name, shared, 100 * vocabulary.coverage)
            return vocabulary
    hint = f'beside model name a draft of its family, or draft_model="{NGRAM}"; in a call, too'
    raise VocabularyMismatchError(field, draft.name, f"its tokenizer {shared}", hint)


_models: Registry[Any] = Registry(close=lambda model: None)
_packings = dict[ModelSpec, "Packing"]()  # of models that are being loaded
_beginning = threading.Lock()


def acquire_model(spec: ModelSpec) -> Any:
    """Return the model of a spec, loaded unless the process holds it. Each call needs a `release_model`."""
    return _models.acquire(spec, lambda: load_model(spec))


def begin_loading(spec: ModelSpec) -> bool:
    """Begin to lay out the weights of a model in blocks, which `load_model` takes over; `drop_loading` frees them.

    Returns:
        False if there is nothing to begin: the model is loaded or being loaded, or its weights are floats.
    """
    with _beginning:
        if spec.form == "float" or spec in _models or spec in _packings:
            return False
        _packings[spec] = _pack(spec, whole_head=False)
        return True


def drop_loading(spec: ModelSpec) -> None:
    """Free what `begin_loading` began for a model that was not loaded after all."""
    if (packing := _packings.pop(spec, None)) is not None:
        packing.close()


def release_model(spec: ModelSpec) -> None:
    """Release one use of a model; the last release frees the weights."""
    _models.release(spec)
    if spec not in _models:
        gc.collect()  # modules refer to themselves in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # torch's cached memory would count as used


def is_loaded(spec: ModelSpec) -> bool:
    """Return whether the process holds the model of a spec."""
    return spec in _models


def num_loaded_models() -> int:
    """Return the number of models whose weights the process holds."""
    return len(_models)


def load_model(spec: ModelSpec, *, fused: bool = True, whole_head: bool = False) -> Any:
    """Load a causal language model of transformers in evaluation mode, with this package's attention.

    Args:
        spec: the model.
        fused: whether layers with blocks may be replaced by compiled ones, which cannot run in transformers' own loops.
        whole_head: whether a draft keeps all outputs.
    """
    with building:
        with single_threaded():
            model = _load_float(spec) if spec.form == "float" else _load_blocks(spec, fused, whole_head)
        if spec.compiled:
            compile_layers(model)
        if spec.draft and spec.form == "float" and not whole_head:
            draft_form.cut_head(model)
        return model.requires_grad_(False).eval()


def device_map(spec: ModelSpec) -> dict[str, torch.device]:
    """Return the device of each part of a model by the part's name; see `placement.place`."""
    if not spec.others:
        return {"": spec.device}
    return place(empty_model(read_config(spec.folder)), spec.devices, [capacity(device) for device in spec.devices])


def _load_float(spec: ModelSpec) -> Any:
    from transformers import AutoModelForCausalLM  # more than a second
    from transformers.utils import logging

    register()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # progress is reported by this package
    quantizer = find_quantizer(read_config(spec.folder), spec.quantization, spec.device)
    passed = {"quantization_config": quantizer.quantization_config} if quantizer and not quantizer.pre_quantized else {}
    try:
        return AutoModelForCausalLM.from_pretrained(
            spec.folder,
            dtype=spec.dtype,
            device_map=device_map(spec),
            attn_implementation=ATTENTION_NAME,
            # Grouped matrix products of experts do not support float64.
            experts_implementation="eager" if spec.dtype == torch.float64 else None,
            local_files_only=True,
            use_safetensors=True,
            **passed,
        )
    except torch.OutOfMemoryError as error:
        raise DeviceError("device", str(spec.device), f"{spec.name} does not fit", "use a smaller model") from error
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_blocks(spec: ModelSpec, fused: bool, whole_head: bool) -> Any:
    from langchain_card.runtime.cpu.common_model import CommonModel, fits  # imports numba, which floats do not need
    from langchain_card.runtime.cpu.fused_layers import fuse_layers, stack_layers
    from langchain_card.runtime.cpu.quantized_weights import read_weights

    packing = (None if whole_head else _packings.get(spec)) or _pack(spec, whole_head=whole_head)
    try:
        config = read_config(spec.folder)
        common = fused and is_common(config) and fits(config, packing.matrices)
        model = CommonModel(config, spec.dtype) if common else _empty_model(config, spec.dtype)
        read_weights(model, packing, spec.dtype)
    finally:
        packing.close()
        if _packings.get(spec) is packing:
            del _packings[spec]
    if common:
        model.fuse()
    elif fused:
        fuse_layers(model.get_decoder())
    if fused:
        stack_layers(model.get_decoder())
    return model


def _empty_model(config: Any, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM  # more than a second

    register()
    empty: AbstractContextManager[Any] = init_empty_weights(include_buffers=False)
    with empty:
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)


def _pack(spec: ModelSpec, *, whole_head: bool) -> Packing:
    """Begin to lay out the matrices of a model in blocks."""
    from langchain_card.models.block_index import read_tensors
    from langchain_card.runtime.cpu.blocks.formats import Q4_0
    from langchain_card.runtime.cpu.quantized_weights import Packing  # imports numba, which float weights do not need

    outputs = draft_form.HEAD if spec.draft and not whole_head else None
    return Packing(read_tensors(spec.folder), Q4_0 if spec.draft else None, outputs)
