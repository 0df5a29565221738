"""Overhead of serving: streams of a server compared with the same requests to an engine in this process.

    python benchmarks/serving.py [--streams 8] [--max-tokens 96] [--rounds 5] [--model NAME --draft NAME]

The server is `langchain-card serve` in its own process, with its engine in a further one (`--isolate`, the default) or
in the same (`--no-isolate`). Clients are streams of the `openai` package's async client in this process. The engine's
answers are read token by token as well. All ways take turns and write the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai

from langchain_card import CARDChatModel
from langchain_card.bench import prompts
from langchain_card.core.request import SamplingParams
from langchain_card.limits import Limits

Answers = Callable[[int], Awaitable[int]]
"""A function of the round: answers all prompts at once and returns the number of tokens."""


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Start a server and return its address."""
    code = "import sys; from langchain_card.cli import main; sys.exit(main())"
    command = [sys.executable, "-W", "ignore", "-c", code, "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = next(filter(None, (re.search(r"running on (http://\S+)", line) for line in process.stderr)))
            yield address[1]
        finally:
            process.terminate()


def served(client: openai.AsyncOpenAI, name: str, texts: list[str], max_tokens: int) -> Answers:
    async def answer(text: str) -> int:
        messages: Any = [{"role": "user", "content": text}]
        options: Any = {"stream_options": {"include_usage": True}, "max_tokens": max_tokens, "temperature": 0}
        tokens = 0
        async for chunk in await client.chat.completions.create(model=name, messages=messages, stream=True, **options):
            tokens = chunk.usage.completion_tokens if chunk.usage else 0
        return tokens

    async def all_of_them(round_: int) -> int:
        return sum(await asyncio.gather(*(answer(f"{round_}. {text}") for text in texts)))

    return all_of_them


def bare(model: CARDChatModel, texts: list[str], max_tokens: int) -> Answers:
    engine = model.engine
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)

    async def answer(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        prompt_ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
        return sum([piece.token_id >= 0 async for piece in engine.submit(prompt_ids, params)])

    async def all_of_them(round_: int) -> int:
        return sum(await asyncio.gather(*(answer(f"{round_}. {text}") for text in texts)))

    return all_of_them


async def compare(ways: dict[str, Answers], rounds: int) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):  # the first one is not counted
        for name in list(ways) if round_ % 2 else list(ways)[::-1]:
            started = time.perf_counter()
            tokens = await ways[name](round_)
            seconds = time.perf_counter() - started
            print(f"{name}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s", flush=True)
            if round_:
                speeds[name].append(tokens / seconds)
    for name, of_way in speeds.items():
        ratios = sorted(speed / other for speed, other in zip(of_way, speeds["engine"], strict=True))
        ratio = f"{statistics.median(ratios):.3f} times the engine's ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"{name}: {statistics.median(of_way):.1f} tokens/s, {ratio}")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--draft", default="ngram", help="beside --model")
    args = parser.parse_args()
    fields = {} if args.model is None else {"model": args.model, "draft_model": args.draft}
    arguments = [] if args.model is None else ["--model", args.model, "--draft-model", args.draft]
    arguments += ["--served-model-name", "it", "--max-num-seqs", str(args.streams)]
    texts = prompts.load(prompts.OWN, args.streams)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(CARDChatModel(**fields, limits=Limits(max_num_seqs=args.streams)).load())
        ways = {"engine": bare(model, texts, args.max_tokens)}
        for name, flag in (("server, isolated", "--isolate"), ("server", "--no-isolate")):
            url = stack.enter_context(server(flag, *arguments))
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
            ways[name] = served(client, "it", texts, args.max_tokens)
        await compare(ways, args.rounds)


if __name__ == "__main__":
    asyncio.run(main())
