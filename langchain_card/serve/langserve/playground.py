"""LangServe's playgrounds, at `/card/playground/` and `/card/chat/playground/`, and the schemas of the routes.

What a shared link holds behind `/c/` is read by the page itself, in the browser: the server does not unpack it, because
few kilobytes may become gigabytes. So there are pages and schemas under `/c/`, and no answers.
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
from pydantic import BaseModel, RootModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import override

from langchain_card.chat_model import CARDChatModel
from langchain_card.serve.error_bodies import Problem, Refused
from langchain_card.serve.langserve.requests import Config

ROOT = "/card"
CHAT = f"{ROOT}/chat"
"""The same routes once more: LangServe's pages look for them next to themselves."""
Kind = Literal["default", "chat"]

_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


class _Runnable:
    """What LangServe asks of a runnable to show its page."""

    @staticmethod
    def config_schema(include: Any) -> type[Config]:
        return Config


class Conversation(BaseModel):
    """What the chat playground asks."""

    messages: list[AnyMessage]


class Answer(RootModel[AnyMessage]):
    """What is answered."""

    @classmethod
    @override
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **{"schema_generator": _Enums, **options})


class _Enums(GenerateJsonSchema):
    """Says `{"enum": ["ai"]}` for `{"const": "ai"}`: the chat playground looks for it."""

    @override
    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        found = super().literal_schema(schema)
        return {**found, "enum": [found.pop("const")]} if "const" in found else found


def playground_routes(model: CARDChatModel) -> APIRouter:
    """Pages and schemas, for one model."""
    router = APIRouter(include_in_schema=False)

    def add(kind: Kind, prefix: str, asked: type[BaseModel]) -> None:
        schemas: dict[str, type[BaseModel]] = {"input": asked, "output": Answer, "config": Config}

        async def page(request: Request, file_path: str) -> Response:
            if (file_path or "index.html") not in _files(kind):
                raise Refused(Problem(404, "There is no such page.", code="not_found"))
            base = request.scope.get("root_path", "").rstrip("/") + f"{prefix}/playground"
            response = await langserve.playground.serve_playground(
                cast(Any, _Runnable), asked, Answer, (), base, file_path, False, False, playground_type=kind
            )
            response.headers["content-security-policy"] = _policy(response.body)
            return response

        for part in (prefix, prefix + "/c/{config_hash}"):
            router.add_api_route(part + "/playground/{file_path:path}", page)
            for name, schema in schemas.items():
                router.add_api_route(f"{part}/{name}_schema", _says(schema.model_json_schema()))

    add("default", ROOT, cast("type[BaseModel]", model.get_input_schema()))
    add("chat", CHAT, Conversation)
    return router


def _says(schema: dict[str, Any]) -> Any:
    async def say() -> dict[str, Any]:
        return schema

    return say


def _policy(page: bytes | memoryview) -> str:
    """What a page may load: files of this server, the script that it holds, styles that its own scripts make."""
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _SCRIPT.findall(page)]
    scripts = " ".join(["'self'", "'unsafe-eval'", *(f"'sha256-{each}'" for each in hashes)])  # schemas are compiled
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _files(kind: Kind) -> frozenset[str]:
    """Paths of a playground's files."""
    folder = Path(langserve.playground.__file__).parent / ("playground" if kind == "default" else "chat_playground")
    return frozenset(path.relative_to(folder / "dist").as_posix() for path in (folder / "dist").rglob("*.*"))
