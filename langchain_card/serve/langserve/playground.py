"""LangServe's playgrounds, at `/card/playground/` and `/card/chat/playground/`, and the schemas of the routes.

A shared link carries a compressed configuration behind `/c/`, which only the page in the browser unpacks: on the server
a few kilobytes could become gigabytes. Under `/c/` there are therefore pages and schemas but no endpoints that answer.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import langserve.playground
from fastapi import APIRouter, Request, Response
from langchain_core.messages import AnyMessage
from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import override

from langchain_card.chat_model import CARDChatModel
from langchain_card.serve.error_bodies import Problem, Refused
from langchain_card.serve.langserve.requests import Config

ROOT = "/card"
CHAT = f"{ROOT}/chat"
"""Prefix of a second set of the same routes: LangServe's pages expect the routes beside them."""
PlaygroundType = Literal["default", "chat"]

_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


class _Runnable:
    """The part of a runnable that LangServe needs to serve a page."""

    @staticmethod
    def config_schema(include: Any) -> type[Config]:
        return Config


class Conversation(BaseModel):
    """Input of the chat playground."""

    messages: list[AnyMessage]


class PlaygroundOutput(RootModel[AnyMessage]):
    """Output of both playgrounds: a message."""

    model_config = ConfigDict(title="Answer")

    @classmethod
    @override
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **{"schema_generator": _Enums, **options})


class _Enums(GenerateJsonSchema):
    """A schema generator that writes `{"enum": ["ai"]}` for `{"const": "ai"}`: the chat playground requires it."""

    @override
    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        literal = super().literal_schema(schema)
        return {**literal, "enum": [literal.pop("const")]} if "const" in literal else literal


def playground_routes(model: CARDChatModel) -> APIRouter:
    """Create the routes of pages and schemas for one model."""
    router = APIRouter(include_in_schema=False)

    def add(kind: PlaygroundType, prefix: str, input_: type[BaseModel]) -> None:
        schemas: dict[str, type[BaseModel]] = {"input": input_, "output": PlaygroundOutput, "config": Config}

        async def page(request: Request, file_path: str) -> Response:
            if (file_path or "index.html") not in _files(kind):
                raise Refused(Problem(404, "There is no such page.", code="not_found"))
            base = request.scope.get("root_path", "").rstrip("/") + f"{prefix}/playground"
            response = await langserve.playground.serve_playground(
                cast(Any, _Runnable), input_, PlaygroundOutput, (), base, file_path, False, False, playground_type=kind
            )
            response.headers["content-security-policy"] = _policy(response.body)
            return response

        for base_path in (prefix, prefix + "/c/{config_hash}"):
            router.add_api_route(base_path + "/playground/{file_path:path}", page)
            for name, schema in schemas.items():
                router.add_api_route(f"{base_path}/{name}_schema", _constant(schema.model_json_schema()))

    add("default", ROOT, cast("type[BaseModel]", model.get_input_schema()))
    add("chat", CHAT, Conversation)
    return router


def _constant(schema: dict[str, Any]) -> Any:
    async def endpoint() -> dict[str, Any]:
        return schema

    return endpoint


def _policy(page: bytes | memoryview) -> str:
    """Return a content security policy that allows this server's files and the page's inline script and styles."""
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _SCRIPT.findall(page)]
    scripts = " ".join(
        ["'self'", "'unsafe-eval'", *(f"'sha256-{digest}'" for digest in hashes)]
    )  # eval: the page compiles schemas
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _files(kind: PlaygroundType) -> frozenset[str]:
    """Return the paths of a playground's files."""
    folder = Path(langserve.playground.__file__).parent / ("playground" if kind == "default" else "chat_playground")
    return frozenset(path.relative_to(folder / "dist").as_posix() for path in (folder / "dist").rglob("*.*"))
