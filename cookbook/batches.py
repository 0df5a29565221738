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
# # A data set, row by row
#
# At the end of this page a table of letters has become a table of subjects: all rows share the passes of the model, a bar
# shows how far it is, a row that fails keeps its error and the others go on, and a run that was broken off goes on where
# it was. It takes two minutes on two CPU cores.
#
# You need `pip install tqdm`, which comes with transformers.

# %% [markdown]
# ## The rows
#
# Twelve short letters, and one that is far too long: somebody sent a whole log.

# %%
LETTERS = """
The lamp that came today flickers. I would like a new one.
Where is my parcel? It was promised for Monday.
I was charged twice for order 1187. Please send one payment back.
Your chairs are lovely! My mother wants four of them as well.
How do I get the green cover off to wash it?
Cancel my order from this morning, I picked the wrong size.
The invoice names my old address. Can you write a new one?
My password does not work any more, and no mail comes.
Do you deliver to Norway, and how long does it take?
Two screws were missing in the box of the shelf.
The app stops whenever I open my basket.
I want to speak to a human being, not to a machine.
"""
ROWS = [{"id": number, "letter": letter} for number, letter in enumerate(LETTERS.strip().splitlines(), 1)]
ROWS.insert(4, {"id": 99, "letter": "Please read this: " + "error 500 in basket.py, line 7. " * 1000})
print(len(ROWS), "rows; the longest has", max(len(row["letter"]) for row in ROWS), "characters")

# %% [markdown]
# ## The model
#
# `CARDChatModel()` is the built-in pair. The variables `LANGCHAIN_CARD_MODEL` and `LANGCHAIN_CARD_DRAFT_MODEL` name
# another one, for instance `smollm2-135m` and `ngram`. How many answers share a pass is found from the memory that is
# free, 16 at most; `limits=Limits(max_num_seqs=4)` asks for fewer.

# %%
import warnings

from langchain_core.prompts import ChatPromptTemplate

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=24).load()
prompt = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "You sort the letters of a shop. Answer with a subject line for the letter, in at most eight words.",
        ),
        ("human", "{letter}"),
    ]
)
chain = prompt | model
print(model.model, "with", model.draft_model, "-", model.engine.config.limits.max_num_seqs, "answers in a pass at most")

# %% [markdown]
# ## All of them
#
# `batch` takes the rows and gives the answers in their order. A row that fails ends the batch; with
# `return_exceptions=True` its error takes the place of its answer.

# %%
answers = chain.batch(ROWS, return_exceptions=True)
for row, answer in zip(ROWS, answers):
    shown = f"{type(answer).__name__}" if isinstance(answer, Exception) else " ".join(answer.text.split())
    print(f"{row['id']:3}  {row['letter'][:40]:40}  {shown}")

# %% [markdown]
# ## With a progress bar
#
# `batch_as_completed` gives each answer when it is there, with the number of its row. `tqdm` draws what it is given; on
# standard output here, because a page keeps it so.

# %%
import sys

from tqdm import tqdm

bar = {"total": len(ROWS), "file": sys.stdout, "ncols": 80}
prompts = prompt.batch(ROWS)
found = {}
for number, answer in tqdm(model.batch_as_completed(prompts, return_exceptions=True), **bar):
    found[number] = answer

# %% [markdown]
# The prompts were made first, and the model has the batch: it tells the engine how many come, so that they share their
# first pass as well. A chain's own `batch_as_completed` is LangChain's: it runs as many rows at once as a pool of Python
# has threads, which is four more than there are cores; `{"max_concurrency": 16}` asks for more.
#
# On an event loop it is `abatch_as_completed`, of the chain if you like: there nothing but the engine limits it. It is
# quick here, because n-grams know these answers by now.

# %%
from tqdm.asyncio import tqdm as async_tqdm

async for number, answer in async_tqdm(chain.abatch_as_completed(ROWS, return_exceptions=True), **bar):
    found[number] = answer

# %% [markdown]
# ## What it gained
#
# The same twelve rows, all at once and one by one. Each way is a *tenant* of its own, so that neither drafts from what
# the other wrote. Requests in a pass are `mean_batch_size`: answers end at different times, so that it is less than the
# number of rows. The time has the reading of the prompts in it.

# %%
import statistics
import time

good = [text for row, text in zip(ROWS, prompts) if row["id"] != 99]
ways = {
    "all at once": lambda **options: model.batch(good, **options),
    "four at once": lambda **options: model.batch(good, {"max_concurrency": 4}, **options),
    "one by one": lambda **options: [model.invoke(text, **options) for text in good],
}
texts = {}
for way, call in ways.items():
    started = time.perf_counter()
    done = call(tenant=way)
    seconds = time.perf_counter() - started
    texts[way] = [answer.text for answer in done]
    tokens = sum(answer.usage_metadata["output_tokens"] for answer in done)
    together = statistics.mean(answer.response_metadata["card"]["mean_batch_size"] for answer in done)
    print(f"{way:12}  {seconds:5.1f} s  {tokens / seconds:5.1f} tokens/s  {together:4.1f} requests in a pass")

# %% [markdown]
# In blocks on a CPU an answer does not depend on its neighbours:

# %%
print("same text:", texts["all at once"] == texts["four at once"] == texts["one by one"])

# %% [markdown]
# ## A table
#
# What went wrong stays in the table: an error names the field, the value and the limit.

# %%
import csv
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
with (folder / "subjects.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["id", "subject", "tokens", "error"])
    for number, row in enumerate(ROWS):
        answer = found[number]
        if isinstance(answer, Exception):
            table.writerow([row["id"], "", "", answer])
        else:
            table.writerow([row["id"], " ".join(answer.text.split()), answer.usage_metadata["output_tokens"], ""])
print((folder / "subjects.csv").read_text())

# %% [markdown]
# Rows that failed can be asked again, in another form. Here the letter is cut.

# %%
failed = [row for number, row in enumerate(ROWS) if isinstance(found[number], Exception)]
again = chain.batch([{**row, "letter": row["letter"][:400]} for row in failed], return_exceptions=True)
for row, answer in zip(failed, again):
    print(row["id"], answer.text if not isinstance(answer, Exception) else answer)

# %% [markdown]
# ## A run that may be broken off
#
# Each answer goes into a file when it is there, and a new run leaves out what the file has. Who leaves the loop, by
# ctrl-c or, as here, after four rows, ends the answers that still run.

# %%
import json

path = folder / "subjects.jsonl"


def write_subjects(most=None):
    known = {json.loads(line)["id"] for line in path.read_text().splitlines()} if path.exists() else set()
    rest = [row for row in ROWS if row["id"] not in known]
    print(len(known), "rows are there,", len(rest), "to do")
    with path.open("a") as file:
        results = model.batch_as_completed(prompt.batch(rest), return_exceptions=True)
        for count, (number, answer) in enumerate(results, 1):
            failed = isinstance(answer, Exception)
            text = {"error": str(answer)} if failed else {"subject": " ".join(answer.text.split())}
            file.write(json.dumps({"id": rest[number]["id"], **text}) + "\n")
            file.flush()
            if count == most:
                return


write_subjects(most=4)
write_subjects()
print(len(path.read_text().splitlines()), "rows in the file")

# %%
model.close()
