"""The deployment of engines on Ray Serve: how many, on what, and who may reach them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from langchain_card.cluster.replica import EngineReplica
from langchain_card.cluster.replica_pool import DEPLOYMENT, LOGS_HINT, ReplicaPool, failure
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError, InvalidInputError, check_range

log = logging.getLogger(__name__)

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

SEATS = 16
"""Requests that a replica answers at once, unless `max_num_seqs` says otherwise."""

BUSY_SHARE = 0.75
"""Share of the seats above which autoscaling adds replicas."""

WAITING_SHARE = 1.25
"""Requests that the router sends to a replica at once, for each of its seats: a session waits a little for its own."""

OBJECT_STORE_BYTES = 200 << 20
"""Memory that a cluster started here keeps for Ray's objects: answers are streams and need next to none of it."""


MAX_REPLICAS = 10_000
"""Most replicas of an application."""

CONNECT_SECONDS = 5.0
"""Longest time until the head of a cluster accepts a connection."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Number and size of the replicas of an application.

    Attributes:
        min_replicas, max_replicas: autoscaling keeps their number between these two.
        cpus: cores of a replica; None for the most of which the cluster has room for `max_replicas`.
        gpus: GPUs of a replica; None for one, where the cluster has any.
        drain_seconds: time that answers have to end on a replica that leaves; then they go on elsewhere.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float | None = None
    gpus: float | None = None
    drain_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_range("max_replicas", self.max_replicas, 1, MAX_REPLICAS)
        check_range("min_replicas", self.min_replicas, 1, self.max_replicas, "raise max_replicas, too")
        check_range("drain_seconds", self.drain_seconds, 0.0, 86_400.0)
        for name in ("cpus", "gpus"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0.0, 1024.0)


@contextlib.contextmanager
def joined_cluster(address: str | None = None, *, insecure: bool = False) -> Iterator[None]:
    """Join a Ray cluster and leave it at the end; or start one on this machine, which then ends.

    Args:
        address: as in `ray.init`, such as `"auto"` or `"10.0.0.1:6379"`; None starts a cluster.
        insecure: whether a cluster without token authentication will do.

    Raises:
        InvalidInputError: this process has no token authentication or is in a cluster, or `address` cannot be reached.
    """
    if ray.is_initialized():
        raise InvalidInputError(
            "cluster", address, "cannot be joined: this process is in one", "ray.shutdown() leaves it"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    if address is not None:
        _check_address(address)
    try:
        ray.init(address=address or "local", **({} if address else own))
    except Exception as error:  # Ray's own have no common class
        where = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
        limit = f"cannot be joined ({type(error).__name__}: {str(error)[:300]})"
        raise InvalidInputError("--ray", address, limit, f"is the token in {where} the cluster's?") from error
    try:
        check_tokens(insecure)
        yield
    finally:
        if address is None:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise `InvalidInputError` unless a cluster may have this address; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65_536:
        limit = "is no address of a cluster's head node"
        raise InvalidInputError("--ray", address, limit, "HOST:PORT, or auto for the cluster that this machine is in")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        hint = f"start its head there: ray start --head --port {port}"
        raise InvalidInputError("--ray", address, f"cannot be reached ({error})", hint) from error


def check_tokens(insecure: bool) -> None:
    """Raise `InvalidInputError` if everybody who reaches Ray's ports may run code, unless that was asked for."""
    if not insecure and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        hint = "set RAY_AUTH_MODE=token on all nodes; or say insecure, if the network is your own"
        raise InvalidInputError("RAY_AUTH_MODE", "disabled", "lets everybody who reaches Ray's ports run code", hint)


def deploy(config: EngineConfig, settings: ClusterSettings, application: str = "card") -> None:
    """Start the engines of an application, or update it, and wait until they answer.

    An update replaces the replicas one after the other; answers that they have begun go on in others.

    Args:
        config: of each engine.
        settings: number and size of the replicas.
        application: its name: `CARDChatModel(cluster=application)` reaches it from any process of the cluster.

    Raises:
        InvalidInputError: `application` is empty.
        EngineError: the engines could not be loaded.
    """
    if not application:
        raise InvalidInputError("application", application, "needs a name")
    serve.start(proxy_location="Disabled")
    if (most := room(settings)) < settings.min_replicas:
        log.warning("the nodes have room for %d replicas now; the others wait for more nodes, or other sizes", most)
    engines = engine_deployment(config, settings)
    try:
        serve.run(engines, name=application, route_prefix=None, blocking=False)
    except RuntimeError as error:
        limit = f"could not be started: {failure(application) or error}"
        raise EngineError("cluster", application, limit, LOGS_HINT) from error


