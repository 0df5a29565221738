"""Agents that need two or three calls: how many of twenty tasks end right, by the form of calls.

    python benchmarks/agents.py [--forms plan blocks hermes list decision] [--tasks JUDGED SINGLE TUNING] [--at-once 28]
        [--json FILE]

Every form is run by `create_agent` with the same ten tools, greedy, with the built-in target. It runs without its draft
and with all tasks of a form at once: neither changes an answer, and both save time.

- *plan*: the form that the package uses with this model: fenced blocks of JSON, with the names of all calls before the
  first one; later answers are held to them.
- *blocks*: the same without plans. After each result the model is free to call or to answer.
- *hermes*: the one of Qwen 2.5's own chat template, with tools between `<tools>` and calls between `<tool_call>` tags.
- *list*: a JSON document that is either a list of calls or the answer.
- *decision*: a JSON document that first says what is missing, then chooses a function or the answer.

JUDGED are twenty tasks of two or three calls; SINGLE are questions that need one call or none; the wording was chosen
on TUNING and SINGLE. A task is right if the last message contains what its answer must contain; a question that needs
no call is right if none was made. Calls count as made up to the number that the task needs of each tool.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from benchmarks import agent_tasks
from benchmarks.agent_tasks import TOOLS, Task
from langchain_card import CARDChatModel, chat_model
from langchain_card.chat.schemas import tool_dicts
from langchain_card.limits import Limits
from langchain_card.text import tool_form
from langchain_card.text.prompt import encode

MAX_MODEL_CALLS = 7
MAX_TOKENS = 100
Schema = dict[str, Any]

DESCRIBED = """You are a helpful assistant.

# Functions

You can call these functions:
{functions}

"""
LIST = """Answer every message with one JSON document. To call functions:
{"calls": [{"name": "function_name", "arguments": {"argument": "value"}}]}
You are then told the results. When no function is needed, or you know all results:
{"answer": "the answer to the whole question"}"""
DECISION = """Answer every message with one JSON document. To call a function:
{"missing": "what is not known yet", "next": "function_name", "arguments": {"argument": "value"}}
You are then told the result. When no function is needed, or you know all results:
{"missing": "nothing", "next": "answer", "answer": "the answer to the whole question"}"""


def closed(**properties: Any) -> Schema:
    """Return the schema of an object with these properties, in this order."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def arguments(function: Mapping[str, Any]) -> Schema:
    return {"additionalProperties": False, **function["parameters"]}


TEXT = {"type": "string", "maxLength": 300}


def list_schema(functions: Sequence[Mapping[str, Any]]) -> Schema:
    calls = [closed(name={"const": one["name"]}, arguments=arguments(one)) for one in functions]
    return {"anyOf": [closed(calls={"type": "array", "items": {"anyOf": calls}, "minItems": 1}), closed(answer=TEXT)]}


def decision_schema(functions: Sequence[Mapping[str, Any]]) -> Schema:
    missing = {"type": "string", "maxLength": 120}
    ways = [closed(missing=missing, next={"const": one["name"]}, arguments=arguments(one)) for one in functions]
    return {"anyOf": [*ways, closed(missing=missing, next={"const": "answer"}, answer=TEXT)]}


