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
# # Chains and streaming callbacks
#
# A chain with this model streams, calls back, runs side by side and stops like any chain in LangChain. At the end of this
# page you have seen that, one small cell each: streams and handlers first, then many prompts at once, then what may go
# wrong. It takes two minutes on two CPU cores.
#
# The pictures need matplotlib (the extra `bench`), nothing else does.

# %% [markdown]
# ## Load
#
# `CARDChatModel()` is the built-in pair. The variables `LANGCHAIN_CARD_MODEL` and `LANGCHAIN_CARD_DRAFT_MODEL` name
# another one, for instance `smollm2-135m` and `ngram`.

# %%
import warnings

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=80).load()
print(model.model, "with", model.draft_model)

# %% [markdown]
# ## Stream a chain
#
# Prompt, model and parser, piped together. Each piece is there when the target has decided it.

# %%
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

prompt = ChatPromptTemplate.from_messages(
    [
        ("system", "You explain Python to beginners, in one or two short sentences."),
        ("human", "What is {thing}?"),
    ]
)
chain = prompt | model | StrOutputParser()
for piece in chain.stream({"thing": "a generator"}):
    print(piece, end="|", flush=True)

# %% [markdown]
# ## A handler that sees each token
#
# `stream` tells the handlers about every token. `invoke` does so with the option `stream=True`, or when the model has
# the field `streaming=True`. In a chain, bind the option to the model: `chain.invoke(..., stream=True)` would give it to
# the prompt, which drops it. The two tokens without text are the end of the answer and the usage.

# %%
from langchain_core.callbacks import BaseCallbackHandler


class Tokens(BaseCallbackHandler):
    def on_llm_new_token(self, token, **kwargs):
        print(token, end="|", flush=True)


telling = prompt | model.bind(stream=True) | StrOutputParser()
answer = telling.invoke({"thing": "a tuple"}, {"callbacks": [Tokens()]})

# %% [markdown]
# On an event loop the handler may be async. This one notes when each token came: once with the draft, where a
# pass of the target brings several, and once from the target alone, which writes one token a pass.

# %%
import time

from langchain_core.callbacks import AsyncCallbackHandler


class Clock(AsyncCallbackHandler):
    def __init__(self):
        self.started, self.times = time.perf_counter(), []

    async def on_llm_new_token(self, token, **kwargs):
        if token:
            self.times.append(time.perf_counter() - self.started)


question = "Write a Python function that merges two sorted lists. Only the code."
clocks = {}
for name, options in (("with the draft", {}), ("the target alone", {"schedule": "plain"})):
    clocks[name] = Clock()
    await model.ainvoke(question, {"callbacks": [clocks[name]]}, stream=True, **options)

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.6))
for (name, clock), colour in zip(clocks.items(), ("#c1121f", "#888888")):
    axes.step(clock.times, range(1, len(clock.times) + 1), where="post", color=colour, label=name)
axes.set(xlabel="seconds", ylabel="tokens so far", xlim=(0, None), ylim=(0, None))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A handler that keeps figures
#
# What was measured is in `response_metadata["card"]` of the message; `on_llm_end` gets the message. The parser behind
# the model drops all but the text, the handler does not mind.


# %%
class Figures(BaseCallbackHandler):
    def __init__(self):
        self.cards = []

    def on_llm_end(self, response, **kwargs):
        self.cards.append(response.generations[0][0].message.response_metadata["card"])


figures = Figures()
print(chain.invoke({"thing": "a lambda"}, {"callbacks": [figures]}))
for name in ("schedule", "rounds", "mean_accepted_length", "tokens_per_second", "time_to_first_token"):
    print(f"{name}: {figures.cards[0][name]}")

# %% [markdown]
# ## Events
#
# `astream_events` tells what happens in every step of the chain; here the model's own events.

# %%
async for event in chain.astream_events({"thing": "a slice"}, version="v2"):
    if event["event"] == "on_chat_model_start":
        print("asked:", event["data"]["input"]["messages"][0][-1].content)
    elif event["event"] == "on_chat_model_stream":
        print(event["data"]["chunk"].text, end="|")
    elif event["event"] == "on_chat_model_end":
        print("\nused:", event["data"]["output"].usage_metadata)

# %% [markdown]
# ## Two branches at once
#
# The branches of a `RunnableParallel` meet in the engine: while both write, each pass of the target serves both.
# `mean_batch_size` is the number of answers that shared a pass, on average.

# %%
from langchain_core.runnables import RunnableParallel

code = ChatPromptTemplate.from_messages([("human", "Show {thing} in Python, in three lines of code. Only the code.")])
both = RunnableParallel(words=chain, code=code | model | StrOutputParser())
figures = Figures()
found = both.invoke({"thing": "a dictionary"}, {"callbacks": [figures]})
print(found["words"], found["code"], sep="\n\n")
print("\nanswers in a pass:", [card["mean_batch_size"] for card in figures.cards])

# %% [markdown]
# ## Many prompts
#
# `batch` hands all prompts to the engine at once. It decodes up to 16 of them together, as many as half of the free
# memory has room for; `max_concurrency` asks for fewer. The whole batch goes first here: the others may find their
# prompts read already.

