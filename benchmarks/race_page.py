"""The parts of README.md and docs/performance.md on the race, written from the file of `race.py`.

    python -m benchmarks.race_page [FILE]

FILE is docs/race.json by default. What lies between the two marks of each page is replaced. `make race` measures and
writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.pages import DOCS, ROOT, command_and_machine, listed, replace_part, weights
from langchain_card.bench.compare import markdown_table
from langchain_card.bench.method_table import PLAIN
from langchain_card.bench.race import Race, bandwidth_share, details, load_race, losses, peers_of, summary


def readme(race: Race) -> str:
    """Return the short part: the table, and how to read it."""
    asked, machine = race.about["asked"], race.about["machine"]
    notes = (
        f"{asked['count']} prompts of each text, {asked['max_tokens']} tokens each, greedy, on {machine['processor']}, "
        f"{machine['cores']} cores. Each peer runs plainly and at its best: its fastest speculation, with options that "
        "were found on other prompts. *card / best peer* compares with the fastest of all peer methods on that text. "
        "Options, bounds and losses: [docs/performance.md](docs/performance.md#the-race)."
    )
    return f"{markdown_table([*summary(race)])}\n\n{notes}"


def page(race: Race) -> str:
    """Return the long part: command, conditions, both tables, and what was lost."""
    measured = command_and_machine(race.about, "needs the peers and an hour")
    lists = [*_conditions(race), *(f"*{name}* was left out: {why}" for name, why in race.failed.items())]
    none = "None: no peer was faster than `card`, and none decoded plainly faster than `plain`."
    lost = losses(race) or [none if peers_of(race) else "No peer took part."]
    parts = [measured, markdown_table([*summary(race)]), markdown_table([*details(race)]), listed(lists)]
    return "\n\n".join([*parts, "Losses (medians, 95 % bounds):", listed(lost)])


def _conditions(race: Race) -> list[str]:
    notes = [weights(race.weights)]
    for name, options in race.about["options"].items():
        if options and name in race.weights:
            words = ", ".join(f"`{option} {value}`" for option, value in options.items())
            notes.append(f"Options of `{name}`: {words}.")
    notes.append(
        "Keys and values: this engine keeps integers of 16 and 8 bits; each peer has its default. Memory of `plain` is "
        "that of this engine's process, which holds the draft, too."
    )
    plains = [PLAIN, *peers_of(race)]
    if any(bandwidth_share(race, results, name) for results in race.sets.values() for name in plains):
        notes.append(
            f"*Bandwidth* is the share of {race.about['bandwidth'] / 1e9:.1f} GB/s, which all cores read together, at "
            f"{race.about['bytes_a_pass'] / 1e9:.2f} GB a pass: the target's file without its table of embeddings. "
            "OpenVINO converts the file and may read more."
        )
    notes.append(
        "*Times own plain* of `card` is over `plain`; that of a peer is over the same package without a draft."
    )
    notes.append(
        "This engine remembers earlier prompts, answers and what its controller learned, as in normal use. Peers read "
        "each prompt anew, which their first token shows."
    )
    return notes


def main(path: Path) -> None:
    race = load_race(path)
    replace_part(ROOT / "README.md", "race", readme(race))
    replace_part(DOCS / "performance.md", "race", page(race))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "race.json")
