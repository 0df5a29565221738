"""`/health`: whether answers are being written, judged by the progress of each worker, not by a question asked."""

from __future__ import annotations

import math
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from langchain_card.core.messages import TARGET
from langchain_card.engine.isolated.supervisor import NAME as ENGINE_PROCESS
from langchain_card.ports import Health
from langchain_card.serve.error_bodies import RETRY_AFTER_SECONDS
from langchain_card.serve.service import Service

Status = Literal["ok", "degraded", "failing", "draining"]

_NEEDED = (TARGET, ENGINE_PROCESS)
"""Without any other worker answers take longer, and are the same."""


class WorkerHealth(BaseModel):
    """Of one worker.

    Attributes:
        state: "up", "loading", "down" (it starts again) or "given up".
        busy_seconds: since its step began, or since one was due.
        budget_seconds: that this may take; null where nothing is to be done.
    """

    state: str
    busy_seconds: float
    budget_seconds: float | None


class HealthReport(BaseModel):
    """Of the service: `degraded` is slower than it should be, `failing` and `draining` are answered with a 503."""

    status: Status
    open_requests: int
    workers: dict[str, WorkerHealth]


def health_routes(service: Service) -> APIRouter:
    """The route, for one application."""
    router = APIRouter()
    unwell: dict[int | str, dict[str, Any]] = {503: {"model": HealthReport, "description": "It cannot answer now."}}

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=unwell, response_model=HealthReport, summary="Whether answers are being written")
    async def health() -> JSONResponse:
        state = service.state()
        status = "draining" if service.draining else judge(state.workers)
        told = {name: _told(health) for name, health in state.workers.items()}
        report = HealthReport(status=status, open_requests=state.num_open, workers=told)
        if status in ("ok", "degraded"):
            return JSONResponse(report.model_dump())
        return JSONResponse(report.model_dump(), 503, {"retry-after": str(RETRY_AFTER_SECONDS)})

    return router


def judge(workers: dict[str, Health]) -> Status:
    """Of a service with such workers."""
    unwell = [name for name, health in workers.items() if not health.ok]
    if any(name in _NEEDED for name in unwell):
        return "failing"
    return "degraded" if unwell else "ok"


def _told(health: Health) -> WorkerHealth:
    budget = None if health.budget == math.inf else round(health.budget, 3)
    return WorkerHealth(state=health.state, busy_seconds=round(health.busy, 3), budget_seconds=budget)
