"""Replay of recorded answers with the n-gram drafter, compared with prompt lookup and plain Cacheback.

    python benchmarks/ngram.py [FILE ...] [--table FILE] [--device NAME]

A file holds a JSON list of objects with `prompt_ids` and `token_ids`. The default is the traces of the contest. Speed
is modelled from step times of a measured device. The controller's rule chooses the rows of the n-gram drafter; the
references verify all that they propose. Times of the drafter are CPU times of this process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contest.devices import load_device
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.costs import CostModel, Speed
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.ports import Budget, Setting

TRACES = Path(__file__).parent / "contest" / "data"
WINDOW = 16
CACHEBACK_LENGTHS = ((1, 3), (2, 2))
"""Lengths of leaders and followers."""

Answer = tuple[list[int], list[int]]


@dataclass
class Counts:
    """Counts and seconds of one drafter on one set."""

    rounds: int = 0
    tokens: int = 0
    verified: int = 0
    modelled: float = 0.0
    read: int = 0
    reading: float = 0.0
    drafting: float = 0.0

    def shown(self, plain: float) -> str:
        """Return the counts in a line. `plain` is the time of a plain step."""
        line = (
            f"{self.tokens * plain / self.modelled:6.3f} x plain, {self.tokens / self.rounds:5.2f} tokens and "
            f"{self.verified / self.rounds:5.2f} candidates a pass"
        )
        if self.read:
            line += (
                f", {1e6 * self.reading / self.read:5.1f} us read, {1e6 * self.drafting / self.tokens:5.1f} us a token"
            )
        return line


def step_times(device: str) -> CostModel:
    """Return a cost model with the step times of a device."""
    costs = CostModel(Speed(), Speed())
    for rows, seconds in load_device(device).target.items():
        costs.target.observe(rows, seconds)
    return costs


def drafted(drafter: NgramDrafter, answers: Sequence[Answer], costs: CostModel) -> Counts:
    """Replay answers with the n-gram drafter, which learns from one answer for the next."""
    counts = Counts()
    for number, (prompt_ids, token_ids) in enumerate(answers):
        tree, done, begun = CandidateTree(prompt_ids[-1]), 1, time.process_time()
        drafter.begin(Request(number, tuple(prompt_ids), SamplingParams()), token_ids[:1])
        counts.reading, counts.read = counts.reading + time.process_time() - begun, counts.read + len(prompt_ids)
        tree.advance(token_ids[0])
        while done < len(token_ids):
            begun = time.process_time()
            [proposal] = drafter.step([Budget(number)])
            counts.drafting += time.process_time() - begun
            nodes = [tree.root]
            for parent, token, score in zip(proposal.parents, proposal.token_ids, proposal.scores, strict=True):
                nodes.append(tree.insert(nodes[parent], token, score, "ngram"))
            candidates, chances = tree.best_subtree(WINDOW - 1)
            width = costs.widths([chances], [costs.per_token.value])[0]
            chosen, node, new = {*candidates[:width]}, tree.root, []
            for token in token_ids[done:]:
                new.append(token)
                node = next((child for child in tree.children(node) if tree.tokens[child] == token), -1)
                if node not in chosen:
                    break
            seconds = costs.target.at(1 + width)
            costs.per_token.add(seconds / len(new), len(new))
            count(counts, seconds, width, len(new))
            for token in new:
                tree.advance(token)
            begun = time.process_time()
            drafter.correct(number, done, new)
            counts.drafting += time.process_time() - begun
            done += len(new)
        drafter.end(number)
    return counts


def count(counts: Counts, seconds: float, verified: int, tokens: int) -> None:
    """Count a pass."""
    counts.rounds += 1
    counts.modelled += seconds
    counts.verified += verified
    counts.tokens += tokens


def lookup(text: Sequence[int], num_tokens: int = 10, longest: int = 2) -> list[list[int]]:
    """Return the candidates of transformers' prompt lookup: the text after the first match of the longest n-gram."""
    for n in range(longest, 0, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return [list(text[start + n : start + n + num_tokens])]
    return []


class Cacheback:
    """Cacheback as published, without a frozen table: leaders and followers of one length each."""

    def __init__(self, leader: int, follower: int, ways: int = 4) -> None:
        self.leader, self.follower, self.ways = leader, follower, ways
        self.table: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def learn(self, window: Sequence[int]) -> None:
        """Record the last tokens of a text."""
        if len(window) == self.leader + self.follower:
            followers = self.table.setdefault(tuple(window[: self.leader]), [])
            followed = tuple(window[self.leader :])
            if followed in followers:
                followers.remove(followed)
            followers.insert(0, followed)
            del followers[self.ways :]

    def paths(self, text: Sequence[int]) -> Iterator[list[int]]:
        """Yield candidate paths, each followed by its continuations. The caller stops at its budget."""
        paths: list[list[int]] = [[]]
        for path in paths:
            for followed in self.table.get(tuple([*text[-self.leader :], *path][-self.leader :]), []):
                yield (longer := [*path, *followed])
                paths.append(longer)


def referenced(answers: Sequence[Answer], costs: CostModel, cacheback: Cacheback | None) -> Counts:
    """Replay answers with Cacheback, which keeps its table between answers, or with prompt lookup if it is None."""
    counts = Counts()
    for prompt_ids, token_ids in answers:
        text, done, learnt = [*prompt_ids, token_ids[0]], 1, 0
        while done < len(token_ids):
            if cacheback is not None:
                width = cacheback.leader + cacheback.follower
                for end in range(learnt, len(text)):
                    cacheback.learn(text[max(0, end + 1 - width) : end + 1])
                learnt = len(text)
            nodes: set[tuple[int, ...]] = set()
            for path in cacheback.paths(text) if cacheback is not None else lookup(text):
                for i in range(1, len(path) + 1):
                    if len(nodes) < WINDOW - 1:
                        nodes.add(tuple(path[:i]))
                if len(nodes) == WINDOW - 1:
                    break
            right = 0
            while done + right < len(token_ids) and tuple(token_ids[done : done + right + 1]) in nodes:
                right += 1
            new = token_ids[done : done + right + 1]
            count(counts, costs.target.at(1 + len(nodes)), len(nodes), len(new))
            text, done = [*text, *new], done + len(new)
    return counts


def main() -> None:
    """Print a line for each set and drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="recorded answers")
    parser.add_argument("--table", default="", help="a frozen table, of the recorded model's tokenizer")
    parser.add_argument("--device", default="cpu", help="whose step times are taken (%(default)s)")
    args = parser.parse_args()
    plain = step_times(args.device).target.at(1)
    for file in args.files or sorted(TRACES.glob("*.json")):
        answers = [(row["prompt_ids"], row["token_ids"]) for row in json.loads(file.read_text())]
        counts_by_name = {
            "n-grams": drafted(NgramDrafter(Setting(), table=args.table), answers, step_times(args.device)),
            "prompt lookup": referenced(answers, step_times(args.device), None),
            **{
                f"Cacheback {n}, {m}": referenced(answers, step_times(args.device), Cacheback(n, m))
                for n, m in CACHEBACK_LENGTHS
            },
        }
        for name, counts in counts_by_name.items():
            print(f"{file.stem:10} {name:14} {counts.shown(plain)}", flush=True)


if __name__ == "__main__":
    main()
