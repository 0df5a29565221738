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
# # Who guesses
#
# The target writes the answer; *drafters* guess ahead, and a wrong guess costs a row of a pass and never a word. By
# default a small model guesses, and with it `ngram`, which knows what followed such words before: in this prompt, in
# this answer, in earlier answers of the same tenant.
#
# This page looks at who guessed what, and adds a drafter of its own.

# %%
import math
import os
import warnings

from langchain_card import CARDChatModel, plugins

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

names = {
    "model": os.environ.get("CARD_COOKBOOK_MODEL", "qwen2.5-coder-1.5b"),
    "draft_model": os.environ.get("CARD_COOKBOOK_DRAFT", "qwen2.5-coder-0.5b"),
}


def figures(answer):
    card = answer.response_metadata["card"]
    by = [
        f"{name}: {taken} of {card['verified_by_source'][name]}" for name, taken in card["accepted_by_source"].items()
    ]
    return (
        f"{answer.usage_metadata['output_tokens']} tokens in {card['rounds']} passes; right guesses of {', '.join(by)}"
    )


# %% [markdown]
# ## Copying
#
# An edit repeats most of what it is given. There n-grams alone go a long way, and cost next to nothing.

# %%
edit = """Rename the variable `x` to `price` and repeat the whole function:

def total(items, rate):
    x = 0
    for item in items:
        x += item.cost * item.count
    if x > 100:
        x -= x * rate
    return x
"""
with CARDChatModel(**{**names, "draft_model": "ngram"}, max_tokens=120) as alone:
    answer = alone.invoke(edit)
    print(answer.content)
    print(figures(answer))

# %% [markdown]
# ## Together
#
# A draft model asks n-grams below it what may follow, checks that in one step, and hands up what it would have said itself:
# several tokens a step. Beside it, others grow the same tree of candidates; each is judged by what came true of its
# guesses. By default n-grams do both. The text is the same.

# %%
for where, options in {"both": {}, "beside": {"drafters": ("ngram",)}, "none": {"drafters": ()}}.items():
    with CARDChatModel(**names, **options, max_tokens=120) as model:
        other = model.invoke(edit)
        print(f"{where:6} same text: {other.content == answer.content};", figures(other))

# %% [markdown]
# ## One of your own
#
# Say that all your programs begin with the same lines. A drafter that knows them by heart proposes the rest as soon as
# the answer has begun one of them. It needs no model, only this; `writing_a_drafter` goes through it step by step, and
# `docs/plugins.md` says what each method may rely on.

# %%
from langchain_card.core.messages import Proposal

LICENCE = """# Copyright 2026 The Tea House
# Licensed under the Apache License, Version 2.0
# See the file LICENSE for details
"""


class Phrasebook:
    name, paced = "phrasebook", False

    def __init__(self, setting):
        self.phrase = setting.tokenizer(LICENCE).input_ids
        self.answers, self.epochs = {}, {}

    def begin(self, request, output_ids):
        self.answers[request.request_id], self.epochs[request.request_id] = [*output_ids], 0

    def correct(self, request_id, start, token_ids):
        if request_id in self.answers:
            self.answers[request_id] += token_ids[len(self.answers[request_id]) - start :]  # some may be repeated

    def step(self, budgets):
        return [self.propose(each.request_id) for each in budgets if each.request_id in self.answers]

    def propose(self, request_id):
        answer = self.answers[request_id]
        known = [n for n in range(3, len(self.phrase)) if self.phrase[n - 3 : n] == answer[-3:]]
        rest = self.phrase[known[0] : known[0] + 12] if known else []
        self.epochs[request_id] += 1
        return Proposal(
            self.name,
            request_id,
            self.epochs[request_id],
            root=0,
            applied_len=len(answer),
            first=1,
            parents=tuple(range(len(rest))),
            token_ids=tuple(rest),
            scores=(math.log(0.9),) * len(rest),
        )

    def end(self, request_id):
        self.answers.pop(request_id, None)
        self.epochs.pop(request_id, None)

    def close(self):
        self.answers.clear()
        self.epochs.clear()


plugins.register("drafters", "phrasebook", Phrasebook)

# %%
question = f"Our files begin with these three lines:\n{LICENCE}\nWrite hello.py. Begin with them."
with CARDChatModel(**{**names, "draft_model": "phrasebook"}, drafters=(), max_tokens=80) as own:
    plain, guessed = own.invoke(question, schedule="plain"), own.invoke(question)
    print(guessed.content)
    print("same text:", guessed.content == plain.content)
    print(figures(guessed))

# %% [markdown]
# ## Which ones pay?
#
# `langchain-card plan --lower ngram` measures the models, how often they agree, and what a pass costs on your machine;
# it predicts every stack of them, runs the best, and says so where none pays.
