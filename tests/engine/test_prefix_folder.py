"""Beginnings of texts in a folder: found again by the next process, and refused or missed where they must be."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from langchain_card import runtime
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import prefix_folder
from langchain_card.engine.engine import Engine
from langchain_card.engine.prefix_folder import BLOCK, LEAST_TOKENS, dependencies
from langchain_card.limits import Limits
from langchain_card.models.files import source_hash
from langchain_card.models.loader import resolve
from langchain_card.models.store import default_cache
from tests.support import tiny
from tests.support.prefixes import EACH, OTHER, PROMPT, WHOLE, answer, answers, blocks, folder_config

pytestmark = pytest.mark.usefixtures("folder")
CHILD = "import sys; from tests.engine import test_prefix_folder as test; getattr(test, sys.argv[1])(sys.argv[2])"


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"dtype": "float64"},
        pytest.param({"quantization": "int8", "kv_dtype": "float"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "exact": "strict"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_next_engine_loads_and_answers_with_the_same_bits(target: str, options: dict[str, Any]) -> None:
    config, longer = folder_config(target, **options), [*PROMPT, *OTHER[:BLOCK]]
    read = answers(replace(config, prefix_cache="memory"), (PROMPT, "one"), (longer, "other"))
    (expected, _), (expected_of_longer, _) = read
    assert [cached for _, cached in read] == [0, 0]
    assert answer(config, PROMPT) == (expected, 0)
    assert answer(config, longer) == (expected_of_longer, WHOLE)
    assert answer(config, PROMPT) == (expected, WHOLE)


def test_texts_share_blocks_and_go_on_where_memory_ends(target: str) -> None:
    config = folder_config(target, limits=Limits(max_num_seqs=1))
    expected, _ = answer(config, PROMPT)
    assert [*answers(config, (PROMPT[: BLOCK + 9], ""), (PROMPT, ""))] == [(ANY, BLOCK), (expected, WHOLE)]
    assert answer(config, [*PROMPT[: 2 * BLOCK + 9], *OTHER])[1] == 2 * BLOCK


def test_files_are_written_once_and_their_times_touched(target: str, folder: Path) -> None:
    config = folder_config(target)
    answer(config, PROMPT)
    first = {file: file.stat() for file in blocks(folder)}
    assert len(first) == EACH
    answers(config, (PROMPT, ""), (OTHER[: LEAST_TOKENS - 9], ""))
    assert {file.stat().st_ino for file in blocks(folder)} == {status.st_ino for status in first.values()}
    assert all(file.stat().st_mtime_ns > status.st_mtime_ns for file, status in first.items())
    assert blocks(folder) == [*first], "a text loses its end first, and short ones are not written"


def test_only_this_user_can_read_them(target: str, folder: Path) -> None:
    answer(folder_config(target), PROMPT, tenant="alice")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in [*blocks(folder), folder / "secret"]} == {0o600}
    assert not any("alice" in file.name for file in folder.iterdir())


def flip(place: int) -> Callable[[Path, Path], None]:
    def damage(file: Path, other: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path, Path], Any]] = {
    "a byte of a number": flip(-999),
    "a byte of the header": flip(40),
    "the size of the header": flip(2),
    "its end": lambda file, other: os.truncate(file, file.stat().st_size - 9),
    "all of it": lambda file, other: os.truncate(file, 0),
    "no safetensors": lambda file, other: file.write_bytes(b"\xff" * 999),
    "another tenant's": lambda file, other: shutil.copyfile(other, file),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_file_is_refused_and_replaced(
    target: str,
    folder: Path,
    written: tuple[Path, Any],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path, Path], Any],
) -> None:
    shutil.copytree(written[0], folder)  # with modes and times
    file, other = (blocks(folder)[1 + tenant * EACH] for tenant in range(2))
    content = file.read_bytes()
    damage(file, other)
    assert file.read_bytes() != content
    with caplog.at_level(logging.WARNING):
        assert answer(folder_config(target), PROMPT) == (written[1], BLOCK)
    (message,) = caplog.messages
    assert str(file) in message and "read anew: " in message
    assert file.read_bytes() == content, "the same bits were written again"


def test_a_file_that_cannot_be_read_now_is_kept(
    target: str,
    folder: Path,
    written: tuple[Path, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(written[0], folder)
    before, read = blocks(folder), Path.read_bytes

    def fail(file: Path) -> bytes:
        if file.suffix == ".safetensors":
            raise OSError(24, "Too many open files")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with caplog.at_level(logging.WARNING):
        assert answer(folder_config(target), PROMPT) == (written[1], 0)
    assert "Too many open files" in "".join(caplog.messages)
    monkeypatch.undo()
    assert {*blocks(folder)} == {*before}


MISSES: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "other weights at the same place": lambda config: config,
    "another number format": lambda config: replace(config, kv_dtype="float"),
    "another type": lambda config: replace(config, quantization=None, kv_dtype="auto", dtype="float64"),
    "steps of one shape": lambda config: replace(config, exact="strict", kv_dtype="auto"),
}


@pytest.mark.parametrize("case", MISSES)
def test_nothing_is_found_for(case: str, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny.make_target("qwen2", tmp_path / "target")
    config = folder_config(target, quantization="int8", kv_dtype="int8")
    answer(config, PROMPT)
    if case == "other weights at the same place":
        tiny.make_target("qwen2", tmp_path / "target", seed=5)
    config = MISSES[case](config)
    expected, _ = answer(replace(config, prefix_cache="memory"), PROMPT)
    with caplog.at_level(logging.WARNING):
        assert answer(config, PROMPT) == (expected, 0)
    assert not caplog.messages and len(blocks(folder)) == 2 * EACH


def test_nothing_is_found_for_another_tenant_or_by_another_secret(
    target: str, folder: Path, written: tuple[Path, Any]
) -> None:
    shutil.copytree(written[0], folder)
    texts = [(PROMPT, tenant) for tenant in ("other", "one", " other", "other ")]
    assert [cached for _, cached in answers(folder_config(target), *texts)] == [WHOLE, 0, 0, 0]
    (folder / "secret").write_bytes(b"")
    assert answer(folder_config(target), PROMPT, "other") == (written[1], 0)
    assert (folder / "secret").stat().st_size == 32


def test_a_folder_that_is_open_to_others_is_not_used(
    target: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o755)
    with caplog.at_level(logging.WARNING):
        assert answer(folder_config(target), PROMPT)[1] == 0
    assert "chmod 700" in "".join(caplog.messages) and not blocks(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")
def test_a_failure_of_cuda_loses_the_text_and_nothing_else(
    target: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with caplog.at_level(logging.WARNING), Engine(folder_config(target)) as engine:
        prefixes: Any = engine.backend._target._prefixes  # type: ignore[attr-defined]
        monkeypatch.setattr(prefixes._runner, "synchronize", lost)
        for _ in range(2):
            assert len(engine.submit(PROMPT, SamplingParams(max_tokens=8)).result().token_ids) == 8
    assert len(caplog.messages) == 1 and "CUDA" in caplog.messages[0] and not blocks(folder)


def test_texts_depend_on_the_code_and_its_compiler(target: str, tmp_path: Path) -> None:
    config, source = folder_config(target), Path(runtime.__path__[0])
    shutil.copytree(source, tmp_path / "code", copy_function=shutil.copyfile)
    assert source_hash(tmp_path / "code") == source_hash(source), "times do not matter"
    kernel = tmp_path / "code" / "cpu" / "block_attention.py"
    kernel.write_text(kernel.read_text() + "\n")
    changed = source_hash(tmp_path / "code")
    assert changed != source_hash(source)
    kernel.rename(kernel.with_name("block_attentions.py"))
    assert source_hash(tmp_path / "code") != changed, "names matter"
    described = dependencies(resolve(config, None).target, config)
    for part in (source_hash(source), importlib.metadata.version("numba"), importlib.metadata.version("llvmlite")):
        assert part in described


def write(target: str) -> None:
    """Run in a process of its own."""
    prefix_folder.CLOSE_SECONDS = 60.0
    answer(folder_config(target), PROMPT)


def write_until_killed(target: str) -> None:
    """Run in a process of its own, which dies before its third block has its name."""
    rename, folder = Path.replace, default_cache() / "prefixes"

    def rename_or_die(temporary: Path, file: Path) -> Path:
        if len(blocks(folder)) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(temporary, file)

    Path.replace = rename_or_die  # type: ignore[assignment]
    write(target)


def start(function: Callable[[str], None], target: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, function.__name__, target]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_write_the_same_text_and_a_third_loads_it(
    target: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = answer(folder_config(target, prefix_cache="memory"), PROMPT)
    children = [start(write, target) for _ in range(2)]
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0] and "prefixes" not in "".join(errors)
    assert len(blocks(folder)) == EACH
    with caplog.at_level(logging.WARNING):
        assert answer(folder_config(target), PROMPT) == (expected, WHOLE)
    assert not caplog.messages


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(target: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = answer(folder_config(target, prefix_cache="memory"), PROMPT)
    child = start(write_until_killed, target)
    child.communicate(timeout=200)
    assert child.returncode == -signal.SIGKILL and len(blocks(folder)) == 2 and [*folder.glob("*.tmp")]
    assert answer(folder_config(target), PROMPT) == (expected, 2 * BLOCK)
    assert answer(folder_config(target), PROMPT) == (expected, WHOLE) and not caplog.messages


@pytest.mark.slow
def test_an_isolated_engine_writes_and_loads(target: str) -> None:
    expected, _ = answer(folder_config(target, isolate=True), PROMPT)
    assert answer(folder_config(target), PROMPT) == (expected, WHOLE)
    assert answer(folder_config(target, isolate=True), PROMPT) == (expected, WHOLE)
