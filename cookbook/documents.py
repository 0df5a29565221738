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
# # Documents
#
# At the end of this page you have a chain that finds the right page of this package's own documentation, gives it to the
# model, and streams the answer. You know what a second question about the same page costs: only what is new is read.
#
# You need this package, its checkout for the pages, and no vector store. It takes about three minutes on two CPU cores;
# long prompts take most of it.

# %% [markdown]
# ## The pages
#
# The guides are split at their headings. A retriever is any runnable that returns documents. This one counts the words
# that a section shares with the question; rare words count more, and those of long sections less. For more text, put a
# vector store here.

# %%
import math
import re
from collections import Counter
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "docs" / "guides").is_dir())
sections = [
    Document(section.strip(), metadata={"page": page.stem})
    for page in sorted((root / "docs" / "guides").glob("*.md"))
    for section in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if len(section) > 300
]


def words(text):
    return set(re.findall(r"[a-z_]{4,}", text.lower()))


seen = Counter(word for section in sections for word in words(section.page_content))


def find(question, count=1):
    """Returns the sections that share the most telling words with the question."""

    def score(section):
        own = words(section.page_content)
        return sum(math.log(len(sections) / seen[word]) for word in words(question) & own) / math.sqrt(len(own))

    return sorted(sections, key=score, reverse=True)[:count]


retriever = RunnableLambda(find)
question = "Which exception is raised when a prompt is too long for the context?"
for document in retriever.invoke(question):
    print(
        document.metadata["page"],
        "|",
        document.page_content.splitlines()[0],
        "|",
        len(document.page_content),
        "characters",
    )

# %% [markdown]
# ## The chain
#
# The document stands first and the question last. So two questions about one document begin with the same tokens, and
# those are read once.

# %%
import warnings

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=60).load()
prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer from this page alone, in one short sentence.\n\n{page}"), ("human", "{question}")]
)


def text(documents):
    return "\n\n".join(document.page_content for document in documents)


chain = {"page": retriever | text, "question": RunnablePassthrough()} | prompt | model
for chunk in (chain | StrOutputParser()).stream(question):
    print(chunk, end="", flush=True)

# %% [markdown]
# ## What is read once
#
# The same long page, and three questions. `cache_read` of the usage is the number of tokens that an earlier request had
# read already; the rest had to be read. `response_metadata["card"]` has the figures of each answer.

# %%
page = text([section for section in sections if section.metadata["page"] == "chains"])
of_page = prompt.partial(page=page) | model
for number, asked in enumerate(
    (
        "Which key of the metadata says how many tokens a pass produced?",
        "How is an answer ended early?",
        "What does timeout include?",
    ),
    1,
):
    answer = of_page.invoke({"question": asked})
    usage = answer.usage_metadata
    known = usage["input_token_details"]["cache_read"]
    print(f"question {number}: {usage['input_tokens']} tokens, {known} known, {usage['input_tokens'] - known} read")
    print("   ", answer.text.strip().splitlines()[0])

# %%
card = answer.response_metadata["card"]
for key in ("schedule", "rounds", "mean_accepted_length", "acceptance_rate", "accepted_by_source", "load_time"):
    print(f"{key}: {card[key]}")

# %% [markdown]
# `time_to_first_token` is there, too: what you waited for, from the call on, without loading. On your machine, compare
# that of the first question with that of the second.
#
# Answers about a text often repeat it. `accepted_by_source` counts how many guesses came from the draft model, and how
# many from the text itself (`ngram`).

# %% [markdown]
# ## Progress of a long text
#
# While a text is read that no pass can take at once, callbacks receive the event `card_reading`.

# %%
from langchain_core.callbacks import BaseCallbackHandler


class Watch(BaseCallbackHandler):
    def on_custom_event(self, name, data, **_):
        print(name, data)


other = text([section for section in sections if section.metadata["page"] == "troubleshooting"])
answer = (prompt | model).invoke(
    {"page": other, "question": "What does a first answer that takes a minute longer do?"}, {"callbacks": [Watch()]}
)
print(answer.text.strip().splitlines()[0])

# %% [markdown]
# ## A text that does not fit
#
# Nothing is cut off in silence: a prompt that leaves no room for an answer is an error, before anything is read.

# %%
from langchain_core.exceptions import ContextOverflowError

try:
    (prompt | model).invoke({"page": text(sections * 3), "question": question})
except ContextOverflowError as error:
    print(error)

# %% [markdown]
# ## Across processes
#
# `CARDChatModel(prefix_cache="folder")` keeps what was read of long texts on disk, so that the next process does not read
# them again. The page [Options](../docs/guides/options.md) says what is stored, and for whom.

# %%
model.close()
