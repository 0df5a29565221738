"""What an engine is built from, and the bounds that every input is checked against."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from langchain_card import plugins
from langchain_card.errors import InvalidInputError, check_choice, check_range

Schedule = Literal["auto", "plain", "sequential", "parallel"]
Quantization = Literal["int8"]
DraftTransport = Literal["auto", "thread", "process"]
Exactness = Literal["default", "strict"]
Execution = Literal["auto", "eager", "graphs", "compiled"]
Dtype = Literal["auto", "float32", "float64", "float16", "bfloat16"]

SCHEDULES: tuple[str, ...] = get_args(Schedule)
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
DRAFT_TRANSPORTS: tuple[str, ...] = get_args(DraftTransport)
EXACTNESS: tuple[str, ...] = get_args(Exactness)
EXECUTIONS: tuple[str, ...] = get_args(Execution)
DTYPES: tuple[str, ...] = get_args(Dtype)
NGRAM = "ngram"
MAX_BLOCK = 32
MODEL_VARIABLE = "LANGCHAIN_CARD_MODEL"
DRAFT_VARIABLE = "LANGCHAIN_CARD_DRAFT_MODEL"

LEAST_NGRAM_BYTES = 1 << 16
_LEAST = {"max_ngram_bytes": LEAST_NGRAM_BYTES}
_MAY_BE_ZERO = ("max_queue", "max_deaths", "max_stop_strings", "max_logit_bias", "max_banned_ids", "max_logprobs")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, all checked before a request is queued or while it runs.

    Attributes:
        max_output_tokens: largest `max_tokens` of a request.
        max_stop_strings: stop strings per request.
        max_stop_chars: characters in one stop string.
        max_logit_bias: entries of a request's `logit_bias`.
        max_banned_ids: tokens that a request may ban.
        max_logprobs: likeliest tokens reported beside each token of an answer.
        max_grammar_bytes: of one grammar, a JSON schema written out in it.
        max_grammar_seconds: that a process of its own may take to check one.
        max_grammar_cache_bytes: of the grammars that are kept compiled; what was used longest ago goes first.
        max_tenant_chars: characters in the name of a tenant.
        max_ngram_bytes: of the text that the n-gram drafter keeps of all tenants; what was used longest ago goes first.
        max_queue: requests waiting at once.
        max_num_seqs: requests decoded at once; None for as many, up to 16, as half of the free memory has room for, and
            for one where `exact` is `"strict"`, whose steps cost as much as all of them.
        max_step_rows: rows of one target pass: the windows of all requests, and what is left for prompts to be read.
        max_window: rows of one verification, the last committed token included.
        max_lead: candidate depth at which a drafter is given no more steps; those under way then may add as much again.
        max_draft_width: candidates that one draft step expands at most.
        max_tree_nodes: candidates per request; dead ones are swept out beyond it, more than twice as many refused.
        max_unread: tokens that may wait for a slow consumer before its request is paused.
        max_failures: target steps in a row that may fail with one request before it fails, alone when `max_deaths` is
            not less.
        max_deaths: deaths of one worker within `deaths_seconds` before it is given up.
        deaths_seconds: see `max_deaths`.
        silence_seconds: after which an isolated engine that says nothing is ended and started again.
        restart_seconds: pause before a worker that died starts again; doubles with every further death.
    """

    max_output_tokens: int = 32_768
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 300
    max_banned_ids: int = 1024
    max_logprobs: int = 20
    max_grammar_bytes: int = 1 << 18
    max_grammar_seconds: float = 5.0
    max_grammar_cache_bytes: int = 1 << 23
    max_tenant_chars: int = 256
    max_ngram_bytes: int = 1 << 26
    max_queue: int = 512
    max_num_seqs: int | None = None
    max_step_rows: int = 512
    max_window: int = 16
    max_lead: int = 16
    max_draft_width: int = 4
    max_tree_nodes: int = 1024
    max_unread: int = 1024
    max_failures: int = 2
    max_deaths: int = 5
    deaths_seconds: float = 60.0
    silence_seconds: float = 60.0
    restart_seconds: float = 0.1

    def __post_init__(self) -> None:
        for field_ in fields(self):
            if field_.name == "max_num_seqs" and self.max_num_seqs is None:
                continue
            low: float = 0.0 if field_.name.endswith("_seconds") else 0 if field_.name in _MAY_BE_ZERO else 1
            low = _LEAST.get(field_.name, low)
            check_range(field_.name, getattr(self, field_.name), low, 2**31)
        hint = "max_step_rows is too small: every request that runs has a row in each pass"
        check_range("max_num_seqs", self.num_seqs, 1, self.max_step_rows, hint)

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, which an engine fills in; one where nobody did."""
        return self.max_num_seqs or 1


@dataclass(frozen=True, slots=True)
class Pins:
    """Choices that are made here and not by the controller; None leaves one to it.

    Attributes:
        draft_width: candidates that a draft step expands, if there are so many.
        window: rows of a verification, the last committed token included, if there are so many candidates.
        lead: depth of candidates for which a round waits, or drafts, before it verifies.
    """

    draft_width: int | None = None
    window: int | None = None
    lead: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("draft_width", 1), ("window", 1), ("lead", 0)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), low, 2**16)


@dataclass(frozen=True, slots=True)
class Level:
    """One drafter of a stack.

    Attributes:
        spec: a model's name, or a drafter that needs none, with its options.
        block: candidates that the level above asks it for at a time.
    """

    spec: str
    block: int

    @classmethod
    def read(cls, text: str) -> Level:
        """Of a spec that may have the option `block`; what needs no model costs little, and is asked for more."""
        spec, block = plugins.take_option(text, "block")
        if block is None:
            block = 8 if plugins.is_known("drafters", spec) else 4
        check_range("stack", block, 1, MAX_BLOCK, f"the block of {spec}")
        return cls(spec, block)

    @property
    def is_model(self) -> bool:
        """Whether a model is loaded for it."""
        return not plugins.is_known("drafters", self.spec)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which weights run where. Equal configurations share one engine in a process.

    Attributes:
        model: the target: hub id, folder with safetensors, GGUF file or built-in name.
        draft_model: the draft, likewise; or the name of a drafter that needs no model, such as `"ngram"`; None for
            plain decoding, without any drafter.
        device: of the target: `"auto"` (CUDA when there is one, else CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, ...; or
            several, `"cuda:0,cuda:1"`, over which its layers are spread.
        draft_device: of the draft; `"auto"` is a CUDA device that the target leaves free, else the target's.
        draft_transport: where the draft model runs: on a `"thread"` of this process, or in a `"process"` of its own,
            which alone loads its weights; `"auto"` is a process when each model has a CUDA device of its own. Plug-ins
            whose steps cost device time go to a process where `"process"` is asked for.
        dtype: of weights and KV; `"auto"` is float32 on a CPU and bfloat16 on CUDA.
        quantization: `"int8"` for row-exact int8 linear layers (CPU), `"auto"` for int8 when the model is a built-in
            one on a CPU, None for none; or a transformers quantization config as a JSON object, such as
            `'{"quant_method": "bitsandbytes", "load_in_4bit": true}'`. Folders whose weights are quantized already
            (`quantization_config` in their config.json) stay as they are.
        isolate: whether all of it runs in a process of its own: when that dies it is started again, and every request
            goes on where it was.
        drafters: those that work beside the draft, on the same tree: names, perhaps with options, as
            `"ngram?table=code.ngrams"`; what is built in and what packages add (docs/plugins.md). None for n-grams,
            which then work below a draft model as well, where it lives in this process and `stack` names nothing else.
            Without a draft there are none; one that `draft_model` names has the options that it names there.
        acceptance: the rule by which candidates become the answer: `"exact"`, or one that is **lossy**, such as
            `"loose"` or `"loose?reading=paper&threshold=0.2&window=8"` (`acceptance/loose.py`): then the answer may
            not be what the target would have written. A lossy rule takes trusted drafters only (`ports.Drafter`), and
            no steering.
        steering: a transform of the target's logits, by name and perhaps with options; None for none. The answer is
            that of the steered target. What packages add (`ports.Steering`).
        stack: drafters below the draft model, from the top, each queried by the one above it: names of models or, as
            the last, of a drafter that needs none; with `?block=4` the one above asks for four candidates at a time.
            `langchain-card plan` finds out which stack pays.
        exact: `"strict"` gives every target step one fixed shape (`limits.max_window` rows of each of
            `limits.max_num_seqs` sequences, all positions), so that in any dtype an answer equals plain decoding by the
            same engine bit for bit; candidates are chains then. What `"default"` promises: docs/concepts/exactness.md.
        execution: of steps on CUDA: `"graphs"`, which is `"auto"`, captures them, `"compiled"` compiles the layers as
            well, `"eager"` does neither. On a CPU it changes nothing: steps take rows of any shape.
        max_model_len: positions per sequence, prompt and answer together; None for the model's own, at most 8,192.
        limits: bounds for requests.
        pins: choices that are not left to the controller.
    """

    model: str = "qwen2.5-coder-1.5b"
    draft_model: str | None = "qwen2.5-coder-0.5b"
    device: str = "auto"
    draft_device: str = "auto"
    draft_transport: str = "auto"
    dtype: str = "auto"
    quantization: str | None = "auto"
    exact: str = "default"
    execution: str = "auto"
    isolate: bool = False
    drafters: tuple[str, ...] | None = None
    acceptance: str = "exact"
    steering: str | None = None
    stack: tuple[str, ...] = ()
    max_model_len: int | None = None
    limits: Limits = field(default_factory=Limits)
    pins: Pins = field(default_factory=Pins)

    def __post_init__(self) -> None:
        check_choice("draft_transport", self.draft_transport, DRAFT_TRANSPORTS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("exact", self.exact, EXACTNESS)
        check_choice("execution", self.execution, EXECUTIONS)
        if self.quantization is not None:
            check_quantization(self.quantization)
        if self.max_model_len is not None:
            check_range("max_model_len", self.max_model_len, 16, 10_000_000)
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
        check_stack(self)
        if self.lossy:
            check_lossy(self)
        for pin in fields(Pins):
            if (value := getattr(self.pins, pin.name)) is not None:
                most = f"max_{pin.name}"
                check_range(f"pins.{pin.name}", value, 0, getattr(self.limits, most), f"limits.{most} is the most")

    @property
    def lossy(self) -> bool:
        """Whether the acceptance rule is: the answer may then not be the target's own."""
        return bool(getattr(plugins.find("acceptance", self.acceptance).factory, "lossy", True))

    def execution_on(self, device_type: str) -> str | None:
        """`execution` as `runtime.runner.ModelRunner` takes it; a CPU's steps keep to what is exact there."""
        return None if self.execution == "auto" or device_type != "cuda" else self.execution

    @property
    def has_draft(self) -> bool:
        """Whether a draft model is loaded beside the target."""
        return self.draft_model is not None and not plugins.is_known("drafters", self.draft_model)

    @property
    def levels(self) -> tuple[Level, ...]:
        """`stack`, read."""
        return tuple(map(Level.read, self.stack))

    @property
    def modelless_drafters(self) -> tuple[str, ...]:
        """Specs of the drafters that work beside the draft model, or in its place."""
        if self.draft_model is None:
            return ()
        beside = (NGRAM,) if self.drafters is None else self.drafters
        if self.has_draft:
            return beside
        own = plugins.name_of(self.draft_model)
        return (self.draft_model, *(spec for spec in beside if plugins.name_of(spec) != own))

    def settled(self, *, apart: bool) -> EngineConfig:
        """The same, with n-grams below the draft model as well, if nobody said where (docs/LOG.md) and both have room.

        Args:
            apart: whether the draft model lives in a process of its own, with nothing below it.
        """
        small = self.limits.max_ngram_bytes < 2 * LEAST_NGRAM_BYTES
        if self.drafters is not None or self.stack or apart or small or not self.has_draft:
            return self
        return replace(self, drafters=(NGRAM,), stack=(NGRAM,))


def lossy_note(acceptance: str) -> str:
    """What is said wherever a lossy rule comes into force."""
    return f"lossy: with acceptance={acceptance!r} the draft may write where the target would have said something else"


def default_model() -> str:
    """The target where nobody names one: the environment's, else the built-in one."""
    return os.environ.get(MODEL_VARIABLE) or EngineConfig().model


def default_draft_model() -> str | None:
    """Likewise the draft; `"none"` in the environment is None."""
    named = os.environ.get(DRAFT_VARIABLE) or EngineConfig().draft_model
    return None if named == "none" else named


def check_quantization(value: str) -> None:
    """Raises `InvalidInputError` unless `value` is a known word or a JSON object that names its `quant_method`."""
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


def check_stack(config: EngineConfig) -> None:
    """Raises `InvalidInputError` where nothing could work below the draft model."""
    if config.stack and not config.has_draft:
        raise InvalidInputError("stack", config.stack, "works below a draft model", "name one as draft_model")
    if config.stack and config.draft_transport == "process":
        raise InvalidInputError("draft_transport", "process", "a stack runs on a thread", 'use "auto" or stack=()')
    for level in config.levels[:-1]:
        if not level.is_model:
            hint = "name it last"
            raise InvalidInputError("stack", level.spec, "needs no model, so nothing can work below it", hint)


def check_lossy(config: EngineConfig) -> None:
    """Raises `InvalidInputError` where a lossy rule would break a promise, or let anybody write the answer."""
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
