"""Which models the runner can run exactly: found out before any weights are read.

Transformers knows some two hundred families of language models. What the runner needs of one is that all its memory of
earlier tokens are keys and values which go through the attention interface, layer by layer, so that a rejected row
leaves nothing behind. This is looked at and not listed: the model is built without memory (accelerate's empty weights)
and reads three tokens with an attention function that computes nothing and notes what it is given. Masks of that pass
carry in their shape how many keys a layer may see, and attention must have been told the same.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from langchain_card.errors import UnsupportedModelError

RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layer types of transformers that keep a state which every token changes."""

_ATTENDING_LAYERS = ("full_attention", "sliding_attention")
_PROBE_NAME = "card-probe"
_PROBE_TOKENS = 3
_UNDERSTOOD = ("scaling", "softcap", "sliding_window", "dropout", "is_causal", "position_ids")
_HINT = "use a model whose layers all keep keys and values, such as Llama, Qwen 3, Mistral or Gemma 3"


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps of each position.

    Attributes:
        layers: number of layers.
        kv_heads: heads of keys, and as many of values, in a layer.
        head_dim: numbers in one of them.
    """

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def numbers(self) -> int:
        """Numbers kept of one position, keys and values of all layers together."""
        return self.layers * 2 * self.kv_heads * self.head_dim


def kv_shape(config: Any) -> KVShape:
    """The shape that the config of a text model states."""
    heads = config.num_attention_heads
    return KVShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of a causal language model, in order; families name the list differently."""
    layers = next(child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList))
    stacked: nn.ModuleList | None = getattr(layers[0], "stacked_layers", None)
    return layers if stacked is None else stacked


def context_length(config: Any) -> int:
    """Positions of a text model over which a row is computed alike, whatever rows are in its pass.

    LongRoPE (arXiv 2402.13753) takes other frequencies for a whole pass as soon as one row of it lies beyond the
    context that the model was trained with first: rows of one answer would depend on how they were grouped.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    switches = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return int(min([config.max_position_embeddings, *switches]))


def read_config(folder: Path) -> Any:
    """The whole config of a model folder; `get_text_config()` of it is the language model's."""
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def empty_model(config: Any) -> Any:
    """The causal language model of a config, on the meta device: it takes no memory and cannot compute."""
    with init_empty_weights(include_buffers=True):
        # Of transformers' ways to run experts the one whose shapes do not depend on values.
        options = {"attn_implementation": _PROBE_NAME, "experts_implementation": "batched_mm"}
        return AutoModelForCausalLM.from_config(config, **options).eval()


def check_family(name: str, folder: Path, field: str = "model") -> None:
    """Raises unless the engine can run a model exactly. Reads its config and no weights.

    Args:
        name: of the model, as the user gave it.
        folder: with its config.
        field: that named it.

    Raises:
        UnsupportedModelError: not a causal language model, or some of what it remembers cannot be rolled back or does
            not reach our attention. Names the layers and the reason.
    """
    config = read_config(folder)
    try:
        problem = _problem(config)
    except Exception as error:  # code of some two hundred families runs here, with shapes that it may not expect
        problem = (
            f"{config.model_type} models do not run with this attention ({type(error).__name__}: {str(error)[:200]})"
        )
    if problem:
        raise UnsupportedModelError(field, name, problem, _HINT)


def _problem(config: Any) -> str:
    """Why the engine cannot run the model, or nothing."""
    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        return f"{config.model_type} is not a causal language model"
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", False):
        return "its tokens attend to later ones, so it cannot decode token by token"
    name = AutoModelForCausalLM._model_mapping[type(config)].__name__
    kinds = Counter(getattr(text, "layer_types", None) or ())
    if recurrent := _listed(kinds, RECURRENT_LAYERS):
        return f"recurrent state cannot be rolled back; {name} has {recurrent} layers of {text.num_hidden_layers}"
    if other := _listed(kinds, set(kinds) - set(_ATTENDING_LAYERS)):
        return f"{name} has {other} layers, and only those of {' and '.join(_ATTENDING_LAYERS)} are supported"
    model = empty_model(config)
    if model._is_stateful:
        return f"recurrent state cannot be rolled back; transformers marks {name} as stateful"
    return next(_problems(model.get_decoder(), text), "")


def _problems(decoder: nn.Module, text: Any) -> Iterator[str]:
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        yield f"{type(decoder).__name__} numbers its positions itself"
    probe = _Probe(kv_shape(text), getattr(text, "sliding_window", None))
    with torch.inference_mode(), torch.device("meta"):
        decoder(
            input_ids=torch.ones(1, _PROBE_TOKENS, dtype=torch.long),
            position_ids=torch.arange(_PROBE_TOKENS)[None],
            attention_mask=torch.ones(1, _PROBE_TOKENS, dtype=torch.long),
            use_cache=False,
            step=probe,
        )
    yield from probe.problems
    if not probe.layers:
        yield f"the layers of {type(decoder).__name__} do not use transformers' attention interface"
    elif probe.layers != list(range(probe.shape.layers)):
        limit = f"attention of {type(decoder).__name__} runs for layers {probe.layers}"
        yield f"{limit}, where each of {probe.shape.layers} must run once"


@dataclass(slots=True)
class _Probe:
    """Takes the place of a step's plan and notes what attention was given.

    Attributes:
        shape: that the keys and values should have.
        window: of sliding layers.
        layers: indices of the layers that attended, in order.
        problems: with what they asked for.
    """

    shape: KVShape
    window: int | None
    layers: list[int | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
        """Takes one call of attention down."""
        self.layers.append(getattr(module, "layer_idx", None))
        for problem in self._problems(module, key, value, mask, options):
            self.problems.append(f"attention of {type(module).__name__} {problem}")

    def _problems(
        self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Iterator[str]:
        shape, window = self.shape, options.get("sliding_window")
        if key.shape != value.shape:
            yield f"has keys of size {key.shape[3]} and values of size {value.shape[3]}"
        elif (key.shape[1], key.shape[3]) != (shape.kv_heads, shape.head_dim):
            found = f"keeps {key.shape[1]} heads of size {key.shape[3]}"
            yield f"{found}, where the config says {shape.kv_heads} of size {shape.head_dim}"
        unset = (None, False)  # compared by identity: some are tensors
        if extra := sorted(n for n, x in options.items() if n not in _UNDERSTOOD and not any(x is u for u in unset)):
            yield f"needs {', '.join(extra)}, which is not supported"
        if False in (options.get("is_causal"), getattr(module, "is_causal", True)):
            yield "is not causal"
        if mask is None or mask.shape[:3] != (1, 1, 1):
            yield "makes a mask of its own"
        elif mask.shape[3] - 1 != (window or 0) or window not in (None, self.window):
            yield f"was told a window of {window}, where its mask has {mask.shape[3] - 1 or None}"


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: _Probe | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if step is None:
        raise TypeError("options of a pass do not reach its layers")
    step.note(module, key, value, attention_mask, options)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _marked_mask(*, local_size: int | None = None, **_: Any) -> Tensor:
    """[1, 1, 1, 1 + keys that a row sees], or [1, 1, 1, 1] where it sees all."""
    return torch.zeros(1, 1, 1, 1 + (local_size or 0))


def _listed(counts: Counter[str], kinds: Iterable[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in sorted(kinds) if counts[kind])


AttentionInterface.register(_PROBE_NAME, _look)
AttentionMaskInterface.register(_PROBE_NAME, _marked_mask)
