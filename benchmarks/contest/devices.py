"""Devices of the contest: step times from files that `langchain-card bench --steps` writes, or estimates."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.contest.contenders import Costs
from langchain_card.bench.step_times import Device, check_curve, interpolate, monotone
from langchain_card.errors import InvalidInputError

FOLDER = Path(__file__).parent / "data" / "devices"


def load_device(name: str) -> Device:
    """Load a shipped device by name, or any device by its file.

    Raises:
        InvalidInputError: there is no such device, or its file is not valid.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        row = json.loads(path.read_text())
        target, draft = (
            {int(rows): float(seconds) for rows, seconds in row[side].items()} for side in ("target", "draft")
        )
        slowdown = (float(row["slowdown"][0]), float(row["slowdown"][1]))
        for curve in (target, draft):
            check_curve(curve, slowdown)
        return Device(row["name"], row["measured"], row["source"], monotone(target), monotone(draft), slowdown)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise InvalidInputError("device", name, f"cannot be read ({error!r})", f"known: {known}") from error


def costs_of(device: Device, c: float | None = None) -> Costs:
    """Return a device's curves in seconds. `c` scales those of the draft so that a target pass lasts `c` steps."""
    scale = 1.0 if c is None else interpolate(device.target, 1) / (c * interpolate(device.draft, 1))
    return Costs(
        draft=lambda rows: scale * interpolate(device.draft, rows),
        target=lambda rows: interpolate(device.target, rows),
    )
