"""Packages as `pip` leaves them: modules, and metadata with entry points."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, kind: str = "drafters", **offered: str) -> None:
    """Writes the metadata of a package in `folder` that offers plug-ins of a kind."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{plug_in.replace('_', '-')} = {place}\n" for plug_in, place in offered.items()]
    (metadata / "entry_points.txt").write_text(f"[langchain_card.{kind}]\n" + "".join(lines))
