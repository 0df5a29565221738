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
# # Train your own head
#
# At the end of this page a head has been trained for a model, from nothing but the model itself, and drafts for it. It
# takes about two minutes on two CPU cores.
#
# A *head* is a small model over the target's own states. It needs no second model and no second tokenizer. Two minutes
# of training make a weak one, which is enough to see how everything works; docs/guides/heads.md tells what an hour gives.

# %% [markdown]
# ## Train
#
# For a minute, the model writes questions and answers them, and the states of three of its layers are recorded. For
# another minute the head learns to predict the next tokens by these states. `--hours 1` in place of `--tokens` gives it an
# hour for both.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = "smollm2-135m"
folder = Path(tempfile.mkdtemp())
command = ["train", "eagle", "--model", MODEL, "--tokens", "4000", "--out", str(folder / "head")]
command += ["--plot", str(folder / "curve.png")]
done = subprocess.run([sys.executable, "-m", "langchain_card", *command], capture_output=True, text=True)
print(done.stdout.replace(str(folder), "..."), done.stderr if done.returncode else "")

# %% [markdown]
# *Tokens a pass*: what one pass of the model yields on answers that the head has not seen, if the head proposes a chain
# of three tokens. Before the training it is 1: the head predicts what the last state stands for, and that token is there
# already.

# %%
from IPython.display import Image

Image(folder / "curve.png", width=620)

# %% [markdown]
# ## What was written
#
# The weights, and a description. `target` has the hash of the model: with any other model, the head is refused.

# %%
import json

description = json.loads((folder / "head" / "head.json").read_text())
for name in ("kind", "target", "weights", "answers", "accepted_length"):
    print(f"{name}: {description[name]}")
print(f"{(folder / 'head' / 'head.safetensors').stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# ## Use it
#
# `drafters=()` leaves out the n-grams, which otherwise work beside the head. The answer is the model's own, whatever the
# head proposes.

# %%
from langchain_card import CARDChatModel

QUESTION = "Why is the sky blue?"
answers = {}
for draft in (None, f"head?file={folder / 'head'}"):
    with CARDChatModel(model=MODEL, draft_model=draft, drafters=(), max_tokens=100, schedule="sequential") as model:
        answers["plain" if draft is None else "head"] = model.invoke(QUESTION)
print(answers["head"].text)
print()
print("the same text:", answers["head"].text == answers["plain"].text)

# %%
for name, answer in answers.items():
    card = answer.response_metadata["card"]
    tokens = answer.usage_metadata["output_tokens"]
    print(f"{name}: {tokens} tokens in {card['rounds']} passes, {tokens / card['rounds']:.2f} a pass")

# %% [markdown]
# ## Go on
#
# - `--hours 1`, or more: tokens a pass grow with the number of answers.
# - `--data prompts.jsonl`: your own prompts, one `{"prompt": "..."}` a line. A head is best at what it was trained on.
# - `langchain-card bench --model ... --draft-model "head?file=FOLDER"` measures whether it pays on this machine.
