"""The picture of a timeline: what the draft guesses, what the target checks, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch, Rectangle

from langchain_card.bench.canvas import Figure, panels
from langchain_card.bench.timeline import Round, Timeline, corrections
from langchain_card.core.messages import TARGET

HIT, MISS, OTHER, DRAFT, GUESSED, OWN = "#2a9d5c", "#d1495b", "#8a8f98", "#5b8fd6", "#cfe1f7", "#e6e6e6"
"""Colours: of passes by what they met, of draft steps, of tokens."""

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
_SIZE, _ASPECT = 7.0, 0.602  # of the answer's letters: points, and width by height
_ROW, _ROWS = 0.3, 6
_LABELS = 0.15  # of the picture's width, which "query" and "correct" take beside each other
_SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})


def plot_timeline(
    timeline: Timeline,
    decode: Callable[[Sequence[int]], str],
    names: Mapping[str, str],
    path: Path,
    first: int = 1,
    count: int = 6,
) -> None:
    """Writes the picture that `draw_timeline` draws into a file; the ending of `path` says of what kind."""
    draw_timeline(timeline, decode, names, first, count).savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_timeline(
    timeline: Timeline,
    decode: Callable[[Sequence[int]], str],
    names: Mapping[str, str],
    first: int = 1,
    count: int = 6,
) -> Figure:
    """Draws some rounds of an answer; a notebook shows the figure.

    Args:
        timeline: of the answer.
        decode: token ids -> text.
        names: by lane, the model's.
        first: of the rounds that are drawn; the first of all reads the prompt.
        count: rounds.
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
    told = [pair for pair in corrections(timeline) if pair[0] in rounds and pair[1].begin < end]
    for done, step in told:
        _arrow(panel, ms(done.end), lanes[TARGET] + _LANE, ms(step.begin), lanes[step.source], _colour(done))
    if told:
        _explain(panel, ms(rounds[0].begin), ms(told[0][0].end), lanes[TARGET] + _LANE, lanes[told[0][1].source])
    used = max(_write(panel, done, ms(done.begin), ms(done.end), decode) for done in rounds)
    _label(figure, panel, timeline, lanes, names, used)
    return figure


def _colour(done: Round) -> str:
    """Of a pass: neither a hit nor a miss where nothing drafts, or nothing follows."""
    return OTHER if done.hit is None or done.schedule == "plain" else HIT if done.hit else MISS


def _arrow(panel: Any, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
    panel.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.1})


def _explain(panel: Any, query: float, correction: float, low: float, high: float) -> None:
    """Names what goes between the lanes, where it is seen first: the target asks, and later says what came true."""
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
    """The tokens of a round below it, each on the colour of who had it first; how many rows they needed."""
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
    """With signs for white space, and for what the picture's font has not."""
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
