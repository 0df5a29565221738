"""The folder of a head: `head.safetensors`, and `head.json`, which names the target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from langchain_card.errors import InvalidInputError, check_choice
from langchain_card.heads.eagle import EagleHead
from langchain_card.heads.model import HeadModel
from langchain_card.heads.specformer import SpecFormerHead
from langchain_card.runtime.families import building

if TYPE_CHECKING:
    from langchain_card.runtime.cpu.blocks.packing import StoredRows

SHIPPED = Path(__file__).parent / "shipped"
"""Heads that come with the package, a folder each."""

WEIGHTS, DESCRIPTION = "head.safetensors", "head.json"

KINDS: dict[str, type[EagleHead | SpecFormerHead]] = {"eagle": EagleHead, "specformer": SpecFormerHead}


def make_head(
    kind: str, target: Any, dtype: torch.dtype, *, ids: Tensor | None = None, intermediate_size: int | None = None
) -> EagleHead | SpecFormerHead:
    """Make a head that is not trained, on the device of a target.

    Args:
        kind: of `KINDS`.
        target: a model of transformers.
        dtype: of the head's numbers.
        ids: as in `HeadModel`.
        intermediate_size: as in `HeadModel`.
    """
    with building, target.device:
        ids = None if ids is None else ids.to(target.device, torch.long)
        head = KINDS[kind](target, ids=ids, intermediate_size=intermediate_size)
    for module in head.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(weight.to(dtype), requires_grad=weight.requires_grad))
    return head


def save_head(
    head: EagleHead | SpecFormerHead,
    folder: Path,
    target: Mapping[str, str],
    described: Mapping[str, Any] | None = None,
    bits: int | None = None,
) -> Path:
    """Write a head; return the folder.

    Args:
        head: to be written.
        folder: of the head; made if it is missing.
        target: its `name`, and the `sha256` of its files (`ModelStore.content_hash`).
        described: its training, for readers.
        bits: of a number of a matrix, 8 or 4; None for those of the head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors, forms = {name: weight.detach().contiguous() for name, weight in _trained(head).items()}, dict[str, int]()
    if bits is not None:
        from langchain_card.heads.blocks import round_to_blocks  # imports numba

        for name, weight in tensors.items():
            if weight.dim() == 2:
                stored = round_to_blocks(weight, bits)
                tensors[name], forms[name] = torch.from_numpy(stored.rows), stored.form
    tensors |= {} if head.ids is None else {"ids": head.ids.to(torch.int32)}
    save_file(tensors, folder / WEIGHTS, {"forms": json.dumps(forms)})
    own = {
        "intermediate_size": head.config.intermediate_size,
        "weights": sum(map(Tensor.numel, _trained(head).values())),
    }
    text = {"kind": head.kind, "target": {**target}, **own, **(described or {})}
    (folder / DESCRIPTION).write_text(json.dumps(text, indent=1))
    return folder


def load_head(folder: Path, target: Any) -> HeadModel:
    """Read a head for a target of the right shape; `find_head` compares hashes.

    Args:
        folder: of the head.
        target: a model of transformers.

    Raises:
        InvalidInputError: there is no head, or it is damaged or of another shape.
    """
    described = describe(folder)
    check_choice("kind of head", described["kind"], tuple(KINDS))
    try:
        size = int(described["intermediate_size"])
        tensors, stored = _read(folder / WEIGHTS)
    except Exception as error:  # safetensors' own is no subclass of OSError or ValueError
        limit = f"is no folder of a head ({type(error).__name__}: {error})"
        raise InvalidInputError("head", str(folder), limit, "langchain-card train writes heads") from error
    ids = tensors.pop("ids", None)
    head = make_head(described["kind"], target, target.dtype, ids=ids, intermediate_size=size)
    weights = _trained(head)
    if {name: each.shape for name, each in weights.items()} != {name: each.shape for name, each in tensors.items()}:
        limit = "has other weights than a head of its kind for this target"
        raise InvalidInputError("head", str(folder), limit, "langchain-card train writes heads")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    if not isinstance(target.get_output_embeddings(), nn.Linear):
        from langchain_card.heads.blocks import to_blocks  # imports numba

        to_blocks(head, stored)
    head.digest = head_digest(str(folder))
    return head.requires_grad_(requires_grad=False).eval()


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, StoredRows]]:
    """Return the weights of a file as numbers, and those that are in blocks."""
    with safe_open(file, "pt") as opened:
        forms: dict[str, int] = json.loads(opened.metadata()["forms"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    if not forms:
        return tensors, {}
    from langchain_card.heads.blocks import numbers  # imports numba
    from langchain_card.runtime.cpu.blocks.packing import StoredRows

    stored = {name: StoredRows(form, tensors[name].numpy()) for name, form in forms.items()}
    return tensors | {name: numbers(rows) for name, rows in stored.items()}, stored


def head_bytes(file: str) -> int:
    """Return the bytes of a head in float32, about; `file` as in `find_head`.

    Raises:
        InvalidInputError: there is no head.
    """
    found = [describe(_path(file))] if file else [describe(folder) for folder in shipped_heads().values()]
    return 4 * max((int(each.get("weights", 0)) for each in found), default=0)


def head_digest(file: str) -> str:
    """Return the hash of a head's weights."""
    return hashlib.sha256((_path(file) / WEIGHTS).read_bytes()).hexdigest()


def find_head(file: str, hash_target: Callable[[], str] | None) -> Path:
    """Return the folder of a target's head.

    Args:
        file: the folder; "" for the package's own head for the target.
        hash_target: returns the hash of the target's files; without it, any head in `file` is taken.

    Raises:
        InvalidInputError: there is none, or it is one of another target.
    """
    if hash_target is None:
        return _path(file)
    sha256 = hash_target()
    if file:
        own = describe(_path(file))["target"]
        if own["sha256"] != sha256:
            limit = f"reads {own['name']} (sha256 {own['sha256']}); the target has sha256 {sha256}"
            raise InvalidInputError("head", file, limit, "langchain-card train makes one for this target")
        return _path(file)
    shipped = shipped_heads()
    if sha256 not in shipped:
        names = " and ".join(describe(folder)["target"]["name"] for folder in shipped.values())
        limit = f"comes with the package for {names or 'no target'}, not for one with sha256 {sha256}"
        raise InvalidInputError("head", "", limit, 'langchain-card train makes one: draft_model="head?file=FOLDER"')
    return shipped[sha256]


def _path(file: str) -> Path:
    return Path(file).expanduser()


def describe(folder: Path) -> dict[str, Any]:
    """Read the description of a head.

    Raises:
        InvalidInputError: there is none.
    """
    try:
        found = json.loads((folder / DESCRIPTION).read_text())
        return {
            "target": {"name": found["target"]["name"], "sha256": found["target"]["sha256"]},
            "weights": found["weights"],
            **found,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        limit = f"is no folder of a head ({type(error).__name__}: {error})"
        raise InvalidInputError("head", str(folder), limit, "langchain-card train writes heads") from error


def shipped_heads() -> dict[str, Path]:
    """Return the heads of the package: folders by the hashes of their targets."""
    files = sorted(SHIPPED.glob(f"*/{DESCRIPTION}"))
    return {describe(file.parent)["target"]["sha256"]: file.parent for file in files}


def _trained(head: HeadModel) -> dict[str, Tensor]:
    """Return the weights that training changes; the others are the target's."""
    return {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
