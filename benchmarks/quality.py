"""Quality of int8 weights, teacher-forced: top-1 agreement with float32, and perplexity of both.

python benchmarks/quality.py --model qwen2.5-coder-1.5b --prompts humaneval.jsonl gsm8k.jsonl --count 40
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from langchain_card.config import EngineConfig
from langchain_card.models.loader import Pair, acquire_model, release_model, resolve
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import num_cores, use_threads

ROWS = 32


@dataclass
class Quality:
    """Sums over teacher-forced tokens."""

    tokens: int = 0
    agreed: int = 0
    loss_float: float = 0.0
    loss_int8: float = 0.0

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens

    @property
    def perplexities(self) -> tuple[float, float]:
        return math.exp(self.loss_float / self.tokens), math.exp(self.loss_int8 / self.tokens)


def texts(path: Path, count: int) -> list[tuple[str, str]]:
    """Return question and answer of each row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    keys: tuple[str, str] = ("prompt", "canonical_solution") if "prompt" in rows[0] else ("question", "answer")
    return [(row[keys[0]], row[keys[1]]) for row in rows]


@contextmanager
def runner(model: str, quantization: str | None) -> Iterator[tuple[ModelRunner, Pair]]:
    pair = resolve(EngineConfig(model=model, draft_model=None, quantization=quantization, dtype="float32"))
    yield ModelRunner(acquire_model(pair.target), max_len=2048, num_scratch=ROWS), pair
    release_model(pair.target)


def losses(model: ModelRunner, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each answer token and the model's choice there, from decode steps of `ROWS` rows."""
    cache = model.open()
    model.prefill(cache, prompt[:-1])
    loss, choice = [], []
    for logits, wanted in zip(
        model.follow(cache, [prompt[-1], *answer[:-1]]), torch.tensor(answer).split(ROWS), strict=True
    ):
        loss.append(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none"))
        choice.append(logits.argmax(-1))
    return torch.cat(loss), torch.cat(choice)


def measure(model: str, sets: dict[str, list[tuple[str, str]]]) -> dict[str, Quality]:
    """Return the quality of every set. One model is in memory at a time."""
    use_threads(num_cores())
    results: dict[str, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {name: [] for name in sets}
    for quantization in (None, "int8"):
        with runner(model, quantization) as (model_runner, pair):
            for name, rows in sets.items():
                shown = tqdm(rows, desc=f"{name}, {quantization or 'float32'}", unit="row")
                results[name].append([losses(model_runner, *_encode(pair.tokenizer, *row)) for row in shown])
    qualities = {}
    for name, (floats, ints) in results.items():
        quality = qualities[name] = Quality()
        for (loss_float, choice_float), (loss_int8, choice_int8) in zip(floats, ints, strict=True):
            quality.tokens += len(loss_float)
            quality.agreed += int((choice_float == choice_int8).sum())
            quality.loss_float += float(loss_float.sum())
            quality.loss_int8 += float(loss_int8.sum())
    return qualities


def _encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return list(prompt), list(tokenizer(answer, add_special_tokens=False).input_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    for name, q in measure(args.model, {path.stem: texts(path, args.count) for path in args.prompts}).items():
        in_float, in_int8 = q.perplexities
        print(
            f"{args.model} {name}: {q.tokens} tokens, top-1 agreement {q.agreement:.4f}, "
            f"perplexity {in_float:.4f} float32, {in_int8:.4f} int8 ({100 * (in_int8 / in_float - 1):+.2f} %)"
        )


if __name__ == "__main__":
    main()
