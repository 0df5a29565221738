"""Where drafters live: on the target's thread, on a thread of their own, or in a process of their own."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from langchain_card import plugins
from langchain_card.config import EngineConfig, Level, Limits
from langchain_card.core.messages import Proposal
from langchain_card.core.query import DrafterTraits
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.model import ModelDrafter
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.engine.plugin_drafters import Chosen, source_of
from langchain_card.engine.transports.inline import InlineTransport
from langchain_card.engine.transports.thread import ThreadTransport
from langchain_card.errors import CARDError, DeviceError, InvalidInputError, ModelStoreError, is_out_of_memory
from langchain_card.models.loader import ModelSpec, Pair, load_model
from langchain_card.models.tokenizer import read_tokenizer
from langchain_card.models.vocabulary import VocabularyMap, read_map
from langchain_card.ports import Constraint, Drafter, Setting, Transport
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import ThreadPlan, use_threads

if TYPE_CHECKING:
    from langchain_card.engine.driver import Driver

log = logging.getLogger(__name__)

SCRATCH = 64
"""Unverified nodes that the draft holds KV for."""

FACTORY = f"{__name__}:build_worker"
PLUGIN_FACTORY = f"{__name__}:build_plugin_worker"


def needs_process(config: EngineConfig, pair: Pair) -> bool:
    """Whether the draft model gets a process of its own.

    Raises:
        InvalidInputError: it should have one, and msgspec is not installed.
    """
    if pair.draft is None or config.draft_transport == "thread":
        return False
    if config.draft_transport == "process":
        return _check_process()
    devices = pair.target.device, pair.draft.device
    if devices[0] == devices[1] or any(device.type != "cuda" for device in devices):
        return False
    if config.stack:
        log.info("the draft runs on a thread, with the drafters below it: a process has room for one drafter")
        return False
    if importlib.util.find_spec("msgspec") is not None:
        return True
    log.info("the draft runs on a thread: msgspec, which a process needs, is not installed")
    return False


def _check_process() -> Literal[True]:
    if importlib.util.find_spec("msgspec") is None:
        raise InvalidInputError("draft_transport", "process", "needs the package msgspec", "pip install msgspec")
    return True


def transport_makers(
    config: EngineConfig,
    pair: Pair,
    threads: ThreadPlan,
    models: Sequence[Any],
    setting: Setting,
    beside: Sequence[Chosen],
    below: Chosen | None,
) -> dict[DrafterTraits, Callable[[Driver], Transport]]:
    """For each drafter what makes its transport, with a fresh worker behind it.

    Args:
        config: of the engine.
        pair: of the engine.
        threads: CPU threads of either side.
        models: the draft model and those of the stack; none when it lives in a process of its own, or there is none.
        setting: of the engine's plug-ins.
        beside: drafters beside the draft model or in its place.
        below: the one below it.

    Raises:
        InvalidInputError: a drafter should have a process, and msgspec is not installed.
    """
    makers: dict[DrafterTraits, Callable[[Driver], Transport]] = {}
    for chosen in beside:
        make = functools.partial(_here, chosen.make, threads)
        if chosen.source.paced and config.draft_transport == "process" and _check_process():
            told = _told(setting, chosen.spec, pair.target.folder, threads.draft("parallel"))
            make = functools.partial(_in_process, chosen.source.name, PLUGIN_FACTORY, told)
        makers[chosen.source] = make
    if pair.draft is not None and not models:
        sizes: dict[str, str | int] = {
            "max_len": pair.max_len,
            "num_seqs": config.limits.num_seqs,
            "vocab_size": pair.vocab_size,
            "execution": config.execution_on(pair.draft.device.type) or "",
            "num_threads": threads.draft("parallel"),
            "target_folder": str(pair.target.folder) if pair.vocabulary is not None else "",
        }
        arguments = {**_fields(pair.draft), **sizes}
        makers[source_of(ModelDrafter)] = functools.partial(_in_process, ModelDrafter.name, FACTORY, arguments)
    elif pair.draft is not None:
        execution = config.execution_on(pair.draft.device.type)
        runners = [_runner(model, pair.max_len, config.limits.num_seqs, execution) for model in models]
        draft = functools.partial(_stack, config.levels, runners, pair.vocabularies, setting, below)
        makers[source_of(ModelDrafter)] = functools.partial(_here, draft, threads)
    return makers


def setting_of(config: EngineConfig, pair: Pair, constrain: Callable[[str], Constraint]) -> Setting:
    """Where this engine's plug-ins work."""
    return Setting(
        vocab_size=pair.vocab_size,
        max_len=pair.max_len,
        num_seqs=config.limits.num_seqs,
        eos_ids=pair.eos_ids,
        tokenizer=pair.tokenizer,
        constrain=constrain,
        limits=config.limits,
    )


