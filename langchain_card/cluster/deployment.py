"""The deployment of engines on Ray Serve: how many, on what, and who may reach them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from langchain_card.cluster.replica import EngineReplica
from langchain_card.cluster.replica_pool import DEPLOYMENT
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError, check_range

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

SEATS = 16
"""Requests that a replica answers at once, unless `max_num_seqs` says otherwise or its memory is too small."""

BUSY_SHARE = 0.75
"""Share of the seats above which autoscaling adds replicas."""

WAITING_SHARE = 1.25
"""Requests that the router sends to a replica at once, for each of its seats: a session waits a little for its own."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Number and size of the replicas of an application.

    Attributes:
        min_replicas, max_replicas: autoscaling keeps their number between these two.
        cpus: cores of a replica; None shares out all cores of the cluster among `max_replicas`.
        gpus: GPUs of a replica; None for one, where the cluster has any.
        drain_seconds: time that answers have to end on a replica that leaves; then they go on elsewhere.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float | None = None
    gpus: float | None = None
    drain_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_range("min_replicas", self.min_replicas, 1, self.max_replicas, "max_replicas is the most")
        check_range("drain_seconds", self.drain_seconds, 0.0, 86_400.0)


def join_cluster(address: str | None, *, insecure: bool = False) -> None:
    """Join a Ray cluster, or start one on this machine.

    Args:
        address: as in `ray.init`; None starts a cluster.
        insecure: whether a cluster without token authentication will do.

    Raises:
        InvalidInputError: the cluster has no token authentication.
    """
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address=address, include_dashboard=None if address else False)
    if not insecure and not _has_tokens():
        hint = "set RAY_AUTH_MODE=token on all nodes; or give --insecure, if the network is your own"
        raise InvalidInputError("RAY_AUTH_MODE", "disabled", "lets everybody who reaches Ray's ports run code", hint)


def _has_tokens() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def deploy(config: EngineConfig, settings: ClusterSettings, application: str) -> None:
    """Start the engines of an application, or update it: replicas are replaced where something changed."""
    serve.start(proxy_location="Disabled")
    serve.run(
        engine_deployment(config, settings).bind(with_seats(config)),
        name=application,
        route_prefix=None,
        blocking=False,
    )


def with_seats(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a number of seats."""
    if config.limits.max_num_seqs is not None:
        return config
    return replace(config, limits=replace(config.limits, max_num_seqs=1 if config.exact == "strict" else SEATS))


def engine_deployment(config: EngineConfig, settings: ClusterSettings) -> serve.Deployment:
    """Return the deployment of engines; it takes their configuration."""
    seats = with_seats(config).limits.num_seqs
    scaling: dict[str, Any] = {"num_replicas": settings.min_replicas}
    if settings.max_replicas > settings.min_replicas:
        bounds = {"min_replicas": settings.min_replicas, "max_replicas": settings.max_replicas}
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": BUSY_SHARE * seats}}
    deployment: Any = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=seats + max(1, int(seats * (WAITING_SHARE - 1))),
        ray_actor_options=_resources(settings),
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=5,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),  # type: ignore[arg-type]
        **scaling,
    )
    return cast("serve.Deployment", deployment)


def _resources(settings: ClusterSettings) -> dict[str, float]:
    """Return what a replica takes of a node."""
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = (1.0 if total.get("GPU") else 0.0) if settings.gpus is None else settings.gpus
    cpus = max(1.0, total.get("CPU", 1.0) // settings.max_replicas) if settings.cpus is None else settings.cpus
    return {"num_cpus": cpus, "num_gpus": gpus}
