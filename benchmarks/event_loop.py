"""How late an event loop is while it reads streams: against one that idles beside the same decoding.

    python benchmarks/event_loop.py [--streams 20] [--seconds 20] [--rounds 3] [--model NAME --draft NAME]

Each round has two phases, which differ only in who reads the answers. *Idle*: threads do, and the loop does nothing
but tick every millisecond (beside the threads' Python: the same work, elsewhere). *Streams*: the loop reads all of
them with `astream`, and ticks. A tick's delay is how much later it came than it was due.
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
    """`count` answers are always being written and read, until `stop()`."""

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
    found, end = [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        found.append(time.perf_counter() - now - TICK)
    return found


def idle(model: CARDChatModel, streams: int, seconds: float) -> tuple[list[float], float]:
    load = Load(model, streams)
    threads = load.read_in_threads()
    time.sleep(2)
    before = load.tokens
    found = asyncio.run(delays(seconds))
    tokens = load.tokens - before
    load.stop()
    for thread in threads:
        thread.join()
    return found, tokens / seconds


def reading(model: CARDChatModel, streams: int, seconds: float) -> tuple[list[float], float]:
    async def run() -> tuple[list[float], float]:
        load = Load(model, streams)
        readers = [asyncio.create_task(load.read()) for _ in range(streams)]
        await asyncio.sleep(2)
        before = load.tokens
        found = await delays(seconds)
        tokens = load.tokens - before
        load.stop()
        await asyncio.gather(*readers)
        return found, tokens / seconds

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
                found, speed = phases[name](model, args.streams, args.seconds)
                worst[name] = quantile(found, 0.999)
                line = ", ".join(f"p{100 * share:g} {quantile(found, share):.1f} ms" for share in (0.5, 0.99, 0.999))
                print(f"{name}: {len(found):,} ticks, {line}; {speed:.0f} tokens/s", flush=True)
            ratios.append(worst["streams"] / worst["idle"])
        print(f"p99.9 of a loop that reads {args.streams} streams: {statistics.median(ratios):.2f} times an idle one's")


if __name__ == "__main__":
    main()
