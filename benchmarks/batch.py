"""Throughput of a LangChain chain: `batch` and `abatch` compared with single calls.

    python benchmarks/batch.py [--prompts FILE.jsonl] [--count 32] [--max-tokens 64] [--rounds 2]
        [--model NAME --draft NAME]

Each round answers every prompt with single calls, `batch` and `abatch` of `prompt | model`, in alternating order. The
first words of the prompts differ between rounds and methods, so that no method profits from cached text.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from langchain_card import CARDChatModel
from langchain_card.bench import prompts

Chain = Runnable[dict[str, Any], AIMessage]


def singly(chain: Chain, inputs: list[dict[str, Any]]) -> list[AIMessage]:
    return [chain.invoke(input_) for input_ in inputs]


def batch(chain: Chain, inputs: list[dict[str, Any]]) -> list[AIMessage]:
    return chain.batch(inputs)


def abatch(chain: Chain, inputs: list[dict[str, Any]]) -> list[AIMessage]:
    return asyncio.run(chain.abatch(inputs))


METHODS: list[Callable[[Chain, list[dict[str, Any]]], list[AIMessage]]] = [singly, batch, abatch]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--draft", default="ngram", help="beside --model")
    args = parser.parse_args()
    fields = {} if args.model is None else {"model": args.model, "draft_model": args.draft}
    texts = prompts.load(args.prompts, args.count)
    template = ChatPromptTemplate.from_messages([("system", "You are helper {number}."), ("human", "{text}")])
    with CARDChatModel(**fields, max_tokens=args.max_tokens).load() as model:
        chain: Chain = template | model
        for number in (1, 2):  # one answer by each schedule, to measure step times
            chain.invoke({"number": number, "text": texts[0]})
        speeds: dict[str, list[float]] = {method.__name__: [] for method in METHODS}
        for round_ in range(args.rounds):
            for place, method in enumerate(METHODS if round_ % 2 == 0 else METHODS[::-1]):
                inputs = [{"number": 10 + 10 * round_ + place, "text": text} for text in texts]
                started = time.perf_counter()
                messages = method(chain, inputs)
                seconds = time.perf_counter() - started
                tokens = sum(message.usage_metadata["output_tokens"] for message in messages if message.usage_metadata)
                sizes = [message.response_metadata["card"]["mean_batch_size"] for message in messages]
                schedules = sorted({message.response_metadata["card"]["schedule"] for message in messages})
                speeds[method.__name__].append(tokens / seconds)
                print(
                    f"{method.__name__}: {len(texts)} answers, {tokens} tokens in {seconds:.1f} s, "
                    f"{tokens / seconds:.1f} tokens/s; "
                    f"requests in a pass: {statistics.mean(sizes):.1f} ({', '.join(schedules)})",
                    flush=True,
                )
        base = statistics.median(speeds["singly"])
        for name in ("batch", "abatch"):
            print(f"{name}: {statistics.median(speeds[name]) / base:.2f} times the throughput of single calls")


if __name__ == "__main__":
    main()
