"""The picture of the contest. Needs matplotlib: the extra `bench`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest.changes import Change
from benchmarks.contest.contest import Row
from langchain_card.bench import plots

STYLES = {
    "card": ("card (this engine, learns as it goes)", "#c1121f", 3.0),
    "card-default": ("this engine with its default limits", "#c1121f", 1.0),
    "card-fixed": ("this engine, best fixed setting in hindsight", "#e07a5f", 1.2),
    "tree": ("tree speculative decoding, tuned", "#2a6f97", 1.6),
    "chain": ("chain speculative decoding, tuned", "#61a5c2", 1.6),
    "card-synchronous": ("CARD as published (in lockstep), tuned", "#6a994e", 1.6),
    "linear-asynchronous": ("linear asynchronous (PEARL, AMUSD)", "#a7c957", 1.6),
    "outcome-cache": ("outcome cache (Saguaro), tuned", "#8e7dbe", 1.6),
    "plain": ("plain", "#888888", 1.0),
}
"""Label, colour and line width by method."""


def plot(rows: Sequence[Row], runs: Sequence[Change], path: Path) -> None:
    """Draw the contest, one panel per kind of text, and below it how the controller follows sudden changes.

    Args:
        rows: of the contest.
        runs: with a sudden change.
        path: of the picture. Its suffix names the format.
    """
    kinds = list(dict.fromkeys(row.trace for row in rows if row.method == "tree"))
    figure, panels = plots.panels(15, 9.5, 2, max(len(kinds), len(runs)))
    for panel, kind in zip(panels[0], kinds, strict=False):
        _draw_kind(panel, [row for row in rows if row.trace == kind])
    panels[0][0].set_ylabel("times plain decoding")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=3, frameon=False, bbox_to_anchor=(0.5, 1.0))
    for panel, change in zip(panels[1], runs, strict=False):
        _draw_change(panel, change, explain=panel is panels[1][0])
    panels[1][0].set_ylabel("milliseconds a token")
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=110)


def _draw_kind(panel: Any, rows: Sequence[Row]) -> None:
    ratios = sorted({row.c for row in rows})
    ceiling = {row.c: row.ceiling for row in rows}
    panel.plot(ratios, [ceiling[c] for c in ratios], ":", color="black", lw=1, label="about the ceiling of this draft")
    for method, (words, colour, width) in reversed(STYLES.items()):
        speedup = {row.c: row.speedup for row in rows if row.method == method}
        panel.plot(ratios, [speedup[c] for c in ratios], "o-", color=colour, lw=width, ms=2 * width, label=words)
    panel.set(xscale="log", yscale="log", title=rows[0].trace, xlabel="c = target pass / draft step")
    panel.set_xticks(ratios, [f"{c:g}" for c in ratios])
    ticks = [0.5, 1, 2, 4, 8, 16]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _draw_change(panel: Any, change: Change, *, explain: bool) -> None:
    """Draw the true and the estimated time per token, and the windows of the rounds."""
    rounds, changed = change.rounds, change.index
    count = range(len(rounds))
    took = [b.ended - a.ended for a, b in itertools.pairwise(rounds)]
    tokens = [b.at - a.at for a, b in itertools.pairwise(rounds)]
    panel.plot(
        count[1:], [1e3 * s / n for s, n in zip(took, tokens, strict=True)], ".", color="#bbbbbb", label="as it was"
    )
    panel.plot(count, [1e3 * done.per_token for done in rounds], color="#c1121f", lw=2, label="as believed")
    panel.axvspan(changed, changed + 20, color="#ffe8a1", label="20 rounds after the change")
    panel.set(title=change.name, xlabel="rounds", ylim=(0, None))
    other = panel.twinx()
    other.plot(count, [done.rows for done in rounds], color="#2a6f97", lw=0.8, alpha=0.7, label="rows of the window")
    other.set_ylim(0, None)
    other.set_ylabel("rows")
    if not explain:
        return
    handles, labels = (
        [*left, *right]
        for left, right in zip(panel.get_legend_handles_labels(), other.get_legend_handles_labels(), strict=True)
    )
    panel.legend(handles, labels, fontsize=8)
