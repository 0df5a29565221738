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

from langchain_card._version import __version__
from langchain_card.chat_model import CARDChatModel
from langchain_card.errors import CARDError
from langchain_card.serve.error_bodies import Problem, Refused, validation_problem
from langchain_card.serve.guard import Guard
from langchain_card.serve.health import health_routes
from langchain_card.serve.metrics import CLIENT_LEFT, Counting
from langchain_card.serve.openai.chat import chat_routes
from langchain_card.serve.openai.completions import completion_routes
from langchain_card.serve.openai.models import model_routes
from langchain_card.serve.page import PAGE_PATHS, page_routes
from langchain_card.serve.service import Service
from langchain_card.serve.settings import Settings
from langchain_card.serve.waiting import ClientLeft

_PROMPTS = {"/v1/chat/*": "messages", "/card/*batch": "inputs", "/card/*": "input"}
"""By path: the field that holds the prompt."""
OPEN_PATHS = ("/health", "/version", *PAGE_PATHS)
"""What needs no key, and is answered while others are not."""


def create_app(model: CARDChatModel, settings: Settings | None = None) -> FastAPI:
    """A web application that answers with a chat model, in the words of OpenAI's interface.

    The model is loaded when the application starts, and given back when it ends; `model` itself stays open. The
    application's `state.service` is its `Service`: `state.service.draining = True` refuses new requests.

    Args:
        model: which answers; its fields say how, where a request does not.
        settings: keys and bounds.
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
    app.add_middleware(Counting, metrics=service.metrics)
    for routes in (chat_routes, completion_routes, model_routes, health_routes, *_remote_routes()):
        app.include_router(routes(service))
    app.include_router(page_routes())
    _add_own_routes(app, service)
    _add_handlers(app, service)
    return app


def _remote_routes() -> list[Callable[[Service], APIRouter]]:
    """LangServe's, where it is installed."""
    if find_spec("langserve") is None:
        return []
    from langchain_card.serve.langserve.routes import remote_routes

    return [remote_routes]


def _add_own_routes(app: FastAPI, service: Service) -> None:
    @app.head("/", include_in_schema=False)
    async def here() -> Response:
        return Response()

    @app.get("/version", summary="The version of the server; open to everybody")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(service.state()), media_type=service.metrics.media_type)


def _add_handlers(app: FastAPI, service: Service) -> None:
    def prompt_of(request: Request) -> str:
        found = (name for pattern, name in _PROMPTS.items() if fnmatchcase(request.url.path, pattern))
        return next(found, "prompt")

    async def invalid(request: Request, error: Any) -> Response:
        return validation_problem(error, prompt_of(request)).response()

    async def refused(_: Request, error: Any) -> Response:
        response: Response = error.problem.response()
        return response

    async def failed(request: Request, error: Any) -> Response:
        return service.problem(error, prompt_of(request)).response()

    async def left(*_: Any) -> Response:
        return Response(status_code=CLIENT_LEFT)

    async def http(_: Request, error: Any) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return Problem(error.status_code, str(error.detail), code=code).response()

    for kind, handler in {
        RequestValidationError: invalid,
        Refused: refused,
        CARDError: failed,
        ClientLeft: left,
        HTTPException: http,
    }.items():
        app.add_exception_handler(kind, handler)
