"""What a cluster refuses before anything is started, and how replicas share out its cores."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from langchain_card import CARDChatModel
from langchain_card.cli import main
from langchain_card.cli.serve import replica_bounds
from langchain_card.cluster import ClusterSettings, build
from langchain_card.cluster.deployment import check_tokens, largest_share
from langchain_card.errors import EngineError, InvalidInputError
from tests.support import tiny


@pytest.mark.parametrize(
    ("cores", "replicas", "share"),
    [
        ([8], 1, 8),
        ([8], 2, 4),
        ([8], 3, 2),
        ([4, 4, 4], 3, 4),
        ([4, 4, 4], 4, 2),
        ([16, 2], 3, 5),
        ([2], 8, 1),
        ([], 1, 1),
    ],
)
def test_replicas_share_out_the_cores_of_all_nodes(cores: list[int], replicas: int, share: int) -> None:
    assert largest_share(cores, replicas) == share


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas = 3: must be a whole number between 1 and 2"),
        ({"min_replicas": 0, "max_replicas": 0}, "max_replicas = 0: must be a whole number between 1 and 10,000"),
        ({"drain_seconds": -1.0}, "drain_seconds = -1.0: must be"),
        ({"cpus": -1.0}, "cpus = -1.0: must be"),
    ],
)
def test_settings_out_of_range(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        ClusterSettings(**fields)


def test_a_cluster_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_tokens(insecure=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    check_tokens(insecure=True)
    with pytest.raises(InvalidInputError, match="RAY_AUTH_MODE = 'disabled': lets everybody who reaches Ray's ports"):
        check_tokens(insecure=False)


def test_numbers_of_replicas() -> None:
    assert replica_bounds("3") == (3, 3) and replica_bounds("2:8") == (2, 8)
    for text in ("", "x", "2:y", ":8", "-1", "2:", "0", "3:2"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number from 1 on, or MIN:MAX"):
            replica_bounds(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--replicas", "1:2"), "--replicas = '1:2': changes with the load on Ray only. Hint: add --ray"),
        (("--application", "x"), "--application = 'x': goes with --ray only"),
        (("--cpus-per-replica", "2"), "--cpus-per-replica = 2.0: goes with --ray only"),
        (("--ray", "127.0.0.1:1"), "--ray = '127.0.0.1:1': cannot be reached ([Errno 111] Connection refused)"),
        (("--ray", "ray://10.0.0.1:10001"), "--ray = 'ray://10.0.0.1:10001': is no address of a cluster's head node"),
        (("--ray", "10.0.0.1"), "--ray = '10.0.0.1': is no address of a cluster's head node. Hint: HOST:PORT, or auto"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...], said: str, capsys: Any, tmp_path: Path) -> None:
    target = tiny.make_target("llama", tmp_path)
    assert main(["serve", "--model", target, "--draft-model", "none", "--port", "0", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"insecure": "true", "modell": "x"}, "modell = 'x': is no field of an application. Hint: did you mean model"),
        ({"insecure": "true", "min_replica": 2}, "min_replica = 2: .* Hint: did you mean min_replicas"),
        ({"insecure": "true", "servers": "0"}, "servers = 0: must be a whole number between 1 and 10,000"),
        ({"insecure": "perhaps"}, "insecure\n.*valid boolean"),
        ({"insecure": "true", "min_replicas": "2"}, "min_replicas = 2: must be a whole number between 1 and 1"),
        ({}, "api_key_file = None: is needed: other machines can reach the proxies of Ray"),
        ({"api_key_file": "/no/keys"}, "api_key_file = '/no/keys': cannot be read"),
    ],
)
def test_arguments_of_an_application(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(arguments)


def test_a_process_outside_a_cluster() -> None:
    with pytest.raises(EngineError, match="cluster = 'card': cannot be reached: this process has not joined a Ray"):
        CARDChatModel(cluster="card").load()
    with pytest.raises(ValueError, match="cluster = 'card': has engines of its own, beside isolate and replicas"):
        CARDChatModel(cluster="card", isolate=True)
