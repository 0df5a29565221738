"""`langchain-card serve`: the web application over a model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import gc
import ipaddress
import logging
import logging.config
import re
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_card.cli.fields import REPLICAS, add_served_fields, needing_server, served_model
from langchain_card.errors import InvalidInputError, check_range
from langchain_card.limits import Limits
from langchain_card.serve.settings import read_keys

if TYPE_CHECKING:
    from langchain_card.chat_model import CARDChatModel
    from langchain_card.serve.service import Service
    from langchain_card.serve.settings import Settings

log = logging.getLogger("langchain_card.serve")

APPLICATION = "card"
"""Name of the application of engines on Ray."""

_FLUSH_SECONDS = 5
"""Seconds that clients have to read the error that ends their answer."""
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_WARNING = """\
langchain-card: WARNING: --insecure: everybody who reaches {host}:{port} may use the model, without a key and without
langchain-card: WARNING: encryption. Give --api-key-file instead, or let a proxy ask who they are."""


def register(subparsers: Any) -> None:
    """Add `serve` and its options."""
    parser = subparsers.add_parser("serve", help="answer over HTTP, as OpenAI's clients know it")
    add_served_fields(parser)
    bounds = f"{REPLICAS} (1); with --ray, MAX allows more of them under load"
    parser.add_argument("--replicas", type=replica_bounds, default=(1, 1), metavar="N[:MAX]", help=bounds)
    queue = Limits().max_queue
    parser.add_argument("--max-queue", type=int, default=queue, help="requests that wait (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="%(default)s; 0 takes a free one")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line; requests must have one")
    insecure = "other addresses than this machine's without keys, and Ray without tokens"
    parser.add_argument("--insecure", action="store_true", help=insecure)
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="that an answer may take")
    parser.add_argument("--max-wait", type=float, metavar="SECONDS", help="that a request waits until it begins")
    drain = "after SIGTERM, until answers that still run are ended (%(default)s)"
    parser.add_argument("--drain", type=int, default=30, metavar="SECONDS", help=drain)
    on_ray = parser.add_argument_group("engines on a Ray cluster (docs/guides/cluster.md)")
    joined = (
        "cluster to join, such as auto or 10.0.0.1:6379; without ADDRESS, one on this machine that ends with the server"
    )
    on_ray.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=joined)
    on_ray.add_argument(
        "--application", default=APPLICATION, metavar="NAME", help="of the engines on Ray (%(default)s)"
    )
    cpus = "cores of a replica (the most of which there is room for all)"
    on_ray.add_argument("--cpus-per-replica", type=float, metavar="N", help=cpus)
    on_ray.add_argument("--gpus-per-replica", type=float, metavar="N", help="GPUs of a replica (1 where there are any)")
    parser.set_defaults(run=run)


def replica_bounds(text: str) -> tuple[int, int]:
    """Parse `--replicas`: a number, or the least and the most."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 on, or MIN:MAX")
    return low, high


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or ctrl-c, and return 0."""
    keys = read_keys(args.api_key_file) if args.api_key_file else ()
    check_address(args.host, args.port, bool(keys), args.insecure)
    check_range("--drain", args.drain, 0, 86_400)
    _check_replicas(args)
    model = served_model(args, 1 if args.ray is not None else args.replicas[1], max_queue=args.max_queue)
    if not keys and not is_loopback(args.host):
        print(_WARNING.format(host=args.host, port=args.port), file=sys.stderr)
    with needing_server("serve"):
        import uvicorn

        from langchain_card.serve import app  # noqa: F401
    logging.config.dictConfig(_log_config(uvicorn.config.LOGGING_CONFIG))
    with bind(args.host, args.port) as bound, _engines(model, args) as reached:
        _serve(reached, _settings(args, keys), args, bound)
    return 0


def _check_replicas(args: argparse.Namespace) -> None:
    """Raise `InvalidInputError` for options that go with `--ray` alone."""
    low, high = args.replicas
    if args.ray is not None:
        return
    if low != high:
        raise InvalidInputError("--replicas", f"{low}:{high}", "changes with the load on Ray only", "add --ray")
    for name, default in (("application", APPLICATION), ("cpus_per_replica", None), ("gpus_per_replica", None)):
        if (value := getattr(args, name)) != default:
            raise InvalidInputError(f"--{name.replace('_', '-')}", value, "goes with --ray only", "leave it out")


@contextlib.contextmanager
def _engines(model: CARDChatModel, args: argparse.Namespace) -> Iterator[CARDChatModel]:
    """Start the engines on Ray if they are to be there, and return the model to serve: the same, or one over them."""
    if args.ray is None:
        yield model
        return
    if find_spec("ray") is None:
        raise InvalidInputError("--ray", args.ray, "needs Ray", "pip install 'langchain-card[ray]'")
    from langchain_card.cluster.deployment import ClusterSettings, check_model, check_room, deploy, joined_cluster

    low, high = args.replicas
    settings = ClusterSettings(low, high, cpus=args.cpus_per_replica, gpus=args.gpus_per_replica)
    with joined_cluster(args.ray or None, insecure=args.insecure):
        if args.ray:
            check_model(model.engine_config(), args.application)
        else:
            check_room(settings)
        log.info("Ray's usage statistics are off; engines of the application %r start", args.application)
        deploy(model.engine_config(), settings, args.application)
        yield model.model_copy(update={"cluster": args.application, "isolate": False})


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


def _serve(model: CARDChatModel, settings: Settings, args: argparse.Namespace, bound: socket.socket) -> None:
    import uvicorn

    from langchain_card.serve import create_app

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
    with model.load():  # loaded here, where ctrl-c works and an error prints one line
        Server(config).run([bound])


def _log_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return uvicorn's logging configuration with timestamps, extended to this package's loggers."""
    config = copy.deepcopy(config)
    for formatter in config["formatters"].values():
        formatter["fmt"] = f"%(asctime)s {formatter['fmt']}"
    config["loggers"]["langchain_card"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config
