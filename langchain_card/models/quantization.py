"""Find transformers' quantizer for weights that it quantizes while loading, or that are quantized already.

The settings are a transformers quantization config as JSON, from `EngineConfig.quantization`, or from the model's
`config.json` (`quantization_config`) if its weights are quantized already.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from langchain_card.errors import InvalidInputError

_PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "quanto": "optimum-quanto",
    "fbgemm_fp8": "fbgemm-gpu-genai",
    "fp8": "kernels",
    "mxfp4": "kernels",
    "spqr": "spqr_quant[gpu]",
    "aqlm": "aqlm[gpu]",
}
"""Names on the package index of packages that are not called like their method."""


def stored_settings(config: Any) -> dict[str, Any] | None:
    """Return the quantization config of stored weights, or None for plain ones."""
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else dict(settings.to_dict())


def find_quantizer(config: Any, quantization: str | None, device: torch.device) -> Any:
    """Return transformers' quantizer for a model, or None for plain weights.

    Args:
        config: the model's config; weights that are quantized already stay unchanged.
        quantization: JSON of a quantization config for plain weights, or None.
        device: the device of the weights.

    Raises:
        InvalidInputError: the settings are wrong, a package is missing, or the method does not run on the device.
    """
    stored = stored_settings(config)
    settings = stored if stored is not None or quantization is None else json.loads(quantization)
    if settings is None:
        return None
    from transformers.quantizers import AutoHfQuantizer  # more than half a second

    method = str(settings.get("quant_method"))
    field, value = ("quantization", quantization) if stored is None else ("quantization_config", method)
    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=stored is not None)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except ImportError as error:
        hint = f"pip install {_PACKAGES.get(method, method)}"
        raise InvalidInputError(field, value, f"needs a package that is not installed ({error})", hint) from error
    except Exception as error:  # some twenty methods check their settings with code of their own
        missing = f"pip install {_PACKAGES.get(method, method)}" if "install" in str(error) else ""
        limit = f"{method} does not run on {device} with these settings ({type(error).__name__}: {str(error)[:200]})"
        raise InvalidInputError(field, value, limit, missing) from error
    return quantizer


def quantized_bytes(model: Any, quantizer: Any) -> int:
    """Return the bytes of plain weights after quantization, as transformers estimates them.

    Args:
        model: the model on the meta device, in its later dtype; its layers may be replaced.
        quantizer: a result of `find_quantizer`.
    """
    quantizer.preprocess_model(model=model)
    parameters = model.named_parameters()
    return int(sum(tensor.numel() * quantizer.param_element_size(model, name, tensor) for name, tensor in parameters))
