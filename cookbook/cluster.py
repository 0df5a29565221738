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
# # A cluster
#
# At the end of this page two engines have run on a Ray cluster, and one of them was killed while it wrote an answer.
# The other one went on, and the text is the one that a single engine writes. It takes two minutes on two CPU cores.
#
# You need the extra `ray` (docs/install.md). Everything runs on this machine; docs/guides/cluster.md says what changes
# with several.

# %% [markdown]
# ## One engine
#
# First the text to compare with, from an engine in this process. The question is sampled, with a seed: a single token
# that is chosen otherwise would change all that follow.

# %%
import logging
import os
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "RAY_LOG_TO_DRIVER": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
logging.disable(logging.WARNING)  # Ray says a lot
warnings.filterwarnings("ignore")

from langchain_card import CARDChatModel

PAIR = {"model": "smollm2-135m", "draft_model": "ngram", "max_model_len": 1024}
QUESTION = "Tell a story about a lighthouse keeper and a storm."
OPTIONS = {"max_tokens": 120, "temperature": 0.8, "seed": 7}

with CARDChatModel(**PAIR) as alone:
    undisturbed = alone.invoke(QUESTION, **OPTIONS).text
print(undisturbed)

# %% [markdown]
# ## Two engines on Ray
#
# `joined_cluster` starts a cluster on this machine, or joins the one at an address. `deploy` starts the engines and waits
# until they answer. A cluster that is started here has Ray's token authentication; one that is joined must have it, too.

# %%
import contextlib

from langchain_card.cluster import ClusterSettings, deploy, joined_cluster

cluster = contextlib.ExitStack()
cluster.enter_context(joined_cluster())
deploy(CARDChatModel(**PAIR).engine_config(), ClusterSettings(min_replicas=2, max_replicas=2, cpus=1))
model = CARDChatModel(model=PAIR["model"], cluster="card").load()
model.engine.health()

# %% [markdown]
# `CARDChatModel(cluster="card")` reaches these engines from any process of the cluster. Here it loads no weights: the
# engines send their settings and the files of their tokenizer. Everything else is as with any other chat model.

# %%
answer = model.invoke("Name three animals that live in the sea.", max_tokens=40)
print(answer.text)

# %% [markdown]
# ## A killed engine
#
# The question again, as a stream. In the middle of it, the engine that writes is killed without a warning. Which one
# that is shows in the processor time that each of the two has taken since the question was asked.

# %%
import time

import psutil


def engines():
    """Return the processor time of each engine's process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "EngineReplica" in " ".join(process.cmdline()):
                found[process] = sum(process.cpu_times()[:2])
    return found


before, text, last = engines(), "", None
with contextlib.redirect_stdout(None):  # for Ray's report of the death, which is long
    for number, chunk in enumerate(model.stream(QUESTION, **OPTIONS)):
        text += chunk.text
        last = chunk if last is None else last + chunk
        if number == 30:
            now = engines()
            writer = max(now, key=lambda process: now[process] - before[process])
            writer.kill()
            killed, first = time.monotonic(), text

print(first, "⚡", text.removeprefix(first))
print("\nsame text:", text == undisturbed)
print("resumed:", last.response_metadata["card"]["resumed"])

# %% [markdown]
# The process that holds the consumer, this one, also holds the answer so far. It gave the question and these tokens to
# the other engine, which read them and wrote the next token: the same one that the first engine would have
# written, because every token is the target's own choice, a function of the text before it and the seed.
#
# Ray meanwhile starts a new engine in place of the one that was killed.

# %%
while len(engines()) < 2:
    time.sleep(0.1)
print(f"a new engine loads, {time.monotonic() - killed:.0f} seconds after the kill")

# %% [markdown]
# ## The end
#
# The cluster was started here and ends here. One that was joined at an address stays, with its engines, for others.

# %%
model.close()
with contextlib.redirect_stdout(None):  # Ray's reports of its own end
    cluster.close()
