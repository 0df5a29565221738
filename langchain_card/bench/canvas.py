"""What pictures are drawn with: matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from langchain_card.errors import InvalidInputError

try:
    import matplotlib as mpl
    from matplotlib import pyplot as plt
except ImportError as error:
    hint = "pip install 'langchain-card[bench]'"
    raise InvalidInputError("--plot", "matplotlib", "is not installed", hint) from error

mpl.use("Agg")

__all__ = ["plt"]
