"""Adapters over HTTP: requests name one as their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_card import CARDChatModel
from langchain_card.errors import InvalidInputError
from langchain_card.serve import Settings, create_app
from tests.support.adapters import make
from tests.support.served import CHAT, NAME, TEXT, ask, served

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_adapter_is_a_model_of_its_own(toy: dict[str, Any], tmp_path: Path) -> None:
    made = make(toy["model"], tmp_path, seed=1, target_modules="all-linear")
    model = CARDChatModel(**toy, adapters={"tuned": made.adapter})
    with pytest.raises(InvalidInputError, match="is a name of the model, too"):
        create_app(model, Settings(model_names=("tuned",)))
    with CARDChatModel(**{**toy, "model": made.merged}) as merged:
        wanted = merged.invoke("Q").text
    with served(model) as address, httpx.Client(base_url=address) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [(NAME, None), ("alias", None), ("tuned", NAME)]
        assert client.get("/v1/models/tuned").json()["parent"] == NAME
        answer = client.post(CHAT, json=ask(model="tuned")).json()
        assert (answer["choices"][0]["message"]["content"], answer["model"]) == (wanted, "tuned")
        assert answer["card"]["adapter"] == "tuned" and "acceptance_rate" in answer["card"]
        assert client.post(CHAT, json=ask()).json()["choices"][0]["message"]["content"] != wanted
        texts = [
            client.post(TEXT, json={"model": name, "prompt": "Q", "max_tokens": 8}).json()["choices"][0]["text"]
            for name in (NAME, "tuned")
        ]
        assert texts[0] != texts[1]
        refused = client.post(CHAT, json=ask(model="tunde"))
        assert refused.status_code == 404 and "tiny, alias, tuned" in refused.json()["error"]["message"]
