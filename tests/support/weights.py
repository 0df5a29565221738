"""Count the weights that are loaded."""

from __future__ import annotations

import gc

from langchain_card.models import loader


def num_loaded_models() -> int:
    """Return the number of models in this process, without those of engines that only a cycle of references keeps."""
    gc.collect()
    return loader.num_loaded_models()
