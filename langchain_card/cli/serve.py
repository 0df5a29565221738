"""`langchain-card serve`: the web application over a model."""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import ipaddress
import logging
import logging.config
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_card.cli.fields import add_drafter_fields, add_engine_fields, drafter_fields, engine_fields
from langchain_card.config import SCHEDULES, EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.errors import InvalidInputError, check_range
from langchain_card.limits import Limits

if TYPE_CHECKING:
    from langchain_card.chat_model import CARDChatModel
    from langchain_card.serve.service import Service
    from langchain_card.serve.settings import Settings

log = logging.getLogger("langchain_card.serve")

_FLUSH_SECONDS = 5
"""Seconds that clients have to read the error that ends their answer."""
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_WARNING = """\
langchain-card: WARNING: --insecure: everybody who reaches {host}:{port} may use the model, without a key and without
langchain-card: WARNING: encryption. Give --api-key-file instead, or let a proxy ask who they are."""


def register(subparsers: Any) -> None:
    """Add `serve` and its options."""
    limits, params = Limits(), SamplingParams()
    parser = subparsers.add_parser("serve", help="answer over HTTP, as OpenAI's clients know it")
    add_engine_fields(parser)
    add_drafter_fields(parser)
    adapters = "LoRA adapters of the model, as PEFT saves them; requests name them as their model"
    parser.add_argument("--adapters", nargs="+", default=(), type=_adapter, metavar="NAME=FOLDER", help=adapters)
    isolate = "decode in a process of its own, which is started again when it dies; answers go on (default: on)"
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=True, help=isolate)
    replicas = "engines, each in a process of its own with its part of the cores or of the GPUs (%(default)s)"
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help=replicas)
    parser.add_argument("--schedule", default="auto", choices=SCHEDULES, help="where a request has none (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=params.max_tokens, help="where a request has none (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=params.temperature, help="where a request has none (%(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int, help="answers decoded at once (by free memory)")
    parser.add_argument("--max-queue", type=int, default=limits.max_queue, help="requests that wait (%(default)s)")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests may call the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="%(default)s; 0 takes a free one")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line; requests must have one")
    parser.add_argument("--insecure", action="store_true", help="other addresses than this machine's without keys")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="that an answer may take")
    parser.add_argument("--max-wait", type=float, metavar="SECONDS", help="that a request waits until it begins")
    drain = "after SIGTERM, until answers that still run are ended (%(default)s)"
    parser.add_argument("--drain", type=int, default=30, metavar="SECONDS", help=drain)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or ctrl-c, and return 0."""
    keys = read_keys(args.api_key_file) if args.api_key_file else ()
    check_address(args.host, args.port, bool(keys), args.insecure)
    check_range("--drain", args.drain, 0, 86_400)
    limits = Limits(max_queue=args.max_queue, max_num_seqs=args.max_num_seqs)
    fields = {**engine_fields(args), **drafter_fields(args), "limits": limits, "adapters": dict(args.adapters)}
    fields |= {"isolate": args.isolate, "replicas": args.replicas}
    config = EngineConfig(**fields | {"adapters": tuple(args.adapters)})
    SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature).check(limits)
    if not keys and not is_loopback(args.host):
        print(_WARNING.format(host=args.host, port=args.port), file=sys.stderr)
    _serve(_model(args, config, fields), _settings(args, keys), args)
    return 0


def _adapter(text: str) -> tuple[str, str]:
    """Parse `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FOLDER")
    return name, folder


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one per line.

    Raises:
        InvalidInputError: the file cannot be read, holds an invalid key, or holds none.
    """
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("--api-key-file", str(path), f"cannot be read ({type(error).__name__})") from error
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            limit = f"key {number} must be printable ASCII characters without blanks"
            raise InvalidInputError("--api-key-file", str(path), limit, "a line holds a key and nothing else")
    if not keys:
        hint = "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        raise InvalidInputError("--api-key-file", str(path), "holds no key", hint)
    return keys


def check_address(host: str, port: int, has_keys: bool, insecure: bool) -> None:
    """Raise `InvalidInputError` if other machines could reach a server without keys."""
    check_range("--port", port, 0, 65_535)
    if not has_keys and not insecure and not is_loopback(host):
        hint = "give --api-key-file FILE; or --insecure, if the network is your own"
        raise InvalidInputError("--host", host, "can be reached by other machines, and there are no keys", hint)


def is_loopback(host: str) -> bool:
    """Return True for a loopback address and for the name `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _model(args: argparse.Namespace, config: EngineConfig, fields: dict[str, Any]) -> CARDChatModel:
    from langchain_card.chat_model import CARDChatModel
    from langchain_card.models.store import ModelStore

    for field, name in (("--model", config.model), ("--draft-model", config.draft_model if config.has_draft else None)):
        if name is not None:
            ModelStore().check(name, field=field)
    sampling = {"schedule": args.schedule, "max_tokens": args.max_tokens, "temperature": args.temperature}
    return CARDChatModel(**fields, **sampling)


