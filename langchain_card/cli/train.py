"""`langchain-card train HEAD --model NAME --out FOLDER`: train a head for a target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from langchain_card.chat.progress import ConsoleProgress
from langchain_card.config import EngineConfig, default_model
from langchain_card.errors import check_choice, check_range
from langchain_card.limits import Limits

KINDS = ("eagle", "specformer")

SEATS = 32
"""Prompts that are answered at once."""

MAX_LEN = 1024
"""Positions of a text that is recorded."""


def register(subparsers: Any) -> None:
    """Add `train` and its options."""
    parser = subparsers.add_parser("train", help="train a head, which drafts from the target's own states")
    parser.add_argument("head", metavar="HEAD", help=f"kind: {', '.join(KINDS)}")
    parser.add_argument("--model", default=default_model(), help="target (%(default)s)")
    own = "prompts, JSON lines with prompt or messages; self has the target write them (%(default)s)"
    parser.add_argument("--data", default="self", metavar="FILE", help=own)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float, help="half for answers, half for training (1)")
    length.add_argument("--tokens", type=int, help="of answers, in place of hours")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the head")
    parser.add_argument("--resume", action="store_true", help="go on with the training in FOLDER")
    parser.add_argument("--max-disk", type=float, default=8.0, metavar="GB", help="of recorded states (%(default)s)")
    parser.add_argument("--bits", type=int, default=8, choices=(8, 4), help="of the head's numbers (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curve (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, and say what the head is worth."""
    from langchain_card.cli.fields import check_output

    check_choice("HEAD", args.head, KINDS)
    hours = 1.0 if args.hours is None and args.tokens is None else args.hours
    check_range("--hours", hours or 1.0, 0.001, 1000.0)
    check_range("--tokens", args.tokens or 1000, 1000, 10**9)
    check_range("--max-disk", args.max_disk, 0.1, 10_000.0)
    check_output("--plot", args.plot, ".png")
    if args.plot is not None:
        from langchain_card.bench import plots  # fails before the work, where matplotlib is absent
    from langchain_card.train.run import TrainingOptions, train_head

    options = TrainingOptions(args.head, args.model, hours, args.tokens, int(args.max_disk * 1e9), args.bits)
    config = EngineConfig(args.model, None, max_model_len=MAX_LEN, limits=Limits(max_num_seqs=SEATS))
    data = None if args.data == "self" else Path(args.data)
    with ConsoleProgress() as progress:

        def report(stage: str, share: float, more: str) -> None:
            progress.update(stage, min(100, int(100 * share)), 100, lambda percent: f"{percent} %", more)

        head = train_head(options, config, data, args.out, report, resume=args.resume)
    if args.plot is not None:
        plots.plot_curve(head["curve"], args.plot, f"{args.head} for {args.model}")
    print(f"{args.out}: {head['accepted_length']:.2f} tokens a pass, by {head['answers']:,} tokens of answers")
    print(f'CARDChatModel(model="{args.model}", draft_model="head?file={args.out}")')
    return 0