def calls_of(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls in a document of either schema."""
    if "arguments" in document:
        return [(document["next"], document["arguments"])]
    return [(call["name"], call["arguments"]) for call in document.get("calls", ())]


class Documents(AgentMiddleware):
    """Calls and answers as JSON documents, which the system message describes and a schema enforces."""

    def __init__(self, description: str, schema: Callable[[Sequence[Mapping[str, Any]]], Schema]) -> None:
        super().__init__()
        self.description, self.schema = description, schema

    def wrap_model_call(self, request: Any, handler: Any) -> AIMessage:
        functions = [tool["function"] for tool in tool_dicts(request.tools)]
        described = DESCRIBED.format(functions="\n".join(map(json.dumps, functions)))
        turns = [SystemMessage(described + self.description), *written(request.messages)]
        form = {"type": "json_schema", "json_schema": {"name": "step", "schema": self.schema(functions)}}
        said = request.model.invoke(turns, response_format=form)
        document = json.loads(said.text)
        calls = [{"name": name, "args": args, "id": uuid.uuid4().hex} for name, args in calls_of(document)]
        usage, kept = said.usage_metadata, {"document": said.text}
        text = document.get("answer", "")
        return AIMessage(text, tool_calls=calls, usage_metadata=usage, additional_kwargs=kept)


def written(messages: Sequence[AnyMessage]) -> Iterator[BaseMessage]:
    """Yield the turns of an agent whose calls are documents; each result is followed by the question."""
    question = next(message.text for message in messages if isinstance(message, HumanMessage))
    for message in messages:
        if isinstance(message, ToolMessage):
            yield HumanMessage(f"Result of {message.name}:\n{message.text}\n\nThe question was: {question}")
        else:
            yield AIMessage(message.additional_kwargs["document"]) if isinstance(message, AIMessage) else message


@contextmanager
def own_template(tokenizer: Any) -> Iterator[None]:
    """Let the chat template write tools and calls; its example of a call has one brace in place of two."""
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace('{{\\"name\\"', '{\\"name\\"').replace("object>}}", "object>}")
    tool_form._known.clear()
    try:
        if not tool_form.tool_form(tokenizer).native:
            raise SystemExit("hermes: the chat template does not write calls between <tool_call> tags")
        yield
    finally:
        tokenizer.chat_template = template
        tool_form._known.clear()


@contextmanager
def without_plans(_: Any) -> Iterator[None]:
    """Describe tools without plans; the model then writes none."""
    with patch.object(chat_model, "encode", lambda *args, planned: encode(*args, planned=False)):
        yield


@contextmanager
def as_it_is(_: Any) -> Iterator[None]:
    yield


SETTINGS = {"blocks": without_plans, "hermes": own_template}
FORMS: Mapping[str, Sequence[AgentMiddleware]] = {
    "plan": (),
    "blocks": (),
    "hermes": (),
    "list": (Documents(LIST, list_schema),),
    "decision": (Documents(DECISION, decision_schema),),
}


@dataclass
class Score:
    """What a form reached.

    Attributes:
        right: tasks that ended right.
        tasks: tasks in all.
        made: calls that were needed and made.
        needed: calls that were needed.
        other: calls beyond those.
        prompt_tokens: tokens of all prompts, with those that were reused.
        seconds: wall time of the form, all sets of tasks at once.
    """

    right: int = 0
    tasks: int = 0
    made: int = 0
    needed: int = 0
    other: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0

    def add(self, task: Task, messages: Sequence[BaseMessage]) -> bool:
        """Count a task; return whether it ended right."""
        called = Counter(message.name for message in messages if isinstance(message, ToolMessage))
        made = sum(min(called[name], count) for name, count in task.needs.items())
        last = messages[-1]
        answer = last.text if isinstance(last, AIMessage) and not last.tool_calls else ""
        right = task.is_right(answer) and (bool(task.needs) or not called)
        self.right, self.tasks = self.right + right, self.tasks + 1
        self.made, self.needed = self.made + made, self.needed + sum(task.needs.values())
        self.other += called.total() - made
        said = [message.usage_metadata for message in messages if isinstance(message, AIMessage)]
        self.prompt_tokens += sum(usage["input_tokens"] for usage in said if usage)
        return right

    def row(self) -> str:
        right, made = f"{self.right} of {self.tasks}", f"{self.made} of {self.needed}"
        return f"{right:>9} {made:>12} {self.other:>12} {self.prompt_tokens:>14,} {self.seconds:>8.0f}"


def run(model: CARDChatModel, form: str, sets: Mapping[str, Sequence[Task]], at_once: int) -> dict[str, Score]:
    """Return the scores of a form by set of tasks; print how each task went."""
    limit: Any = ModelCallLimitMiddleware(run_limit=MAX_MODEL_CALLS)
    agent: Any = create_agent(model, TOOLS, middleware=[*FORMS[form], limit])
    started = time.perf_counter()
    agent.invoke({"messages": [("user", "Hello!")]})  # reads the description of the tools
    tasks = [(name, task) for name, members in sets.items() for task in members]
    questions = [{"messages": [("user", task.question)]} for _, task in tasks]
    states = agent.batch(questions, {"max_concurrency": at_once, "recursion_limit": 100})
    scores = {name: Score(seconds=time.perf_counter() - started) for name in sets}
    for (name, task), state in zip(tasks, states, strict=True):
        print(f"{'right' if scores[name].add(task, state['messages']) else 'WRONG'}  {task.question}")
        for message in state["messages"][1:]:
            calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())]
            print(f"       {message.type:5} {' '.join(message.text.split())[:90]}", *calls)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--tasks", nargs="+", choices=("JUDGED", "SINGLE", "TUNING"), default=["JUDGED", "SINGLE"])
    parser.add_argument("--at-once", type=int, default=28)
    parser.add_argument("--json", type=Path, help="write the scores here as well")
    args = parser.parse_args()
    sets = {name: getattr(agent_tasks, name) for name in args.tasks}
    scores = dict[str, dict[str, Score]]()
    limits = Limits(max_num_seqs=args.at_once)
    with CARDChatModel(draft_model=None, max_tokens=MAX_TOKENS, max_model_len=4096, limits=limits).load() as model:
        for form in args.forms:
            print(f"\n{form}")
            with SETTINGS.get(form, as_it_is)(model._engine().tokenizer):
                scores[form] = run(model, form, sets, args.at_once)
    columns = f"{'right':>9} {'needed calls':>12} {'other calls':>12} {'prompt tokens':>14} {'seconds':>8}"
    print(f"\n{'form':10} {'tasks':8} {columns}")
    for form, by_set in scores.items():
        for name, score in by_set.items():
            print(f"{form:10} {name:8} {score.row()}")
    if args.json:
        figures = {form: {name: asdict(score) for name, score in by_set.items()} for form, by_set in scores.items()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
