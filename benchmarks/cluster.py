"""Engines on Ray: what the way through a replica costs, how soon an answer goes on, and where second turns land.

    python -m benchmarks.cluster speed [--model NAME --draft NAME] [--streams 16] [--rounds 5]
    python -m benchmarks.cluster faults [--kills 20] [--hangs 5]
    python -m benchmarks.cluster sessions [--chats 60] [--load 0.7] [--pause 0.2]

*speed* compares an engine in a process of its own with the same engine as a replica of a cluster on this machine, in
alternating rounds. *faults* and *sessions* use tiny random models: the first kills and stops replicas under eight
streams, the second sends chats of two turns to three replicas and counts the second turns whose prefix was cached.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from langchain_card.bench import prompts
from langchain_card.cluster import ClusterSettings, deploy, joined_cluster
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.engine.relay.open_requests import OpenRequest
from langchain_card.limits import Limits
from langchain_card.testing import tiny


def measure_speed(args: argparse.Namespace) -> None:
    """Print tokens a second of streams at once, and the time to the first token of one, as ratio and difference."""
    models = {} if args.model is None else {"model": args.model, "draft_model": args.draft}
    config = EngineConfig(**models, isolate=True, limits=Limits(max_num_seqs=args.streams))
    texts = prompts.find(args.prompts, args.streams)
    speeds: dict[str, list[float]] = {"process": [], "replica": []}
    firsts: dict[str, list[float]] = {"process": [], "replica": []}
    deploy(config, ClusterSettings())
    with Engine(config) as process, Engine(replace(config, isolate=False, cluster="card")) as replica:
        engines = {"process": process, "replica": replica}
        for round_ in range(args.rounds + 1):  # the first warms up
            for name in [*engines][:: 1 if round_ % 2 else -1]:
                engine, params = engines[name], SamplingParams(max_tokens=args.max_tokens)
                begun = time.perf_counter()
                ids = [prompts.user_prompt(engine, f"{text} (variant {round_})") for text in texts]
                generations = [engine.submit(prompt, params) for prompt in ids]
                tokens = sum(len(generation.result().token_ids) for generation in generations)
                speed = tokens / (time.perf_counter() - begun)
                times = []
                for number, prompt in enumerate(ids[:6]):
                    begun = time.perf_counter()
                    next(iter(generation := engine.submit([*prompt[:-5], number + 5, *prompt[-5:]], params)))
                    times.append(time.perf_counter() - begun)
                    generation.abort()
                if round_:
                    speeds[name].append(speed)
                    firsts[name] += times
                print(f"{name}: {speed:.1f} tokens/s, first token {statistics.median(times) * 1000:.0f} ms", flush=True)
    ratio = statistics.median(b / a for a, b in zip(speeds["process"], speeds["replica"], strict=True))
    later = statistics.median(b - a for a, b in zip(firsts["process"], firsts["replica"], strict=True))
    print(f"a replica: {ratio:.3f} times the tokens/s of a process; first token {later * 1000:+.1f} ms")


def tiny_config(folder: Path, seats: int, silence: float = 10.0) -> EngineConfig:
    target = tiny.make_target("llama", folder / "target")
    bounds = Limits(max_num_seqs=seats, max_deaths=10_000, max_failures=1000, silence_seconds=silence)
    return EngineConfig(target, "ngram", dtype="float64", device="cpu", max_model_len=2048, limits=bounds)


def replicas() -> list[int]:
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    found = client.get_serve_details()["applications"]["card"]["deployments"]["EngineReplica"]
    return [
        each["pid"]
        for each in found["replicas"]
        if each["state"] == "RUNNING" and Path(f"/proc/{each['pid']}").exists()
    ]


def measure_faults(args: argparse.Namespace) -> None:
    """Print when the relay left a replica that was killed or stopped, and when the next token of each answer came.

    Each as a median, with the most in brackets.
    """
    config = tiny_config(Path(tempfile.mkdtemp()), 8, silence=args.silence)
    deploy(config, ClusterSettings(2, 2, cpus=0.5))
    seen: dict[signal.Signals, tuple[list[float], list[float]]] = {
        what: ([], []) for what in (signal.SIGKILL, signal.SIGSTOP)
    }
    over, now, left = threading.Event(), [(signal.SIGKILL, 0.0)], OpenRequest.left

    def noted(entry: OpenRequest, *, died: bool = False) -> None:
        if died and entry.begun:
            seen[now[0][0]][0].append(time.monotonic() - now[0][1])
        left(entry, died=died)

    OpenRequest.left = noted  # type: ignore[method-assign, assignment]
    with Engine(replace(config, cluster="card")) as front, ThreadPoolExecutor(8) as pool:
        no_end = ((front.tokenizer.eos_token_id, -100.0),)

        def read(number: int) -> int:
            answers, prompt = 0, front.tokenizer(f"stream {number}").input_ids
            while not over.is_set():
                params = SamplingParams(max_tokens=1900, temperature=1.0, seed=answers, logit_bias=no_end)
                generation, deaths = front.submit(prompt, params), 0
                for _ in generation:
                    assert generation.stats is not None
                    if (count := generation.stats.resumed.get("died", 0)) > deaths:
                        seen[now[0][0]][1].append(time.monotonic() - now[0][1])
                        deaths = count
                answers += 1
            return answers

        readers = [pool.submit(read, number) for number in range(8)]
        dice = random.Random(1)
        for what in [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.hangs:
            while len(pids := replicas()) < 2:
                time.sleep(0.2)
            time.sleep(1 + dice.random())
            victim = dice.choice(pids)
            now[0] = what, time.monotonic()
            os.kill(victim, what)
            time.sleep(args.silence + 3)
            if what == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
        over.set()
        answers = sum(reader.result() for reader in readers)
        begun = time.monotonic()
        next(iter(front.submit(front.tokenizer("x" * 1000).input_ids, SamplingParams(max_tokens=4))))
        reading = time.monotonic() - begun
    for what, (notices, gaps) in seen.items():
        if notices:
            noticed, next_token = (f"{statistics.median(part):.2f} ({max(part):.2f})" for part in (notices, gaps))
            print(f"{what.name}, {len(gaps)} answers: left after {noticed} s, next token after {next_token} s")
    print(f"{answers} answers ended; alone, a prompt of 1,000 tokens takes {reading:.2f} s to its first token")


def measure_sessions(args: argparse.Namespace) -> None:
    """Print the share of second turns that found their first one in the prefix cache of the replica they came to.

    An engine keeps the texts of its last requests in the seats that are free: with pauses longer than answers take, a
    text may be gone before its second turn comes back to it.
    """
    seats = 16
    config = tiny_config(Path(tempfile.mkdtemp()), seats)
    deploy(config, ClusterSettings(3, 3, cpus=0.5))
    dice, lock, found = random.Random(1), threading.Lock(), list[bool]()
    with Engine(replace(config, cluster="card")) as front, ThreadPoolExecutor(int(3 * seats * args.load)) as pool:

        def turn(ids: list[int], chat: int) -> Completion:
            return front.submit(ids, SamplingParams(max_tokens=200, seed=chat, session=f"chat {chat}")).result()

        def talk(chat: int) -> None:
            first = front.tokenizer(f"{chat} " + "".join(dice.choices("abcdefgh ", k=300))).input_ids
            ids = [*first, *(token for token in turn(first, chat).token_ids if token < len(front.tokenizer))]
            time.sleep(dice.expovariate(1.0 / args.pause))
            second = turn([*ids, *front.tokenizer("and then?").input_ids], chat)
            with lock:
                found.append(second.stats.cached_tokens > len(first) - 64)

        for each in [pool.submit(talk, chat) for chat in range(args.chats)]:
            each.result()
    print(f"{sum(found)} of {len(found)} second turns found their first one: {sum(found) / len(found):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("--model")
    speed.add_argument("--draft", default="ngram", help="beside --model")
    speed.add_argument("--prompts", default="own")
    speed.add_argument("--streams", type=int, default=16)
    speed.add_argument("--max-tokens", type=int, default=64)
    speed.add_argument("--rounds", type=int, default=5)
    speed.set_defaults(run=measure_speed)
    faults = commands.add_parser("faults")
    faults.add_argument("--kills", type=int, default=20)
    faults.add_argument("--hangs", type=int, default=5)
    faults.add_argument("--silence", type=float, default=2.0, help="seconds")
    faults.set_defaults(run=measure_faults)
    sessions = commands.add_parser("sessions")
    sessions.add_argument("--chats", type=int, default=60)
    sessions.add_argument("--load", type=float, default=0.7, help="share of the seats")
    sessions.add_argument("--pause", type=float, default=0.2, help="mean seconds between two turns of a chat")
    sessions.set_defaults(run=measure_sessions)
    args = parser.parse_args()
    with joined_cluster():
        args.run(args)


if __name__ == "__main__":
    main()
