"""The row for LangChain's list of integrations, and the page in its form, say what the model can do."""

from __future__ import annotations

import re
from typing import Any

import tomllib
import yaml

import langchain_card
from langchain_card import CARDChatModel
from tests.support import ROOT, SMALL

PAGE = (ROOT / "docs/langchain/chat_card.md").read_text(encoding="utf-8")
PROFILE: dict[str, Any] = dict(CARDChatModel(model=SMALL, draft_model=None).profile or {})


def test_the_row_is_true() -> None:
    (row,) = yaml.safe_load((ROOT / "docs/langchain/row.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert row == {
        "name": CARDChatModel.__name__,
        "pypi": project["name"],
        "docs_url": f"https://pypi.org/project/{project['name']}/",
        "stream": CARDChatModel._stream is not super(CARDChatModel, CARDChatModel)._stream,
        "tool_calling": PROFILE["tool_calling"],
        "structured_output": PROFILE["structured_output"],
        "multimodal": any(PROFILE[f"{kind}_inputs"] for kind in ("image", "audio", "video")),
    }


def test_the_page_has_the_parts_of_the_template_in_order() -> None:
    assert PAGE.startswith('---\ntitle: "CARDChatModel integration"\ndescription: "Integrate with the CARDChatModel')
    headings = re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)
    parts = ["Overview", "Details", "Features", "Setup", "Credentials", "Installation", "Instantiation", "Invocation"]
    assert headings[: len(parts)] == parts and headings[-1] == "API reference"
    assert "| Class | Package | Serializable |" in PAGE and "| Downloads | Version |" in PAGE


def test_the_features_of_the_page_are_true() -> None:
    heads, _, marks = re.findall(r"^\| .*Tool calling.*\n.*\n.*$", PAGE, re.MULTILINE)[0].splitlines()
    names = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).strip() for cell in heads.strip("|").split("|")]
    said = dict(zip(names, (cell.strip() == "✅" for cell in marks.strip("|").split("|")), strict=True))
    kinds = {f"{kind.capitalize()} input": PROFILE[f"{kind}_inputs"] for kind in ("image", "audio", "video")}
    able = {"Tool calling": PROFILE["tool_calling"], "Structured output": PROFILE["structured_output"], **kinds}
    assert {name: said[name] for name in able} == able
    assert [name for name in said if name not in able] == [
        "Token-level streaming", "Native async", "Token usage", "Logprobs",
    ] and all(said[name] for name in said if name not in able)  # fmt: skip
    assert langchain_card.__version__ in PAGE
