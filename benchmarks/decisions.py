"""How often decisions are right, how sure they are, and what they take, beside answers under a schema.

    python benchmarks/decisions.py [--schedule auto] [--json FILE]

LETTERS is a set of messages to a shop, each with the team that handles it and whether it needs an answer today. Every
letter is decided three ways, in turns, with the built-in target:

- *decision*: `CARDDecisionModel`, both questions in one call, which reads the letter once.
- *schema*: `with_structured_output` of an object with both fields.
- *text*: a free answer, which counts as right if it begins with the label.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from langchain_core.decisions import Choice, Noul
from pydantic import BaseModel

from langchain_card import CARDChatModel, CARDDecisionModel
from langchain_card.config import Schedule

TEAMS: dict[str, Any] = {
    "billing": "Payments, prices, invoices and refunds.",
    "technical": "Devices, apps and passwords that do not work.",
    "delivery": "Parcels, addresses and dates of arrival.",
    "sales": "Questions before an order, and offers for companies.",
}
TEAM = "Which team should handle this letter?"
URGENT = "Does the customer demand an answer today?"

LETTERS = (
    ("You took 40 euros twice from my account.", "billing", False),
    ("My card was charged although I cancelled. Refund me today or I go to my lawyer!", "billing", True),
    ("Could you send the invoice of March again, this time with our VAT number?", "billing", False),
    ("The discount code was accepted, but the full price was taken.", "billing", False),
    ("I pay 12 euros a month. Why was it 15 in May?", "billing", False),
    ("The refund should have been here two weeks ago. Call me back within the hour.", "billing", True),
    ("The app closes by itself whenever I open the camera.", "technical", False),
    ("I forgot my password, and the mail to reset it never comes.", "technical", False),
    (
        "Our checkout has shown error 503 since this morning and we lose every order. Help us now!",
        "technical",
        True,
    ),
    ("The speaker hums at low volume. Is there a firmware for it?", "technical", False),
    ("The thermostat does not connect to the wireless network.", "technical", False),
    ("The lock does not open any more and my children are inside. I need somebody right now!", "technical", True),
    ("The tracking page has said 'in transit' for nine days.", "delivery", False),
    ("The driver left the parcel at a neighbour whom I do not know.", "delivery", False),
    ("I moved. Please send order 5512 to the new address.", "delivery", False),
    ("The cake was to come at noon and the party begins at four. Where is it? Answer now!", "delivery", True),
    ("Only two of the three boxes have arrived.", "delivery", False),
    ("The medicine must be here this evening. Tell me at once whether it will.", "delivery", True),
    ("Do you offer lower prices for schools that buy thirty tablets?", "sales", False),
    ("Which of the two vacuum cleaners is better for carpets? I would like to order one.", "sales", False),
    ("We are a hotel with 80 rooms and would like an offer for coffee machines.", "sales", False),
    ("Is there a trial before one subscribes to the large plan?", "sales", False),
    ("We sign with another supplier at five o'clock unless your offer for 200 chairs is here before.", "sales", True),
    ("Will the red version of the lamp be sold again before Christmas?", "sales", False),
)


class Handled(BaseModel):
    """What is done with a letter."""

    team: Literal["billing", "technical", "delivery", "sales"]
    urgent: bool


Answer = tuple[str, bool, float, float]
"""The team, whether it is urgent, and the probabilities of both."""


def ways(schedule: Schedule) -> dict[str, Callable[[str], Answer]]:
    """Return what answers a letter, by name."""
    chat = CARDChatModel(schedule=schedule, max_tokens=60).load()
    decide = CARDDecisionModel()
    questions: dict[str, Any] = {"team": Choice(instructions=TEAM, criteria=TEAMS), "urgent": Noul(instructions=URGENT)}
    described = "\n".join(f"- {team}: {use}" for team, use in TEAMS.items())
    extract = chat.with_structured_output(Handled)

    def decision(letter: str) -> Answer:
        found = decide.invoke({"state": letter, "questions": questions})
        team, urgent = found.choices["team"], found.nouls["urgent"].noul
        return team.choice, urgent > 0.5, team.confidence, max(urgent, 1 - urgent)

    def schema(letter: str) -> Answer:
        request = f"{TEAM} The field `team` is one of:\n{described}\nThe field `urgent`: {URGENT}\n\nLetter: {letter}"
        found: Any = extract.invoke(request)
        return found.team, found.urgent, 1.0, 1.0

    def text(letter: str) -> Answer:
        request = f"{TEAM}\n{described}\nAnswer with the name of the team alone.\n\nLetter: {letter}"
        team = chat.invoke(request, max_tokens=8).text.strip().lower()
        request = f"{URGENT} Answer with yes or no alone.\n\nLetter: {letter}"
        urgent = chat.invoke(request, max_tokens=4).text.strip().lower()
        return next((name for name in TEAMS if team.startswith(name)), "?"), urgent.startswith("yes"), 1.0, 1.0

    return {"decision": decision, "schema": schema, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="auto", choices=get_args(Schedule), help="of the answers in text")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    answering = ways(args.schedule)
    for answer in answering.values():
        answer("Hello!")  # reads what all letters have in common
    seconds = {name: list[float]() for name in answering}
    right = {name: [0, 0] for name in answering}
    sure: dict[bool, list[float]] = {True: [], False: []}
    for number, (letter, team, urgent) in enumerate(LETTERS):
        names = list(answering)[number % 3 :] + list(answering)[: number % 3]
        for name in names:
            begun = time.perf_counter()
            found = answering[name](letter)
            seconds[name].append(time.perf_counter() - begun)
            right[name][0] += found[0] == team
            right[name][1] += found[1] == urgent
            if name == "decision":
                sure[found[0] == team].append(found[2])
                sure[found[1] == urgent].append(found[3])
    print(f"{'way':10} {'team':>9} {'urgent':>9} {'seconds a letter':>17}")
    for name, (teams, urgencies) in right.items():
        median = statistics.median(seconds[name])
        print(f"{name:10} {teams:>3} of {len(LETTERS)} {urgencies:>3} of {len(LETTERS)} {median:>17.2f}")
    for good, values in sure.items():
        if values:
            print(f"mean confidence of {'right' if good else 'wrong'} decisions: {statistics.mean(values):.2f}")
    if args.json:
        args.json.write_text(json.dumps({"right": right, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