def _settings(args: argparse.Namespace, keys: tuple[str, ...]) -> Settings:
    from langchain_card.serve.settings import Settings

    times = {"deadline_seconds": args.deadline, "max_wait_seconds": args.max_wait}
    return Settings(
        api_keys=keys,
        model_names=tuple(args.served_model_name) if args.served_model_name else None,
        hosts=(*_LOOPBACK_HOSTS, args.host) if not keys and is_loopback(args.host) else None,
        **{name: seconds for name, seconds in times.items() if seconds is not None},
    )


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket without listening, so that an address in use is reported before weights are loaded.

    Raises:
        InvalidInputError: the address is in use or not one of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidInputError("--host", host, f"is no address ({error.strerror})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        hint = "is another server running? --port 0 takes a free one"
        raise InvalidInputError("--port", port, f"cannot be used at {host} ({error.strerror})", hint) from error
    return bound


def _serve(model: CARDChatModel, settings: Settings, args: argparse.Namespace) -> None:
    from langchain_card import serve

    try:
        import uvicorn

        create_app = serve.create_app
    except ModuleNotFoundError as error:
        raise InvalidInputError("serve", error.name, "is missing, which the server needs", serve.INSTALL) from error

    bound = bind(args.host, args.port)
    logging.config.dictConfig(_log_config(uvicorn.config.LOGGING_CONFIG))
    app = create_app(model, settings)
    service: Service = app.state.service
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{host}:{bound.getsockname()[1]}"

    class Server(uvicorn.Server):
        """A server that drains at the first signal, ends the answers at the second, and exits at the third."""

        loop: asyncio.AbstractEventLoop | None = None

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            self.loop = asyncio.get_running_loop()
            gc.collect()
            gc.freeze()  # a full collection would look at every object of the libraries, and stop all for half a second
            log.info("%s running on %s (a page at /, OpenAI's interface at /v1)", service.names[0], address)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if not self.should_exit:
                self.should_exit = service.draining = True
            elif self.loop is not None and not service.ending.done():
                self.loop.call_soon_threadsafe(service.end)
            else:
                self.force_exit = True

        async def shutdown(self, sockets: Any = None) -> None:
            log.info("ends when all answers are written, after %d s at the latest; ctrl-c ends them now", args.drain)
            asyncio.get_running_loop().call_later(args.drain, service.end)
            await super().shutdown(sockets)

    end = args.drain + _FLUSH_SECONDS
    config = uvicorn.Config(app, timeout_graceful_shutdown=end, server_header=False, ws="none", log_config=None)
    with bound, model.load():  # loaded here, where ctrl-c works and an error prints one line
        Server(config).run([bound])


def _log_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return uvicorn's logging configuration with timestamps, extended to this package's loggers."""
    config = copy.deepcopy(config)
    for formatter in config["formatters"].values():
        formatter["fmt"] = f"%(asctime)s {formatter['fmt']}"
    config["loggers"]["langchain_card"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config
