"""`build`: the web application and its engines as one application of Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from fastapi import FastAPI
from pydantic import TypeAdapter
from ray import serve

from langchain_card.chat.sampling_options import unknown_name
from langchain_card.chat_model import CARDChatModel
from langchain_card.cluster.deployment import MAX_REPLICAS, ClusterSettings, check_tokens, engine_deployment
from langchain_card.errors import InvalidInputError, check_range
from langchain_card.serve.app import create_app
from langchain_card.serve.settings import Settings, read_keys

T = TypeVar("T")


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application of `serve run langchain_card.cluster:build`, or of a YAML file's `import_path`.

    Args:
        args: fields of `CARDChatModel`, `ClusterSettings` and `serve.Settings`, each under its own name. Also
            `api_key_file`, keys for `Settings.api_keys`, one a line; `servers`, the number of replicas of the web
            application; and `insecure`, without which keys and Ray's token authentication are required.

    Raises:
        InvalidInputError: a field is unknown, or breaks a limit.
    """
    args = dict(args)
    web, cluster, settings = _taken(_WebSettings, args), _taken(ClusterSettings, args), _taken(Settings, args)
    known = ("model_name", *CARDChatModel.model_fields)
    for name in args.keys() - {*known}:
        names = [*known, *(field.name for kind in (_WebSettings, ClusterSettings, Settings) for field in fields(kind))]
        raise unknown_name(name, args[name], "is no field of an application", names, "the guide to clusters has them")
    if web.api_key_file is not None:
        settings = replace(settings, api_keys=read_keys(web.api_key_file, "api_key_file"))
    if not settings.api_keys and not web.insecure:
        hint = "give api_key_file; or insecure, if the network is your own"
        raise InvalidInputError("api_key_file", None, "is needed: other machines can reach the proxies of Ray", hint)
    check_tokens(web.insecure)
    model = CARDChatModel(**args)
    server: Any = serve.deployment(
        serve.ingress()(WebServer),
        name="WebServer",
        num_replicas=web.servers,
        max_ongoing_requests=settings.max_requests,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=settings.deadline_seconds,  # its answers end with it
        ray_actor_options={"num_cpus": 0},  # the cores are for the engines
    )
    return cast("serve.Application", server.bind(args, settings, engine_deployment(model.engine_config(), cluster)))


@dataclass(frozen=True, slots=True)
class _WebSettings:
    """Fields of `build` that belong to the web application alone."""

    insecure: bool = False
    servers: int = 1
    api_key_file: Path | None = None

    def __post_init__(self) -> None:
        check_range("servers", self.servers, 1, MAX_REPLICAS)


class WebServer:
    """The web application in an actor, over the engines of its own application.

    Args:
        model: fields of the chat model.
        settings: of the web application.
        engines: the deployment of engines, which this one starts.
    """

    def __init__(self, model: dict[str, Any], settings: Settings, engines: Any) -> None:
        self._fields, self._settings, self._engines = model, settings, engines

    def __serve_build_asgi_app__(self) -> FastAPI:
        application = serve.get_replica_context().app_name
        fields = {**self._fields, "cluster": application, "isolate": False, "replicas": 1}
        self._model = CARDChatModel(**fields)
        return create_app(self._model, self._settings)

    async def check_health(self) -> None:
        """Raise if the engines have another model by now, so that Ray replaces this server; the next one joins them."""
        states = {health.state for health in self._model.engine.health().values()}
        if states == {"given up"}:
            raise RuntimeError("the engines have another model than the one that this server has joined")


def _taken(kind: type[T], args: dict[str, Any]) -> T:
    """Take the fields of a class out of the arguments, which a command line gives as text, and make one of it."""
    found = {field.name: args.pop(field.name) for field in fields(kind) if field.name in args}  # type: ignore[arg-type]
    return TypeAdapter(kind).validate_python(found)
