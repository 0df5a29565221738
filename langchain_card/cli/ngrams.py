"""`langchain-card ngrams FOLDER --out FILE`: build a frozen table for the n-gram drafter from text files."""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_card.chat.progress import ConsoleProgress, megabytes
from langchain_card.config import default_model
from langchain_card.errors import InvalidInputError, check_range

MAX_FILE_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 26


def register(subparsers: Any) -> None:
    """Add `ngrams` and its options."""
    parser = subparsers.add_parser("ngrams", help="count a folder's text, for faster answers of its kind")
    contents = "with text files, in folders of its own too; hidden files and folders (.git, .env) are left out"
    parser.add_argument("folder", type=Path, help=contents)
    parser.add_argument("--model", default=default_model(), help="whose tokenizer reads it (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what the table is written to")
    parser.add_argument("--max-bytes", type=int, default=1 << 24, help="of the table (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count the n-grams of a folder and write the table."""
    import numpy as np

    from langchain_card.drafters.ngram.frozen import MAX_BYTES, count, write
    from langchain_card.models.tokenizer import load_tokenizer

    check_range("--max-bytes", args.max_bytes, 1024, MAX_BYTES)
    if not args.folder.is_dir():
        raise InvalidInputError("FOLDER", str(args.folder), "is no folder")
    if not args.out.absolute().parent.is_dir():
        raise InvalidInputError("--out", str(args.out), "lies in no folder", "make the folder first")
    tokenizer, skipped, ids = load_tokenizer(args.model), Counter[str](), array("i")
    with ConsoleProgress() as progress:
        for text, done, total in _texts(args.folder, skipped):
            ids.extend([*tokenizer.encode(text, add_special_tokens=False, verbose=False), -1])
            progress.update(f"read {args.folder}", done, total)
        progress.update("count", 0, 0)
        tables = count(np.frombuffer(ids, np.int32), args.max_bytes)
    leaders = sum(len(columns[0]) for columns in tables.values())
    if not leaders:
        raise InvalidInputError("FOLDER", str(args.folder), "holds no text that says anything twice")
    write(args.out, tables, tokenizer, args.model)
    for reason, number in skipped.items():
        print(f"skipped {number:,} files: {reason}", file=sys.stderr)
    print(f"{args.out}: {leaders:,} leaders of {len(ids):,} tokens, {megabytes(args.out.stat().st_size)}")
    return 0


def _texts(folder: Path, skipped: Counter[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the text of each file that is not hidden, the bytes processed so far, and the bytes of all files."""
    visible = (path for path in sorted(folder.rglob("*")) if "/." not in f"/{path.relative_to(folder).as_posix()}")
    files = [path for path in visible if path.is_file() and not path.is_symlink()]
    sizes = {path: path.stat().st_size for path in files}
    done, read, total = 0, 0, sum(sizes.values())
    for path, size in sizes.items():
        done += size
        if size > MAX_FILE_BYTES:
            skipped[f"larger than {megabytes(MAX_FILE_BYTES)}"] += 1
        elif read + size > MAX_TEXT_BYTES:
            skipped[f"beyond the first {megabytes(MAX_TEXT_BYTES)} of text"] += 1
        elif (text := _text(path)) is None:
            skipped["not text in UTF-8, or not readable"] += 1
        else:
            read += size
            yield text, done, total


def _text(path: Path) -> str | None:
    """Return the content of a file; None if it is not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return None if "\0" in text else text
