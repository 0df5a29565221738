"""Tools and tasks of `benchmarks/agents.py`: each task needs results that no model can know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal

TODAY = date(2026, 3, 14)
WEATHER = {
    "rome": "fog, 13 degrees Celsius",
    "oslo": "snow, -5 degrees Celsius",
    "paris": "hail, 20 degrees Celsius",
    "lima": "drizzle, 27 degrees Celsius",
    "cairo": "sandstorm, 35 degrees Celsius",
}
PRICES = {"lamp": 34, "chair": 85, "desk": 230, "pen": 3, "shelf": 61}
STAFF = {"Ann": "Lima", "Bob": "Oslo", "Cid": "Cairo", "Dora": "Rome"}
RESIDENTS = {"lima": 8852, "oslo": 709, "cairo": 9540, "rome": 2873, "paris": 2161}
FILES = {
    "order.txt": "Product: shelf\nPieces: 15",
    "trip.txt": "Destination: Cairo\nSeats: 4",
    "notes.txt": "The password of the cellar is MANGO-7.",
    "sizes.txt": "width 18\nheight 27",
    "agenda.txt": "Meeting with Dora on 2026-03-30.",
}
FACTORS = {"miles": 1.609, "kilometers": 1.0, "pounds": 0.4536, "kilograms": 1.0}


def today() -> str:
    """Get today's date."""
    return TODAY.isoformat()


def weather(city: str) -> str:
    """Get the current weather of a city."""
    return WEATHER.get(city.lower(), f"Error: no weather of {city}")


def price(product: str) -> str:
    """Get the price of a product in euros."""
    return str(PRICES.get(product.lower().removesuffix("s"), f"Error: no product {product}"))


def employee_city(name: str) -> str:
    """Get the city in which an employee works."""
    return STAFF.get(name, f"Error: no employee {name}")


def residents(city: str) -> str:
    """Get the number of residents of a city, in thousands."""
    return str(RESIDENTS.get(city.lower(), f"Error: no city {city}"))


def read_file(path: str) -> str:
    """Read a text file."""
    return FILES.get(path, f"Error: no file {path}")


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:.10g}"


def days_between(first: str, last: str) -> str:
    """Count the days from one date to another, both as YYYY-MM-DD."""
    try:
        return str((date.fromisoformat(last) - date.fromisoformat(first)).days)
    except ValueError as error:
        return f"Error: {error}"


Unit = Literal["miles", "kilometers", "pounds", "kilograms", "celsius", "fahrenheit"]


def convert(value: float, from_unit: Unit, to_unit: Unit) -> str:
    """Convert a value from one unit to another."""
    if (from_unit, to_unit) == ("celsius", "fahrenheit"):
        return f"{value * 9 / 5 + 32:g}"
    if from_unit in FACTORS and to_unit in FACTORS:
        return f"{value * FACTORS[from_unit] / FACTORS[to_unit]:.4g}"
    return f"Error: cannot convert {from_unit} to {to_unit}"


TOOLS = (today, weather, price, employee_city, residents, read_file, add, multiply, days_between, convert)


@dataclass(frozen=True)
class Task:
    """A question with the calls that it needs.

    Attributes:
        question: the user's message.
        needs: number of calls of each tool that the answer needs; empty if it needs none.
        right: regular expressions that a right answer contains, each.
    """

    question: str
    needs: Mapping[str, int]
    right: Sequence[str]

    def is_right(self, answer: str) -> bool:
        text = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
        return all(re.search(pattern, text, re.IGNORECASE) for pattern in self.right)


def _number(value: str) -> str:
    return rf"(?<![\d.]){re.escape(value)}(?!\d|\.\d*[1-9])"


DATE = r"2026-03-14|March 14|14(th)?( of)? March"