def _runner(model: Any, max_len: int, num_seqs: int, execution: str | None) -> ModelRunner:
    max_len = min(max_len, model.config.get_text_config().max_position_embeddings)
    return ModelRunner(model, max_len=max_len, num_scratch=SCRATCH, num_seqs=num_seqs, execution=execution)


def _model_drafter(
    runner: ModelRunner,
    vocab_size: int,
    constrain: Callable[[str], Constraint] | None = None,
    vocabulary: VocabularyMap | None = None,
    lower: LowerLevel | None = None,
) -> ModelDrafter:
    runner.pool.forget()  # what one that died had left there
    return ModelDrafter(runner, vocab_size=vocab_size, constrain=constrain, vocabulary=vocabulary, lower=lower)


def _stack(
    levels: Sequence[Level],
    runners: Sequence[ModelRunner],
    vocabularies: Sequence[VocabularyMap | None],
    setting: Setting,
    lowest: Chosen | None,
) -> ModelDrafter:
    """The draft model, which is the first of the runners, with all levels below it, made from the lowest up."""
    lower, left = None, [*zip(runners, vocabularies, strict=True)]
    for level in reversed(levels):
        if lowest is not None and lower is None:
            drafter = lowest.make()
        else:
            runner, vocabulary = left.pop()
            drafter = _model_drafter(runner, setting.vocab_size, setting.constrain, vocabulary, lower)
        lower = LowerLevel(drafter, level.block, setting.vocab_size)
    runner, vocabulary = left.pop()
    return _model_drafter(runner, setting.vocab_size, setting.constrain, vocabulary, lower)


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
        return ThreadTransport(worker, name=drafter.name, on_death=on_death)
    return InlineTransport(worker, name=drafter.name, on_death=on_death)


def _in_process(name: str, factory: str, arguments: Mapping[str, str | int], driver: Driver) -> Transport:
    from langchain_card.engine.transports.process import ProcessTransport  # needs msgspec

    return ProcessTransport(
        factory,
        arguments,
        name=name,
        publish=driver.publish,
        report_out_of_memory=functools.partial(driver.report_out_of_memory, name),
        on_ready=functools.partial(driver.report_start, name),
        on_death=functools.partial(driver.report_death, name),
    )


def _told(setting: Setting, spec: str, folder: Path, num_threads: int) -> dict[str, str | int]:
    """As `build_plugin_worker` takes it."""
    numbers = {name: getattr(setting, name) for name in ("vocab_size", "max_len", "num_seqs", "eos_ids")}
    sent = json.dumps({**numbers, "limits": asdict(setting.limits)})
    return {"spec": spec, "folder": str(folder), "setting": sent, "num_threads": num_threads}


def build_plugin_worker(
    publish: Callable[[Proposal], None],
    report_out_of_memory: Callable[[tuple[int, ...]], None],
    *,
    spec: str,
    folder: str,
    setting: str,
    num_threads: int,
) -> DraftWorker:
    """In a plug-in's process: makes the drafter that `spec` names, which knows of no grammars there.

    Raises:
        InvalidInputError: there is none, as where it was registered in the parent alone.
    """
    use_threads(num_threads)
    sent = json.loads(setting)
    sent["limits"], sent["eos_ids"] = Limits(**sent["limits"]), tuple(sent["eos_ids"])
    drafter = plugins.find("drafters", spec).make(Setting(**sent, tokenizer=read_tokenizer(Path(folder))))
    return DraftWorker(drafter, publish, report_out_of_memory, lambda _: use_threads(num_threads))


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
    target_folder: str,
) -> DraftWorker:
    """In the draft's process: loads the draft model that a `ModelSpec` with these fields describes.

    A step takes `num_threads` CPU threads, whatever the schedule: this process does not know when the other one rests.
    `target_folder` is that of a target with another vocabulary.

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
    vocabulary = read_map(Path(target_folder), spec.folder) if target_folder else None
    drafter = _model_drafter(runner, vocab_size, None, vocabulary)
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
