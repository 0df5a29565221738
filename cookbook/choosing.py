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
# # Choosing a draft
#
# At the end of this page you have asked three commands about your machine: `doctor`, what a pair finds there; `bench`, how
# fast it is with and without a draft; `plan`, which drafts pay, or that none does. You know how to read each, and what to
# change then. It takes about five minutes on two CPU cores, with very few prompts; take more for a decision.
#
# In a terminal type what stands behind `$`. The variables `LANGCHAIN_CARD_MODEL` and `LANGCHAIN_CARD_DRAFT_MODEL` name
# another pair than the built-in one, and so do `--model` and `--draft-model`.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())


def card(*arguments):
    """Runs `langchain-card` and shows what it says; what it says of its progress is left out."""
    print("$ langchain-card", *arguments, end="\n\n", flush=True)
    command = [sys.executable, "-m", "langchain_card", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout if done.returncode == 0 else done.stderr)


# %% [markdown]
# ## Doctor
#
# It looks at the machine, reads what the models' files say, adds up the memory, and only then loads them. Then it measures
# steps, answers two prompts under each schedule, and says what would help.

# %%
card("doctor")

# %% [markdown]
# How to read it:
#
# - **Kernels**. Blocks on a CPU with AVX-512 VNNI are the fastest that it has. A GGUF file runs as it is. A folder of
#   safetensors runs in float32, which is several times as slow, unless you say `quantization="int8"` or `"int4"`.
# - **Memory**. Each sequence takes its part for as many positions as `max_model_len` says. Fewer positions, or
#   `Limits(max_num_seqs=...)`, make room.
# - **Steps**. Verifying several rows should take little longer than one; and a target pass should take as long as several
#   draft steps. Below two there is little to gain: take a smaller draft.
# - **Guessed**. How often the target's token was among the draft's candidates, where it had any. It has several for a
#   place, so that this is more than `acceptance` below, which counts every candidate that was checked. It decides more
#   than anything else, and it depends on what is asked: code and edits are guessed well, essays are not.
# - **Schedule**. What `auto` will take. The prediction is made of step times and guesses alone, and may be too high; the
#   measured line counts. Where other programs use the cores the first section says so; do not believe times then.
#
# `card("doctor", "--no-measure")` loads no weights: it answers at once whether a pair fits. With `--draft-model` it
# compares vocabularies, too.

# %% [markdown]
# ## Bench
#
# The same prompts by every method, in turns: `plain` (no draft), `sequential`, `parallel`, and `card`, which is `auto`
# and what you get by default. `--prompts copying` has prompts whose answers repeat them; a file of your own has one JSON
# object a line, with `prompt` in it. Three prompts are enough to see how it works and not to decide: by default there
# are 20, of 128 tokens each.

# %%
import json

(folder / "own.jsonl").write_text(
    "\n".join(
        json.dumps({"prompt": prompt})
        for prompt in (
            "Write a Python function that counts the words of a text. Only the code.",
            "Add type hints to this function, only the code:\n\ndef area(width, height):\n    return width * height",
            "Explain in two sentences what a queue is.",
        )
    )
)
asked = ["--prompts", "own.jsonl", "--count", "3", "--max-tokens", "24"]
card("bench", *asked, "--json", "bench.json")

# %% [markdown]
# How to read it:
#
# - **times plain** is the median over prompts; from six prompts on with bounds, its 95 % bootstrap interval: of 100 made so,
#   95 hold the true median. Where the lower one is below 1 nothing is decided yet: take more prompts.
# - **accepted length** is tokens per pass of the target. It is what a draft earns.
# - **acceptance** is the share of candidates that were right. A low one with a high accepted length is fine where rows
#   are cheap.
# - **hits** are rounds after which the draft could go on where it was.
# - **busy** says who works. Under `parallel` both should be near 100 %.
# - **identical** counts answers that equal plain's. In blocks on a CPU it is all of them; below the table each difference
#   is named, with how close the target's decision was.
#
# The file holds every run, for statistics of your own. Here is each prompt: on some a draft gains much, on others nothing.

# %%
runs = {(row["group"], row["method"]): row["run"] for row in json.loads((folder / "bench.json").read_text())["rows"]}


def speed(group, method):
    run = runs[group, method]
    return run["tokens"] / run["seconds"] if run["seconds"] else 0.0


for group in range(3):
    print(f"prompt {group + 1}: plain {speed(group, 'plain'):5.1f} tokens/s, card {speed(group, 'card'):5.1f} tokens/s")

# %% [markdown]
# `ngram`, `model`, `beside` and `below` are methods as well: n-grams alone, the draft model alone, both side by side, and
# n-grams below the model. `hf-assisted` and `hf-prompt-lookup` are transformers' own loops on the same weights. What is
# compared is named with `--methods`; `plain` is always among it.

# %% [markdown]
# ## Plan
#
# A draft may have another drafter below it, and that one in turn. `plan` measures what a pass of each level costs here
# and how far each takes what the lower ones say, predicts every stack, and runs the best of them against plain decoding.

# %%
card("plan", *asked)

# %% [markdown]
# How to read it:
#
# - The first lines are times of passes by rows. What verifies many rows for little more than one wants long blocks.
# - **Agreement**: the chance that the first 1, 2, 4 and 8 candidates of a block are all taken. Where it falls quickly,
#   long blocks are for nothing.
# - **Predicted**, then **measured**, times plain decoding. Bounds that hold 1 between them decide nothing.
# - The last lines are fields of `EngineConfig`, and of `CARDChatModel`: what was run. Its blocks are pinned, so that the
#   figures belong to them; without `pins` the engine chooses for itself as it goes, which is usually faster.
#
# Where it says not to speculate, `draft_model=None` is the answer, or `draft_model="ngram"`, which takes no memory and
# gains where answers copy.

# %% [markdown]
# ## What to change
#
# | what was found | what to try |
# | --- | --- |
# | a target pass takes less than two draft steps | a smaller draft; `draft_model="ngram"` |
# | the draft is often wrong | a draft of the target's own family; one that was trained for what you ask |
# | it shares only some tokens | a draft with the target's tokenizer |
# | answers repeat their prompts | `"ngram"` beside and below the draft, as by default; `langchain-card ngrams FOLDER` for text of your own |
# | both at work slow each other down | a device for each: `draft_device="cuda:1"`; more cores |
# | memory is short | `max_model_len`, `Limits(max_num_seqs=...)`, a quantized target, no draft model |
# | nothing gains | `draft_model=None` |
#
# A change that looks good with three prompts is a guess: `langchain-card bench --prompts yours.jsonl` says how sure it is.
