"""`/v1/models`: the served model under each of its names, and its adapters."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from langchain_card.serve.openai.schemas import ERRORS
from langchain_card.serve.service import Service


def model_routes(service: Service) -> APIRouter:
    """Create the routes for one application."""
    router, created = APIRouter(), int(time.time())

    def model_object(name: str) -> dict[str, Any]:
        head = {"id": name, "object": "model", "created": created, "owned_by": "langchain-card"}
        if name in service.model.adapters:
            head["parent"] = service.names[0]
        return {**head, "max_model_len": service.model.engine.max_model_len}

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", responses=ERRORS, summary="The models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object(name) for name in service.all_names]}

    @router.get("/v1/models/{name:path}", responses=ERRORS, summary="One model")
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return model_object(name)

    return router
