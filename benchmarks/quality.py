"""Quality of weights in blocks, teacher-forced: top-1 agreement with float32 of the same file, and perplexities.

python benchmarks/quality.py --model qwen2.5-coder-1.5b --prompts humaneval.jsonl gsm8k.jsonl --count 40
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
ANSWERED = (("prompt", "canonical_solution"), ("question", "answer"), ("text", "code"))
"""Keys of question and answer in sets that have both."""


@dataclass
class Quality:
    """Losses of teacher-forced tokens in float32 and in one form, and the tokens where both choose the same."""

    tokens: int
    agreed: int
    loss_float: torch.Tensor
    loss: torch.Tensor

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens

    @property
    def increase(self) -> float:
        """Relative increase of the perplexity."""
        return math.expm1(float((self.loss - self.loss_float).mean()))

    def __str__(self) -> str:
        error = float((self.loss - self.loss_float).std()) / math.sqrt(self.tokens)
        perplexities = [math.exp(float(loss.mean())) for loss in (self.loss_float, self.loss)]
        return (
            f"{self.tokens} tokens, top-1 agreement {self.agreement:.4f}, perplexity {perplexities[0]:.4f} float32, "
            f"{perplexities[1]:.4f} ({100 * self.increase:+.2f} +- {100 * error:.2f} %)"
        )


def texts(path: Path, count: int) -> list[tuple[str, str]]:
    """Return question and answer of each row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    question, answer = next(pair for pair in ANSWERED if rows[0].keys() >= {*pair})
    return [(row[question], row[answer]) for row in rows]


@contextmanager
def runner(model: str, quantization: str | None) -> Iterator[tuple[ModelRunner, Pair]]:
    pair = resolve(EngineConfig(model=model, draft_model=None, quantization=quantization, dtype="float32"))
    yield ModelRunner(acquire_model(pair.target), max_len=2048, num_scratch=ROWS), pair
    release_model(pair.target)


def losses(model: ModelRunner, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each answer token and the model's choice there, from decode steps of `ROWS` rows."""
    cache, loss, choice = model.open(), [], []
    with ExitStack() as stack:
        stack.callback(model.close, cache)
        model.prefill(cache, prompt[:-1])
        for logits, wanted in zip(
            model.follow(cache, [prompt[-1], *answer[:-1]]), torch.tensor(answer).split(ROWS), strict=True
        ):
            loss.append(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none"))
            choice.append(logits.argmax(-1))
    return torch.cat(loss), torch.cat(choice)


def measure(model: str, forms: list[str], sets: dict[str, list[tuple[str, str]]]) -> Iterator[tuple[str, str, Quality]]:
    """Yield form, set and quality. One model is in memory at a time."""
    use_threads(num_cores())
    floats: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for form in (None, *forms):
        with runner(model, form) as (model_runner, pair):
            for name, rows in sets.items():
                shown = tqdm(rows, desc=f"{name}, {form or 'float32'}", unit="row")
                found = [losses(model_runner, *_encode(pair.tokenizer, *row)) for row in shown]
                if form is None:
                    floats[name] = found
                    continue
                (loss_float, choice_float), (loss, choice) = (
                    tuple(torch.cat(parts) for parts in zip(*side, strict=True)) for side in (floats[name], found)
                )
                yield form, name, Quality(len(loss), int((choice_float == choice).sum()), loss_float, loss)


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
    parser.add_argument("--forms", nargs="+", default=["file", "int8"], help="values of quantization")
    args = parser.parse_args()
    sets = {path.stem: texts(path, args.count) for path in args.prompts}
    for form, name, quality in measure(args.model, args.forms, sets):
        print(f"{args.model} {name}, {form}: {quality}", flush=True)


if __name__ == "__main__":
    main()
