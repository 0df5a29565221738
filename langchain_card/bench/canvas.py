"""What pictures are drawn with: matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from typing import Any

from langchain_card.errors import InvalidInputError

try:
    from matplotlib.figure import Figure
except ImportError as error:
    hint = "pip install 'langchain-card[bench]'"
    raise InvalidInputError("--plot", "matplotlib", "is not installed", hint) from error

__all__ = ["Figure", "panels"]


def panels(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure that no pyplot knows of: a notebook, or a program with windows, keeps its own backend.

    Args:
        width: in inches.
        height: likewise.
        rows: of panels.
        columns: likewise.

    Returns:
        The figure and its panels [rows, columns].
    """
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False)
