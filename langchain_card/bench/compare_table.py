"""A race as a table, in words and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_card.bench.compare import Difference, Race
from langchain_card.bench.method import Run
from langchain_card.bench.method_table import PEERS, PLAIN

_GIB = 1 << 30

FEWEST = 6
"""Prompts from which on bounds are given: those of fewer are far too narrow."""

HEADERS = (
    "method", "weights", "tokens/s (quartiles)", "times plain (95 %)", "accepted length", "acceptance", "hits",
    "busy target / draft", "first token", "peak memory", "identical",
)  # fmt: skip


def markdown(found: Race) -> str:
    """A table with a line a method; those that failed have none of the figures."""
    lines = [HEADERS, *(_line(found, name) for name in found.weights)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    drawn = (" | ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(f"| {line} |" for line in drawn)


def _line(found: Race, name: str) -> tuple[str, ...]:
    runs = [row.run for row in found.of(name)]
    if not runs:
        return (name, found.weights[name], *[""] * (len(HEADERS) - 2))
    speeds, times = [run.speed for run in runs], found.speedup(name)
    low, _, high = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else [speeds[0]] * 3
    same, every = found.identical(name)
    schedules = sorted({run.figures.get("schedule", name) for run in runs})
    is_base = name == PLAIN
    return (
        f"{name} ({', '.join(schedules)})" if name == "card" else name,
        found.weights[name],
        f"{statistics.median(speeds):.1f} ({low:.1f} to {high:.1f})",
        "1" if is_base or not times else f"{times.value:.2f}{_bounds(found, name)}",
        _mean(runs, "accepted_length", "{:.2f}"),
        _mean(runs, "acceptance", "{:.2f}"),
        _mean(runs, "hit_rate", "{:.2f}"),
        f"{_mean(runs, 'target_busy', '{:.0%}')} / {_mean(runs, 'draft_busy', '{:.0%}')}".strip(" /"),
        f"{statistics.median(run.first for run in runs):.2f} s",
        f"{max(run.peak for run in runs) / _GIB:.1f} GiB",
        "" if is_base or (name in PEERS and not found.greedy) else f"{same} of {every}",
    )


def _mean(runs: Sequence[Run], figure: str, form: str) -> str:
    values = [run.figures[figure] for run in runs if run.figures.get(figure) is not None]
    return form.format(statistics.mean(values)) if values else ""


def _bounds(found: Race, name: str) -> str:
    times = found.speedup(name)
    few = len(found.speedups(name)) < FEWEST
    return "" if few or times is None else f" ({times.low:.2f} to {times.high:.2f})"


def remarks(found: Race) -> list[str]:
    """What a table does not say: who failed, where answers differ, and what is not alike."""
    said = [f"{name} was left out: {why}" for name, why in found.failed.items()]
    if 0 < len(found.speedups(PLAIN)) < FEWEST:
        said.append(f"Bounds are given from {FEWEST} prompts on.")
    for name in found.weights:
        if own := [each for each in found.differences if each.method == name]:
            said += _remark(found, name, own)
    if any(name in PEERS for name in found.weights):
        said.append(
            "This engine's methods share what its controller learns, and each remembers earlier prompts and answers, "
            "as it does for users; others' loops begin anew with each prompt. Peak memory is that of a method's "
            "process: this engine's methods have one together, with all of their models, and what a draft in a process "
            "of its own holds is not in it."
        )
    return said


def _remark(found: Race, name: str, own: Sequence[Difference]) -> list[str]:
    """Nothing where others draw noise of their own."""
    if name in PEERS and not found.greedy:
        return []
    first, gaps = own[0], [each.gap for each in own if each.gap is not None]
    alike = found.weights[name].split(",")[0] == found.weights[PLAIN].split(",")[0]
    kind = "is not lossless here" if alike else "runs on other weights"
    place = f"prompt {first.group + 1}, token {first.position}: {first.own!r} in the place of {first.plain!r}"
    sure = "" if first.gap is None else f", where the target's two likeliest tokens are {first.gap:.2g} nats apart"
    spread = f" (all: median {statistics.median(gaps):.2g}, at most {max(gaps):.2g})" if gaps else ""
    every = found.identical(name)[1]
    return [f"{name} {kind}: {len(own)} of {every} answers differ. The first difference: {place}{sure}{spread}."]


def plot(found: Race, path: Path, title: str) -> None:
    """Speedups: a bar a method with its bounds, a mark a prompt."""
    from langchain_card.bench.canvas import panels

    names = [name for name in found.weights if name != PLAIN and found.speedup(name) is not None]
    figure, [[panel]] = panels(8, 1.2 + 0.5 * len(names))
    for place, name in enumerate(reversed(names)):
        _bar(panel, place, found.speedup(name), found.speedups(name), ours=name not in PEERS)
    panel.set_yticks(range(len(names)), list(reversed(names)))
    panel.axvline(1.0, color="black", lw=1)
    panel.set_xlim(0, None)
    panel.set_xlabel("times plain decoding: median of prompts, bounds of 95 %; a mark a prompt", size=8)
    panel.set_title(title, size=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


def _bar(panel: Any, place: int, times: Any, each: Sequence[float], *, ours: bool) -> None:
    colour: Callable[[bool], str] = lambda ours: "#2a9d5c" if ours else "#8d99ae"  # noqa: E731
    panel.barh(place, times.value, color=colour(ours), height=0.6)
    if len(each) >= FEWEST:
        panel.errorbar(times.value, place, xerr=[[times.value - times.low], [times.high - times.value]], color="black")
    panel.plot(each, [place] * len(each), "|", color="#333333", alpha=0.5, ms=7)
    panel.text(max(times.high, *each) + 0.04, place, f"{times.value:.2f}", va="center", size=9)