TUNING = (
    Task("What day is it today, and what is the weather in Lima?", {"today": 1, "weather": 1}, [DATE, "27"]),
    Task("Add 12 and 49, then multiply the result by 25.", {"add": 1, "multiply": 1}, [_number("1525")]),
    Task("What do 14 chairs cost?", {"price": 1, "multiply": 1}, [_number("1190")]),
    Task("What is the weather in the city where Bob works?", {"employee_city": 1, "weather": 1}, ["snow|-5"]),
    Task("Read trip.txt and tell me the weather at the destination.", {"read_file": 1, "weather": 1}, ["sandstorm|35"]),
    Task("How warm is it in Paris, in degrees Fahrenheit?", {"weather": 1, "convert": 1}, [_number("68")]),
    Task("How many days are left until 2026-05-01?", {"today": 1, "days_between": 1}, [_number("48")]),
    Task("What is the price of a lamp, and the price of a shelf?", {"price": 2}, [_number("34"), _number("61")]),
    Task(
        "How many thousand residents do Oslo and Cairo have together?", {"residents": 2, "add": 1}, [_number("10249")]
    ),
    Task(
        "Tell me three things: the date, the price of a desk and what is in notes.txt.",
        {"today": 1, "price": 1, "read_file": 1},
        [DATE, _number("230"), "MANGO-7"],
    ),
)
"""Tasks for the choice of words; `JUDGED` decides."""

JUDGED = (
    Task("What is today's date, and how is the weather in Rome?", {"today": 1, "weather": 1}, [DATE, "fog|13"]),
    Task("Multiply 45 by 17, add 120 and then add 30.", {"multiply": 1, "add": 2}, [_number("915")]),
    Task("Is it warmer in Oslo or in Cairo? Tell me both temperatures.", {"weather": 2}, ["-5", "35"]),
    Task("How much do 12 lamps cost?", {"price": 1, "multiply": 1}, [_number("408")]),
    Task("What does a desk and a chair cost together?", {"price": 2, "add": 1}, [_number("315")]),
    Task("What is the weather where Ann works?", {"employee_city": 1, "weather": 1}, ["drizzle|27"]),
    Task("How many residents does the city have in which Cid works?", {"employee_city": 1, "residents": 1}, ["9540"]),
    Task("Read order.txt. What is the price of the product in it?", {"read_file": 1, "price": 1}, [_number("61")]),
    Task("Multiply the width in sizes.txt by the height.", {"read_file": 1, "multiply": 1}, [_number("486")]),
    Task(
        "What does the order in order.txt cost in total?",
        {"read_file": 1, "price": 1, "multiply": 1},
        [_number("915")],
    ),
    Task("How many days is it from today to 2026-04-01?", {"today": 1, "days_between": 1}, [_number("18")]),
    Task(
        "How many days from now is the meeting in agenda.txt?",
        {"read_file": 1, "today": 1, "days_between": 1},
        [_number("16")],
    ),
    Task("Convert 26 miles to kilometers and 70 kilograms to pounds.", {"convert": 2}, ["41.83", "154.3"]),
    Task("How cold is it in Oslo in Fahrenheit?", {"weather": 1, "convert": 1}, [_number("23")]),
    Task("What is the date? And what is the password in notes.txt?", {"today": 1, "read_file": 1}, [DATE, "MANGO-7"]),
    Task(
        "Give me the price of a pen, the weather in Paris, and the residents of Lima.",
        {"price": 1, "weather": 1, "residents": 1},
        [_number("3"), "hail|20", "8852"],
    ),
    Task(
        "In which cities do Bob and Dora work, and what is the date today?",
        {"employee_city": 2, "today": 1},
        ["Oslo", "Rome", DATE],
    ),
    Task("Add 128 and 256, and add 77 to the sum.", {"add": 2}, [_number("461")]),
    Task("A lamp costs how many dollars, if a euro is 1.5 dollars?", {"price": 1, "multiply": 1}, [_number("51")]),
    Task(
        "How many thousand people live in Rome and Paris in total?",
        {"residents": 2, "add": 1},
        [_number("5034")],
    ),
)

SINGLE = (
    Task("What is the weather in Cairo?", {"weather": 1}, ["sandstorm|35"]),
    Task("What does a chair cost?", {"price": 1}, [_number("85")]),
    Task("What is 413 times 87?", {"multiply": 1}, [_number("35931")]),
    Task("What is the capital of France?", {}, ["Paris"]),
    Task("Hello! How are you?", {}, [""]),
    Task("Write a Python function that reverses a string.", {}, ["def "]),
    Task("Thanks, that is all.", {}, [""]),
    Task("What is a hash table?", {}, ["key"]),
)
"""Questions that need one call or none: a form that calls too much fails here."""
