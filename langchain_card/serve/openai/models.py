"""`/v1/models`: the one model that is served, under all its names."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from langchain_card.serve.openai.requests import ERRORS
from langchain_card.serve.service import Service


def model_routes(service: Service) -> APIRouter:
    """The routes, for one application."""
    router, created = APIRouter(), int(time.time())

    def described(name: str) -> dict[str, Any]:
        length = service.model.engine.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "langchain-card",
            "max_model_len": length,
        }

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", responses=ERRORS, summary="The models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in service.names]}

    @router.get("/v1/models/{name:path}", responses=ERRORS, summary="One model")
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return described(name)

    return router
