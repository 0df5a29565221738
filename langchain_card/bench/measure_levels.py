"""What `plan` plans with: pass times of every level, and how far each takes what the ones below it say."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from langchain_card import plugins
from langchain_card.bench.devices import check_curve, line, rising
from langchain_card.bench.plan import MAX_BLOCK, Case, Edge
from langchain_card.bench.steps import CONTEXT, SIZES, Steps, curves
from langchain_card.bench.teacher_forced import along, asked_as_user, borrowed, check_alike
from langchain_card.config import EngineConfig
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.lower_level import GuessRequest, LowerLevel
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import ModelSpec, Pair, resolve
from langchain_card.ports import Setting
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import num_cores, use_threads

Curve: TypeAlias = Mapping[int, float]
Chains: TypeAlias = Sequence[Sequence[int]]
"""[positions] what a level says from there on, the text up to there being the target's."""

MOST = MAX_BLOCK + 1


@dataclass(frozen=True)
class Text:
    """One answer of the target.

    Attributes:
        prompt_ids: of the question.
        token_ids: of the answer.
        said: by level, the smallest first.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    said: list[Chains]


@dataclass(frozen=True)
class Levels:
    """What was measured.

    Attributes:
        names: of the levels, the smallest first; the last is the target.
        seconds: of each, by the rows of a pass.
        edges: by (lower, upper).
    """

    names: list[str]
    seconds: list[Curve]
    edges: dict[tuple[int, int], Edge]

    def case(self) -> Case:
        """As the planner takes it."""
        return Case(self.names, [_cost(curve) for curve in self.seconds], self.edges)

    def to_json(self) -> dict[str, Any]:
        """As `read_levels` reads it."""
        edges = [
            {"lower": self.names[low], "upper": self.names[up], "reach": edge.reach, "offered": edge.offered}
            for (low, up), edge in self.edges.items()
        ]
        levels = [{"name": name, "seconds": curve} for name, curve in zip(self.names, self.seconds, strict=True)]
        return {"levels": levels, "edges": edges}


def _cost(curve: Curve) -> Callable[[float], float]:
    return (lambda rows: line(curve, rows)) if len(curve) > 1 else (lambda _: curve[1])


def read_levels(path: Path) -> Levels:
    """Figures from a file: what `plan --json` wrote, or one by hand, with `chance` in the place of `reach`.

    Raises:
        InvalidInputError: it cannot be read as such.
    """
    try:
        found = json.loads(path.read_text())
        found = found.get("inputs", found)
        names = [str(level["name"]) for level in found["levels"]]
        seconds = [{int(rows): float(each) for rows, each in level["seconds"].items()} for level in found["levels"]]
        for curve in seconds:
            if len(curve) > 1:
                check_curve(curve)
            elif [*curve] != [1] or not 0 <= curve[1] < float("inf"):
                raise ValueError("seconds of a level go by rows and begin with one row")
        edges = {(names.index(each["lower"]), names.index(each["upper"])): _edge(each) for each in found["edges"]}
        if not names or len(set(names)) < len(names) or not seconds[-1][1] or any(low >= up for low, up in edges):
            raise ValueError("levels have names of their own and come the smallest first, the target the last")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        hint = 'levels with "name" and "seconds" by rows; edges with "lower", "upper" and "chance" or "reach"'
        raise InvalidInputError("--costs", str(path), f"cannot be read ({error!r})", hint) from error
    return Levels(names, [rising(curve) for curve in seconds], edges)


def _edge(row: Mapping[str, Any]) -> Edge:
    edge = Edge.of(float(row["chance"])) if "chance" in row else Edge(tuple(map(float, row["reach"])))
    edge = replace(edge, offered=tuple(map(float, row.get("offered", ()))))
    falls = all(before >= after for before, after in itertools.pairwise((1.0, *edge.reach, 0.0)))
    if len(edge.reach) < MOST or len(edge.offered) not in (0, len(edge.reach)):
        raise ValueError(f"reach, and offered where it is there, has {MOST} chances")
    if not falls or not all(0.0 <= chance <= 1.0 for chance in edge.offered):
        raise ValueError("chances lie between 0 and 1, and those of more candidates are no larger")
    return edge


def measure(config: EngineConfig, texts: Sequence[str], max_tokens: int, report: Callable[[str], None]) -> Levels:
    """Has the target answer, asks every level what it would have said, and times their passes.

    Args:
        config: target, draft model and stack: the levels that there are to choose from.
        texts: what is asked.
        max_tokens: of each answer.
        report: told how far it is.
    """
    pair = resolve(config)
    own = [config.draft_model] if config.draft_model is not None else []
    names = [*reversed([*own, *(level.spec for level in config.levels)]), config.model]
    models = [*reversed([pair.target, *([pair.draft] if pair.draft is not None else []), *pair.stack])]
    drafters = names[: len(names) - len(models)]
    check_alike(pair)
    with Engine(config, pair=pair) as engine:  # has room for all of them
        answers = [_answer(engine, text, max_tokens) for text in texts]
        if all(len(answer.token_ids) < MOST for answer in answers):
            hint = "take prompts that have longer answers"
            raise InvalidInputError("--prompts", f"{len(texts)} answers", f"none has {MOST} tokens, a block", hint)
        report(f"{len(texts)} answers, {sum(len(answer.token_ids) for answer in answers)} tokens")
        seconds: list[Curve] = [_ask_drafter(spec, config, pair, answers) for spec in drafters]
        for model in models:
            _ask_model(model, pair, answers)
        seconds += _pass_times(models)
    for name, curve in zip(names, seconds, strict=True):
        report(f"{name}: " + ", ".join(f"{rows} rows {1e3 * each:.2f} ms" for rows, each in curve.items()))
    pairs = itertools.combinations(range(len(names)), 2)
    return Levels(names, seconds, {(low, up): agreement(answers, low, up) for low, up in pairs})


def _answer(engine: Engine, text: str, max_tokens: int) -> Text:
    prompt_ids = asked_as_user(engine, text)
    params = SamplingParams(max_tokens=max_tokens)
    return Text(prompt_ids, engine.submit(prompt_ids, params).result().token_ids, [])


def _ask_model(spec: ModelSpec, pair: Pair, answers: Sequence[Text]) -> None:
    """What a model says at each position, one pass for many."""
    use_threads(num_cores())
    with borrowed(spec) as model:
        runner = ModelRunner(model, max_len=pair.max_len, num_scratch=16)
        for text in answers:
            ids = list[int]()
            for logits in along(runner, text.prompt_ids, text.token_ids):
                ids += logits[:, : pair.vocab_size].argmax(-1).tolist()
            text.said.append([ids[place : place + MOST] for place in range(len(ids))])


def _ask_drafter(spec: str, config: EngineConfig, pair: Pair, answers: Sequence[Text]) -> Curve:
    """What a drafter without a model says at each position; seconds that it takes a time."""
    setting = Setting(pair.vocab_size, pair.max_len, 1, pair.eos_ids, pair.tokenizer, limits=config.limits)
    drafter = plugins.find("drafters", spec).make(setting)
    lower, spent, asked = LowerLevel(drafter, 1, pair.vocab_size), 0.0, 0
    for number, text in enumerate(answers):
        request = Request(number, text.prompt_ids, SamplingParams(), pair.eos_ids)
        lower.begin(request, ())
        chains = list[list[int]]()
        for place, token in enumerate(text.token_ids):
            begun = time.perf_counter()
            (heard,) = lower.guess([GuessRequest(number, place, (), MOST)])
            spent, asked = spent + time.perf_counter() - begun, asked + 1
            chains.append(_chain(heard.rows(0, 1, lambda _: True)))
            lower.correct(number, place, [token])
        lower.end(number)
        text.said.append(chains)
    lower.close()
    if lower.failed:
        raise InvalidInputError(
            "stack", spec, "failed while it was asked", "the log says how: mend it, or leave it out"
        )
    return {1: spent / max(1, asked)}


def _chain(guesses: Sequence[tuple[int, int]]) -> list[int]:
    """The likeliest child of the likeliest child, and so on."""
    chain, last = list[int](), 0
    for row, (parent, token) in enumerate(guesses, 1):
        if parent == last:
            chain.append(token)
            last = row
    return chain


def _pass_times(specs: Sequence[ModelSpec], repeats: int = 9) -> list[dict[int, float]]:
    use_threads(num_cores())
    with contextlib.ExitStack() as held:
        models = [held.enter_context(borrowed(spec)) for spec in specs]
        steps = [Steps(ModelRunner(model, max_len=2 * CONTEXT, num_scratch=max(SIZES))) for model in models]
        return [dict(rising(curve)) for curve in curves(steps, repeats)]


def agreement(texts: Sequence[Text], lower: int, upper: int) -> Edge:
    """How far one level takes another's candidates, block after block along the target's texts.

    Where both leave the text nobody knows what they would say next: such a block counts up to there (a product-limit
    estimate, as of survival times that are cut short).
    """
    rounds, asked, there, taken = 0, [0] * MOST, [0] * MOST, [0] * MOST
    for text in texts:
        place, count = 0, len(text.token_ids)
        while place + MOST <= count:
            chain, rounds, length = text.said[lower][place], rounds + 1, 0
            for k in range(len(chain)):
                there[k] += 1
            for k in range(MOST):
                asked[k] += 1
                if k == len(chain) or chain[k] != text.said[upper][place + k][0]:
                    break
                taken[k], length = taken[k] + 1, k + 1
                if chain[k] != text.token_ids[place + k]:
                    break
            place += length + 1
    chances = [hit / seen if seen else 0.0 for hit, seen in zip(taken, asked, strict=True)]
    reach = tuple(itertools.accumulate(chances, lambda before, chance: before * chance))
    return Edge(reach, tuple(count / max(1, rounds) for count in there))
