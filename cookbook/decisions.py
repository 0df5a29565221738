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
# # Decisions
#
# At the end of this page you have a model that sorts requests, answers yes or no, and scores, with a probability for each
# possible answer; and you have used these probabilities to send only the doubtful cases to a person.
#
# You need langchain-core 1.8, which needs Python 3.11. It takes about two minutes on two CPU cores.

# %% [markdown]
# ## Questions with labels
#
# A decision model writes no text. The target reads the state and the question once, and one pass weighs all labels. The
# probability of a label is the chance that it is the model's whole answer, among all labels.

# %%
import warnings

from langchain_core.decisions import Choice, Noul, Score

from langchain_card import CARDDecisionModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

decide = CARDDecisionModel().load()
team = Choice(
    instructions="Which team should handle this request?",
    criteria={
        "billing": "Payments, invoices and refunds.",
        "technical": "Faults, errors and crashes.",
        "sales": "Prices and offers.",
    },
)
answer = decide.invoke({"state": "The app crashes when I log in.", "questions": {"team": team}})
print(answer.choices["team"].choice)
for label, chance in answer.choices["team"].probabilities.items():
    print(f"  {label}: {chance:.2f}")

# %% [markdown]
# ## Several questions about one state
#
# The first question reads the state; the others read only what is new. `usage` counts that.

# %%
questions = {
    "team": team,
    "urgent": Noul(instructions="Does the customer need an answer today?"),
    "anger": Score(instructions="How angry is the customer?", criteria=["Calm.", "Annoyed.", "Furious."]),
}
state = (
    "Since the update this morning, none of our forty tills works. We have customers waiting in the shop, and your "
    "hotline has not answered for an hour! I want this mended now, or my money back."
)
answers = decide.invoke({"state": state, "questions": questions})
print("team: ", answers.choices["team"].choice)
print(f"urgent: {answers.nouls['urgent'].noul:.2f}")
print(f"anger:  {answers.scores['anger'].score:.2f} of 2")
known = answers.usage["input_token_details"]["cache_read"]
print(f"{answers.usage['input_tokens']} tokens in three prompts, {known} of them known")

# %% [markdown]
# ## Many requests
#
# `batch` takes many states. A decision model is a runnable like any other.

# %%
requests = [
    "I was charged twice in March.",
    "What does the plan for fifty seats cost?",
    "The page shows error 500.",
    "Hello, can somebody call me back?",
    "Please cancel my subscription and tell me what I still owe.",
]
inputs = [{"state": request, "questions": {"team": team}} for request in requests]
sorted_requests = decide.batch(inputs)
for request, answer in zip(requests, sorted_requests):
    choice = answer.choices["team"]
    print(f"{choice.choice:<10} {choice.confidence:.2f}  {request}")

# %% [markdown]
# ## A threshold
#
# A small model is often sure and wrong. Choose the threshold on examples whose answers you know, and give what lies below
# it to a person or to a larger model.

# %%
THRESHOLD = 0.8
for request, answer in zip(requests, sorted_requests):
    choice = answer.choices["team"]
    print("->", choice.choice if choice.confidence >= THRESHOLD else "a person", "|", request)

# %% [markdown]
# ## In a chain
#
# A decision may choose what runs next. Both models share one set of weights.

# %%
from langchain_core.runnables import RunnableBranch, RunnableLambda

from langchain_card import CARDChatModel

model = CARDChatModel(max_tokens=40)
code = Noul(instructions="Is this a request to write code?")


def is_code(text):
    return decide.invoke({"state": text, "questions": {"code": code}}).nouls["code"].noul > 0.5


chain = RunnableBranch((is_code, model), RunnableLambda(lambda text: f"(not for the coder: {text})"))
for text in ("Write a Python function that adds two numbers. Only the code.", "Where is the Eiffel Tower?"):
    result = chain.invoke(text)
    print(getattr(result, "text", result))

# %% [markdown]
# LangChain's middlewares for agents take a decision model, too: the page [Decisions](../docs/guides/decisions.md) routes
# between a small and a large model, and asks before risky tools run.

# %%
model.close()
decide.close()