# %%
things = "a list,a set,a string,a class,a module,a loop,a method,an exception,a dictionary,a package,a test,a type hint"
inputs = [{"thing": thing} for thing in things.split(",")]
longer = ChatPromptTemplate.from_messages([("system", "You explain Python in four sentences."), *prompt.messages[1:]])
answering = longer | model.bind(max_tokens=48)
ways = {
    "all at once": lambda: answering.batch(inputs),
    "three at once": lambda: answering.batch(inputs, {"max_concurrency": 3}),
    "one by one": lambda: [answering.invoke(input_) for input_ in inputs],
}
answers, speeds, sizes = {}, {}, {}
for way, call in ways.items():
    started = time.perf_counter()
    answers[way] = call()
    seconds = time.perf_counter() - started
    speeds[way] = sum(answer.usage_metadata["output_tokens"] for answer in answers[way]) / seconds
    sizes[way] = sum(answer.response_metadata["card"]["mean_batch_size"] for answer in answers[way]) / len(inputs)
    print(f"{way}: {speeds[way]:.1f} tokens/s, {sizes[way]:.1f} answers in a pass")

# %%
figure, axes = plt.subplots(figsize=(6, 1.8))
bars = axes.barh(list(speeds), list(speeds.values()), color=["#c1121f", "#e07a5f", "#888888"])
axes.bar_label(bars, [f"{size:.1f} in a pass" for size in sizes.values()], label_type="center", color="white")
axes.invert_yaxis()
axes.set(xlabel="tokens/s of all answers together")
plt.show()

# %% [markdown]
# In blocks on a CPU each answer is the one that it would be alone:

# %%
texts = {way: [answer.text for answer in found] for way, found in answers.items()}
print("same text:", texts["all at once"] == texts["three at once"] == texts["one by one"])

# %% [markdown]
# An item that fails ends the batch. With `return_exceptions=True` its error takes the place of its answer, and the
# others go on.

# %%
things = ["an integer", "a very " + "long " * 9000 + "story", "a float"]
for found in chain.batch([{"thing": thing} for thing in things], return_exceptions=True):
    print(repr(found) if isinstance(found, Exception) else found)

# %% [markdown]
# ## Leave early
#
# Whoever leaves a stream ends the work. The next answer has the engine to itself: one answer in a pass.

# %%
counting = "Count from one to one hundred, in words."


def ask_next():
    card = model.invoke("Say hello.").response_metadata["card"]
    print(f"next: {card['mean_batch_size']} in a pass, first token after {card['time_to_first_token']:.2f} s")


for number, chunk in enumerate(model.stream(counting, max_tokens=400)):
    print(chunk.text, end="", flush=True)
    if number == 12:
        break
print()
ask_next()

# %% [markdown]
# A cancelled task ends its answer, too. `asyncio.wait_for` cancels it after a time:

# %%
import asyncio

try:
    await asyncio.wait_for(model.ainvoke(counting, max_tokens=400), 1.0)
except asyncio.TimeoutError:
    print("not waited for any longer")
ask_next()

# %% [markdown]
# `timeout` is the same as a field of the model. Another model with the same weights costs nothing: both share the engine.

# %%
from langchain_card.errors import GenerationTimeoutError

hurried = CARDChatModel(timeout=0.5, max_tokens=400)
try:
    hurried.invoke(counting)
except GenerationTimeoutError as error:
    print(error)

# %% [markdown]
# ## Count tokens
#
# Counts are the target's own, chat template included. `profile` tells how many fit.

# %%
messages = prompt.invoke({"thing": "a token"}).to_messages()
print("counted:", model.get_num_tokens_from_messages(messages), "tokens")
print("read:", model.invoke(messages).usage_metadata["input_tokens"], "tokens")
print("at most:", model.profile["max_input_tokens"], "tokens")

# %% [markdown]
# ## Try again, or something else
#
# `with_retry` repeats whatever went wrong, also a prompt that is too long the second time as well. So name what may
# pass: an `EngineError`, such as a full queue or a time-out. `with_fallbacks` takes the rest; here a conversation that
# is too long is asked again with its last messages only.

# %%
from langchain_core.messages import trim_messages

from langchain_card.errors import ContextOverflowError, EngineError


class Tries(BaseCallbackHandler):
    def on_chat_model_start(self, *args, **kwargs):
        print("asked")

    def on_llm_error(self, error, **kwargs):
        print("failed:", type(error).__name__)


talk = [("system", "You have a good memory.")]
for number in range(150):
    talk += [("human", f"Remember the number {number}. " + "Think of it often. " * 12), ("ai", "I will.")]
talk.append(("human", "Which number did I say last? Only the number."))

end = trim_messages(max_tokens=300, token_counter=model, include_system=True, start_on="human")
safe = model.with_retry(retry_if_exception_type=(EngineError,)).with_fallbacks(
    [end | model], exceptions_to_handle=(ContextOverflowError,)
)
answer = safe.invoke(talk, {"callbacks": [Tries()]})
print(f"{answer.text} ({answer.usage_metadata['input_tokens']} tokens read)")

# %% [markdown]
# A time-out is tried twice here; then a short answer takes its place.

# %%
twice = hurried.with_retry(retry_if_exception_type=(EngineError,), stop_after_attempt=2)
quick = twice.with_fallbacks([model.bind(max_tokens=12)], exceptions_to_handle=(EngineError,))
print(quick.invoke(counting, {"callbacks": [Tries()]}).text)

# %% [markdown]
# ## Cache
#
# A cache answers what was asked before. Its key is all that the answer depends on: draft and schedule are not in it.
# LangChain asks it in `invoke` and `batch`; `stream` writes anew.

# %%
from langchain_core.caches import InMemoryCache

cached = CARDChatModel(max_tokens=80, cache=InMemoryCache())
for options in ({}, {}, {"schedule": "plain"}, {"max_tokens": 20}):
    started = time.perf_counter()
    answer = cached.invoke("What is a cache? One sentence.", **options)
    print(f"{time.perf_counter() - started:.3f} s {options}: {answer.text}")

# %% [markdown]
# ## Close
#
# The memory is free when the last model that shares it is closed.

# %%
for one in (model, hurried, cached):
    one.close()
