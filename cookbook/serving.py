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
# # Serving
#
# At the end of this page a server has answered OpenAI's client, LangChain's own, and a chain over LangServe; and its
# engine was killed in the middle of an answer, which came whole all the same.
#
# It takes three minutes on two CPU cores. You need the extras `server`, `structured` and `langserve` (docs/install.md),
# and the package `langchain-openai`.

# %% [markdown]
# ## A server
#
# One command. It listens to this machine alone; for others it wants keys (`--api-key-file`). It is started in the
# background here; in a terminal it is `langchain-card serve`.

# %%
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

URL = "http://127.0.0.1:8765"

command = Path(sys.executable).parent / "langchain-card"
log = tempfile.NamedTemporaryFile("w", prefix="langchain-card-", suffix=".log")
server = subprocess.Popen([command, "serve", "--port", "8765"], stdout=log, stderr=log)


def health() -> str:
    try:
        return httpx.get(f"{URL}/health").json()["status"]
    except httpx.ConnectError:
        return "not there yet"


while health() != "ok":
    assert server.poll() is None, Path(log.name).read_text()
    time.sleep(0.2)
httpx.get(f"{URL}/health").json()

# %% [markdown]
# `/health` tells of each worker whether it makes progress: how long its step takes already, and how long it may.

# %% [markdown]
# ## OpenAI's client

# %%
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
MODEL = client.models.list().data[0].id
MODEL

# %%
stream = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Write a Python function that reverses a linked list. Code only."}],
    max_tokens=160,
    stream=True,
    extra_body={"card": True},  # tells of each token who proposed it; other servers ignore it
)
sources = []
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="")
    card = chunk.model_extra["card"]
    sources += [token["source"] for token in card["tokens"]]

# %%
import collections

stats = card["stats"]
print(f"{stats['output_tokens']} tokens in {stats['rounds']} passes of the target; proposed by:")
collections.Counter(source or "nobody: the target's own" for source in sources)

# %% [markdown]
# A schema is enforced token by token, so the answer is one of its documents.

# %%
from typing import Literal

from pydantic import BaseModel, Field


class Ticket(BaseModel):
    """What a customer wants."""

    topic: Literal["invoice", "delivery", "other"]
    is_urgent: bool
    summary: str = Field(max_length=100)


client.chat.completions.parse(
    model=MODEL,
    messages=[
        {"role": "user", "content": "Make a ticket of this letter: My parcel is three weeks late. Call me today!"}
    ],
    response_format=Ticket,
    max_tokens=100,
).choices[0].message.parsed

# %% [markdown]
# ## LangChain over HTTP
#
# `ChatOpenAI` has everything: tools, schemas, streams. A chain, an agent or a graph does not see the difference.

# %%
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

remote = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=60)
chain = ChatPromptTemplate.from_template("In one sentence: what is {thing}?") | remote | StrOutputParser()
for piece in chain.stream({"thing": "a B-tree"}):
    print(piece, end="")

# %% [markdown]
# With the extra `langserve` there are LangServe's routes, too. Its client cannot hand options on, so what may change is
# configurable: `stop`, `seed`, `temperature`, `max_tokens`.

# %%
from langserve import RemoteRunnable

runnable = RemoteRunnable(f"{URL}/card")
for answer in runnable.batch(
    ["Name a colour.", "Name a river."], config={"configurable": {"max_tokens": 20, "temperature": 0.0}}
):
    print(answer.text)

# %% [markdown]
# ## A killed engine
#
# Models run in a process of their own. Here it is killed while an answer is written. The server keeps every request and
# what was written of it; the next engine goes on there. That it is the same text follows from the engine's exactness:
# every token is the target's own choice, a function of the text before it and the seed.

# %%
import psutil

question = {"model": MODEL, "messages": [{"role": "user", "content": "Tell a story about a lighthouse."}]}
options = {"max_tokens": 80, "temperature": 0.8, "seed": 7}
undisturbed = client.chat.completions.create(**question, **options).choices[0].message.content

text, engine = "", psutil.Process(server.pid).children()[0]
for number, chunk in enumerate(client.chat.completions.create(**question, **options, stream=True)):
    text += chunk.choices[0].delta.content or ""
    if number == 30:
        engine.kill()
        before, killed = text, time.monotonic()
    elif number == 31:
        print(f"{time.monotonic() - killed:.0f} seconds until the next engine wrote on\n")
print(before, "⚡", text.removeprefix(before))
print("\nsame text:", text == undisturbed)

# %% [markdown]
# ## The end
#
# On SIGTERM the server takes no more requests, and writes those that run to their end (30 seconds at most, `--drain`).

# %%
server.terminate()
print("exit code", server.wait())
log.close()
