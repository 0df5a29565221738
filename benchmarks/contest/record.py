"""Record the candidates of a draft along the target's text: `python -m benchmarks.contest.record FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contest.traces import Trace, save
from langchain_card.bench.prompts import find, user_prompt
from langchain_card.bench.teacher_forced import check_same_vocabulary, logits_along, shared_model
from langchain_card.cli.fields import SETS, add_engine_fields, check_output, engine_fields
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.drafters.tree import NUM_CHILDREN
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import resolve
from langchain_card.runtime.runner import ModelRunner


def record(engine: Engine, draft: ModelRunner, prompt_ids: Sequence[int], max_tokens: int) -> Trace:
    """Record one trace.

    Args:
        engine: writes the text, greedily.
        draft: predicts each token of it.
        prompt_ids: of the text.
        max_tokens: of the text.
    """
    token_ids = engine.submit(prompt_ids, SamplingParams(max_tokens=max_tokens)).result().token_ids
    ids: list[tuple[int, ...]] = []
    logs: list[tuple[float, ...]] = []
    for logits in logits_along(draft, prompt_ids, token_ids):
        top = logits.double().log_softmax(dim=-1).topk(NUM_CHILDREN)
        ids += map(tuple, top.indices.tolist())
        logs += map(tuple, top.values.tolist())
    return Trace(tuple(prompt_ids), tuple(token_ids), tuple(ids), tuple(logs))


def record_all(
    config: EngineConfig, texts: Sequence[str], max_tokens: int, report: Callable[[int, Trace], None]
) -> list[Trace]:
    """Record a trace of the answer to each text.

    Args:
        config: a target and a draft model.
        texts: messages of the user.
        max_tokens: of each answer.
        report: receives the number and the trace of each answer.

    Raises:
        InvalidInputError: the draft is not a model, or has another vocabulary.
    """
    traces: list[Trace] = []
    pair = resolve(config)
    if pair.draft is None:
        raise InvalidInputError("draft_model", config.draft_model, "must be a model", "prompt lookup needs no record")
    check_same_vocabulary(pair)
    with Engine(config, pair=pair) as engine, shared_model(pair.draft) as model:
        draft = ModelRunner(model, max_len=engine.max_model_len, num_scratch=16)
        for number, text in enumerate(texts, start=1):
            traces.append(record(engine, draft, user_prompt(engine, text), max_tokens))
            report(number, traces[-1])
    return traces


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a pair's traces over a set of prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_fields(parser)
    parser.add_argument("file", type=Path, help="where the traces are written (.json)")
    parser.add_argument("--prompts", default="own", metavar="SET", help=SETS)
    parser.add_argument("--count", type=int, default=8, help="prompts (8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (128)")
    args = parser.parse_args(arguments)
    check_output("file", args.file, ".json")
    texts = find(args.prompts, args.count)

    def report(number: int, trace: Trace) -> None:
        first = sum(trace.rank(position) == 0 for position in range(len(trace.token_ids)))
        print(f"{number} of {len(texts)}: {len(trace.token_ids)} tokens, {first} of them the draft's first choice")

    save(record_all(EngineConfig(**engine_fields(args)), texts, args.max_tokens, report), args.file)


if __name__ == "__main__":
    main()
