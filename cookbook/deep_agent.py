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
# # A deep agent
#
# `deepagents` is LangChain's agent with files: it lists, reads, writes and edits them until a task is done. At the end of
# this page it has done tasks of three steps with a model of 1.5 billion parameters, on two CPU cores.
#
# It takes three minutes. You need `pip install deepagents` (Python 3.11), and the extra `structured` (docs/install.md).

# %% [markdown]
# ## Three steps
#
# The files are in the agent's state, not on the disk; `backend=` of `create_deep_agent` changes that.

# %%
import warnings

from deepagents import create_deep_agent

from langchain_card import CARDChatModel

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

model = CARDChatModel(max_tokens=300).load()
agent = create_deep_agent(model)

task = "Write the line 'apples 3' to the file /notes.txt, then read it, then change apples to pears in it."
state = agent.invoke({"messages": [("user", task)]})
for message in state["messages"]:
    print(f"{message.type:5} {message.text or [(call['name'], call['args']) for call in message.tool_calls]}")
for path, file in state.get("files", {}).items():
    print(path, repr(file["content"]))

# %% [markdown]
# ## What made it possible
#
# deepagents found a harness in this package. File tools have descriptions of one line, so the first prompt is a quarter
# as long. And the model first writes a plan: each step with the tool that does it, in a form that is enforced. Then each
# step is a call that it must make. Without a plan, a model of this size stops after its first call.
#
# The plan is one more answer, the first. It is in no message; a callback sees it.

# %%
from langchain_core.callbacks import BaseCallbackHandler


class Answers(BaseCallbackHandler):
    """Prints each answer of the model, and what it cost."""

    def on_llm_end(self, response, **_):
        message = response.generations[0][0].message
        usage = message.usage_metadata
        known = usage["input_token_details"]["cache_read"]
        print(
            f"read {usage['input_tokens']:4}, of which {known:4} were known; wrote {usage['output_tokens']:3}:", end=" "
        )
        print(message.text or [call["name"] for call in message.tool_calls])


state = agent.invoke({"messages": [("user", task)]}, {"callbacks": [Answers()]})

# %% [markdown]
# ## Files that exist, and tools of your own
#
# Your tools are in the plan, too; the harness leaves their descriptions as they are.

# %%
from deepagents.backends.utils import create_file_data
from langchain_core.tools import tool


@tool
def rate(currency: str) -> str:
    """Return the price of one unit of a currency in euros."""
    return {"USD": "0.9", "GBP": "1.2"}.get(currency, "unknown")


agent = create_deep_agent(model, [rate])
files = {"/order.txt": create_file_data("order of Ann\nprice 50\ncurrency USD\n")}
task = "Read /order.txt. Get the rate of its currency. Write the rate, only the number, to /rate.txt."
state = agent.invoke({"messages": [("user", task)], "files": files})
for message in state["messages"]:
    print(f"{message.type:5} {message.text or [(call['name'], call['args']) for call in message.tool_calls]}")
print({path: file["content"] for path, file in state["files"].items()})

# %% [markdown]
# ## Larger models, and other small ones
#
# The short tools are for every `CARDChatModel`, the plan only for the built-in models. `PlannedSteps` is a middleware
# like any other; a profile adds it to another model, here by its name.

# %%
from deepagents import HarnessProfile, register_harness_profile

from langchain_card.chat.deep_agents import PlannedSteps

register_harness_profile("card:llama-3.2-1b", HarnessProfile(extra_middleware=[PlannedSteps()]))

# %%
model.close()
