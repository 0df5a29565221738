"""The process of a peer (`peer.Peer`), with the loops of transformers, FlashSpec and OpenVINO.

`-m langchain_card.bench.peers.process` reads a description of the peer and then prompts, and writes runs, all as JSON
lines.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch

from langchain_card.bench.method import PeakMemory, Run, Served
from langchain_card.bench.method_table import PEERS, PeerOptions
from langchain_card.bench.peers.weights import gguf_file
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import ModelSpec, Pair, load_model, resolve
from langchain_card.runtime.threads import num_cores, use_threads

_Generate: TypeAlias = Callable[[Sequence[Sequence[int]], int], Run]


def main() -> None:
    """Load the peer that the first line describes and respond `{}`; then respond to each line of prompts with a run."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr
    setup = json.loads(sys.stdin.readline())
    try:
        generate, device = _make(setup)
    except Exception as error:
        print(json.dumps({"error": _message(error)}), file=output, flush=True)
        return
    peak = PeakMemory(cuda=device.type == "cuda")
    print("{}", file=output, flush=True)
    for line in sys.stdin:
        peak.reset()
        try:
            response = _respond(generate, json.loads(line)) | {"peak": peak.read()}
        except Exception as error:
            response = {"error": _message(error)}
        print(json.dumps(response), file=output, flush=True)


def _respond(generate: _Generate, message: dict[str, Any]) -> dict[str, Any]:
    prompts, max_tokens = message["prompts"], message["max_tokens"]
    if "requests" in message:
        assert isinstance(generate, _Batching)
        return {"answers": [asdict(answer) for answer in generate.serve(prompts, max_tokens, message["requests"])]}
    run = generate(prompts, max_tokens)
    return {name: getattr(run, name) for name in ("token_ids", "first", "seconds", "tokens", "gap", "figures")}


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _make(setup: dict[str, Any]) -> tuple[_Generate, torch.device]:
    config, kind = EngineConfig(**setup["config"]), PEERS[setup["name"]]
    if kind.weights == "float32":
        config = replace(config, quantization=None, dtype="float32")
    pair = resolve(config)
    use_threads(num_cores(), in_torch=pair.target.form == "float")
    if setup["ignore_end"]:
        pair = replace(pair, eos_ids=())
    makers = {"flashspec": _flashspec, "openvino": _openvino, "openvino-lookup": _openvino}
    makers["openvino-batching"] = _Batching
    make = makers.get(setup["name"], _transformers)
    return make(setup["name"], pair, setup["temperature"], setup["options"]), pair.target.device


def _load(spec: ModelSpec) -> Any:
    """Load a model in transformers' layers, with the default generation config; a draft keeps its whole head."""
    from transformers import GenerationConfig

    model = load_model(replace(spec, compiled=False), fused=False, whole_head=True)
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    return model


def _now(device: torch.device) -> float:
    """Return the time after all work on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _transformers(name: str, pair: Pair, temperature: float, options: PeerOptions) -> _Generate:
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = _load(pair.target)
    given: dict[str, Any] = {"do_sample": False}
    if temperature:
        given = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if name == "hf-assisted":
        assert pair.draft is not None
        given["assistant_model"] = _load(pair.draft)
    elif name == "hf-prompt-lookup":
        given["prompt_lookup_num_tokens"] = 10
    padding = pair.eos_ids[0] if pair.eos_ids else 0

    class TokenTimer(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        """A recorder of length and time at each step. It never stops an answer."""

        def __init__(self) -> None:
            self.steps: list[tuple[int, float]] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.steps.append((input_ids.shape[1], _now(input_ids.device)))
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        longest = max(map(len, prompts))
        padded = [[padding] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        torch.manual_seed(0)
        timer, begun = TokenTimer(), time.perf_counter()
        out = model.generate(
            torch.tensor(padded, device=pair.target.device),
            attention_mask=torch.tensor(mask, device=pair.target.device),
            max_new_tokens=max_tokens,
            stopping_criteria=StoppingCriteriaList([timer]),
            eos_token_id=list(pair.eos_ids) or None,
            pad_token_id=padding,
            **given,
        )
        answers = tuple(_cut(row, pair.eos_ids) for row in out[:, longest:].tolist())
        lengths, ended = zip(*timer.steps, strict=True)
        return Run.of_steps(answers, begun, ended, (lengths[0] - longest) * len(prompts))

    return generate


def _cut(token_ids: Sequence[int], eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Return an answer without its padding. The end-of-text token belongs to the answer."""
    ends = [i for i, token in enumerate(token_ids) if token in eos_ids]
    return tuple(token_ids[: ends[0] + 1] if ends else token_ids)


def _flashspec(name: str, pair: Pair, temperature: float, options: PeerOptions) -> _Generate:
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

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        steps_ended.clear()
        begun = time.perf_counter()
        result = engine.generate(torch.tensor([*map(list, prompts)], device=spec.device), max_new_tokens=max_tokens)
        steps_ended.append(_now(spec.device))
        answer = tuple(result.output_ids[0, : result.n_tokens_generated].tolist())
        steps = result.arm_steps
        figures = {"accepted_length": len(answer) / len(steps), "acceptance": result.acceptance_rate}
        return Run.of_steps((answer,), begun, steps_ended, steps[0].emitted, figures)

    return generate


