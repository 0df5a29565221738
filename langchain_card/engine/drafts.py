"""Where drafters live: on the target's thread, on a thread of their own, or in a process of their own."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Proposal
from langchain_card.drafters.forced import ForcedDrafter
from langchain_card.drafters.model import ModelDrafter
from langchain_card.drafters.ngram import NgramDrafter
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.errors import CARDError, DeviceError, InvalidInputError, ModelStoreError, is_out_of_memory
from langchain_card.ports import Constraint, Drafter, Transport
from langchain_card.runtime.loader import ModelSpec, Pair, load_model
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import ThreadPlan, use_threads
from langchain_card.transports.inline import InlineTransport
from langchain_card.transports.thread import ThreadTransport

if TYPE_CHECKING:
    from langchain_card.engine.driver import Driver

log = logging.getLogger(__name__)

SCRATCH = 64
"""Unverified nodes that the draft holds KV for."""

FACTORY = f"{__name__}:build_worker"


def needs_process(config: EngineConfig, pair: Pair) -> bool:
    """Whether the draft model gets a process of its own.

    Raises:
        InvalidInputError: it should have one, and msgspec is not installed.
    """
    if pair.draft is None or config.draft_transport == "thread":
        return False
    asked = config.draft_transport == "process"
    devices = pair.target.device, pair.draft.device
    if not asked and (devices[0] == devices[1] or any(device.type != "cuda" for device in devices)):
        return False
    if importlib.util.find_spec("msgspec") is not None:
        return True
    if asked:
        raise InvalidInputError("draft_transport", "process", "needs the package msgspec", "pip install msgspec")
    log.info("the draft runs on a thread: msgspec, which a process needs, is not installed")
    return False


def transport_makers(
    config: EngineConfig, pair: Pair, threads: ThreadPlan, model: Any | None, constrain: Callable[[str], Constraint]
) -> dict[str, Callable[[Driver], Transport]]:
    """By drafter, what makes its transport with a fresh worker behind it.

    Args:
        config: of the engine.
        pair: of the engine.
        threads: CPU threads of either side.
        model: the draft model; None when it lives in a process of its own, or there is none.
        constrain: what a grammar allows, before the answer.
    """
    makers: dict[str, Callable[[Driver], Transport]] = {}
    if config.has_ngram:
        makers[NgramDrafter.name] = functools.partial(_here, NgramDrafter, threads)
    if config.draft_model is not None:
        makers[ForcedDrafter.name] = functools.partial(_here, functools.partial(ForcedDrafter, constrain), threads)
    if pair.draft is not None and model is None:
        sizes: dict[str, str | int] = {
            "max_len": pair.max_len,
            "num_seqs": config.limits.num_seqs,
            "vocab_size": pair.vocab_size,
            "execution": config.execution_on(pair.draft.device.type) or "",
            "num_threads": threads.draft("parallel"),
        }
        arguments = {**_fields(pair.draft), **sizes}
        makers["model"] = functools.partial(_in_process, arguments)
    elif pair.draft is not None:
        execution = config.execution_on(pair.draft.device.type)
        runner = _runner(model, pair.max_len, config.limits.num_seqs, execution)
        make = functools.partial(_model_drafter, runner, pair.vocab_size, constrain)
        makers["model"] = functools.partial(_here, make, threads)
    return makers


def _runner(model: Any, max_len: int, num_seqs: int, execution: str | None) -> ModelRunner:
    max_len = min(max_len, model.config.get_text_config().max_position_embeddings)
    return ModelRunner(model, max_len=max_len, num_scratch=SCRATCH, num_seqs=num_seqs, execution=execution)


def _model_drafter(
    runner: ModelRunner, vocab_size: int, constrain: Callable[[str], Constraint] | None = None
) -> ModelDrafter:
    runner.pool.forget()  # what one that died had left there
    return ModelDrafter(runner, vocab_size=vocab_size, constrain=constrain)


def _here(make: Callable[[], Drafter], threads: ThreadPlan, driver: Driver) -> Transport:
    """In this process: what costs device time gets a thread of its own."""
    drafter = make()
    worker = DraftWorker(
        drafter,
        driver.publish,
        functools.partial(driver.report_out_of_memory, drafter.name),
        (lambda schedule: use_threads(threads.draft(schedule))) if drafter.paced else lambda _: None,
    )
    on_death = functools.partial(driver.report_death, drafter.name)
    if drafter.paced:
        return ThreadTransport(worker, name=f"card-{drafter.name}", on_death=on_death)
    return InlineTransport(worker, on_death=on_death)


def _in_process(arguments: Mapping[str, str | int], driver: Driver) -> Transport:
    from langchain_card.transports.process import ProcessTransport  # needs msgspec

    name = ModelDrafter.name
    return ProcessTransport(
        FACTORY,
        arguments,
        name=name,
        publish=driver.publish,
        report_out_of_memory=functools.partial(driver.report_out_of_memory, name),
        on_ready=functools.partial(driver.report_start, name),
        on_death=functools.partial(driver.report_death, name),
    )


def _fields(spec: ModelSpec) -> dict[str, str | int]:
    """As `build_worker` takes them."""
    return {
        "name": spec.name,
        "folder": str(spec.folder),
        "form": spec.form,
        "device": str(spec.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": spec.quantization or "",
        "draft": spec.draft,
    }


def build_worker(
    publish: Callable[[Proposal], None],
    report_out_of_memory: Callable[[tuple[int, ...]], None],
    *,
    name: str,
    folder: str,
    form: Literal["float", "int8"],
    device: str,
    dtype: str,
    quantization: str,
    draft: bool,
    execution: str,
    max_len: int,
    num_seqs: int,
    vocab_size: int,
    num_threads: int,
) -> DraftWorker:
    """In the draft's process: loads the draft model that a `ModelSpec` with these fields describes.

    A step takes `num_threads` CPU threads, whatever the schedule: this process does not know when the other one rests.

    Raises:
        DeviceError: the device has no room for the model.
        CARDError: it could not be loaded.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the terminal is the parent's
    use_threads(num_threads)
    spec = ModelSpec(
        name, Path(folder), form, torch.device(device), getattr(torch, dtype), quantization or None,
        compiled=execution == "compiled", draft=draft,
    )  # fmt: skip
    runner = _runner(_load(spec), max_len, num_seqs, execution or None)
    drafter = _model_drafter(runner, vocab_size)
    return DraftWorker(drafter, publish, report_out_of_memory, lambda _: use_threads(num_threads))


def _load(spec: ModelSpec) -> Any:
    """The model, or one of our errors: any other could not be raised again in the parent."""
    try:
        return load_model(spec)
    except CARDError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            hint = "use a smaller draft, or another draft_device"
            raise DeviceError("draft_device", str(spec.device), f"has no room for {spec.name}", hint) from error
        limit = f"could not be loaded ({type(error).__name__}: {error})"
        raise ModelStoreError("draft_model", spec.name, limit, "remove the model and pull it again") from error
