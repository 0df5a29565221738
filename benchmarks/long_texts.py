"""The section on long texts of docs/performance.md, written from the rows of `langchain-card bench --context`.

    python benchmarks/long_texts.py

It reads docs/long_texts.json and replaces what lies between the two marks of the page. `make long-texts` measures,
draws and writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langchain_card.bench.compare import Comparison, Row, conditions, markdown_table
from langchain_card.bench.long_texts import LongText, table
from langchain_card.bench.method import Run

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- begin: make long-texts -->", "<!-- end: make long-texts -->"


def section(found: dict[str, Any]) -> str:
    """Return command, machine, table, picture and notes of a file of rows."""
    texts = [LongText(**text) for text in found["texts"]]
    rows = [Row(**row | {"run": Run(**row["run"])}) for row in found["rows"]]
    results = Comparison(found["weights"], rows, found["failed"], greedy=not found["asked"]["temperature"])
    machine, packages = found["machine"], {"torch": found["machine"]["torch"], **found["packages"]}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    weights = "; ".join(f"`{name}`: {words}" for name, words in found["weights"].items())
    return "\n\n".join(
        (
            "<!-- runs: not in CI, needs the built-in pair and half an hour -->\n```console\n$ "
            + found["command"]
            + "\n```",
            f"Measured on {machine['processor']}, {machine['cores']} cores, {machine['memory']} ({versions}).",
            markdown_table([*table(results, texts)]),
            "![Whole time and speed by the length of the text, a column per length of answer](long_texts.png)",
            "\n".join(f"- {note}" for note in (f"Weights: {weights}.", *conditions(results))),
        )
    )


def main() -> None:
    page = DOCS / "performance.md"
    before, rest = page.read_text().split(BEGIN)
    text = section(json.loads((DOCS / "long_texts.json").read_text()))
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
