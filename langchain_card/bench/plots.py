"""Pictures of comparisons and timelines. Needs matplotlib: the extra `bench`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_card.bench.bounds import Measured
from langchain_card.bench.compare import MIN_PROMPTS, Comparison
from langchain_card.bench.load import LoadResults
from langchain_card.bench.long_texts import LongText, runs_of
from langchain_card.bench.method_table import PEERS, PLAIN
from langchain_card.bench.timeline import Round, Timeline, corrections
from langchain_card.core.messages import TARGET
from langchain_card.errors import InvalidInputError

try:
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    hint = "pip install matplotlib"
    raise InvalidInputError("--plot", "matplotlib", "is not installed", hint) from error

HIT, MISS, OTHER, DRAFT, GUESSED, OWN = "#2a9d5c", "#d1495b", "#8a8f98", "#5b8fd6", "#cfe1f7", "#e6e6e6"
"""Colours: of target passes by outcome, of draft steps, of tokens by origin."""

_LEGEND = {
    "draft step": DRAFT,
    "target pass, then a hit: its last token was guessed, too": HIT,
    "then a miss: the draft starts anew": MISS,
    "without a draft, or the last one": OTHER,
    "token guessed by the draft": GUESSED,
    "the target's own": OWN,
}
_WIDTH, _HEIGHT, _DPI = 7.2, 3.6, 220  # inches
_LANE, _PITCH = 0.8, 1.55
_SIZE, _ASPECT = 7.0, 0.602  # of the answer's letters: points, and width / height
_ROW, _ROWS = 0.3, 6
_LABELS = 0.15  # share of the picture's width that "query" and "correct" need side by side
_SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})


def panels(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Return a figure and its panels [rows, columns].

    pyplot does not manage the figure, so that notebooks and programs with windows keep their backend. `width` and
    `height` are in inches.
    """
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_comparison(results: Comparison, path: Path, title: str) -> None:
    """Draw the speedups into a file: a bar per method with its interval, a mark per prompt."""
    speedups = {name: times for name in results.weights if name != PLAIN and (times := results.speedup(name))}
    figure, [[panel]] = panels(8, 1.2 + 0.5 * len(speedups))
    for place, (name, times) in enumerate(reversed(speedups.items())):
        _bar(panel, place, times, results.speedups(name), "#8d99ae" if name in PEERS else "#2a9d5c")
    panel.set_yticks(range(len(speedups)), list(reversed(speedups)))
    panel.axvline(1.0, color="black", lw=1)
    panel.set_xlim(0, None)
    panel.set_xlabel("times plain decoding: median of prompts, bounds of 95 %; a mark a prompt", size=8)
    panel.set_title(title, size=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


def _bar(panel: Any, place: int, times: Measured, speedups: Sequence[float], colour: str) -> None:
    panel.barh(place, times.value, color=colour, height=0.6)
    if len(speedups) >= MIN_PROMPTS:
        panel.errorbar(times.value, place, xerr=[[times.value - times.low], [times.high - times.value]], color="black")
    panel.plot(speedups, [place] * len(speedups), "|", color="#333333", alpha=0.5, ms=7)
    panel.text(max(times.high, *speedups) + 0.04, place, f"{times.value:.2f}", va="center", size=9)


def plot_long_texts(results: Comparison, texts: Sequence[LongText], path: Path, title: str) -> None:
    """Draw whole time and speed over the length of the text into a file: a column per length of answer."""
    answers, contexts = (sorted({getattr(text, name) for text in texts}) for name in ("answer", "context"))
    rows = {"seconds, whole": "whole", "tokens/s after the first": "speed"}
    figure, grid = panels(1 + 2.6 * len(answers), 5.2, len(rows), len(answers))
    for line, (label, figure_name) in zip(grid, rows.items(), strict=True):
        for panel, answer in zip(line, answers, strict=True):
            for method in results.weights:
                found = {c: [*itertools.chain(*runs_of(results, texts, method, c, answer).values())] for c in contexts}
                points = {
                    c: statistics.median(getattr(run, figure_name) for run in runs) for c, runs in found.items() if runs
                }
                panel.plot(
                    [*points], [*points.values()], "o-" if method not in PEERS else "s--", ms=3, lw=1.2, label=method
                )
            panel.set_xlim(0, None)
            panel.set_ylim(0, None)
            panel.tick_params(labelsize=7)
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
            if panel in grid[0]:
                panel.set_title(f"{answer:,} tokens written", size=8)
            else:
                panel.set_xlabel("tokens read", size=8)
        line[0].set_ylabel(label, size=8)
    grid[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(title, size=9)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


def plot_load(results: LoadResults, path: Path, title: str) -> None:
    """Draw the speed of all requests together over their number into a file: a panel per set of prompts."""
    texts = [*dict.fromkeys(cell.text for cell in results.cells)]
    columns = min(2, len(texts))
    rows = -(-len(texts) // columns)
    figure, grid = panels(1 + 3.2 * columns, 0.6 + 2.6 * rows, rows, columns)
    flat = [*itertools.chain(*grid)]
    counts = sorted({cell.requests for cell in results.cells})
    for panel, text in zip(flat, texts, strict=False):
        for method in results.weights:
            cells = [cell for cell in results.cells if (cell.text, cell.method) == (text, method)]
            style, colour = "s--" if method in PEERS else "o-", {PLAIN: OTHER, "card": HIT}.get(method)
            requests, speeds = [cell.requests for cell in cells], [cell.speed for cell in cells]
            panel.plot(requests, speeds, style, ms=4, lw=1.4, color=colour, label=method)
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_ylim(0, None)
        panel.set_title(text, size=9)
        panel.tick_params(labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    for panel in flat[len(texts) :]:
        panel.set_visible(False)
    for panel in grid[-1]:
        panel.set_xlabel("requests at once", size=8)
    for line in grid:
        line[0].set_ylabel("tokens/s, all together", size=8)
    flat[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, size=9)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


def plot_timeline(
    timeline: Timeline,
    decode: Callable[[Sequence[int]], str],
    names: Mapping[str, str],
    path: Path,
    first: int = 1,
    count: int = 6,
) -> None:
    """Write the picture of `draw_timeline` to a file, in the format that the suffix of `path` names."""
    draw_timeline(timeline, decode, names, first, count).savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_timeline(
    timeline: Timeline,
    decode: Callable[[Sequence[int]], str],
    names: Mapping[str, str],
    first: int = 1,
    count: int = 6,
) -> Figure:
    """Draw some rounds of an answer.

    Args:
        timeline: of the answer.
        decode: turns token ids into text.
        names: of the models, by lane.
        first: index of the first round that is drawn. Round 0 reads the prompt.
        count: number of rounds.

    Returns:
        The figure, which a notebook shows.
    """
    rounds = timeline.rounds[first : first + count]
    begin, end = rounds[0].begin, rounds[-1].end
    figure, [[panel]] = panels(_WIDTH, _HEIGHT)
    panel.set_xlim(0, 1e3 * (end - begin))
    lanes = {name: _PITCH * place for place, name in enumerate((TARGET, *timeline.sources))}

    def ms(seconds: float) -> float:
        return 1e3 * (min(max(seconds, begin), end) - begin)

    for done in rounds:
        _block(panel, ms(done.begin), ms(done.end), lanes[TARGET], _colour(done))
        label = f"{done.rows - 1} checked\n{len(done.token_ids)} written"
        middle = (ms(done.begin) + ms(done.end)) / 2
        panel.text(middle, lanes[TARGET] + _LANE / 2, label, color="white", size=6.5, ha="center", va="center")
    for step in timeline.drafts:
        if step.end > begin and step.begin < end:
            _block(panel, ms(step.begin), ms(step.end), lanes[step.source], DRAFT)
    shown = [pair for pair in corrections(timeline) if pair[0] in rounds and pair[1].begin < end]
    for done, step in shown:
        _arrow(panel, ms(done.end), lanes[TARGET] + _LANE, ms(step.begin), lanes[step.source], _colour(done))
    if shown:
        done, step = shown[0]
        _label_messages(panel, ms(begin), ms(done.end), lanes[TARGET] + _LANE, lanes[step.source])
    used = max(_write(panel, done, ms(done.begin), ms(done.end), decode) for done in rounds)
    _label(figure, panel, timeline, lanes, names, used)
    return figure


def _colour(done: Round) -> str:
    """Return the colour of a target pass. Plain passes and the last one are neither hits nor misses."""
    return OTHER if done.hit is None or done.schedule == "plain" else HIT if done.hit else MISS


def _arrow(panel: Any, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
    panel.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.1})


def _label_messages(panel: Any, query: float, correction: float, low: float, high: float) -> None:
    """Label the first query, and the first correction after it, between the lanes."""
    aside, middle = 0.006 * panel.get_xlim()[1], (low + high) / 2
    _arrow(panel, query + 2 * aside, high, query + 2 * aside, low, "#777777")
    panel.text(query + 3 * aside, middle, "query", color="#555555", size=7, va="center", style="italic")
    is_near = correction - query < _LABELS * panel.get_xlim()[1]
    place, side = (correction + 2 * aside, "left") if is_near else (correction - aside, "right")
    panel.text(place, middle, "correct", color="#555555", size=7, va="center", ha=side, style="italic")


def _block(panel: Any, begin: float, end: float, bottom: float, colour: str) -> None:
    gap = min(0.0015 * panel.get_xlim()[1], (end - begin) / 4)
    panel.add_patch(Rectangle((begin, bottom), end - begin - gap, _LANE, color=colour, lw=0))


def _write(panel: Any, done: Round, begin: float, end: float, decode: Callable[[Sequence[int]], str]) -> int:
    """Write the tokens of a round below it, coloured by origin. Returns the number of rows used."""
    points = panel.get_position().width * _WIDTH * 72
    letter = _SIZE * _ASPECT * panel.get_xlim()[1] / points
    across = max(1, int((end - begin) / letter) - 1)
    row, column = 0, 0
    for token_id, source in zip(done.token_ids, done.sources, strict=True):
        text = _visible(decode([token_id]))
        if column and column + len(text) > across:
            row, column = row + 1, 0
        if row == _ROWS:
            panel.text(begin, -0.25 - row * _ROW, "…", size=_SIZE)
            break
        text = text if len(text) <= across else text[: across - 1] + "…"
        left, top = begin + column * letter, -0.25 - row * _ROW
        colour = GUESSED if source else OWN
        panel.add_patch(Rectangle((left, top - 0.22), (len(text) - 0.1) * letter, 0.25, color=colour, lw=0))
        panel.text(left, top - 0.16, text, family="monospace", size=_SIZE, parse_math=False)
        column += len(text)
    return row + 1


def _visible(text: str) -> str:
    """Return the text with symbols for white space and for characters that the font lacks."""
    font = get_font(findfont(FontProperties(family="monospace")))
    return "".join(char if font.get_char_index(ord(char)) else "▯" for char in text.translate(_SHOWN))


def _label(
    figure: Any, panel: Any, timeline: Timeline, lanes: Mapping[str, float], names: Mapping[str, str], rows: int
) -> None:
    for lane, bottom in lanes.items():
        role = "target" if lane == TARGET else "draft"
        text = f"{role}\n{names.get(lane, lane)}\nbusy {timeline.busy(lane):.0%}"
        panel.text(
            -0.01, bottom + _LANE / 2, text, size=7.5, ha="right", va="center", transform=panel.get_yaxis_transform()
        )
    panel.text(-0.01, -0.35, "the answer", size=7.5, ha="right", va="center", transform=panel.get_yaxis_transform())
    panel.set_ylim(-0.45 - _ROW * rows, max(lanes.values()) + _LANE + 0.1)
    panel.set_yticks([])
    panel.tick_params(labelsize=7)
    panel.set_xlabel("milliseconds", size=7.5)
    for side in ("left", "right", "top"):
        panel.spines[side].set_visible(False)
    patches = [Patch(color=colour, label=words) for words, colour in _LEGEND.items()]
    figure.legend(handles=patches, loc="upper center", ncol=3, frameon=False, fontsize=7, handlelength=1.2)
    figure.subplots_adjust(left=0.17, right=0.99, top=0.86, bottom=0.12)


def plot_curves(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, title: str) -> None:
    """Draw what more answers are worth into a file: tokens a pass of each kind of head over tokens of answers."""
    figure, [[panel]] = panels(4.2, 2.8, columns=1)
    for (kind, points), color in zip(curves.items(), (HIT, OTHER), strict=True):
        tokens, lengths = zip(*points, strict=True)
        panel.plot(tokens, lengths, "o-", color=color, ms=3, lw=1.2)
        panel.annotate(kind, (tokens[-1], lengths[-1]), (4, 4), textcoords="offset points", size=7, ha="right")
    panel.set_xscale("log", base=2)
    panel.set_xticks([tokens for tokens, _ in next(iter(curves.values()))])
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.minorticks_off()
    panel.tick_params(labelsize=7)
    panel.set_xlabel("tokens of answers", size=8)
    panel.set_ylabel("tokens a pass, held out", size=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.suptitle(title, size=9)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


def plot_curve(curve: Sequence[tuple[float, int, float]], path: Path, title: str) -> None:
    """Draw a training into a file: tokens a pass over minutes, and over tokens that were trained on."""
    seconds, tokens, lengths = zip(*curve, strict=True)
    figure, [axes] = panels(7.2, 2.8, columns=2)
    for panel, xs, label in zip(
        axes, ([each / 60 for each in seconds], tokens), ("minutes of training", "tokens trained on"), strict=True
    ):
        panel.plot(xs, lengths, "o-", color=HIT, ms=3, lw=1.2)
        panel.set_xlabel(label, size=8)
        panel.tick_params(labelsize=7)
        panel.axhline(1.0, color=OTHER, lw=0.8, ls=":")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    axes[0].set_ylabel("tokens a pass, held out", size=8)
    axes[1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.suptitle(title, size=9)
    figure.tight_layout()
    figure.savefig(path, dpi=160)
