"""What more answers are worth to a head: `python benchmarks/learning_curve.py MODEL FOLDER --plot FILE`.

FOLDER is the `training` folder of a head, with the states that `langchain-card train` recorded. Heads of all kinds are
trained for M minutes (4) each on an eighth, a quarter, a half and all of its answers; the answers on which they are
measured are the same. This takes eight times M, and as much again where checks are slow.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from langchain_card.config import EngineConfig
from langchain_card.heads.folder import KINDS, make_head
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.threads import num_cores
from langchain_card.train.loop import Bounds, Trainer
from langchain_card.train.replay import Replay
from langchain_card.train.run import frequent_tokens, held_out_of
from langchain_card.train.shards import texts_in

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(num_cores())
    held_out, texts = held_out_of(texts_in(args.folder))
    model = load_model(resolve(EngineConfig(args.model, None)).target)
    found: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    for share in SHARES:
        some = texts[: max(1, round(len(texts) * share))]
        for kind, points in found.items():
            torch.manual_seed(0)
            head = make_head(kind, model, torch.float32, ids=frequent_tokens(texts))
            with tempfile.TemporaryDirectory() as folder:
                bounds = Bounds(60 * args.minutes)
                done = Trainer(head, Replay(head, model), some, held_out, Path(folder), bounds).run()
            tokens = sum(text.num_tokens for text in some)
            points.append((tokens, max(length for *_, length in done.curve)))
            seen = f"{done.num_tokens:,} trained on in {done.seconds:.0f} s"
            print(f"{kind:10} {tokens:>9,} tokens, {seen}: {points[-1][1]:.3f} tokens a pass", flush=True)
    if args.plot is not None:
        from langchain_card.bench.plots import plot_curves

        plot_curves(found, args.plot, f"{args.model}: heads after {args.minutes:g} minutes of training")


if __name__ == "__main__":
    main()
