"""`create_app`: the web application over a chat model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from langchain_card import __version__
from langchain_card.chat_model import CARDChatModel
from langchain_card.errors import CARDError
from langchain_card.serve.error_bodies import Problem, Refused, validation_problem
from langchain_card.serve.guard import Guard
from langchain_card.serve.health import health_routes
from langchain_card.serve.metrics import CLIENT_LEFT, RequestCounter
from langchain_card.serve.openai.chat import chat_routes
from langchain_card.serve.openai.completions import completion_routes
from langchain_card.serve.openai.models import model_routes
from langchain_card.serve.page import PAGE_PATHS, page_routes
from langchain_card.serve.service import Service
from langchain_card.serve.settings import Settings
from langchain_card.serve.waiting import ClientLeft

_PROMPTS = {"/v1/chat/*": "messages", "/card/*batch": "inputs", "/card/*": "input"}
"""The field of a request that holds the prompt, by pattern of the path."""
ANSWERING = "/v1/chat/completions and /v1/completions; GET /openapi.json lists all paths"
OPEN_PATHS = ("/health", "/version", *PAGE_PATHS)
"""Paths that need no key and are served even while the server drains or is full."""


def create_app(model: CARDChatModel, settings: Settings | None = None) -> FastAPI:
    """Create a web application that serves a chat model through OpenAI's interface.

    The model is loaded when the application starts and released when it ends; `model` itself stays open. The
    application's `state.service` is its `Service`: `state.service.draining = True` refuses new requests.

    Args:
        model: the model that answers; its fields are the defaults of requests.
        settings: keys and limits.
    """
    service = Service(model, settings or Settings())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="langchain-card", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Guard, service=service, open_paths=OPEN_PATHS)
    app.add_middleware(RequestCounter, metrics=service.metrics)
    for routes in (chat_routes, completion_routes, model_routes, health_routes, *_langserve_routes()):
        app.include_router(routes(service))
    app.include_router(page_routes())
    _add_server_routes(app, service)
    _add_handlers(app, service)
    return app


def _langserve_routes() -> list[Callable[[Service], APIRouter]]:
    """Return LangServe's routes if it is installed."""
    if find_spec("langserve") is None:
        return []
    from langchain_card.serve.langserve.routes import langserve_routes

    return [langserve_routes]


def _add_server_routes(app: FastAPI, service: Service) -> None:
    @app.head("/", include_in_schema=False)
    async def root() -> Response:
        return Response()

    @app.get("/version", summary="The version of the server; open to everybody")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(service.state()), media_type=service.metrics.media_type)


def _add_handlers(app: FastAPI, service: Service) -> None:
    def prompt_of(request: Request) -> str:
        fields = (name for pattern, name in _PROMPTS.items() if fnmatchcase(request.url.path, pattern))
        return next(fields, "prompt")

    async def invalid(request: Request, error: Any) -> Response:
        return validation_problem(error, prompt_of(request)).response()

    async def refused(_: Request, error: Any) -> Response:
        response: Response = error.problem.response()
        return response

    async def failed(request: Request, error: Any) -> Response:
        return service.problem(error, prompt_of(request)).response()

    async def client_left(*_: Any) -> Response:
        return Response(status_code=CLIENT_LEFT)

    async def http(request: Request, error: Any) -> Response:
        code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(error.status_code)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"{request.url.path}: is not a path of this server. Hint: it answers {ANSWERING}."
        return Problem(error.status_code, message, code=code).response()

    for kind, handler in {
        RequestValidationError: invalid,
        Refused: refused,
        CARDError: failed,
        ClientLeft: client_left,
        HTTPException: http,
    }.items():
        app.add_exception_handler(kind, handler)
