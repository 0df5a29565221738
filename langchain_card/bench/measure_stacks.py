"""Measurements for `plan`: pass times and agreement of the levels of a stack, and the speedup of planned stacks."""

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
from langchain_card.bench.bounds import Measured
from langchain_card.bench.plan import MAX_BLOCK, Case, Edge, Plan
from langchain_card.bench.prompts import user_prompt
from langchain_card.bench.step_times import SIZES, check_curve, curves, interpolate, monotone
from langchain_card.bench.teacher_forced import check_same_vocabulary, logits_along, predict_with_head, shared_model
from langchain_card.config import EngineConfig
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.head import HeadDrafter
from langchain_card.drafters.lower_level import GuessRequest, LowerLevel
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Pins
from langchain_card.models.loader import ModelSpec, Pair, resolve
from langchain_card.ports import Setting
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.step_timer import CONTEXT, StepTimer
from langchain_card.runtime.threads import num_cores, use_threads

Curve: TypeAlias = Mapping[int, float]
"""Seconds of a pass by its rows."""

Chains: TypeAlias = Sequence[Sequence[int]]
"""[positions][tokens] continuation that a level predicts at each position of the target's answer."""

DEPTH = MAX_BLOCK + 1
"""Tokens that each level predicts at each position."""

_PLAIN = "plain decoding"


@dataclass(frozen=True)
class AnsweredPrompt:
    """An answer of the target, with the predictions of every level along it.

    Attributes:
        prompt_ids: of the question.
        token_ids: of the answer.
        predictions: by level, the smallest first.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    predictions: list[Chains]


@dataclass(frozen=True)
class Levels:
    """The measurements of the levels that a stack can have.

    Attributes:
        names: of the levels, the smallest first. The last is the target.
        seconds: of a pass of each level, by its rows.
        edges: agreement of two levels, by (lower, upper).
    """

    names: list[str]
    seconds: list[Curve]
    edges: dict[tuple[int, int], Edge]

    def case(self) -> Case:
        """Return the measurements in the form of the planner's input."""
        return Case(self.names, [_cost(curve) for curve in self.seconds], self.edges)

    def to_json(self) -> dict[str, Any]:
        """Return the measurements in the JSON form of `read_levels`."""
        edges = [
            {"lower": self.names[low], "upper": self.names[up], "reach": edge.reach, "offered": edge.offered}
            for (low, up), edge in self.edges.items()
        ]
        levels = [{"name": name, "seconds": curve} for name, curve in zip(self.names, self.seconds, strict=True)]
        return {"levels": levels, "edges": edges}


def _cost(curve: Curve) -> Callable[[float], float]:
    return (lambda rows: interpolate(curve, rows)) if len(curve) > 1 else (lambda _: curve[1])


def read_levels(path: Path) -> Levels:
    """Read levels from a file of `plan --json`, or from one written by hand with `chance` instead of `reach`.

    Raises:
        InvalidInputError: the file cannot be read, or its levels are not valid.
    """
    try:
        data = json.loads(path.read_text())
        data = data.get("inputs", data)
        names = [str(level["name"]) for level in data["levels"]]
        seconds = [{int(rows): float(time) for rows, time in level["seconds"].items()} for level in data["levels"]]
        for curve in seconds:
            if len(curve) > 1:
                check_curve(curve)
            elif [*curve] != [1] or not 0 <= curve[1] < float("inf"):
                raise ValueError("seconds of a level go by rows and begin with one row")
        edges = {(names.index(edge["lower"]), names.index(edge["upper"])): _edge(edge) for edge in data["edges"]}
        if not names or len(set(names)) < len(names) or not seconds[-1][1] or any(low >= up for low, up in edges):
            raise ValueError("levels have names of their own and come the smallest first, the target the last")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        hint = 'levels with "name" and "seconds" by rows; edges with "lower", "upper" and "chance" or "reach"'
        raise InvalidInputError("--costs", str(path), f"cannot be read ({error!r})", hint) from error
    return Levels(names, [monotone(curve) for curve in seconds], edges)


def _edge(row: Mapping[str, Any]) -> Edge:
    edge = Edge.of(float(row["chance"])) if "chance" in row else Edge(tuple(map(float, row["reach"])))
    edge = replace(edge, offered=tuple(map(float, row.get("offered", ()))))
    falls = all(before >= after for before, after in itertools.pairwise((1.0, *edge.reach, 0.0)))
    if len(edge.reach) < DEPTH or len(edge.offered) not in (0, len(edge.reach)):
        raise ValueError(f"reach, and offered where it is there, has {DEPTH} chances")
    if not falls or not all(0.0 <= chance <= 1.0 for chance in edge.offered):
        raise ValueError("chances lie between 0 and 1, and those of more candidates are no larger")
    return edge


