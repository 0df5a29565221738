"""Hashes of models' files: by content, read once."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest

from langchain_card.models.download import BUILTINS
from langchain_card.models.files import SMALL_FILE, file_hash
from langchain_card.models.store import STAMP, ModelStore
from tests.support import tiny

OLD = 1_700_000_000


def weights(file: Path, seed: int = 0, modified: int = OLD) -> Path:
    file.write_bytes(bytes([seed]) * SMALL_FILE)
    os.utime(file, (modified, modified))
    return file


def true_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test are old at once: the time of their last change of any kind cannot be set."""
    monkeypatch.setattr("langchain_card.models.files._SETTLED_SECONDS", -1.0)


@pytest.mark.usefixtures("settled")
def test_a_large_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    file, known = weights(tmp_path / "a.gguf"), tmp_path / "hashes"
    first = file_hash(file, known)
    assert first == true_hash(file)
    (note,) = known.iterdir()
    note.write_text(note.read_text().replace(first, "f" * 64))
    assert file_hash(file, known) == "f" * 64, "it was not read again"
    time.sleep(0.05)  # the disk's clock has ticks of some milliseconds
    weights(file, seed=1)  # the same size and the same time of modification
    assert file_hash(file, known) == true_hash(file) != first
    assert [*known.iterdir()] == [note], "the hash of the file as it was is gone"
    weights(file, seed=2, modified=OLD + 1)
    assert file_hash(file, known) == true_hash(file)
    note.write_text("{")
    assert file_hash(file, known) == true_hash(file), "what is damaged is made anew"


def test_what_changed_just_now_is_not_kept_and_small_files_never(tmp_path: Path) -> None:
    known = tmp_path / "hashes"
    small = tmp_path / "small.json"
    small.write_text("{}")
    for file in (weights(tmp_path / "a.gguf"), small):
        assert file_hash(file, known) == true_hash(file)
    assert not known.exists()


@pytest.mark.usefixtures("settled")
def test_a_folder_that_cannot_be_written_to_costs_time_alone(tmp_path: Path) -> None:
    known = tmp_path / "hashes"
    known.write_text("no folder")
    file = weights(tmp_path / "a.gguf")
    assert file_hash(file, known) == true_hash(file)


def test_content_counts_and_not_its_place(tiny_pairs: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    target, store = Path(tiny_pairs["llama"][0]), ModelStore(tmp_path)
    copy = Path(shutil.copytree(target, tmp_path / "elsewhere"))
    first = store.content_hash(target)
    (copy / "README.md").write_text("words")
    (copy / STAMP).write_text("{}")
    assert store.content_hash(copy) == first
    shutil.copyfile(copy / "config.json", copy / "other.json")
    assert store.content_hash(copy) != first
    file = tiny.tiny_gguf(tmp_path / "a.gguf")
    assert store.content_hash(file) == store.content_hash(Path(shutil.copyfile(file, tmp_path / "b.gguf")))


def test_a_model_of_this_package_has_the_hash_that_was_compared_when_it_came(tmp_path: Path) -> None:
    name, store = "smollm2-135m", ModelStore(tmp_path)
    source = tmp_path / "models" / name / "source.gguf"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"not read")
    assert store.content_hash(source) == BUILTINS[name].sha256
    elsewhere = Path(shutil.copyfile(source, tmp_path / "a.gguf"))
    assert store.content_hash(elsewhere) == true_hash(elsewhere)


def test_converted_folders_stand_for_what_they_were_made_of(
    tiny_pairs: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    target, store = tiny_pairs["llama"][0], ModelStore(tmp_path)
    for form in ("float", "int8"):
        assert store.source(target, store.prepare(target, form)) == Path(target).resolve()