def check_model(config: EngineConfig, application: str) -> None:
    """Raise `InvalidInputError` if an application that answers has another model than `config` names.

    An update needs the application's own model, so that a server never replaces the model of another one.
    """
    found = serve.status().applications.get(application)
    if found is None or found.status != "RUNNING":
        return
    with contextlib.closing(ReplicaPool(application)) as pool:
        model = pool.describe().config.model
    if model != config.model:
        limit = f"is an application of this cluster that has another model: {model}"
        raise InvalidInputError("--application", application, limit, "give another name, or its own model")


def engine_deployment(config: EngineConfig, settings: ClusterSettings) -> serve.Application:
    """Return the deployment of engines with a configuration. An actor is a process: the engine needs no other one."""
    if config.cluster is not None:
        raise InvalidInputError("cluster", config.cluster, "is where engines are, and no engine", "leave it out")
    config = replace(config, isolate=False, replicas=1)
    if config.limits.max_num_seqs is None:
        seats = 1 if config.exact == "strict" else SEATS
        config = replace(config, limits=replace(config.limits, max_num_seqs=seats))
    seats, taken = config.limits.num_seqs, resources(settings)
    scaling: dict[str, Any] = {"num_replicas": settings.min_replicas}
    if settings.max_replicas > settings.min_replicas:
        bounds = {"min_replicas": settings.min_replicas, "max_replicas": settings.max_replicas}
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": BUSY_SHARE * seats}}
    deployment: Any = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=int(seats * WAITING_SHARE),
        ray_actor_options={"num_cpus": taken["CPU"], "num_gpus": taken["GPU"]},
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=1,
        health_check_timeout_s=5,
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,  # type: ignore[arg-type]
            request_router_kwargs={"num_fallback_replicas": settings.max_replicas - 1},
        ),
        **scaling,
    )
    return cast("serve.Application", deployment.bind(config))


def resources(settings: ClusterSettings) -> dict[str, float]:
    """Return what a replica takes of a node, by Ray's names of resources."""
    nodes = _nodes()
    gpus = float(any("GPU" in node for node in nodes)) if settings.gpus is None else settings.gpus
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("GPU", 0) >= gpus]
    cpus = settings.cpus if settings.cpus is not None else largest_share(cores, settings.max_replicas)
    return {"CPU": cpus, "GPU": gpus}


def room(settings: ClusterSettings) -> int:
    """Return for how many replicas the nodes that the cluster has now are large enough."""
    needs = [(name, value) for name, value in resources(settings).items() if value]
    return sum(int(min((node.get(name, 0) // value for name, value in needs), default=1)) for node in _nodes())


def check_room(settings: ClusterSettings) -> None:
    """Raise `InvalidInputError` if the nodes are too small or too few for the least number of replicas."""
    if (most := room(settings)) < settings.min_replicas:
        taken = resources(settings)
        limit = f"must be {most} at most here: a replica takes {taken['CPU']:g} cores and {taken['GPU']:g} GPUs"
        hint = "--cpus-per-replica and --gpus-per-replica change that, also to fractions"
        raise InvalidInputError("--replicas", settings.min_replicas, limit, hint)


def _nodes() -> list[dict[str, float]]:
    """Return the resources of each node, by name; no nodes before this process has joined a cluster."""
    if not ray.is_initialized():
        return []
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in found if node["Alive"]]


def largest_share(cores: list[int], replicas: int) -> int:
    """Return the most cores a replica can have if all are to fit on nodes with these numbers of cores; at least one."""
    sizes = range(max(cores, default=1), 0, -1)
    return next((size for size in sizes if sum(count // size for count in cores) >= replicas), 1)
