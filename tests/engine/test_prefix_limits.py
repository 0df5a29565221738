"""A folder of prefixes is bounded: by the disk, and in the time that it takes from others."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Reading
from langchain_card.core.request import FinishReason, SamplingParams
from langchain_card.engine import prefix_folder, target_worker
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated.engine_process import END_SECONDS
from langchain_card.engine.prefix_folder import BLOCK, CLOSE_SECONDS, _shared_secret
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.models.files import MARGIN
from langchain_card.models.store import ModelStore
from tests.support.held import held
from tests.support.prefixes import EACH, OTHER, PROMPT, WHOLE, answer, answers, blocks, folder_config, size
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("folder")


def test_the_size_is_bounded_and_what_was_unused_longest_goes(
    target: str, folder: Path, written: tuple[Path, Any]
) -> None:
    shutil.copytree(written[0], folder)
    block = blocks(folder)[0].stat().st_size

    def config(num_blocks: int) -> EngineConfig:
        return folder_config(target, limits=Limits(max_prefix_bytes=num_blocks * block, max_num_seqs=4))

    answers(config(2 * EACH + 1), (PROMPT, "other"), (PROMPT, "new"))
    assert size(folder) == (2 * EACH + 1) * block
    begun = [([*PROMPT[:-BLOCK], *OTHER[:9]], tenant) for tenant in ("new", "other", "")]
    known = [cached for _, cached in answers(config(2 * EACH + 1), *begun)]
    assert known == [WHOLE - BLOCK, WHOLE - BLOCK, BLOCK], "the beginning of the oldest is left"
    answer(config(2), OTHER)
    assert size(folder) == 2 * block
    assert answer(config(2), OTHER)[1] == 2 * BLOCK, "a text that is too long keeps its beginning"
    with pytest.raises(InvalidInputError, match=r"max_prefix_bytes = 999: .* 256 tokens.*Hint: raise it"):
        Engine(folder_config(target, limits=Limits(max_prefix_bytes=999)))


def test_some_of_the_disk_stays_free(
    target: str, folder: Path, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written[0], folder)
    block = blocks(folder)[0].stat().st_size
    disk = MARGIN + (EACH + 1) * block + block // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk - size(folder)))
    answer(folder_config(target), PROMPT, "new")
    assert size(folder) == (EACH + 1) * block
    assert answer(folder_config(target), PROMPT, "new")[1] == WHOLE


def test_a_full_disk_gives_one_warning(target: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, before = folder_config(target), resource.getrlimit(resource.RLIMIT_FSIZE)
    texts = [(PROMPT, ""), (OTHER, "")]
    expected = answers(replace(config, prefix_cache="memory"), *texts)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert answers(config, *texts) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (message,) = caplog.messages
    assert f"no prefixes are kept in {folder}" in message and "File too large" in message
    assert {file.name for file in folder.iterdir()} == {"secret"}
    answer(config, PROMPT)
    assert len(blocks(folder)) == EACH, "there is room again"


def test_several_processes_that_start_at_once_share_a_secret(tmp_path: Path) -> None:
    for n in range(20):
        (folder := tmp_path / str(n)).mkdir()
        barrier, found = threading.Barrier(4), set()

        def run(file: Path, barrier: threading.Barrier, found: set[bytes]) -> None:
            barrier.wait()
            found.add(_shared_secret(file))

        threads = [threading.Thread(target=run, args=(folder / "secret", barrier, found)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1 and [*folder.iterdir()] == [folder / "secret"]


def test_what_a_process_that_died_has_left_is_deleted_later(target: str, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    old, new = (folder / f"{name}-x.tmp" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half a block")
    os.utime(old, (1e9, 1e9))
    answer(folder_config(target), OTHER[:9])
    assert not old.exists() and new.exists(), "another process may be writing it"


def test_what_is_not_written_soon_after_the_end_is_dropped_with_a_warning(
    target: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * CLOSE_SECONDS < END_SECONDS
    replace_file, writes = Path.replace, threading.Event()
    monkeypatch.setattr(prefix_folder, "CLOSE_SECONDS", 0.0)

    def replace_at_the_end(temporary: Path, file: Path) -> Path:
        writes.set()
        while prefixes._deadline == float("inf"):
            threading.Event().wait(0.01)
        return replace_file(temporary, file)

    with caplog.at_level(logging.WARNING), Engine(folder_config(target)) as engine:
        prefixes = engine.backend._target._prefixes  # type: ignore[attr-defined]
        monkeypatch.setattr(prefixes._writer, "join", lambda timeout: threading.Thread.join(prefixes._writer, 30))
        monkeypatch.setattr(Path, "replace", replace_at_the_end)
        engine.submit(PROMPT, SamplingParams(max_tokens=8)).result()
        assert writes.wait(60)
    assert len(blocks(folder)) == 1, "the block in hand"
    (message,) = caplog.messages
    assert f"{WHOLE - BLOCK:,} tokens are not kept in {folder}" in message


def test_other_requests_go_on_while_a_text_is_loaded(
    target: str, folder: Path, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written[0], folder)
    monkeypatch.setattr(target_worker, "LOAD_BLOCKS", 1)
    passes: list[list[Any]] = []
    with Engine(folder_config(target, limits=Limits(max_num_seqs=2))) as engine:
        worker: Any = engine.backend._target  # type: ignore[attr-defined]
        verify = worker.verify
        monkeypatch.setattr(worker, "verify", lambda windows: (passes.append(verify(windows)), passes[-1])[1])
        permits = held(engine, monkeypatch)
        other = engine.submit(OTHER[:9], SamplingParams(max_tokens=40))
        permits.release()
        next(pieces := iter(other))
        generation = engine.submit(PROMPT, SamplingParams(max_tokens=8))
        permits.release(99)
        result = generation.result()
        pieces.close()
    assert (result.token_ids, result.stats.cached_tokens) == (written[1][0], WHOLE)
    loading = [
        (report.read, report.total, len(reports)) for reports in passes for report in reports if type(report) is Reading
    ]
    assert loading == [(n * BLOCK, len(PROMPT), 2) for n in range(1, EACH + 1)], "a verdict beside each block"


def test_a_text_that_no_other_request_waits_for_is_loaded_at_once(
    target: str, folder: Path, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass without work for the model would teach false times, and be taken for a first step."""
    shutil.copytree(written[0], folder)
    monkeypatch.setattr(target_worker, "LOAD_BLOCKS", 1)
    with Engine(folder_config(target)) as engine:
        generation = engine.submit(PROMPT, SamplingParams(max_tokens=8, logprobs=2))
        assert not [*generation.readings()]
        result = generation.result()
    assert ((result.token_ids, result.logprobs), result.stats.cached_tokens) == (written[1], WHOLE)


