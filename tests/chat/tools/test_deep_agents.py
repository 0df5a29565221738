"""deepagents over the real engine: what it finds by entry points, and a model that says what is chosen.

`make test-oldest` runs this file: the environment has an `anthropic` that deepagents does not take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from pydantic import BaseModel

from langchain_card import CARDChatModel
from langchain_card.errors import InvalidInputError
from tests.support.played import make_pair, played
from tests.support.scripted import Scripted

deepagents = pytest.importorskip("deepagents")
LocalShellBackend = pytest.importorskip("deepagents.backends").LocalShellBackend
PlannedSteps = pytest.importorskip("langchain_card.chat.deep_agents").PlannedSteps

pytestmark = pytest.mark.usefixtures("one_thread")

TASK: Any = {"messages": [("human", "Write apples 3 to /notes.txt, read it, then change apples to pears.")]}
PATH = {"file_path": "/notes.txt"}
CALLS: list[dict[str, Any]] = [
    {"name": "write_file", "arguments": {**PATH, "content": "apples 3"}},
    {"name": "read_file", "arguments": PATH},
    {"name": "edit_file", "arguments": {**PATH, "old_string": "apples", "new_string": "pears"}},
]
PLAN = {"steps": [{"instruction": f"use {call['name']}", "function": call["name"]} for call in CALLS]}


class Day(BaseModel):
    day: str


class Plain(Scripted):
    """A model of a provider without a harness."""

    def _get_ls_params(self, stop: Any = None, **options: Any) -> Any:
        return {**super()._get_ls_params(stop, **options), "ls_provider": "plain"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(
        **{**make_pair(tmp_path_factory.mktemp("pair")), "max_model_len": 16384, "max_tokens": 400}
    ).load() as model:
        yield model


def fenced(call: dict[str, Any]) -> str:
    return f"```json\n{json.dumps(call)}\n```"


def follows(prompt: str) -> str:
    """What a model says that plans three calls and makes them."""
    step = re.findall(r"Do step (\d) of 3 now: use (\w+)", prompt)
    if "Split the task" in prompt:
        return json.dumps(PLAN)
    return fenced(CALLS[int(step[-1][0]) - 1]) if "All steps are done." not in prompt else "There are pears."


def offered(model: Scripted, *tools: Any) -> list[dict[str, Any]]:
    """The functions that a deep agent offers in its first call."""
    model._answer = AIMessage('{"steps": []}')  # a plan without steps, and then the answer
    deepagents.create_deep_agent(model, tools).invoke(TASK)
    return [tool["function"] for tool in model._seen[-1]["tools"]]


def test_deepagents_finds_the_harness_and_its_prompt_is_short() -> None:
    short, plain = offered(Scripted()), offered(Plain())
    assert [tool["name"] for tool in plain] == [*(tool["name"] for tool in short), "task"]
    assert {"read_file", "write_file", "edit_file", "grep"} <= {tool["name"] for tool in short}
    assert len(json.dumps(short)) < 0.4 * len(json.dumps(plain[:-1]))
    for tool, long in zip(short, plain, strict=False):
        assert tool["parameters"]["properties"].keys() == long["parameters"]["properties"].keys()
        assert tool["parameters"].get("required") == long["parameters"].get("required")


def test_deepagents_finds_what_it_says_of_names() -> None:
    with pytest.raises(InvalidInputError, match="pass CARDChatModel"):
        deepagents.create_deep_agent("card:smollm2-135m")


@pytest.mark.parametrize("run", ["invoke", "ainvoke"])
async def test_a_plan_is_followed_call_by_call(model: CARDChatModel, run: str) -> None:
    agent = deepagents.create_deep_agent(model, middleware=[PlannedSteps()])
    with played(follows, model._engine().tokenizer):
        state = agent.invoke(TASK) if run == "invoke" else await agent.ainvoke(TASK)
    assert [message.type for message in state["messages"]] == ["human", *["ai", "tool"] * 3, "ai"]
    assert state["files"]["/notes.txt"]["content"] == "pears 3"
    assert state["messages"][-1].text == "There are pears."
    assert "plan" not in state


def test_a_step_is_a_call_of_its_tool_whatever_the_model_would_say(model: CARDChatModel) -> None:
    plan = json.dumps({"steps": [{"instruction": "look", "function": "ls"}]})
    agent = deepagents.create_deep_agent(model, middleware=[PlannedSteps()])
    with played(lambda prompt: plan if "Split the task" in prompt else "Done.", model._engine().tokenizer):
        state = agent.invoke(TASK)
    assert [call["name"] for message in state["messages"] for call in getattr(message, "tool_calls", [])] == ["ls"]
    assert state["messages"][-1].text == "Done."


@pytest.mark.parametrize("name", ["task", "execute", "grep"])
def test_tools_of_the_caller_are_offered_and_called(model: CARDChatModel, name: str, tmp_path: Path) -> None:
    own = StructuredTool(name=name, description="What\nto do", func=lambda day: f"rest on {day}", args_schema=Day)
    backend = LocalShellBackend(root_dir=tmp_path, virtual_mode=True)  # without a shell, deepagents hides `execute`
    call, prompts = {"name": name, "arguments": {"day": "Monday"}}, list[str]()

    def says(prompt: str) -> str:
        prompts.append(prompt)
        return "Rest." if "Result of" in prompt else fenced(call)

    with played(says, model._engine().tokenizer):
        state = deepagents.create_deep_agent(model, [own], backend=backend).invoke(TASK)
    assert [message.text for message in state["messages"][1:]] == ["", "rest on Monday", "Rest."]
    assert json.dumps("What\nto do") in prompts[0]
