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
# # Sampling, word for word
#
# With a temperature, tokens are drawn at random. Systems that guess ahead usually keep the *distribution* of answers;
# this one keeps the *answer*: the noise of a place in the text is a function of the seed and the place alone, so the
# same seed gives the same words with and without a draft, under every schedule, on every run.
#
# At the end of this page you have seen that, the options that shape the distribution, log-probabilities, and a toy world
# in which the protocol is tried in every order of events. It takes a minute on two CPU cores.

# %%
import warnings

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=60).load()

# %% [markdown]
# ## One seed, one answer
#
# Drawn at temperature 0.9 by the target alone, with the draft before it, and with the draft beside it. The words are the
# same; the number of target passes is not. Each is a *tenant* of its own: else n-grams would copy the answer before.

# %%
question = "Write a short docstring for a function that merges two sorted lists."
answers = {
    schedule: model.invoke(question, temperature=0.9, seed=7, schedule=schedule, tenant=schedule)
    for schedule in ("plain", "sequential", "parallel")
}
for schedule, answer in answers.items():
    print(f"{schedule:10} {answer.response_metadata['card']['rounds']:3} passes, same text:", end=" ")
    print(answer.content == answers["plain"].content)
print()
print(answers["plain"].content)

# %% [markdown]
# Other seeds give other answers. Without one, a seed is drawn and reported.

# %%
for seed in (1, 2, 3):
    print(seed, model.invoke("Invent a name for a cat. One word.", temperature=1.0, seed=seed, max_tokens=6).content)
drawn = model.invoke("Invent a name for a cat. One word.", temperature=1.0, max_tokens=6)
print(drawn.response_metadata["card"]["seed"], drawn.content)

# %% [markdown]
# ## Shape the distribution
#
# `top_k`, `top_p` and `min_p` leave unlikely tokens out; the penalties lower what was already said; `logit_bias` raises
# or lowers single tokens. All of them hold inside a guess, too: each candidate is judged with the history that it would
# have. They are fields of the model and options of a call.

# %%
for options in ({"top_p": 0.5}, {"min_p": 0.3}, {"frequency_penalty": 1.5}, {"repetition_penalty": 1.3}):
    text = model.invoke("List five fruits.", temperature=1.0, seed=3, max_tokens=40, **options).content
    print(options, "->", " ".join(text.split()))

# %% [markdown]
# A value out of range is refused before anything runs; the message says what is allowed.

# %%
from langchain_card.errors import InvalidInputError

try:
    model.invoke("Hello", top_p=1.5)
except InvalidInputError as error:
    print(error)

# %% [markdown]
# ## Log-probabilities
#
# They are the target's own, of the tokens that were chosen and of the likeliest others.

# %%
answer = model.invoke("Is 7 a prime number? Yes or no.", max_tokens=3, logprobs=True, top_logprobs=3)
for token in answer.response_metadata["logprobs"]["content"]:
    print(repr(token["token"]), round(token["logprob"], 3), [other["token"] for other in token["top_logprobs"]])

# %%
model.close()

# %% [markdown]
# ## Every order of events
#
# Draft and target work at the same time, messages cross, workers die. `tests/simulation` holds a world with the
# real coordinator and the real draft worker over toy models, and an explorer that tries every order of everything that
# can happen in it. After each event it checks that what was emitted is the target's own answer, that all bounds hold and
# that an ended request holds nothing; at the end, that an end can be reached from every state.

# %%
from tests.simulation import Scope, exhaust

for scope in (
    Scope("two answers", requests=2, max_tokens=2),
    Scope("a draft dies and comes back", faults={"kill": 1}),
    Scope("a message is lost, another comes twice", faults={"lose": 1, "repeat": 1}),
):
    print(f"{scope.name}: {exhaust(scope)}")
