"""The built-in pair with grammars: an agent that gets to its end, documents that are valid, the target's own tokens."""

from __future__ import annotations

import ast
import json
import operator
import random
import sqlite3
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from pydantic import Field

from langchain_card import CARDChatModel
from langchain_card.config import EngineConfig
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from tests.support import schemas

pytestmark = pytest.mark.pair
SIGNS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig()) as engine:
        yield engine


def value(node: Any) -> float:
    if isinstance(node, ast.BinOp):
        return float(SIGNS[type(node.op)](value(node.left), value(node.right)))
    return float(node.value)


def shop_tools() -> list[BaseTool]:
    shop = sqlite3.connect(":memory:", check_same_thread=False)
    shop.executescript(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount REAL);"
        "INSERT INTO orders (customer, amount) VALUES ('Ann', 120.5), ('Bob', 80), ('Ann', 45.25), ('Bob', 310);"
    )

    @tool
    def query(sql: Annotated[str, Field(pattern=r"^SELECT .*$", description="one SELECT statement")]) -> str:
        """Ask the shop's SQLite database. It has one table: orders(id, customer, amount)."""
        return json.dumps(shop.execute(sql).fetchall())

    @tool
    def calculate(expression: Annotated[str, Field(pattern=r"^\d+(\.\d+)?( [+*/-] \d+(\.\d+)?)+$")]) -> str:
        """Calculate an expression: numbers and + - * / between them."""
        return f"{value(ast.parse(expression, mode='eval').body):.2f}"

    return [query, calculate]


def test_an_agent_queries_calculates_and_answers(say: Callable[[str], None]) -> None:
    tools = shop_tools()
    with CARDChatModel(max_tokens=200) as model:
        limit = ModelCallLimitMiddleware(run_limit=6)
        agent = create_agent(
            model, tools, system_prompt="You are a careful assistant. Work step by step.", middleware=[limit]
        )
        steps = "1. Query the sum of the orders of Bob. 2. Calculate 19 % of this sum. 3. Tell me both numbers."
        messages = agent.invoke({"messages": [("user", f"Do this in three steps. {steps}")]})["messages"]
    answers = [message for message in messages if isinstance(message, AIMessage)]
    calls = [call for answer in answers for call in answer.tool_calls]
    by_name = {tool.name: tool for tool in tools}
    for call in calls:
        by_name[call["name"]].tool_call_schema.model_validate(call["args"])  # type: ignore[union-attr]
    assert not any(answer.invalid_tool_calls for answer in answers)
    assert {call["name"] for call in calls} == {"query", "calculate"}
    results = [str(message.content) for message in messages if isinstance(message, ToolMessage)]
    assert "[[390.0]]" in results
    assert "74.10" in results
    assert not answers[-1].tool_calls
    assert "74.1" in answers[-1].text
    cached = [answer.usage_metadata["input_token_details"]["cache_read"] for answer in answers if answer.usage_metadata]
    assert cached == sorted(cached)
    say(f"{[(call['name'], *call['args'].values()) for call in calls]}, {answers[-1].text!r}, cache_read {cached}")


def test_documents_of_any_schema_and_budget_are_valid(engine: Engine, say: Callable[[str], None]) -> None:
    rng = random.Random(7)
    closed = tokens = 0
    for number in range(50):
        schema = schemas.random_schema(rng)
        grammar = json_grammar(schema)
        shortest = engine.grammars.shortest(grammar)
        budget = max(1, shortest + rng.randrange(40))
        messages: Any = [{"role": "user", "content": f"Invent example number {number} of {json.dumps(schema)}"}]
        prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        params = SamplingParams(max_tokens=budget, temperature=1.0, seed=number, grammar=grammar)
        completion = engine.submit(prompt, params).result()
        Draft202012Validator(schema).validate(json.loads(completion.text))
        closed, tokens = closed + completion.stats.closed, tokens + len(completion.token_ids)
    say(f"50 documents of {tokens / 50:.0f} tokens on average, {closed} of them ended in time")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token_under_a_grammar(engine: Engine, temperature: float, say: Callable[[str], None]) -> None:
    rng = random.Random(11)
    compared, by_source = 0, dict[str, int]()
    for number in range(12):
        schema = schemas.random_schema(rng)
        grammar = json_grammar(schema)
        messages: Any = [{"role": "user", "content": f"Invent example number {number} of {json.dumps(schema)}"}]
        prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        budget = engine.grammars.shortest(grammar) + rng.randrange(8, 80)
        answers = {}
        for schedule in ("plain", "sequential", "parallel"):
            params = SamplingParams(
                max_tokens=budget, temperature=temperature, seed=number, schedule=schedule, grammar=grammar
            )
            completion = engine.submit(prompt, params).result()
            answers[schedule] = completion.token_ids
            for source, count in completion.stats.accepted_by_source.items():
                by_source[source] = by_source.get(source, 0) + count
        assert len({*answers.values()}) == 1
        compared += len(answers["plain"])
    assert by_source["forced"] > 0
    assert by_source["model"] > 0
    say(f"{compared} tokens compared, accepted {by_source}")