def _openvino(name: str, pair: Pair, temperature: float, options: PeerOptions) -> _Generate:
    """Return OpenVINO GenAI's loop, on all cores and without a memory of earlier prompts.

    It has no draft model here: the reader of GGUF files refuses Q5_0, in which the built-in draft has most of its
    matrices, and `draft_model` takes converted folders only.
    """
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler, properties, generation = _openvino_options(name, pair, temperature, options)
    if properties.get("ATTENTION_BACKEND") != "SDPA":  # which batches nothing
        properties["scheduler_config"] = scheduler
    if name == "openvino-lookup":
        properties["prompt_lookup"] = True
    model = genai.LLMPipeline(str(gguf_file(name, pair.target.name)), "CPU", **properties)

    class TokenTimer(genai.StreamerBase):  # type: ignore[misc, unused-ignore]
        """A recorder of tokens and of the time of each. The token that ends an answer is among them."""

        def __init__(self) -> None:
            super().__init__()
            self.answer, self.times = list[int](), list[float]()

        def write(self, token: int | Sequence[int]) -> Any:
            tokens = [token] if isinstance(token, int) else [*token]
            self.answer += tokens
            self.times += [time.perf_counter()] * len(tokens)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        generation.max_new_tokens = max_tokens
        timer, begun = TokenTimer(), time.perf_counter()
        model.generate(openvino.Tensor(np.array([prompts[0]], np.int64)), generation, timer)
        return Run.of_steps((tuple(timer.answer),), begun, timer.times, 1)

    return generate


def _openvino_options(name: str, pair: Pair, temperature: float, options: PeerOptions) -> tuple[Any, Any, Any]:
    """Return the scheduler's config, the properties of the pipeline, and the generation config."""
    import openvino_genai as genai

    if pair.target.device.type != "cpu":
        raise InvalidInputError("--methods", name, f"runs on the CPU, not on {pair.target.device}", "leave it out")
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = pair.max_len  # by default a prompt is read in one pass, too
    properties: dict[str, Any] = {key: value for key, value in options.items() if key.isupper()}
    generation = genai.GenerationConfig()
    generation.ignore_eos, generation.stop_token_ids = not pair.eos_ids, {*pair.eos_ids}
    generation.do_sample, generation.apply_chat_template = temperature > 0, False
    if temperature:
        generation.temperature = temperature
    for key, value in options.items():
        if not key.isupper():
            setattr(generation, key, value)
    return scheduler, properties | {"INFERENCE_NUM_THREADS": num_cores()}, generation


class _Batching:
    """OpenVINO GenAI's continuous batching."""

    def __init__(self, name: str, pair: Pair, temperature: float, options: PeerOptions) -> None:
        import openvino_genai as genai

        scheduler, properties, self._generation = _openvino_options(name, pair, temperature, options)
        file = str(gguf_file(name, pair.target.name))
        self._pipeline = genai.ContinuousBatchingPipeline(file, scheduler, "CPU", properties)
        self._next_id = 0

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        """Answer all prompts at once."""
        times, begun = list[float](), time.perf_counter()
        answers = self.serve(prompts, [max_tokens] * len(prompts), len(prompts), times)
        first = [answer.first for answer in answers].count(times[0])
        return Run.of_steps(tuple(answer.token_ids for answer in answers), begun, times, first)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        requests: int,
        times: list[float] | None = None,
    ) -> list[Served]:
        """Answer prompts, so many at once; `times` receives the ends of the steps that brought tokens."""
        import numpy as np
        import openvino

        waiting = [*zip(itertools.count(), prompts, max_tokens)][::-1]
        running: dict[int, tuple[Any, float, list[int], list[float]]] = {}
        answers: dict[int, Served] = {}
        while waiting or running:
            while waiting and len(running) < requests:
                number, prompt, self._generation.max_new_tokens = waiting.pop()
                text, sent = openvino.Tensor(np.array([prompt], np.int64)), time.perf_counter()
                self._next_id += 1
                handle = self._pipeline.add_request(self._next_id, text, self._generation)
                running[number] = handle, sent, [], []
            self._pipeline.step()
            now, written = time.perf_counter(), 0
            for number, (handle, sent, tokens, came) in [*running.items()]:
                while handle.can_read():
                    new = [token for output in handle.read().values() for token in output.generated_ids]
                    tokens += new
                    came += [now] * len(new)
                    written += len(new)
                if handle.get_status().name != "RUNNING":
                    del running[number]
                    answers[number] = Served(tuple(tokens), sent, came[0], came[-1])
            if written and times is not None:
                times.append(now)
        return [answers[number] for number in range(len(prompts))]


if __name__ == "__main__":
    main()