def measure(config: EngineConfig, texts: Sequence[str], max_tokens: int, report: Callable[[str], None]) -> Levels:
    """Measure the agreement of all levels along answers of the target, and their pass times.

    Args:
        config: target, draft model and stack, which are the levels.
        texts: prompts.
        max_tokens: of each answer.
        report: receives the progress.

    Raises:
        InvalidInputError: the levels cannot be compared, or all answers are shorter than a block.
    """
    pair = resolve(config)
    draft = [config.draft_model] if config.draft_model is not None else []
    names = [*reversed([*draft, *(level.spec for level in config.levels)]), config.model]
    models = [*reversed([pair.target, *([pair.draft] if pair.draft is not None else []), *pair.stack])]
    drafters = names[: len(names) - len(models)]
    check_same_vocabulary(pair)
    with Engine(config, pair=pair) as engine:  # checks that all of them fit in memory
        answers = [_answer(engine, text, max_tokens) for text in texts]
        if all(len(answer.token_ids) < DEPTH for answer in answers):
            hint = "take prompts that have longer answers"
            raise InvalidInputError("--prompts", f"{len(texts)} answers", f"none has {DEPTH} tokens, a block", hint)
        report(f"{len(texts)} answers, {sum(len(answer.token_ids) for answer in answers)} tokens")
        seconds: list[Curve] = [_predict_with_drafter(spec, config, pair, answers) for spec in drafters]
        for model in models:
            _predict_with_model(model, pair, answers)
        seconds += _pass_times(models)
    for name, curve in zip(names, seconds, strict=True):
        report(f"{name}: " + ", ".join(f"{rows} rows {1e3 * time:.2f} ms" for rows, time in curve.items()))
    pairs = itertools.combinations(range(len(names)), 2)
    return Levels(names, seconds, {(low, up): agreement(answers, low, up) for low, up in pairs})


def _answer(engine: Engine, text: str, max_tokens: int) -> AnsweredPrompt:
    prompt_ids = user_prompt(engine, text)
    params = SamplingParams(max_tokens=max_tokens)
    return AnsweredPrompt(prompt_ids, engine.submit(prompt_ids, params).result().token_ids, [])


def _predict_with_model(spec: ModelSpec, pair: Pair, answers: Sequence[AnsweredPrompt]) -> None:
    """Add a model's predictions. Each is its likeliest token after the target's text."""
    use_threads(num_cores(), in_torch=spec.form == "float")
    with shared_model(spec) as model:
        runner = ModelRunner(model, max_len=pair.max_len, num_scratch=16)
        for answer in answers:
            ids = list[int]()
            for logits in logits_along(runner, answer.prompt_ids, answer.token_ids):
                ids += logits[:, : pair.vocab_size].argmax(-1).tolist()
            answer.predictions.append([ids[place : place + DEPTH] for place in range(len(ids))])


def _predict_with_drafter(spec: str, config: EngineConfig, pair: Pair, answers: Sequence[AnsweredPrompt]) -> Curve:
    """Add the predictions of a drafter without a model. Returns its seconds per call, as a curve."""
    plugin = plugins.find("drafters", spec)
    if plugin.name == HeadDrafter.name:
        texts = [(answer.prompt_ids, answer.token_ids) for answer in answers]
        drafted, step, after = predict_with_head(str(plugin.options.get("file", "")), pair, texts, DEPTH)
        for answer, places in zip(answers, drafted, strict=True):
            answer.predictions.append(places)
        return {1: max(step, after)}  # the first token of a chain takes no step, but what follows each pass
    setting = Setting(pair.vocab_size, pair.max_len, 1, pair.eos_ids, pair.tokenizer, limits=config.limits)
    drafter = plugin.make(setting)
    level, spent, calls = LowerLevel(drafter, 1, pair.vocab_size), 0.0, 0
    for number, answer in enumerate(answers):
        request = Request(number, answer.prompt_ids, SamplingParams(), pair.eos_ids)
        level.begin(request, ())
        chains = list[list[int]]()
        for place, token in enumerate(answer.token_ids):
            begun = time.perf_counter()
            (reply,) = level.guess([GuessRequest(number, place, (), DEPTH)])
            spent, calls = spent + time.perf_counter() - begun, calls + 1
            chains.append(_chain(reply.rows(0, 1, lambda _: True)))
            level.correct(number, place, [token])
        level.end(number)
        answer.predictions.append(chains)
    level.close()
    if level.failed:
        raise InvalidInputError("stack", spec, "failed while it drafted", "the log has the error; or leave it out")
    return {1: spent / max(1, calls)}


def _chain(guesses: Sequence[tuple[int, int]]) -> list[int]:
    """Return the path of likeliest children from the root."""
    chain, last = list[int](), 0
    for row, (parent, token) in enumerate(guesses, 1):
        if parent == last:
            chain.append(token)
            last = row
    return chain


