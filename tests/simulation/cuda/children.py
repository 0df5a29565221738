"""Child processes take part: their devices are simulated too, and their violations are raised in the parent.

A child's interpreter imports `startup/sitecustomize.py` before anything else; the package has no part in that.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tests.simulation.cuda import errors
from tests.simulation.cuda.simulation import Simulation

VARIABLE = "CARD_SIMULATED_CUDA"
STARTUP = Path(__file__).parent / "startup"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a child finds in its environment.

    Attributes:
        num_devices: number of devices.
        log: file that takes the violations of all children.
        prepare: "module:function", called in each child when its devices are there; "" for nothing.
    """

    num_devices: int
    log: str
    prepare: str


@contextmanager
def shared_with_children(num_devices: int, prepare: str) -> Iterator[None]:
    """Let processes that are started meanwhile, and their own, take part."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "violations"
        log.touch()
        given = json.dumps(asdict(Settings(num_devices, str(log), prepare)))
        paths = [str(STARTUP), str(ROOT), os.environ.get("PYTHONPATH", "")]
        with mock.patch.dict(os.environ, {VARIABLE: given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}):
            yield


def take_violations() -> list[errors.Violation]:
    """Return the violations of child processes since the last call."""
    log = Path(_settings().log)
    lines = log.read_text().splitlines()
    log.write_text("")
    found = list[errors.Violation]()
    for line in lines:
        kind, text = json.loads(line)
        found.append(getattr(errors, kind)(f"{text} (in a child process)"))
    return found


_entered = list[AbstractContextManager[None]]()


def enter() -> None:
    """Let this process take part in its parent's simulation, until it ends."""
    from tests.simulation.cuda.patches import patched

    settings = _settings()
    _entered.append(patched(Simulation(settings.num_devices, Path(settings.log))))
    _entered[0].__enter__()
    if settings.prepare:
        module, _, function = settings.prepare.partition(":")
        getattr(importlib.import_module(module), function)()


def _settings() -> Settings:
    return Settings(**json.loads(os.environ[VARIABLE]))
