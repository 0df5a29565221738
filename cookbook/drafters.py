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
# At the end of this page you know who guessed what in an edit, and how to ask which drafters pay on your machine. It
# takes two minutes on two CPU cores.

# %%
import warnings

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need


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
with CARDChatModel(draft_model="ngram", max_tokens=120) as alone:
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
    with CARDChatModel(**options, max_tokens=120) as model:
        other = model.invoke(edit)
        print(f"{where:6} same text: {other.content == answer.content};", figures(other))

# %% [markdown]
# ## One of your own
#
# Whoever knows something that neither a model nor n-grams know may propose it: a class of six methods.
# [Writing a drafter](writing_a_drafter.ipynb) makes one, tests it and has it work beside these.

# %% [markdown]
# ## Which ones pay?
#
# `langchain-card plan --lower ngram` measures the models, how often they agree, and what a pass costs on your machine;
# it predicts every stack of them, runs the best, and says so where none pays.