def _pass_times(specs: Sequence[ModelSpec], repeats: int = 9) -> list[dict[int, float]]:
    use_threads(num_cores(), in_torch=any(spec.form == "float" for spec in specs))
    with contextlib.ExitStack() as loaded:
        models = [loaded.enter_context(shared_model(spec)) for spec in specs]
        steps = [StepTimer(ModelRunner(model, max_len=2 * CONTEXT, num_scratch=max(SIZES))) for model in models]
        return [monotone(curve) for curve in curves(steps, repeats)]


def agreement(answers: Sequence[AnsweredPrompt], lower: int, upper: int) -> Edge:
    """Return the agreement of two levels, block after block along the target's answers.

    Where both levels leave the answer, their next predictions are unknown, and the block counts up to there (a
    product-limit estimate, as for censored survival times).
    """
    rounds, compared, offered, taken = 0, [0] * DEPTH, [0] * DEPTH, [0] * DEPTH
    for answer in answers:
        place, count = 0, len(answer.token_ids)
        while place + DEPTH <= count:
            chain, rounds, length = answer.predictions[lower][place], rounds + 1, 0
            for k in range(len(chain)):
                offered[k] += 1
            for k in range(DEPTH):
                compared[k] += 1
                if k == len(chain) or chain[k] != answer.predictions[upper][place + k][0]:
                    break
                taken[k], length = taken[k] + 1, k + 1
                if chain[k] != answer.token_ids[place + k]:
                    break
            place += length + 1
    chances = [hits / count if count else 0.0 for hits, count in zip(taken, compared, strict=True)]
    reach = tuple(itertools.accumulate(chances, lambda before, chance: before * chance))
    return Edge(reach, tuple(count / max(1, rounds) for count in offered))


def stack_config(fields: Mapping[str, Any], case: Case, plan: Plan) -> EngineConfig:
    """Return the configuration of an engine that runs a planned stack: block sizes pinned, draft and target in turns.

    Args:
        fields: of `EngineConfig`, except for the models below the target.
        case: input of the planner.
        plan: the stack.
    """
    if not plan.blocks:
        return EngineConfig(**{**fields, "draft_model": None})
    draft, *lower = (case.names[level] for level in reversed(plan.levels[:-1]))
    *blocks, block = plan.blocks
    stack = tuple(_with_block(name, size) for name, size in zip(lower, reversed(blocks), strict=True))
    pins = Pins(draft_width=1, lead=block, window=block + 1)
    return EngineConfig(**{**fields, "draft_model": draft}, drafters=(), stack=stack, pins=pins)


def _with_block(name: str, block: int) -> str:
    bare, _ = plugins.take_option(name, "block")
    return f"{bare}{'&' if '?' in bare else '?'}block={block}"


def measure_speedups(
    fields: Mapping[str, Any], case: Case, plans: Sequence[Plan], texts: Sequence[str], max_tokens: int
) -> list[Measured]:
    """Return the speedups of stacks over plain decoding after the first token. The order changes with each text."""
    seconds: list[list[float]] = []
    with contextlib.ExitStack() as opened:
        configs = [stack_config(fields, case, plan) for plan in (Plan(0.0, (case.target,)), *plans)]
        engines = [opened.enter_context(Engine(config)) for config in configs]
        params = SamplingParams(max_tokens=max_tokens, schedule="sequential")
        for engine in engines:  # not counted: loads and compiles
            engine.submit(user_prompt(engine, texts[0]), replace(params, max_tokens=8)).result()
        for number, text in enumerate(texts):
            spent = [0.0] * len(engines)
            for place in range(len(engines)):
                i = (place + number) % len(engines)
                stats = engines[i].submit(user_prompt(engines[i], text), params).result().stats
                spent[i] = (stats.ended - stats.first_token) / max(1, stats.output_tokens - 1)
            if all(spent):  # False where an answer has one token
                seconds.append(spent)
    return [Measured.of([row[0] / row[i] for row in seconds]) for i in range(1, len(engines))]


def verdict(measured: Mapping[str, Measured]) -> str:
    """Return the result of the measurement in a sentence.

    Args:
        measured: speedups over plain decoding, by the description of the stack.
    """
    every = {**measured, _PLAIN: Measured(1.0, 1.0, 1.0)}
    best = max(every, key=lambda name: every[name].value)
    close = [name for name, speedup in every.items() if name != best and speedup.high >= every[best].low]
    if best == _PLAIN and not close:
        return "Do not speculate: plain decoding is the fastest here."
    if close:
        return f"The fastest: {best}; but too close to tell from {' and '.join(close)} with so few prompts."
    return f"The fastest: {best}."
