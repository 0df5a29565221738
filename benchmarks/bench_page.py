"""The parts of docs/performance.md that are written from files of `langchain-card bench --json`.

    python -m benchmarks.bench_page long-texts
    python -m benchmarks.bench_page load

They read docs/long_texts.json and docs/load.json. `make long-texts` and `make load` measure, draw and write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.pages import DOCS, command_and_machine, listed, replace_part, weights
from langchain_card.bench.compare import Comparison, Row, conditions, markdown_table
from langchain_card.bench.load import Cell, LoadResults, table
from langchain_card.bench.long_texts import LongText
from langchain_card.bench.long_texts import table as table_of_lengths
from langchain_card.bench.method import Run, Served


def long_texts(found: dict[str, Any]) -> str:
    """Return the part on long texts."""
    texts = [LongText(**text) for text in found["texts"]]
    rows = [Row(**row | {"run": Run(**row["run"])}) for row in found["rows"]]
    results = Comparison(found["weights"], rows, found["failed"], greedy=not found["asked"]["temperature"])
    parts = (
        command_and_machine(found, "needs the built-in pair and half an hour"),
        markdown_table([*table_of_lengths(results, texts)]),
        "![Whole time and speed by the length of the text, a column per length of answer](long_texts.png)",
        listed([weights(found["weights"]), *conditions(results)]),
    )
    return "\n\n".join(parts)


def load(found: dict[str, Any]) -> str:
    """Return the part on many requests at once."""
    cells = [
        Cell(**cell | {"turns": tuple(tuple(Served(**answer) for answer in turn) for turn in cell["turns"])})
        for cell in found["cells"]
    ]
    parts = (
        command_and_machine(found, "needs the built-in pair and an hour or two"),
        markdown_table([*table(LoadResults(found["weights"], cells, found["failed"]))]),
        "![Tokens per second of all requests together over their number, a panel per set of prompts](load.png)",
        listed([weights(found["weights"])]),
    )
    return "\n\n".join(parts)


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "long-texts": ("long_texts.json", long_texts),
    "load": ("load.json", load),
}
"""The file and the text of a part, by the target of the Makefile."""


def main(target: str) -> None:
    """Write the part that a target has measured."""
    file, part = PARTS[target]
    replace_part(DOCS / "performance.md", target, part(json.loads((DOCS / file).read_text())))


if __name__ == "__main__":
    main(sys.argv[1])