def test_a_request_may_be_left_while_its_text_is_loaded(
    target: str, folder: Path, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written[0], folder)
    monkeypatch.setattr(target_worker, "LOAD_BLOCKS", 1)
    with Engine(folder_config(target, limits=Limits(max_num_seqs=2))) as engine:
        permits = held(engine, monkeypatch)
        other = engine.submit(OTHER[:9], SamplingParams(max_tokens=40))
        permits.release()
        next(pieces := iter(other))
        generation = engine.submit(PROMPT, SamplingParams(max_tokens=8))
        permits.release(2)  # the first is for a pass that may have begun without it
        for reading in generation.readings():
            assert BLOCK <= reading.read < WHOLE and reading.total == len(PROMPT)
            generation.abort()
            permits.release(99)
        assert generation.result().finish_reason is FinishReason.ABORT
        pieces.close()
        result = engine.submit(PROMPT, SamplingParams(max_tokens=8, logprobs=2)).result()
    assert ((result.token_ids, result.logprobs), result.stats.cached_tokens) == (written[1], WHOLE)


def test_a_process_that_runs_writes_no_more_once_the_folder_was_deleted(
    target: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        with Engine(folder_config(target)) as engine:
            engine.submit(PROMPT, SamplingParams(max_tokens=8)).result()
            wait_until(lambda: len(blocks(folder)) == EACH)
            ModelStore().remove("prefixes")
            assert not folder.exists()
            answer(folder_config(target), OTHER)
            there = blocks(folder)
            engine.submit([*PROMPT, 9], SamplingParams(max_tokens=8)).result()
        assert blocks(folder) == there and len(there) == EACH
    assert "deleted while this process ran" in "".join(caplog.messages)
