"""A Ray cluster of several raylets on this machine, and what may happen to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from tests.support.processes import wait_until

STORE_BYTES = 80 << 20


class Raylets:
    """A cluster with nodes that can be taken away. The first node, with Ray's own actors, stays.

    Args:
        count: number of nodes.
        cpus: of each node.
    """

    def __init__(self, count: int, cpus: int) -> None:
        self._cpus = cpus
        node = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=node)
        for _ in range(count - 1):
            self.add_node()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def add_node(self) -> None:
        """Start one more raylet."""
        self._cluster.add_node(num_cpus=self._cpus, object_store_memory=STORE_BYTES)

    def replicas(self, application: str = "card") -> dict[int, str]:
        """Return the node of every replica that is up, by the replica's process id."""
        found = _get_global_client().get_serve_details()["applications"].get(application)
        replicas = found["deployments"]["EngineReplica"]["replicas"] if found else []
        return {each["pid"]: each["node_id"] for each in replicas if each["state"] == "RUNNING" and _runs(each["pid"])}

    def wait_for(self, count: int, application: str = "card", seconds: float = 300) -> dict[int, str]:
        """Return the replicas once as many are up."""
        deadline = time.monotonic() + seconds
        while len(found := self.replicas(application)) < count:
            assert time.monotonic() < deadline, f"after {seconds:g} seconds {len(found)} of {count} replicas are up"
            time.sleep(0.1)
        return found

    def remove_node(self) -> None:
        """Kill the raylet of a node with replicas, and their processes with it."""
        _head, *others = self._cluster.list_all_nodes()
        wait_until(lambda: bool({node.node_id for node in others} & {*self.replicas().values()}), 300)
        busy = {*self.replicas().values()}
        node = max(others, key=lambda node: node.node_id in busy)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End Ray."""
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def raylets(count: int, cpus: int) -> Iterator[Raylets]:
    """Start a cluster whose processes find this checkout, with one thread each; end it whatever happens."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",  # else 15: replicas would starve beside other tests
        }.items():
            patch.setenv(name, value)
        made = Raylets(count, cpus)
        try:
            yield made
        finally:
            made.close()


def stop_for_a_while(pid: int, seconds: float) -> None:
    """Stop a process, and let it go on later."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def total_memory() -> int:
    """Return the bytes that this process and its descendants hold; what several share counts once."""
    found = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found += process.memory_full_info().pss
    return found


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
