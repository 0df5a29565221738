"""The process of a peer (`peers.Peer`): `python -m langchain_card.bench.peer_process`, which is told all on stdin."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from langchain_card.bench.method import PeakMemory, Run
from langchain_card.bench.method_table import PEERS
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import ModelSpec, Pair, load_model, resolve
from langchain_card.models.store import ModelStore
from langchain_card.runtime.threads import num_cores, use_threads

_Generate: TypeAlias = Callable[[Sequence[Sequence[int]]], Run]


def main() -> None:
    """Reads a line that says what it is, answers `{}`; then a run for each line of prompts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    asked = json.loads(sys.stdin.readline())
    use_threads(num_cores())
    try:
        generate, device = _make(asked)
    except Exception as error:
        print(json.dumps({"error": _words(error)}), file=answers, flush=True)
        return
    peak = PeakMemory(cuda=device.type == "cuda")
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        peak.reset()
        try:
            run = generate(json.loads(line)["prompts"])
            said = {name: getattr(run, name) for name in ("token_ids", "first", "seconds", "tokens", "figures")}
            said["peak"] = peak.read()
        except Exception as error:
            said = {"error": _words(error)}
        print(json.dumps(said), file=answers, flush=True)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _make(asked: dict[str, Any]) -> tuple[_Generate, torch.device]:
    config, kind = EngineConfig(**asked["config"]), PEERS[asked["name"]]
    if kind.weights == "float32":
        config = replace(config, quantization=None, dtype="float32")
    pair = resolve(config)
    make = {"flashspec": _flashspec, "llama-cpp": _llama_cpp}.get(asked["name"], _transformers)
    return make(asked["name"], pair, asked["max_tokens"], asked["temperature"]), pair.target.device


def gguf_file(model: str) -> Path:
    """The GGUF file of a model.

    Raises:
        InvalidInputError: it has none.
    """
    path = ModelStore().path(model)
    if path.suffix != ".gguf":
        raise InvalidInputError("--methods", "llama-cpp", f"reads GGUF files, {model} is none", "leave it out")
    return path


def _load(spec: ModelSpec) -> Any:
    """With transformers' own layers and attention, without the folder's habits; a draft keeps its whole head."""
    from transformers import GenerationConfig

    model = load_model(replace(spec, draft=False, compiled=False), fused=False)
    if spec.draft and spec.form == "int8":
        from langchain_card.runtime.cpu import int4

        int4.to_4_bits(model)
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    return model


def _now(device: torch.device) -> float:
    """The time when the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _transformers(name: str, pair: Pair, max_tokens: int, temperature: float) -> _Generate:
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = _load(pair.target)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if name == "hf-assisted":
        assert pair.draft is not None
        options["assistant_model"] = _load(pair.draft)
    elif name == "hf-prompt-lookup":
        options["prompt_lookup_num_tokens"] = 10
    padding = pair.eos_ids[0] if pair.eos_ids else 0

    class Clock(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        """Stops nothing; notes when there were how many tokens."""

        def __init__(self) -> None:
            self.seen: list[tuple[int, float]] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.seen.append((input_ids.shape[1], _now(input_ids.device)))
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def generate(prompts: Sequence[Sequence[int]]) -> Run:
        longest = max(map(len, prompts))
        padded = [[padding] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        torch.manual_seed(0)
        clock, begun = Clock(), time.perf_counter()
        out = model.generate(
            torch.tensor(padded, device=pair.target.device),
            attention_mask=torch.tensor(mask, device=pair.target.device),
            max_new_tokens=max_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
            eos_token_id=list(pair.eos_ids) or None,
            pad_token_id=padding,
            **options,
        )
        (length, first), (_, ended) = clock.seen[0], clock.seen[-1]
        answers = tuple(_cut(row, pair.eos_ids) for row in out[:, longest:].tolist())
        at_once = (length - longest) * len(prompts)
        return Run(answers, first - begun, ended - first, sum(map(len, answers)) - at_once)

    return generate


def _cut(token_ids: Sequence[int], eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Up to the end of text, which belongs to it; what follows is padding."""
    ends = [i for i, token in enumerate(token_ids) if token in eos_ids]
    return tuple(token_ids[: ends[0] + 1] if ends else token_ids)


def _flashspec(name: str, pair: Pair, max_tokens: int, temperature: float) -> _Generate:
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    assert pair.draft is not None
    spec, draft = pair.target, pair.draft
    target = TargetModel(spec.name, spec.device, spec.dtype, model=_load(spec))
    drafter = HuggingFaceDrafter(draft.name, draft.device, draft.dtype, model=_load(draft))
    config = FlashSpecConfig(
        device=str(spec.device),
        dtype=str(spec.dtype).removeprefix("torch."),
        sampling=SamplingConfig(temperature=temperature),
        eos_token_ids=pair.eos_ids,
    )
    engine, steps_ended, commit = SpeculativeEngine(config, [drafter], target), list[float](), target.commit

    def timed(*args: Any, **options: Any) -> None:
        commit(*args, **options)
        steps_ended.append(_now(spec.device))

    target.commit = timed

    def generate(prompts: Sequence[Sequence[int]]) -> Run:
        steps_ended.clear()
        begun = time.perf_counter()
        result = engine.generate(torch.tensor([*map(list, prompts)], device=spec.device), max_new_tokens=max_tokens)
        ended = _now(spec.device)
        answer = tuple(result.output_ids[0, : result.n_tokens_generated].tolist())
        steps, first = result.arm_steps, (*steps_ended, ended)[0]
        figures = {"accepted_length": len(answer) / len(steps), "acceptance": result.acceptance_rate}
        return Run((answer,), first - begun, ended - first, len(answer) - steps[0].emitted, figures=figures)

    return generate


def _llama_cpp(name: str, pair: Pair, max_tokens: int, temperature: float) -> _Generate:
    """Reads prompts and writes tokens with all cores; its other settings are its own."""
    from llama_cpp import Llama

    model = Llama(
        str(gguf_file(pair.target.name)),
        n_ctx=pair.max_len,
        n_threads=num_cores(),
        n_threads_batch=num_cores(),
        n_gpu_layers=0 if pair.target.device.type == "cpu" else -1,
        verbose=False,
    )

    def generate(prompts: Sequence[Sequence[int]]) -> Run:
        model.reset()
        begun, answer, times = time.perf_counter(), list[int](), list[float]()
        for token in model.generate(prompts[0], temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            answer.append(int(token))
            times.append(time.perf_counter())
            if len(answer) == max_tokens or token in pair.eos_ids:
                break
        return Run((tuple(answer),), times[0] - begun, times[-1] - times[0], len(answer) - 1)

    return generate


if __name__ == "__main__":
    main()
