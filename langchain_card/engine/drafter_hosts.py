"""Drafter hosting: makes each drafter on the target's thread, on its own thread, or in its own process."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from langchain_card import plugins
from langchain_card.config import EngineConfig, Level
from langchain_card.constraints.compiler import Grammars
from langchain_card.constraints.draft_grammars import DraftGrammars
from langchain_card.core.messages import Proposal
from langchain_card.core.query import DrafterTraits
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.model import ModelDrafter
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.engine.plugin_drafters import ChosenDrafter, source_of
from langchain_card.engine.transports.inline import InlineTransport
from langchain_card.engine.transports.thread import ThreadTransport
from langchain_card.errors import CARDError, DeviceError, ModelStoreError, is_out_of_memory
from langchain_card.limits import Limits
from langchain_card.models.loader import ModelSpec, Pair, load_model
from langchain_card.models.store import Form
from langchain_card.models.tokenizer import read_tokenizer
from langchain_card.models.vocabulary import VocabularyMap, read_map
from langchain_card.ports import Constraint, Drafter, Setting, Transport
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import ThreadPlan, use_threads

if TYPE_CHECKING:
    from langchain_card.engine.driver import Driver

log = logging.getLogger(__name__)

SCRATCH = 64
"""Number of unverified nodes that the draft model holds KV for."""

FACTORY = f"{__name__}:build_worker"
PLUGIN_FACTORY = f"{__name__}:build_plugin_worker"


def needs_process(config: EngineConfig, pair: Pair) -> bool:
    """Return whether the draft model gets a process of its own."""
    if pair.draft is None or config.draft_transport == "thread":
        return False
    if config.draft_transport == "process":
        if pair.share_device and pair.target.device.type == "cuda":
            log.warning("draft_transport='process': it takes turns on %s with the target", pair.draft.device)
        return True
    if pair.share_device or any(spec.device.type != "cuda" for spec in (pair.target, pair.draft)):
        return False
    if config.stack:
        log.info("the draft runs on a thread, with the drafters below it: a process has room for one drafter")
        return False
    return True


def transport_makers(
    config: EngineConfig,
    pair: Pair,
    threads: ThreadPlan,
    models: Sequence[Any],
    setting: Setting,
    beside: Sequence[ChosenDrafter],
    below: ChosenDrafter | None,
    on_capture: Callable[[int, int], None],
) -> dict[DrafterTraits, Callable[[Driver], Transport]]:
    """Return for each drafter a function that makes its transport, with a new worker behind it.

    Args:
        config: of the engine.
        pair: of the engine.
        threads: CPU threads of target and draft.
        models: the draft model and those of the stack; empty without a draft model, or if it has a process.
        setting: of the engine, for drafters.
        beside: drafters beside the draft model or in its place.
        below: the drafter below the draft model.
        on_capture: of the runners (`ModelRunner`).
    """
    makers: dict[DrafterTraits, Callable[[Driver], Transport]] = {}
    for chosen in beside:
        in_torch = not chosen.source.reads_target or pair.target.form == "float"
        make = functools.partial(_local_transport, chosen.make, threads, in_torch, setting.constrain)
        if chosen.source.paced and not chosen.source.reads_target and config.draft_transport == "process":
            arguments = {**_setting_arguments(setting, pair.target.folder, threads), "spec": chosen.spec}
            make = functools.partial(_process_transport, chosen.source.name, PLUGIN_FACTORY, arguments)
        makers[chosen.source] = make
    if pair.draft is not None and not models:
        arguments = {
            **_setting_arguments(setting, pair.target.folder, threads),
            **_model_arguments(pair.draft),
            "execution": config.execution_on(pair.draft.device.type) or "",
            "own_vocabulary": pair.vocabulary is not None,
            "context": config.draft_context or 0,
        }
        makers[source_of(ModelDrafter)] = functools.partial(_process_transport, ModelDrafter.name, FACTORY, arguments)
    elif pair.draft is not None:
        execution = config.execution_on(pair.draft.device.type)
        specs = (pair.draft, *pair.stack)
        runners = [
            _runner(model, pair.max_len, config.limits.num_seqs, execution, spec.integer_kv, on_capture)
            for model, spec in zip(models, specs, strict=True)
        ]
        draft = functools.partial(
            _stack, config.levels, runners, pair.vocabularies, config.draft_context, setting, below
        )
        in_torch = any(spec.form == "float" for spec in specs)
        makers[source_of(ModelDrafter)] = functools.partial(
            _local_transport, draft, threads, in_torch, setting.constrain
        )
    return makers


def setting_of(config: EngineConfig, pair: Pair, constrain: Callable[[str], Constraint]) -> Setting:
    """Return the setting for this engine's plug-ins."""
    return Setting(
        vocab_size=pair.vocab_size,
        max_len=pair.max_len,
        num_seqs=config.limits.num_seqs,
        eos_ids=pair.eos_ids,
        tokenizer=pair.tokenizer,
        constrain=constrain,
        limits=config.limits,
    )


