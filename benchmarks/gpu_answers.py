"""Whole answers of the engine on a GPU: tokens per second by schedule and by requests at once.

python benchmarks/gpu_answers.py                 a 7B target with a 0.5B draft, in bfloat16
python benchmarks/gpu_answers.py --tiny          the same code on two tiny models, on a CPU if need be

No weights of that size have to be downloaded. Both models have true shapes and random weights, and write one text: the
token after `t` is `successor[t]`, because a row of the output matrix is the embedding of the token before. The layers
add noise to it. The target's is so small that it never errs, and the draft's so large that it errs at some positions.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from benchmarks.gpu import SHAPES, TINY
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.limits import Limits
from langchain_card.runtime.draft_form import HEAD

Shape = tuple[int, int, int, int, int, bool]
TARGET_NOISE = 0.05
SHARPNESS = 5.0
"""Factor of all logits, with which the draft's chances are about as large as its hits are frequent."""


def write_model(folder: Path, shape: Shape, vocab_size: int, noise: float, device: torch.device) -> str:
    """Write a model whose layers add `noise` times what random layers add."""
    hidden, intermediate, layers, heads, kv_heads, _ = shape
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32_768,
        tie_word_embeddings=False, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    written = min(vocab_size, HEAD)  # a draft's head has no rows for the tokens above
    successor = torch.cat([torch.randperm(written), torch.arange(written, vocab_size)])
    with torch.device(device), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight[successor] = model.model.embed_tokens.weight * (SHARPNESS / hidden**0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= noise
            layer.mlp.down_proj.weight *= noise
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"<{token_id}>": token_id for token_id in range(vocab_size)}, "<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<0>").save_pretrained(folder)
    return str(folder)


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], schedule: str, tokens: int
) -> tuple[float, list[Completion]]:
    """Write answers to all prompts at once, and return tokens per second with the answers."""
    params = SamplingParams(max_tokens=tokens, schedule=schedule, tenant=f"{schedule} {time.perf_counter()}")  # type: ignore[arg-type]
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        done = [*pool.map(lambda ids: engine.submit(ids, params).result(), prompts)]
    return sum(len(answer.token_ids) for answer in done) / (time.perf_counter() - begun), done


def table(engine: Engine, vocab_size: int, tokens: int, repeats: int, counts: Sequence[int]) -> None:
    """Print a row for each number of requests at once and each schedule; runs alternate."""
    generator = torch.Generator().manual_seed(1)
    for count in counts:
        prompts = torch.randint(min(vocab_size, HEAD), (count, 64), generator=generator).tolist()
        speeds: dict[str, list[float]] = {}
        last: dict[str, list[Completion]] = {}
        for repeat in range(repeats + 1):
            for schedule in ("plain", "sequential", "parallel", "auto"):
                speed, last[schedule] = answers(engine, prompts, schedule, tokens)
                if repeat:  # the first run finds out what steps cost
                    speeds.setdefault(schedule, []).append(speed)
        plain = statistics.median(speeds["plain"])
        for schedule, found in speeds.items():
            stats = [answer.stats for answer in last[schedule]]
            rounds = sum(stat.rounds for stat in stats)
            same = sum(a.token_ids == b.token_ids for a, b in zip(last["plain"], last[schedule], strict=True))
            busy = [1e3 * sum(getattr(stat, f"{part}_busy") for stat in stats) / rounds for part in ("target", "draft")]
            wall = 1e3 * sum(stat.ended - stat.first_token for stat in stats) / rounds
            median = statistics.median(found)
            print(
                f"{count:3} at once  {schedule:10}  {median:7.1f} tokens/s  {median / plain:5.2f} x plain"
                f"  {sum(stat.output_tokens for stat in stats) / rounds:5.2f} tokens a round"
                f"  {sum(stat.verified for stat in stats) / rounds:5.2f} candidates"
                f"  round {wall:6.2f} ms, target {busy[0]:6.2f}, draft {busy[1]:6.2f}"
                f"  ran {sorted({stat.schedule for stat in stats})}  same as plain {same} of {count}",
                flush=True,
            )


def main() -> None:
    """Write the two models to memory, and time answers with the draft on each device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, any device")
    noise = "of the layers of each draft: 3.2 errs at 12 tokens in 100, 3.5 at 26"
    parser.add_argument("--noise", type=float, nargs="+", default=[3.2, 3.5], help=noise)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--transport", default="thread", choices=["thread", "process"])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("no CUDA device here: nothing to measure (--tiny runs the same code on a CPU)")
        return
    shapes: dict[str, Any] = TINY if args.tiny else SHAPES
    vocab_size = 512 if args.tiny else 151_936
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        target = write_model(folder / "target", shapes["7B"], vocab_size, TARGET_NOISE, device)
        for noise in args.noise:
            draft = write_model(folder / f"draft {noise}", shapes["0.5B"], vocab_size, noise, device)
            torch.cuda.empty_cache()
            limits = Limits(max_num_seqs=16)
            config = EngineConfig(
                target, draft, drafters=(), draft_transport=args.transport, max_model_len=2048, limits=limits
            )
            begun = time.perf_counter()
            with Engine(config) as engine:
                loaded = time.perf_counter() - begun
                print(f"noise {noise}: {engine.devices}, draft in a {args.transport}, loaded in {loaded:.1f} s")
                table(engine, vocab_size, args.tokens, 2, args.at_once)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
