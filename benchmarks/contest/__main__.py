"""This engine against other ways to use a draft, on a virtual clock: `python -m benchmarks.contest`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contest.changes import changes
from benchmarks.contest.contest import RATIOS, Row, contest
from benchmarks.contest.devices import load_device
from benchmarks.contest.traces import shipped
from langchain_card.cli.fields import check_output
from langchain_card.errors import check_range


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the contest, print its figures, write and draw them.

    Raises:
        InvalidInputError: an option, a trace or a device is not valid.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contest", description=__doc__)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="traces of your own, one JSON file a kind of text")
    parser.add_argument("--ratios", type=float, nargs="+", metavar="C", help="target pass / draft step (1 to 64)")
    parser.add_argument("--gpu", default="h200", help="step times, a device for each model: a name or a file (h200)")
    parser.add_argument("--cpu", default="cpu", help="step times, one device for both: a name or a file (cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result")
    args = parser.parse_args(arguments)
    for ratio in args.ratios or ():
        check_range("--ratios", ratio, 0.01, 1000.0, "target pass / draft step")
    check_output("--json", args.json, ".json")
    check_output("--plot", args.plot, ".png", ".svg", ".pdf")
    if args.plot is not None:
        from benchmarks.contest.plot import plot  # fails before the work, where matplotlib is absent
    rows: list[Row] = []
    kinds, gpu, cpu = shipped(args.traces), load_device(args.gpu), load_device(args.cpu)
    for name, traces in kinds.items():
        print(f"{name}: {len(traces)} texts, {sum(len(trace.token_ids) for trace in traces)} tokens", flush=True)
    print(f"{gpu.name}: {gpu.source}\n{cpu.name}: {cpu.source}\nall figures are times plain decoding", flush=True)
    for cell in contest(kinds, gpu, cpu, args.ratios or RATIOS):
        figures = "  ".join(f"{row.method} {row.speedup:.2f}" for row in cell)
        print(f"{cell[0].trace}, c = {cell[0].c:.3g}: {figures}", flush=True)
        rows += cell
    if args.json is not None:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
        print(f"{len(rows)} rows are in {args.json}")
    if args.plot is not None:
        plot(rows, changes(kinds, gpu) if len(kinds) > 1 else [], args.plot)
        print(f"a picture is in {args.plot}")


if __name__ == "__main__":
    main()
