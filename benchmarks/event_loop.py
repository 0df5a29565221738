"""Delays of an event loop that reads streams, compared with one that idles during the same decoding.

    python benchmarks/event_loop.py [--streams 20] [--seconds 20] [--rounds 3] [--model NAME --draft NAME]

Each round has two phases. *Idle*: threads read the answers, and the loop only ticks every millisecond. *Streams*: the
loop reads all answers with `astream`, and ticks. The delay of a tick is its time minus the time when it was due.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import threading
import time

from langchain_card import CARDChatModel

TICK = 0.001


class Load:
    """A load of `count` concurrent answers, until `stop()`."""

    def __init__(self, model: CARDChatModel, count: int) -> None:
        self._model, self._count = model, count
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self.tokens = 0

    def prompt(self) -> str:
        return f"Write a Python function that adds {next(self._numbers)} to its argument, with a docstring."

    def read_in_threads(self) -> list[threading.Thread]:
        def read() -> None:
            while not self._stopped.is_set():
                for _ in self._model.stream(self.prompt()):
                    self.tokens += 1
                    if self._stopped.is_set():
                        break

        threads = [threading.Thread(target=read) for _ in range(self._count)]
        for thread in threads:
            thread.start()
        return threads

    async def read(self) -> None:
        while not self._stopped.is_set():
            async for _ in self._model.astream(self.prompt()):
                self.tokens += 1
                if self._stopped.is_set():
                    break

    def stop(self) -> None:
        self._stopped.set()


async def delays(seconds: float) -> list[float]:
    late, end = [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        late.append(time.perf_counter() - now - TICK)
    return late


def idle(model: CARDChatModel, streams: int, seconds: float) -> tuple[list[float], float]:
    load = Load(model, streams)
    threads = load.read_in_threads()
    time.sleep(2)
    before = load.tokens
    late = asyncio.run(delays(seconds))
    tokens = load.tokens - before
    load.stop()
    for thread in threads:
        thread.join()
    return late, tokens / seconds


def reading(model: CARDChatModel, streams: int, seconds: float) -> tuple[list[float], float]:
    async def run() -> tuple[list[float], float]:
        load = Load(model, streams)
        readers = [asyncio.create_task(load.read()) for _ in range(streams)]
        await asyncio.sleep(2)
        before = load.tokens
        late = await delays(seconds)
        tokens = load.tokens - before
        load.stop()
        await asyncio.gather(*readers)
        return late, tokens / seconds

    return asyncio.run(run())


def quantile(values: list[float], share: float) -> float:
    return 1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--draft", default="ngram", help="beside --model")
    args = parser.parse_args()
    fields = {} if args.model is None else {"model": args.model, "draft_model": args.draft}
    with CARDChatModel(**fields, max_model_len=1024, max_tokens=200).load() as model:
        ratios = []
        for round_ in range(args.rounds):
            phases = {"idle": idle, "streams": reading}
            worst = {}
            for name in phases if round_ % 2 == 0 else reversed(phases):
                late, speed = phases[name](model, args.streams, args.seconds)
                worst[name] = quantile(late, 0.999)
                line = ", ".join(f"p{100 * share:g} {quantile(late, share):.1f} ms" for share in (0.5, 0.99, 0.999))
                print(f"{name}: {len(late):,} ticks, {line}; {speed:.0f} tokens/s", flush=True)
            ratios.append(worst["streams"] / worst["idle"])
        print(f"p99.9 of a loop that reads {args.streams} streams: {statistics.median(ratios):.2f} times an idle one's")


if __name__ == "__main__":
    main()
