"""Packages as `pip` leaves them: modules, and metadata with entry points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_card import plugins


def install(folder: Path, name: str, kind: str = "drafters", **offered: str) -> None:
    """Writes the metadata of a package in `folder` that offers plug-ins of a kind."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{plug_in.replace('_', '-')} = {place}\n" for plug_in, place in offered.items()]
    (metadata / "entry_points.txt").write_text(f"[langchain_card.{kind}]\n" + "".join(lines))


@contextlib.contextmanager
def installed(folder: Path, name: str, kind: str = "drafters", **offered: str) -> Iterator[None]:
    """Such a package, found in this process for as long as the block runs."""
    install(folder, name, kind, **offered)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        plugins._offered.cache_clear()
        try:
            yield
        finally:
            plugins._offered.cache_clear()
