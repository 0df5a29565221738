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
# # Structured extraction
#
# At the end of this page letters have become rows of a table. Every answer is a valid document of the schema, whatever
# the model and however few tokens it may write: the schema is enforced token by token.
#
# It takes two minutes on two CPU cores. You need the extras `structured` and `bench` (docs/install.md).

# %%
from typing import Literal

from pydantic import BaseModel, Field


class Order(BaseModel):
    """An order of a customer."""

    name_of_the_customer: str
    city: str
    postal_code: str = Field(pattern=r"^\d{4,5}$")
    product: str
    pieces: int = Field(ge=1, le=999)
    delivery: Literal["standard", "express"]


LETTERS = [
    "Ann Berg here. Please send 3 green lamps to Storgata 5, 0155 Oslo. It is urgent!",
    "We would like 12 garden chairs, no hurry. Bob Klein, Am Markt 7, 04109 Leipzig",
    "One coffee machine to Via Roma 22, 00184 Roma, as fast as you can. Cleo Rossi",
    "Dan Novak needs 40 oak boards; any time in May will do. Hlavni 3, 60200 Brno",
]

# %% [markdown]
# ## One letter
#
# `with_structured_output` takes a pydantic class, a TypedDict or a JSON schema. Its `method` is `"json_schema"` by
# default; `"function_calling"` and `"json_mode"` give the same here.

# %%
import warnings

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=160).load()
extract = model.with_structured_output(Order)
extract.invoke(f"Read the order out of this letter.\n\n{LETTERS[0]}")

# %% [markdown]
# ## All of them, at once
#
# In a chain, as a batch: the letters share each pass of the model.

# %%
from langchain_core.prompts import ChatPromptTemplate

prompt = ChatPromptTemplate.from_template("Read the order out of this letter.\n\n{letter}")
chain = prompt | extract
for order in chain.batch([{"letter": letter} for letter in LETTERS]):
    print(order)

# %% [markdown]
# ## Never half a document
#
# An answer may have `max_tokens` tokens. Where that gets short, the document is ended in time: still valid, though
# what stands in it last may be short. `finish_reason` and `closed` say so, and so does the log. Fewer tokens than the
# shortest document has are an error before anything is decoded.

# %%
from langchain_card.errors import InvalidInputError

for max_tokens in (160, 42, 20):
    whole = model.with_structured_output(Order, include_raw=True, max_tokens=max_tokens)
    try:
        found = whole.invoke(f"Read the order out of this letter.\n\n{LETTERS[0]}")
    except InvalidInputError as error:
        print(f"{max_tokens:3} tokens: {error}")
    else:
        metadata = found["raw"].response_metadata
        print(f"{max_tokens:3} tokens: {metadata['finish_reason']}, closed: {metadata['card']['closed']}")
        print(f"            {found['raw'].text}")

# %% [markdown]
# ## What is forced is free
#
# Where an object begins this schema leaves no choice as far as its first value. Such stretches are candidates that cost
# nothing, and the target verifies them in one pass.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

asked = f"Read the order out of this letter.\n\n{LETTERS[0]}"
guided = model.bind(response_format=Order)
runs = {
    "the target alone": guided.invoke(asked, schedule="plain", tenant="alone"),
    "with drafts and the grammar": guided.invoke(asked, tenant="drafted"),  # which cannot copy the other's answer
}
figure, axes = plt.subplots(figsize=(6, 1.8))
for name, answer in runs.items():
    card = answer.response_metadata["card"]
    seconds = answer.usage_metadata["output_tokens"] / card["tokens_per_second"]
    axes.barh(name, seconds, color="#c1121f" if "drafts" in name else "#888888")
    axes.text(seconds, name, f" {card['rounds']} passes", va="center")
    print(name, card["accepted_by_source"])
axes.set_xlabel("seconds")
axes.set_xlim(right=axes.get_xlim()[1] * 1.25)
axes.spines[["top", "right"]].set_visible(False)
plt.show()
print("same text:", runs["the target alone"].text == runs["with drafts and the grammar"].text)

# %%
model.close()
