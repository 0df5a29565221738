"""Weights that transformers quantizes while it loads them, or that were quantized before.

The settings are those of a transformers quantization config, as JSON: they come with a model folder (`config.json`'s
`quantization_config`), which then simply loads, or from `EngineConfig.quantization`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers.quantizers import AutoHfQuantizer

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
"""Packages whose name on the package index is not that of the method."""


def stored_settings(config: Any) -> dict[str, Any] | None:
    """The quantization of a folder's own weights, or None for plain ones."""
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, dict) else dict(found.to_dict())


def find_quantizer(config: Any, quantization: str | None, device: torch.device) -> Any:
    """Transformers' quantizer for a model, or None for plain weights.

    Args:
        config: of the model; weights that are quantized already stay as they are.
        quantization: JSON of a quantization config for plain weights, or None.
        device: that the weights go to.

    Raises:
        InvalidInputError: the settings are wrong, a package is missing, or the method does not run on the device.
    """
    stored = stored_settings(config)
    settings = stored if stored is not None or quantization is None else json.loads(quantization)
    if settings is None:
        return None
    method = str(settings.get("quant_method"))
    field, value = ("quantization", quantization) if stored is None else ("quantization_config", method)
    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=stored is not None)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except ImportError as error:
        hint = f"pip install {_PACKAGES.get(method, method)}"
        raise InvalidInputError(field, value, f"needs a package that is not installed ({error})", hint) from error
    except Exception as error:  # settings are checked by the code of some twenty methods
        missing = f"pip install {_PACKAGES.get(method, method)}" if "install" in str(error) else ""
        limit = f"{method} does not run on {device} with these settings ({type(error).__name__}: {str(error)[:200]})"
        raise InvalidInputError(field, value, limit, missing) from error
    return quantizer


def quantized_bytes(model: Any, quantizer: Any) -> int:
    """What plain weights take once they are quantized, in bytes, by transformers' own account.

    Args:
        model: on the meta device, in the dtype it will have; its layers may be replaced.
        quantizer: of `find_quantizer`.
    """
    quantizer.preprocess_model(model=model)
    parameters = model.named_parameters()
    return int(sum(tensor.numel() * quantizer.param_element_size(model, name, tensor) for name, tensor in parameters))