def _runner(
    model: Any,
    max_len: int,
    num_seqs: int,
    execution: str | None,
    integer_kv: bool,
    on_capture: Callable[[int, int], None] = lambda done, total: None,
) -> ModelRunner:
    max_len = min(max_len, model.config.get_text_config().max_position_embeddings)
    return ModelRunner(
        model,
        max_len=max_len,
        num_scratch=SCRATCH,
        num_seqs=num_seqs,
        execution=execution,
        integer_kv=integer_kv,
        on_capture=on_capture,
    )


def _model_drafter(
    runner: ModelRunner,
    setting: Setting,
    context: int | None,
    vocabulary: VocabularyMap | None = None,
    lower: LowerLevel | None = None,
) -> ModelDrafter:
    runner.pool.forget()  # the KV of a drafter that died
    return ModelDrafter(
        runner,
        vocab_size=setting.vocab_size,
        context=context,
        constrain=setting.constrain,
        vocabulary=vocabulary,
        lower=lower,
    )


def _stack(
    levels: Sequence[Level],
    runners: Sequence[ModelRunner],
    vocabularies: Sequence[VocabularyMap | None],
    context: int | None,
    setting: Setting,
    lowest: ChosenDrafter | None,
) -> ModelDrafter:
    """Make the draft model's drafter (the first runner) and all levels below it, from the lowest up."""
    lower, models = None, [*zip(runners, vocabularies, strict=True)]
    for level in reversed(levels):
        if lowest is not None and lower is None:
            drafter = lowest.make()
        else:
            runner, vocabulary = models.pop()
            drafter = _model_drafter(runner, setting, context, vocabulary, lower)
        lower = LowerLevel(drafter, level.block, setting.vocab_size, setting.constrain)
    runner, vocabulary = models.pop()
    return _model_drafter(runner, setting, context, vocabulary, lower)


def _local_transport(
    make: Callable[[], Drafter],
    threads: ThreadPlan,
    in_torch: bool,
    constrain: Callable[[str], Constraint],
    driver: Driver,
) -> Transport:
    """Host a drafter in this process: on its own thread if its steps cost device time, else inline."""
    drafter = make()
    worker = DraftWorker(
        drafter,
        driver.publish,
        functools.partial(driver.report_out_of_memory, drafter.name),
        (lambda schedule: use_threads(threads.draft(schedule), in_torch=in_torch)) if drafter.paced else lambda _: None,
        constrain,
    )
    on_death = functools.partial(driver.report_death, drafter.name)
    if drafter.paced and not getattr(drafter, "reads_target", False):
        return ThreadTransport(worker, name=drafter.name, on_death=on_death)
    return InlineTransport(worker, name=drafter.name, on_death=on_death)


def _process_transport(name: str, factory: str, arguments: Mapping[str, str | int], driver: Driver) -> Transport:
    from langchain_card.engine.transports.process import ProcessTransport  # imports msgspec

    return ProcessTransport(
        factory,
        arguments,
        name=name,
        publish=driver.publish,
        report_out_of_memory=functools.partial(driver.report_out_of_memory, name),
        on_ready=functools.partial(driver.report_start, name),
        on_death=functools.partial(driver.report_death, name),
    )


