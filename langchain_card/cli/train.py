"""`langchain-card train HEAD --model NAME --out FOLDER`: train a head for a target."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from langchain_card.chat.progress import ConsoleProgress
from langchain_card.config import EngineConfig
from langchain_card.errors import check_choice, check_range

KINDS = ("eagle", "specformer")


def register(subparsers: Any) -> None:
    """Add `train` and its options."""
    from langchain_card.cli.fields import add_target_fields

    parser = subparsers.add_parser("train", help="train a head, which drafts from the target's own states")
    parser.add_argument("head", metavar="HEAD", help=f"kind: {', '.join(KINDS)}")
    add_target_fields(parser)
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
    """Train a head, and print what it is worth."""
    from langchain_card.cli.fields import check_output

    check_choice("HEAD", args.head, KINDS)
    hours = 1.0 if args.hours is None and args.tokens is None else args.hours
    if hours is not None:
        check_range("--hours", hours, 0.001, 1000.0)
    if args.tokens is not None:
        check_range("--tokens", args.tokens, 1000, 10**9)
    check_range("--max-disk", args.max_disk, 0.1, 10_000.0)
    check_output("--plot", args.plot, ".png")
    if args.plot is not None:
        from langchain_card.bench import plots  # fails before the work, where matplotlib is absent
    from langchain_card.train.run import TrainingOptions, train_head

    data = None if args.data == "self" else Path(args.data)
    options = TrainingOptions(args.head, args.model, hours, args.tokens, int(args.max_disk * 1e9), args.bits, data)
    quantization = None if args.quantization == "none" else args.quantization
    config = EngineConfig(args.model, None, device=args.device, dtype=args.dtype, quantization=quantization)
    with ConsoleProgress() as progress:

        def report(stage: str, share: float, more: str) -> None:
            progress.update(stage, min(100, int(100 * share)), 100, lambda percent: f"{percent} %", more)

        try:
            head = train_head(options, config, args.out, progress, report, resume=args.resume)
        except KeyboardInterrupt:
            print(f"the same command with --resume goes on with {args.out}", file=sys.stderr)
            raise
    if args.plot is not None:
        plots.plot_curve(head["curve"], args.plot, f"{args.head} for {args.model}")
    print(f"{args.out}: {head['accepted_length']:.2f} tokens a pass, by {head['answers']:,} tokens of answers")
    print(f'CARDChatModel(model="{args.model}", draft_model="head?file={args.out}")')
    return 0
