# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Agents with tools
#
# At the end of this page an agent asks a database, calculates with what it found, and answers; all on two CPU cores,
# with a model of 1.5 billion parameters. Such a model is no great planner. But every call that it makes is one that its
# tools can take: names, types and patterns of the arguments are enforced while the text is written.
#
# It takes two minutes. You need the package `langchain`, and the extra `structured` (docs/install.md).

# %% [markdown]
# ## Tools
#
# Plain functions. What their arguments may be is said in their types, and it pays to say much: `calculate` takes
# numbers and signs between them, so that the model cannot write `total * 0.19` there. And lengths have bounds: a call
# that `max_tokens` cuts off is none.

# %%
import ast
import json
import operator
import sqlite3
from typing import Annotated

from langchain_core.tools import tool
from pydantic import Field

shop = sqlite3.connect(":memory:", check_same_thread=False)
shop.executescript(
    """
    CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount REAL);
    INSERT INTO orders (customer, amount) VALUES
        ('Ann', 120.5), ('Bob', 80), ('Ann', 45.25), ('Cid', 19.9), ('Bob', 310);
    """
)


@tool
def query(sql: Annotated[str, Field(pattern=r"^SELECT .{1,120}$", description="one SELECT statement")]) -> str:
    """Ask the shop's SQLite database. It has one table: orders(id, customer, amount)."""
    try:
        return json.dumps(shop.execute(sql).fetchall())
    except sqlite3.Error as error:
        return f"error: {error}"


SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@tool
def calculate(
    expression: Annotated[str, Field(pattern=r"^\d{1,9}(\.\d{1,9})?( [+*/-] \d{1,9}(\.\d{1,9})?){1,5}$")],
) -> str:
    """Calculate an expression: numbers and + - * / between them."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        return node.value

    try:
        return f"{value(ast.parse(expression, mode='eval').body):.2f}"
    except (SyntaxError, ArithmeticError) as error:
        return f"error: {error}"


# %% [markdown]
# ## One call
#
# `bind_tools` tells the model of the tools. With `tool_choice` it must call one, may, or may not; by default it may.

# %%
import warnings

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=200).load()
for choice in ("auto", "any", "none"):
    answer = model.bind_tools([query, calculate], tool_choice=choice).invoke("How many orders are there?")
    print(f"{choice:5}", [(call["name"], call["args"]) for call in answer.tool_calls], repr(answer.text))

# %% [markdown]
# Calls stream as they are written.

# %%
for chunk in model.bind_tools([calculate], tool_choice="any").stream("What is 17 * 23?"):
    for piece in chunk.tool_call_chunks:
        print(piece["name"] or piece["args"], end="|")

# %% [markdown]
# ## The agent
#
# `create_agent` goes on until the model answers in words. A limit of model calls ends an agent that goes in circles.
# Small models need their task in steps.

# %%
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware

agent = create_agent(
    model,
    [query, calculate],
    system_prompt="You are a careful assistant. Work step by step.",
    middleware=[ModelCallLimitMiddleware(run_limit=6)],
)
task = (
    "Do this in three steps. 1. Query the sum of the orders of Bob. 2. Calculate 19 % of this sum. "
    "3. Tell me both numbers."
)
state = agent.invoke({"messages": [("user", task)]})
for message in state["messages"]:
    message.pretty_print()

# %% [markdown]
# ## What it cost
#
# What was read in one turn is not read again in the next: `cache_read` counts those tokens. And a call is cheap to
# write: what the grammar leaves no choice about, and what stands in the prompt already, is drafted for free.

# %%
for message in state["messages"]:
    if message.type == "ai" and message.usage_metadata:
        usage, card = message.usage_metadata, message.response_metadata["card"]
        print(
            f"read {usage['input_tokens']:3}, of which {usage['input_token_details']['cache_read']:3} were known;"
            f" wrote {usage['output_tokens']:3}, {card['mean_accepted_length']:.1f} a pass,"
            f" drafted by {card['accepted_by_source']}"
        )

# %% [markdown]
# ## Watching it
#
# `stream_mode="messages"` gives every token, `"updates"` every step.

# %%
for update in agent.stream({"messages": [("user", task)]}, stream_mode="updates"):
    for step, change in update.items():
        for message in (change or {}).get("messages", []):
            print(f"{step}: {message.text or [call['args'] for call in message.tool_calls]}")

# %% [markdown]
# ## An answer that a program can read
#
# With `response_format` the agent ends with an object. The grammar of each answer is then the union of both: a call, or
# the document, which the model is told of as one more function to call.

# %%
from pydantic import BaseModel


class Report(BaseModel):
    customer: str
    sum_of_orders: float
    tax: float


reporting = create_agent(
    model,
    [query, calculate],
    system_prompt="You are a careful assistant. Work step by step.",
    response_format=Report,
    middleware=[ModelCallLimitMiddleware(run_limit=6)],
)
state = reporting.invoke({"messages": [("user", task)]})
print(state.get("structured_response"))

# %%
model.close()
