"""Which weights run where, as fields of a chat model."""

from __future__ import annotations

from dataclasses import fields

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from langchain_card.config import (
    DraftTransport,
    Dtype,
    EngineConfig,
    Exactness,
    Execution,
    Limits,
    Pins,
    default_draft_model,
    default_model,
)
from langchain_card.models.store import ModelStore


class EngineOptions(BaseModel):
    """Fields that say which engine answers: those of `EngineConfig`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str = Field(default_factory=default_model, validation_alias=AliasChoices("model", "model_name"))
    """The target: a built-in name, a folder with safetensors, a GGUF file or a hub id. Also `model_name`. The
    environment's `LANGCHAIN_CARD_MODEL` is another default. A call may name another model."""
    draft_model: str | None = Field(default_factory=default_draft_model)
    """The draft, named likewise; `"ngram"` for lookup in texts without a draft model, None for plain decoding. The
    environment's `LANGCHAIN_CARD_DRAFT_MODEL` is another default, with `none` for None. A call may name another."""
    device: str = "auto"
    """Of the target: `"auto"` (CUDA when there is one, else the CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, ...; or several,
    `"cuda:0,cuda:1"`, over which its layers are spread."""
    draft_device: str = "auto"
    """Of the draft; `"auto"` is a CUDA device that the target leaves free, else the target's device."""
    draft_transport: DraftTransport = "auto"
    """Where the draft runs: a `"thread"` or a `"process"`; `"auto"` is a process when both have a CUDA device each."""
    dtype: Dtype = "auto"
    """Of weights and KV; `"auto"` is float32 on a CPU and bfloat16 on CUDA."""
    quantization: str | None = "auto"
    """`"int8"` for row-exact int8 layers on a CPU, `"auto"` for int8 with built-in models on a CPU, None for none; or a
    transformers quantization config as a JSON object: `'{"quant_method": "bitsandbytes", "load_in_4bit": true}'`."""
    exact: Exactness = "default"
    """`"strict"` makes an answer equal plain decoding by the same engine bit for bit, also in 16 bits; see
    docs/concepts/exactness.md."""
    execution: Execution = "auto"
    """Of steps: `"graphs"` (captured on CUDA), `"compiled"` (layers compiled, too) or `"eager"`."""
    isolate: bool = False
    """Whether all of it runs in a process of its own: when that dies it is started again, and every answer goes on
    where it was. Needs msgspec."""
    drafters: tuple[str, ...] | None = None
    """Those that work beside the draft, on the same tree, by name and perhaps with options, as
    `"ngram?table=code.ngrams"`; `()` for none; None for n-grams, beside the draft model and, where it lives
    in this process, below it (`stack=("ngram",)`). Packages may add their own, see docs/plugins.md."""
    acceptance: str = "exact"
    """The rule by which candidates become the answer. All but `"exact"` are lossy: with `"loose"` the answer may not be
    what the target would have written, see docs/concepts/loose.md."""
    steering: str | None = None
    """A transform of the target's logits, before everything else, by name and perhaps with options; None for none.
    Packages add them, see docs/concepts/steering.md."""
    stack: tuple[str, ...] = ()
    """Drafters below the draft model, from the top, each queried by the one above it: models, and as the last perhaps
    `"ngram"`; `"ngram?block=12"` is asked for twelve candidates at a time. `langchain-card plan` tells what pays."""
    max_model_len: int | None = None
    """Tokens of prompt, answer and `limits.max_window` (16) candidates together; None for the model's own limit, at
    most 8,192."""
    pins: Pins = Field(default_factory=Pins)
    """Choices taken away from the controller: `Pins(draft_width=..., window=..., lead=...)`, or a dict."""
    limits: Limits = Field(default_factory=Limits)
    """Bounds, see `help(Limits)`: `Limits(max_num_seqs=8)` decodes eight answers in common passes. Or a dict."""

    def _engine_config(self) -> EngineConfig:
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)})

    def _check_models(self) -> None:
        """Raises `UnknownModelError` unless models may have these names. Nothing is downloaded to find out."""
        ModelStore().check(self.model)
        if self.draft_model is not None and self._engine_config().has_draft:
            ModelStore().check(self.draft_model, field="draft_model")
            for level in self._engine_config().levels:
                if level.is_model:
                    ModelStore().check(level.spec, field="stack")
