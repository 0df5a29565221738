"""The file for `serve run` in docs/guides/cluster.md is one that Ray and `build` take. A second."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from langchain_card import cluster
from langchain_card.errors import InvalidInputError
from tests.support.documents import ROOT, blocks_of

PAGE = "docs/guides/cluster.md"


def test_the_file_for_serve_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first field that nothing has is the one added here."""
    (file,) = [block.text for block in blocks_of(PAGE, (ROOT / PAGE).read_text()) if block.language == "yaml"]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(file)).applications
    assert application.import_path == f"{cluster.__name__}:{cluster.build.__name__}"
    keys = tmp_path / "keys.txt"
    keys.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(InvalidInputError, match="nonsense = 1: is no field"):
        cluster.build({**application.args, "api_key_file": str(keys), "nonsense": 1})
