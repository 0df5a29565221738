"""Write the tables of docs/performance.md from docs/performance.json: the last step of `make contest`."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from benchmarks.pages import DOCS, replace_part

Cells: TypeAlias = dict[tuple[str, float], dict[str, dict[str, Any]]]
METHODS = {
    "plain": "plain",
    "chain": "chain",
    "tree": "tree",
    "card-synchronous": "CARD, lockstep",
    "linear-asynchronous": "linear async",
    "outcome-cache": "outcome cache",
    "card-fixed": "fixed, hindsight",
    "card": "**card**",
    "card-default": "card, default limits",
}


def main() -> None:
    rows = json.loads((DOCS / "performance.json").read_text())
    cells: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["trace"], row["c"]), {})[row["method"]] = row
    kinds = {trace for trace, _ in cells if ", " not in trace}
    text = [table_of_kind(kind, cells) for kind in sorted(kinds)]
    text += [shared(cells), on_a_cpu(cells), batches(cells)]
    replace_part(DOCS / "performance.md", "contest", "\n\n".join(text))


def table_of_kind(kind: str, cells: Cells) -> str:
    lines = [
        f"### {kind.capitalize()}\n",
        "| c | " + " | ".join(METHODS.values()) + " | card / best other | best fixed setting |",
        "| --- " * (len(METHODS) + 3) + "|",
    ]
    for (trace, c), cell in sorted(cells.items()):
        if trace == kind:
            best = max(row["speedup"] for method, row in cell.items() if method not in ("card", "card-default"))
            figures = " | ".join(f"{cell[method]['speedup']:.2f}" for method in METHODS)
            share = cell["card"]["speedup"] / best
            lines.append(f"| {c:g} | {figures} | {share:.3f} | {cell['card-fixed']['setting']} |")
    return "\n".join(lines)


def shared(cells: Cells) -> str:
    methods = ("plain", "sequential", "parallel")
    lines = [
        "### Both models on one CPU\n",
        "| text | plain | sequential | parallel |",
        "| --- " * 4 + "|",
    ]
    for (trace, _), cell in sorted(cells.items()):
        if "sequential" in cell:
            lines.append(f"| {trace} | " + " | ".join(f"{cell[method]['speedup']:.2f}" for method in methods) + " |")
    return "\n".join(lines)


def on_a_cpu(cells: Cells) -> str:
    """Return the table of the cells with answers of fixed lengths."""
    lines = [
        "### Requests at once, lengths and a slow host, on one CPU\n",
        "On a slow host, steps take twice as long for 40 passes, then not, and so on: means over four starts.\n",
        "| text | fixed, hindsight | card | card / fixed | best fixed setting |",
        "| --- " * 5 + "|",
    ]
    for (trace, _), cell in cells.items():
        if " tokens" in trace:
            fixed, ours = cell["card-fixed"], cell["card"]["speedup"]
            figures = f"{fixed['speedup']:.2f} | {ours:.2f} | {ours / fixed['speedup']:.3f}"
            lines.append(f"| {trace} | {figures} | {fixed['setting']} |")
    return "\n".join(lines)


def batches(cells: Cells) -> str:
    speedups = {trace: cell["card"]["speedup"] for (trace, _), cell in cells.items() if trace.endswith("at once")}
    kinds = sorted({trace.split(",")[0] for trace in speedups})
    counts = sorted({int(trace.split(", ")[1].split()[0]) for trace in speedups})
    lines = ["### Batches\n", "| requests at once | " + " | ".join(kinds) + " |", "| --- " * (len(kinds) + 1) + "|"]
    for count in counts:
        figures = " | ".join(f"{speedups[f'{kind}, {count} at once']:.2f}" for kind in kinds)
        lines += [f"| {count} | {figures} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