def _setting_arguments(setting: Setting, target_folder: Path, threads: ThreadPlan) -> dict[str, str | int]:
    """Return the arguments that all workers in a process of their own have in common."""
    numbers = {name: getattr(setting, name) for name in ("vocab_size", "max_len", "num_seqs", "eos_ids")}
    encoded = json.dumps({**numbers, "limits": asdict(setting.limits)})
    return {"setting": encoded, "target_folder": str(target_folder), "num_threads": threads.draft("parallel")}


def _decoded(setting: str, target_folder: str) -> Setting:
    """Return the setting of `_setting_arguments`. The tokenizer is read with the first grammar, and is not part of it.

    Grammars arrive checked: the engine's process refuses those that take too long or cannot be compiled.
    """
    fields = json.loads(setting)
    fields["limits"], fields["eos_ids"] = Limits(**fields["limits"]), tuple(fields["eos_ids"])

    @functools.cache
    def grammars() -> Grammars:
        tokenizer = read_tokenizer(Path(target_folder))
        return Grammars(tokenizer, fields["vocab_size"], fields["eos_ids"], fields["limits"])

    return Setting(**fields, constrain=DraftGrammars(lambda grammar: grammars().start(grammar)).start)


def build_plugin_worker(
    publish: Callable[[Proposal], None],
    report_out_of_memory: Callable[[tuple[int, ...]], None],
    *,
    spec: str,
    target_folder: str,
    setting: str,
    num_threads: int,
) -> DraftWorker:
    """Make the worker of the drafter `spec`, in a plug-in's process.

    Raises:
        InvalidInputError: the drafter is unknown, for example because only the parent registered it.
    """
    use_threads(num_threads)
    here = replace(_decoded(setting, target_folder), tokenizer=read_tokenizer(Path(target_folder)))
    drafter = plugins.find("drafters", spec).make(here)
    set_threads = lambda _: use_threads(num_threads)  # noqa: E731
    return DraftWorker(drafter, publish, report_out_of_memory, set_threads, here.constrain)


def _model_arguments(spec: ModelSpec) -> dict[str, str | int]:
    """Return the arguments of `build_worker` that describe the model."""
    return {
        "name": spec.name,
        "folder": str(spec.folder),
        "form": spec.form,
        "device": str(spec.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": spec.quantization or "",
        "draft": spec.draft,
        "integer_kv": spec.integer_kv,
    }


def build_worker(
    publish: Callable[[Proposal], None],
    report_out_of_memory: Callable[[tuple[int, ...]], None],
    *,
    name: str,
    folder: str,
    form: Form,
    device: str,
    dtype: str,
    quantization: str,
    draft: bool,
    integer_kv: bool,
    execution: str,
    own_vocabulary: bool,
    context: int,
    target_folder: str,
    setting: str,
    num_threads: int,
) -> DraftWorker:
    """Load the draft model of a `ModelSpec` and make its worker, in the draft's process.

    A step uses `num_threads` CPU threads under every schedule: this process does not know when the target rests.
    `own_vocabulary` is set if the target has another one.

    Raises:
        DeviceError: the device has no room for the model.
        CARDError: the model could not be loaded.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the terminal is the parent's
    use_threads(num_threads)
    spec = ModelSpec(
        name, Path(folder), form, torch.device(device), getattr(torch, dtype), quantization or None,
        compiled=execution == "compiled", draft=draft, integer_kv=integer_kv,
    )  # fmt: skip
    here = _decoded(setting, target_folder)
    runner = _runner(_load(spec), here.max_len, here.num_seqs, execution or None, integer_kv)
    vocabulary = read_map(Path(target_folder), spec.folder) if own_vocabulary else None
    drafter = _model_drafter(runner, here, context or None, vocabulary)
    in_torch = form == "float"
    set_threads = lambda _: use_threads(num_threads, in_torch=in_torch)  # noqa: E731
    return DraftWorker(drafter, publish, report_out_of_memory, set_threads, here.constrain)


def _load(spec: ModelSpec) -> Any:
    """Load the model; turns every error into a `CARDError`, which can be raised again in the parent."""
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
