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
# # Quickstart
#
# A target model writes; a smaller draft model of the same family runs ahead and guesses. The target checks several
# guesses in one pass and keeps those that it would have written anyway: the words are the target's own, in fewer passes.
#
# At the end of this page you have such a pair answering inside a LangChain chain: whole answers, streams and batches,
# with the numbers that tell how much the draft helped.
#
# You need this package and nothing else: no account, no server, no GPU. It takes a minute on two CPU cores; the very
# first run downloads the built-in pair (1.6 GB) and converts it for this machine, which takes some ten minutes more.

# %% [markdown]
# ## Load
#
# `CARDChatModel()` is the built-in pair. The variables `LANGCHAIN_CARD_MODEL` and `LANGCHAIN_CARD_DRAFT_MODEL` name
# another one, for instance `smollm2-135m` and `ngram` (no draft model: guesses are looked up in the text).
#
# Weights are loaded at the first question; `load()` does it now.

# %%
import warnings

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=100).load()
print(model.model, "with", model.draft_model)

# %% [markdown]
# ## Ask
#
# It is a LangChain chat model: a string or a list of messages goes in, an `AIMessage` comes out.

# %%
question = "Write a Python function that returns the n-th Fibonacci number. Only the code."
answer = model.invoke(question)
print(answer.content)

# %%
answer.usage_metadata

# %% [markdown]
# ## What the draft did
#
# `response_metadata["card"]` holds the numbers of this answer. *Rounds* are passes of the target. *Mean accepted length*
# is the tokens that it wrote per pass: 1 is plain decoding, 3 means a third of the passes. *Hit rate* is how often the
# target's last token was already among the guesses, so that the draft did not have to start again.

# %%
card = answer.response_metadata["card"]
print(f"{answer.usage_metadata['output_tokens']} tokens in {card['rounds']} target passes, schedule {card['schedule']}")
print(f"mean accepted length {card['mean_accepted_length']:.2f}, hit rate {card['hit_rate']:.0%}")
print("accepted guesses by source:", card["accepted_by_source"])
print(f"{card['tokens_per_second']:.1f} tokens/s, first token after {card['time_to_first_token']:.2f} s")

# %% [markdown]
# The same question without guesses takes one pass per token and gives the same answer:

# %%
plain = model.invoke(question, schedule="plain")
print(plain.response_metadata["card"]["rounds"], "target passes; same text:", plain.content == answer.content)

# %% [markdown]
# ## Stream
#
# Tokens arrive when the target has decided them, often several at once. Leaving the loop early ends the work, too.

# %%
for chunk in model.stream("Explain a hash map in two sentences."):
    print(chunk.content, end="|", flush=True)

# %% [markdown]
# ## Chain
#
# Prompt, model and parser, piped together. Here the answer repeats most of the prompt, which makes guessing easy.

# %%
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

prompt = ChatPromptTemplate.from_messages(
    [
        ("system", "You edit Python code. Answer with the whole new code and nothing else."),
        ("human", "{task}\n\n{code}"),
    ]
)
chain = prompt | model | StrOutputParser()
code = "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return area(w, h) * d"
print(chain.invoke({"task": "Add type hints; all numbers are floats.", "code": code}))

# %% [markdown]
# ## Batch
#
# `batch` takes many inputs, `abatch` does the same on an event loop.

# %%
words = ["list", "tuple", "set"]
for word, meaning in zip(
    words, model.batch([f"In five words: what is a Python {word}?" for word in words], max_tokens=24)
):
    print(f"{word}: {meaning.content}")

# %% [markdown]
# ## Options of a call
#
# Each call may set `stop`, `max_tokens`, `temperature`, `seed` and `schedule`. With a temperature tokens are drawn; the
# seed that was used is reported, and the same seed gives the same answer again.

# %%
first = model.invoke("Invent a name for a fast chat model. Only the name.", temperature=1.0, max_tokens=8)
seed = first.response_metadata["card"]["seed"]
again = model.invoke("Invent a name for a fast chat model. Only the name.", temperature=1.0, max_tokens=8, seed=seed)
print(first.content, "| again:", again.content)

# %%
print(model.bind(stop=["return"]).invoke(question).content)

# %% [markdown]
# ## Close
#
# This frees the memory. In a script, `with CARDChatModel() as model:` does it at the end of the block.

# %%
model.close()
