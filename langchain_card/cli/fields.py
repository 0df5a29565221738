"""Command-line options that several commands share, and the fields of `EngineConfig` that they set."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_card.config import (
    DRAFT_TRANSPORTS,
    DTYPES,
    KV_DTYPES,
    PREFIX_CACHES,
    SCHEDULES,
    EngineConfig,
    default_draft_model,
    default_model,
)
from langchain_card.core.request import SamplingParams
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits

if TYPE_CHECKING:
    from langchain_card.chat_model import CARDChatModel

REPLICAS = "engines, each in a process of its own with its part of the cores or of the GPUs"
"""Help of `--replicas`."""
SETS = "own (default), copying, code, maths, chat, multilingual or humaneval, or a file of JSON lines"
"""Help of `--prompts`: the values that it accepts."""


def add_target_fields(parser: argparse.ArgumentParser) -> None:
    """Add the options of the target, its device and its number format."""
    parser.add_argument("--model", default=default_model(), help="target model (%(default)s)")
    parser.add_argument("--device", default="auto", help="of the target: auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of weights and activations")
    parser.add_argument(
        "--quantization",
        default="auto",
        help="of weights: auto, file, int8, int4, none, or a transformers config (JSON)",
    )


def add_engine_fields(parser: argparse.ArgumentParser) -> None:
    """Add the options of models, devices and number formats."""
    draft = default_draft_model() or "none"
    add_target_fields(parser)
    parser.add_argument("--draft-model", default=draft, help='draft model, "ngram" or "none" (%(default)s)')
    parser.add_argument("--draft-device", default="auto", help="of the draft")
    stored = "of keys and values: auto (integers with weights in blocks), int8 (CPU), float"
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES, help=stored)
    parser.add_argument(
        "--draft-context",
        type=_tokens_or_all,
        default=EngineConfig().draft_context,
        metavar="TOKENS",
        help="tokens at the end of a long text that draft models read, or all (%(default)s)",
    )
    kept = "where beginnings of texts are kept: in memory (default), or also in a folder for later processes"
    parser.add_argument("--prefix-cache", default="memory", choices=PREFIX_CACHES, help=kept)
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and answer (the model's, at most 8,192)")
    lossy = 'rule by which guesses become the answer: exact (%(default)s), or one that is lossy, such as "loose"'
    parser.add_argument("--acceptance", default="exact", metavar="RULE", help=lossy)
    parser.add_argument("--draft-transport", default="auto", choices=DRAFT_TRANSPORTS, help="where the draft runs")


def _tokens_or_all(text: str) -> int | None:
    """Parse `--draft-context`: None for all."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, or all")
    return None if text == "all" else int(text)


def add_drafter_fields(parser: argparse.ArgumentParser) -> None:
    """Add the options of drafters besides the draft model."""
    beside = 'drafters beside the draft model, such as "ngram?table=code.ngrams", or "none" (n-grams)'
    parser.add_argument("--drafters", nargs="+", metavar="SPEC", help=beside)
    below = "drafters that draft for the draft model, each for the one before it (n-grams)"
    parser.add_argument("--stack", nargs="+", default=(), metavar="SPEC", help=below)


def add_served_fields(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model that answers requests, with those of its engine."""
    params = SamplingParams()
    add_engine_fields(parser)
    add_drafter_fields(parser)
    adapters = "LoRA adapters of the model, as PEFT saves them; requests name them as their model"
    parser.add_argument("--adapters", nargs="+", default=(), type=_adapter, metavar="NAME=FOLDER", help=adapters)
    isolate = "decode in a process of its own, which is started again when it dies; answers go on (default: on)"
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=True, help=isolate)
    parser.add_argument("--schedule", default="auto", choices=SCHEDULES, help="where a request has none (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=params.max_tokens, help="where a request has none (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=params.temperature, help="where a request has none (%(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int, help="answers decoded at once (by free memory)")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests may call the model")


def _adapter(text: str) -> tuple[str, str]:
    """Parse `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FOLDER")
    return name, folder


def check_output(option: str, path: Path | None, *endings: str) -> None:
    """Raise `InvalidInputError` if an output file's folder does not exist or its ending is not one of `endings`."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InvalidInputError(option, str(path), "its folder does not exist", f"mkdir -p {path.parent}")
    if path.suffix not in endings:
        raise InvalidInputError(option, str(path), f"must end in {' or '.join(endings)}")


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_engine_fields` as fields of `EngineConfig` or of a chat model."""
    return {
        "model": args.model,
        "draft_model": None if args.draft_model == "none" else args.draft_model,
        "device": args.device,
        "draft_device": args.draft_device,
        "acceptance": args.acceptance,
        "draft_transport": args.draft_transport,
        "dtype": args.dtype,
        "kv_dtype": args.kv_dtype,
        "draft_context": args.draft_context,
        "prefix_cache": args.prefix_cache,
        "max_model_len": args.max_model_len,
        "quantization": None if args.quantization == "none" else args.quantization,
    }


def drafter_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_drafter_fields` as fields of `EngineConfig` or of a chat model."""
    beside = None if args.drafters is None else tuple(spec for spec in args.drafters if spec != "none")
    return {"drafters": beside, "stack": tuple(args.stack)}


def served_model(args: argparse.Namespace, replicas: int, **limits: Any) -> CARDChatModel:
    """Return the chat model of the options of `add_served_fields`; nothing is loaded.

    Args:
        args: the options.
        replicas: number of engines in processes of this machine.
        limits: more fields of `Limits`.

    Raises:
        InvalidInputError: an option breaks a limit, or there is no such model.
    """
    from langchain_card.chat_model import CARDChatModel
    from langchain_card.models.store import ModelStore

    bounds = Limits(max_num_seqs=args.max_num_seqs, **limits)
    fields = {**engine_fields(args), **drafter_fields(args), "limits": bounds}
    if replicas > 1 and not args.isolate:
        hint = "leave one of them out"
        raise InvalidInputError("--replicas", replicas, "have processes of their own, against --no-isolate", hint)
    fields |= {"isolate": args.isolate, "replicas": replicas}
    config = EngineConfig(**fields, adapters=tuple(args.adapters))
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    SamplingParams(**sampling).check(bounds)
    for field, name in (("--model", config.model), ("--draft-model", config.draft_model if config.has_draft else None)):
        if name is not None:
            ModelStore().check(name, field=field)
    return CARDChatModel(**fields, **sampling, adapters=dict(args.adapters), schedule=args.schedule)


@contextmanager
def needing_server(command: str) -> Iterator[None]:
    """Explain which packages to install where one of the extra `server` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        from langchain_card.serve import INSTALL

        raise InvalidInputError(command, error.name, "is missing, which the server needs", INSTALL) from error
