"""`/health`: the state of the service, judged by the progress of each worker without a test request."""

from __future__ import annotations

import math
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from langchain_card.core.messages import TARGET
from langchain_card.engine.relay.pool import ENGINE_PROCESS, ENGINE_REPLICA, PART
from langchain_card.ports import Health
from langchain_card.serve.error_bodies import RETRY_AFTER_SECONDS
from langchain_card.serve.service import Service

Status = Literal["ok", "degraded", "failing", "draining"]

_NEEDED = (TARGET, ENGINE_PROCESS)
"""Workers without which an engine writes no answer; without the others its answers are the same but slower."""


class WorkerHealth(BaseModel):
    """State of one worker.

    Attributes:
        state: "up", "loading", "down" (it is being restarted) or "given up".
        busy_seconds: seconds since its current step began or was due.
        budget_seconds: seconds that this step may take; null if the worker is idle.
    """

    state: str
    busy_seconds: float
    budget_seconds: float | None


class HealthReport(BaseModel):
    """State of the service: `degraded` is slower than it should be; `failing` and `draining` come with status 503."""

    status: Status
    open_requests: int
    workers: dict[str, WorkerHealth]


def health_routes(service: Service) -> APIRouter:
    """Create the route for one application."""
    router = APIRouter()
    unavailable: dict[int | str, dict[str, Any]] = {
        503: {"model": HealthReport, "description": "It cannot answer now."}
    }

    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health", responses=unavailable, response_model=HealthReport, summary="Whether answers are being written"
    )
    async def health() -> JSONResponse:
        state = service.state()
        status = "draining" if service.draining else judge(state.workers)
        workers = {name: _worker_health(health) for name, health in state.workers.items()}
        report = HealthReport(status=status, open_requests=state.num_open, workers=workers)
        if status in ("ok", "degraded"):
            return JSONResponse(report.model_dump())
        return JSONResponse(report.model_dump(), 503, {"retry-after": str(RETRY_AFTER_SECONDS)})

    return router


def judge(workers: dict[str, Health]) -> Status:
    """Return the status of a service with these workers: it fails when none of its engines can answer."""
    if all(health.ok for health in workers.values()):
        return "ok"
    engines: dict[str, bool] = {}
    for name, health in workers.items():
        engine, _, worker = name.rpartition(PART)
        if name.startswith((f"{ENGINE_PROCESS} ", f"{ENGINE_REPLICA} ")):  # one of several
            engine, worker = (engine, worker) if engine else (name, ENGINE_PROCESS)
        engines[engine] = engines.get(engine, True) and (health.ok or worker not in _NEEDED)
    return "degraded" if any(engines.values()) else "failing"


def _worker_health(health: Health) -> WorkerHealth:
    budget = None if health.budget == math.inf else round(health.budget, 3)
    return WorkerHealth(state=health.state, busy_seconds=round(health.busy, 3), budget_seconds=budget)
