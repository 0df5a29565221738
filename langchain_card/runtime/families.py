"""Check that the runner can run a model exactly, before any weights are read.

Transformers has some two hundred families of language models. The runner can run those whose only memory of earlier
tokens are keys and values that pass through the attention interface, layer by layer: then a rejected row leaves nothing
behind. This is probed instead of listed: the model is built without memory (accelerate's empty weights) and reads three
tokens with an attention function that computes nothing and records its arguments. The masks of that pass carry in their
shape how many keys a layer may see, which must equal the window that attention receives.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from langchain_card.errors import UnsupportedModelError

RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layer types of transformers with a state that every token changes."""

_ATTENDING_LAYERS = ("full_attention", "sliding_attention")
_PROBE_NAME = "card-probe"
_PROBE_TOKENS = 3
_UNDERSTOOD = ("scaling", "softcap", "sliding_window", "dropout", "is_causal", "position_ids")
_HINT = "use a model whose layers all keep keys and values, such as Llama, Qwen 3, Mistral or Gemma 3"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of the keys and values that a model keeps of each position.

    Attributes:
        layers: number of layers.
        kv_heads: heads of keys in a layer, and as many of values.
        head_dim: numbers in a head.
    """

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def numbers(self) -> int:
        """Numbers kept of one position: keys and values of all layers together."""
        return self.layers * 2 * self.kv_heads * self.head_dim


def kv_shape(config: Any) -> KVShape:
    """Return the shape that a text config states."""
    heads = config.num_attention_heads
    return KVShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a causal language model, in order, whatever its family calls the list."""
    layers = next(child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList))
    stacked: nn.ModuleList | None = getattr(layers[0], "stacked_layers", None)
    return layers if stacked is None else stacked


def context_length(config: Any) -> int:
    """Return the positions over which a row is computed alike, whatever rows are in its pass.

    LongRoPE (arXiv 2402.13753) uses other frequencies for a whole pass if one of its rows lies beyond the original
    context: rows of one answer would depend on how they are grouped.
    """
    rotations = _rotations(config)
    switches = [each["original_max_position_embeddings"] for each in rotations if each.get("rope_type") == "longrope"]
    return int(min([config.max_position_embeddings, *switches]))


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings: of the model, or of each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


_COMMON = ("llama", "mistral", "qwen2", "qwen3")
"""Families with models of the common kind."""


def is_common(config: Any) -> bool:
    """Return whether a config is that of a model of the common kind: full attention, plain rotation, gated SiLU."""
    if config.model_type not in _COMMON or getattr(config, "is_heterogeneous", False):
        return False
    shape, rows = kv_shape(config), config.num_attention_heads
    return (
        shape.head_dim % 2 == 0
        and rows % shape.kv_heads == 0
        and getattr(config, "is_causal", True)
        and not getattr(config, "use_bidirectional_attention", False)
        and config.hidden_act == "silu"
        and config.rope_parameters.keys() <= {"rope_type", "rope_theta"}
        and config.rope_parameters.get("rope_type", "default") == "default"
        and getattr(config, "sliding_window", None) is None
        and {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}
        and not getattr(config, "attention_bias", False)
        and not getattr(config, "mlp_bias", False)
    )


def read_config(folder: Path) -> Any:
    """Load the whole config of a model folder; its `get_text_config()` is that of the language model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


building = threading.RLock()
"""Lock to build one model at a time: meanwhile, new parameters of all threads' modules may be on the meta device."""


def empty_model(config: Any) -> Any:
    """Build the causal language model of a config on the meta device; it takes no memory and cannot compute."""
    from accelerate import (
        init_empty_weights,  # a second with transformers, which `resolve` spends while weights are read
    )
    from transformers import AutoModelForCausalLM

    _register_probe()
    with building, init_empty_weights(include_buffers=True):
        # The only implementation of experts whose shapes do not depend on values.
        options = {"attn_implementation": _PROBE_NAME, "experts_implementation": "batched_mm"}
        return AutoModelForCausalLM.from_config(config, **options).eval()


def check_family(name: str, folder: Path, field: str = "model") -> None:
    """Raise unless the engine can run a model exactly. Only its config is read.

    Args:
        name: the user's name of the model.
        folder: the model's folder.
        field: the setting that named the model.

    Raises:
        UnsupportedModelError: not a causal language model, or some of its memory cannot be rolled back or bypasses the
            attention interface. The message names the layers and the reason.
    """
    config = read_config(folder)
    if is_common(config):
        return  # known without the probe, for which transformers imports the family's code
    try:
        problem = _problem(config)
    except Exception as error:  # code of any family runs here, with shapes that it may not expect
        problem = (
            f"{config.model_type} models do not run with this attention ({type(error).__name__}: {str(error)[:200]})"
        )
    if problem:
        raise UnsupportedModelError(field, name, problem, _HINT)


def _problem(config: Any) -> str:
    """Return the reason why the engine cannot run the model, or ""."""
    from transformers import AutoModelForCausalLM

    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        return f"{config.model_type} is not a causal language model"
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", False):
        return "its tokens attend to later ones, so it cannot decode token by token"
    name = AutoModelForCausalLM._model_mapping[type(config)].__name__
    kinds = Counter(getattr(text, "layer_types", None) or ())
    if recurrent := _counts(kinds, RECURRENT_LAYERS):
        return f"recurrent state cannot be rolled back; {name} has {recurrent} layers of {text.num_hidden_layers}"
    if other := _counts(kinds, set(kinds) - set(_ATTENDING_LAYERS)):
        return f"{name} has {other} layers, and only those of {' and '.join(_ATTENDING_LAYERS)} are supported"
    if any(each.get("rope_type") == "dynamic" for each in _rotations(text)):
        return "its dynamic rotation depends on the longest text of a pass, so that a text depends on its neighbours"
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
    """A stand-in for a step's plan that records the arguments of attention.

    Attributes:
        shape: expected shape of keys and values.
        window: window of sliding layers.
        layers: indices of the layers that attended, in order.
        problems: reasons why the runner cannot serve them.
    """

    shape: KVShape
    window: int | None
    layers: list[int | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
        """Record one call of attention."""
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
            kept = f"keeps {key.shape[1]} heads of size {key.shape[3]}"
            yield f"{kept}, where the config says {shape.kv_heads} of size {shape.head_dim}"
        unset = (None, False)  # compared by identity: some are tensors
        if extra := sorted(n for n, x in options.items() if n not in _UNDERSTOOD and not any(x is u for u in unset)):
            yield f"needs {', '.join(extra)}, which is not supported"
        if False in (options.get("is_causal"), getattr(module, "is_causal", True)):
            yield "is not causal"
        if mask is None or mask.shape[:3] != (1, 1, 1):
            yield "makes a mask of its own"
        elif mask.shape[3] - 1 != (window or 0) or window not in (None, self.window):
            yield f"was told a window of {window}, where its mask has {mask.shape[3] - 1 or None}"


def _probe_attention(
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
    step.add(module, key, value, attention_mask, options)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _marked_mask(*, local_size: int | None = None, **_: Any) -> Tensor:
    """Return a mask whose shape is [1, 1, 1, 1 + keys that a row sees], or [1, 1, 1, 1] if it sees all."""
    return torch.zeros(1, 1, 1, 1 + (local_size or 0))


def _counts(counts: Counter[str], kinds: Iterable[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in sorted(kinds) if counts[kind])


@functools.cache
def _register_probe() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(_PROBE_NAME, _marked_mask)
