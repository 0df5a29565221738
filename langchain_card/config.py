"""`EngineConfig`: which models run where, and how."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from langchain_card import plugins
from langchain_card.errors import InvalidInputError, check_choice, check_range
from langchain_card.limits import LEAST_NGRAM_BYTES, Limits, Pins

Schedule = Literal["auto", "plain", "sequential", "parallel"]
Quantization = Literal["file", "int8", "int4"]
DraftTransport = Literal["auto", "thread", "process"]
Exactness = Literal["default", "strict"]
Execution = Literal["auto", "eager", "graphs", "compiled"]
Dtype = Literal["auto", "float32", "float64", "float16", "bfloat16"]
KVDtype = Literal["auto", "float", "int8"]
PrefixCache = Literal["memory", "folder"]

SCHEDULES: tuple[str, ...] = get_args(Schedule)
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
DRAFT_TRANSPORTS: tuple[str, ...] = get_args(DraftTransport)
EXACTNESS: tuple[str, ...] = get_args(Exactness)
EXECUTIONS: tuple[str, ...] = get_args(Execution)
DTYPES: tuple[str, ...] = get_args(Dtype)
KV_DTYPES: tuple[str, ...] = get_args(KVDtype)
PREFIX_CACHES: tuple[str, ...] = get_args(PrefixCache)
NGRAM = "ngram"
MAX_BLOCK = 32
MAX_REPLICAS = 256
MAX_ADAPTER_NAME = 256
MODEL_VARIABLE = "LANGCHAIN_CARD_MODEL"
DRAFT_VARIABLE = "LANGCHAIN_CARD_DRAFT_MODEL"


@dataclass(frozen=True, slots=True)
class Level:
    """A drafter of a stack.

    Attributes:
        spec: name of a model or of a drafter that needs none, with its options.
        block: candidates that the level above requests from it at a time.
    """

    spec: str
    block: int

    @classmethod
    def read(cls, text: str) -> Level:
        """Parse a spec; without the option `block`, a model gives 4 candidates at a time and any other drafter 8."""
        spec, block = plugins.take_option(text, "block")
        if block is None:
            block = 8 if plugins.is_known("drafters", spec) else 4
        check_range("stack", block, 1, MAX_BLOCK, f"the block of {spec}")
        return cls(spec, block)

    @property
    def is_model(self) -> bool:
        """Whether this level loads a model."""
        return not plugins.is_known("drafters", self.spec)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which models run where, and how. Equal configurations share one engine in a process.

    Attributes:
        model: the target model: a built-in name, a hub id, a folder with safetensors, or a GGUF file.
        draft_model: the draft model, named like `model`; or a drafter that needs no model, such as `"ngram"` (lookup in
            earlier text); None for plain decoding, without any drafter.
        device: device of the target: `"auto"` (CUDA if there is one, else the CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, ...;
            or several, such as `"cuda:0,cuda:1"`, over which its layers are spread.
        draft_device: device of the draft model; `"auto"` is a CUDA device without the target; beside a target on the
            only one, that GPU or the CPU, whichever is measured to be faster; else the target's.
        draft_transport: where the draft model runs: on a `"thread"` of this process, or in a `"process"` of its own,
            which alone loads its weights; `"auto"` is a process if each model has a CUDA device of its own. With
            `"process"`, plug-in drafters whose steps cost device time run in processes, too.
        dtype: number format of weights and activations; `"auto"` is float32 on a CPU and bfloat16 on CUDA.
        kv_dtype: number format of keys and values: `"int8"` (CPU) for integers, of 16 bits in keys and of 8 in values,
            with which attention to long texts is several times faster; `"float"` for the format of the activations, at
            least float32 on a CPU; `"auto"` for integers with weights in blocks.
        quantization: on a CPU `"file"` for the blocks of a GGUF file as they are, `"int8"` or `"int4"` for matrices
            that are rounded to blocks of 8 or 4 bits once; `"auto"` for `"file"` with GGUF files on a CPU (`"int8"`
            if the file has no blocks that run); None for none; or a transformers quantization config as a JSON
            object, such as `'{"quant_method": "bitsandbytes", "load_in_4bit": true}'`. Folders whose weights are
            already quantized (`quantization_config` in their config.json) stay as they are.
        isolate: whether models and engine run in a process of their own. If that process dies it is restarted, and
            every answer continues where it stopped.
        replicas: engines on this machine, each in a process of its own (as with `isolate`), with its own models and its
            own part of the cores, or of the GPUs. If one dies, another one goes on with its answers.
        cluster: name of an application on Ray whose engines answer, in place of one in this process, which must have
            joined the cluster (docs/guides/cluster.md). Their configuration holds: of this one only `model`,
            `acceptance`, `steering`, `adapters` and `exact` are read, and must agree with it.
        drafters: drafters that work beside the draft model, on the same tree: names, perhaps with options, such as
            `"ngram?table=code.ngrams"`; built in or from packages (docs/plugins.md); `()` for none. None for n-grams,
            which then also work below a draft model in this process if `stack` is empty. Without a `draft_model` there
            are none; a drafter named as `draft_model` uses the options given there.
        acceptance: the rule by which candidates become the answer: `"exact"`, or a **lossy** one, such as `"loose"` or
            `"loose?reading=paper&threshold=0.2&window=8"`: then the answer may differ from what the target would have
            written (docs/concepts/loose.md). A lossy rule allows only trusted drafters (`ports.Drafter`), and no
            steering.
        steering: a transform of the target's logits, applied before everything else: a name from a package, perhaps
            with options (docs/concepts/steering.md); None for none. The answer is that of the steered target.
        stack: drafters below the draft model, from the top, each queried by the one above it: names of models; the last
            may be a drafter that needs none, such as `"ngram"`. With `"ngram?block=12"` the one above requests twelve
            candidates at a time. `langchain-card plan` measures which stack pays.
        draft_context: tokens at the end of a text that draft models read, besides its first four, and up to half as
            many more; None for all. A long text is then read quickly, and the answer is the same.
        prefix_cache: where the target keeps beginnings of texts, so that they are not read again: in `"memory"`, those
            of the last requests; or also in a `"folder"` on disk, of at most `limits.max_prefix_bytes`, where later
            processes find them. The answer is the same.
        exact: `"strict"` gives every target step one fixed shape (`limits.max_window` rows of each of
            `limits.max_num_seqs` sequences, all positions), so that in any dtype an answer equals plain decoding by the
            same engine bit for bit; candidates are then chains. `"default"`: see docs/concepts/exactness.md.
        execution: how steps run on CUDA: `"graphs"` captures them, `"compiled"` also compiles the layers, `"eager"`
            does neither; `"auto"` is `"graphs"`. It has no effect on a CPU.
        max_model_len: tokens of prompt, answer and `limits.max_window` candidates together; None for the model's own
            limit, at most 8,192.
        adapters: LoRA adapters of the target, which a request may name: pairs of a name and a folder as PEFT saves it
            (`adapter_config.json`, `adapter_model.safetensors`). Requests with several adapters share a pass.
        limits: bounds for requests, an object of `Limits` such as `Limits(max_num_seqs=8)`.
        pins: fixed values for choices of the controller, an object of `Pins` such as `Pins(window=8)`.
    """

    model: str = "qwen2.5-coder-1.5b"
    draft_model: str | None = "qwen2.5-coder-0.5b"
    device: str = "auto"
    draft_device: str = "auto"
    draft_transport: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str | None = "auto"
    exact: str = "default"
    execution: str = "auto"
    isolate: bool = False
    replicas: int = 1
    cluster: str | None = None
    drafters: tuple[str, ...] | None = None
    acceptance: str = "exact"
    steering: str | None = None
    stack: tuple[str, ...] = ()
    draft_context: int | None = 1024
    prefix_cache: str = "memory"
    max_model_len: int | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)
    pins: Pins = field(default_factory=Pins)

    def __post_init__(self) -> None:
        check_choice("draft_transport", self.draft_transport, DRAFT_TRANSPORTS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.kv_dtype == "int8" and self.exact == "strict":
            raise InvalidInputError("kv_dtype", "int8", 'must be "float" or "auto" with exact="strict"')
        check_choice("prefix_cache", self.prefix_cache, PREFIX_CACHES)
        check_choice("exact", self.exact, EXACTNESS)
        check_choice("execution", self.execution, EXECUTIONS)
        check_range("replicas", self.replicas, 1, MAX_REPLICAS)
        if self.cluster is not None and self.in_processes:
            limit = "has engines of its own, beside isolate and replicas"
            raise InvalidInputError("cluster", self.cluster, limit, "leave these out")
        if self.execution == "compiled" and self.exact == "strict":  # each process chooses its kernels by speed
            raise InvalidInputError("execution", "compiled", 'must be "graphs" or "eager" with exact="strict"')
        if self.quantization is not None:
            check_quantization(self.quantization)
        if self.max_model_len is not None:
            check_range("max_model_len", self.max_model_len, 16, 10_000_000)
        if self.draft_context is not None:
            hint = 'None for all of a text ("all" on the command line)'
            check_range("draft_context", self.draft_context, 16, 10_000_000, hint)
        for name in ("drafters", "stack"):
            if isinstance(value := getattr(self, name), str):
                raise InvalidInputError(name, value, "must be a tuple of names", f"write {name}=({value!r},)")
        for spec in self.drafters or ():
            check_choice("drafters", plugins.name_of(spec), plugins.names("drafters"))
        named = [plugins.name_of(spec) for spec in self.drafters or ()]
        if len(set(named)) < len(named):
            raise InvalidInputError("drafters", self.drafters, "names a drafter twice", "name each once")
        if self.steering is not None:
            check_choice("steering", plugins.name_of(self.steering), plugins.names("steering"))
        check_adapters(self)
        check_stack(self)
        if self.lossy:
            check_lossy(self)
        for pin in fields(Pins):
            if (value := getattr(self.pins, pin.name)) is not None:
                most = f"max_{pin.name}"
                check_range(f"pins.{pin.name}", value, 0, getattr(self.limits, most), f"limits.{most} is the most")

    @property
    def lossy(self) -> bool:
        """Whether the acceptance rule is lossy: the answer may then differ from the target's own."""
        return bool(getattr(plugins.find("acceptance", self.acceptance).factory, "lossy", True))

    @property
    def in_processes(self) -> bool:
        """Whether engines run in processes of their own."""
        return self.isolate or self.replicas > 1

    def execution_on(self, device_type: str) -> str | None:
        """Return `execution` for `runtime.runner.ModelRunner`: None for its default, and on a CPU."""
        return None if self.execution == "auto" or device_type != "cuda" else self.execution

    @property
    def has_draft(self) -> bool:
        """Whether a draft model is loaded."""
        return self.draft_model is not None and not plugins.is_known("drafters", self.draft_model)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The parsed `stack`."""
        return tuple(map(Level.read, self.stack))

    @property
    def modelless_drafters(self) -> tuple[str, ...]:
        """Specs of the drafters that work beside the draft model or instead of it."""
        if self.draft_model is None:
            return ()
        beside = (NGRAM,) if self.drafters is None else self.drafters
        if self.has_draft:
            return beside
        first = plugins.name_of(self.draft_model)
        return (self.draft_model, *(spec for spec in beside if plugins.name_of(spec) != first))

    def settled(self, *, apart: bool) -> EngineConfig:
        """Return the configuration with n-grams both beside and below the draft model, where both have room.

        That is the default (docs/LOG.md, 2026-11-23); explicit `drafters` or `stack` are kept.

        Args:
            apart: whether the draft model runs in a process of its own, which allows nothing below it.
        """
        small = self.limits.max_ngram_bytes < 2 * LEAST_NGRAM_BYTES
        if self.drafters is not None or self.stack or apart or small or not self.has_draft:
            return self
        return replace(self, drafters=(NGRAM,), stack=(NGRAM,))


def lossy_note(acceptance: str) -> str:
    """Return the warning that is shown wherever a lossy rule is in force."""
    return f"lossy: with acceptance={acceptance!r} the draft may write where the target would have said something else"


def default_model() -> str:
    """Return the default target: the environment's, else the built-in one."""
    return os.environ.get(MODEL_VARIABLE) or EngineConfig().model


def default_draft_model() -> str | None:
    """Return the default draft model: the environment's, with `"none"` for None, else the built-in one."""
    name = os.environ.get(DRAFT_VARIABLE) or EngineConfig().draft_model
    return None if name == "none" else name


def check_quantization(value: str) -> None:
    """Raise `InvalidInputError` unless `value` is a known name or a JSON object with a `quant_method`."""
    if not str(value).lstrip().startswith("{"):
        check_choice("quantization", value, ("auto", *QUANTIZATIONS))
        return
    try:
        method = json.loads(value).get("quant_method")
    except ValueError as error:
        raise InvalidInputError("quantization", value, f"must be a JSON object ({error})") from error
    if not isinstance(method, str):
        hint = 'add "quant_method": "bitsandbytes", "torchao", ...'
        raise InvalidInputError("quantization", value, "must name its quant_method", hint)


def check_adapters(config: EngineConfig) -> None:
    """Raise `InvalidInputError` unless adapters have names that requests can use."""
    if config.adapters and config.execution == "compiled":
        hint = 'use execution="graphs"'
        raise InvalidInputError("execution", "compiled", "goes without adapters: compiled layers have no place", hint)
    names = [name for name, _ in config.adapters]
    for name in names:
        if not name or not name.isprintable() or len(name) > MAX_ADAPTER_NAME or names.count(name) > 1:
            limit = f"must be one of several distinct names of 1 to {MAX_ADAPTER_NAME} printable characters"
            raise InvalidInputError("adapters", name, limit, 'such as {"sql": "adapters/sql"}')


def check_adapter_name(name: str, config: EngineConfig) -> None:
    """Raise `InvalidInputError` unless the target has an adapter of this name, or it is ""."""
    names = [known for known, _ in config.adapters]
    if name and name not in names:
        limit = f"is not loaded; there is {', '.join(names)}" if names else "is not loaded: there are no adapters"
        raise InvalidInputError("adapter", name, limit, f'give the model adapters={{"{name[:64]}": "its folder"}}')


def check_stack(config: EngineConfig) -> None:
    """Raise `InvalidInputError` if the stack cannot work below the draft model."""
    if config.stack and not config.has_draft:
        raise InvalidInputError("stack", config.stack, "works below a draft model", "name one as draft_model")
    if config.stack and config.draft_transport == "process":
        raise InvalidInputError("draft_transport", "process", "a stack runs on a thread", 'use "auto" or stack=()')
    for level in config.levels[:-1]:
        if not level.is_model:
            hint = "name it last"
            raise InvalidInputError("stack", level.spec, "needs no model, so nothing can work below it", hint)


def check_lossy(config: EngineConfig) -> None:
    """Raise `InvalidInputError` if a lossy rule would break a guarantee or let an untrusted drafter write answers."""
    rule = f'the rule "{config.acceptance}"'
    if config.exact == "strict":
        limit = f"{rule} is lossy, which no exactness goes with"
        raise InvalidInputError("exact", config.exact, limit, 'choose one: exact="default", or acceptance="exact"')
    if config.steering is not None:
        limit = f"{rule} is lossy, and might put into the answer what steering rules out"
        raise InvalidInputError("steering", config.steering, limit, 'choose one: steering=None, or acceptance="exact"')
    named = [("draft_model" if spec == config.draft_model else "drafters", spec) for spec in config.modelless_drafters]
    for name, spec in [*named, *(("stack", level.spec) for level in config.levels if not level.is_model)]:
        if not getattr(plugins.find("drafters", spec, name).factory, "trusted", False):
            limit = f"is not trusted, and {rule} may put what it proposes into the answer"
            raise InvalidInputError(name, spec, limit, 'take acceptance="exact"; see ports.Drafter')
