"""Packages as `pip` leaves them: modules, and metadata with entry points."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, **drafters: str) -> None:
    """Writes the metadata of a package in `folder` that offers drafters."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{drafter.replace('_', '-')} = {place}\n" for drafter, place in drafters.items()]
    (metadata / "entry_points.txt").write_text("[langchain_card.drafters]\n" + "".join(lines))
