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
# # Two GPUs, and big models
#
# At the end of this page you know how to say where the models go: a device for each, one model over several, fewer bits;
# which of these are exact; and how to find out whether it all fits before anything is loaded. It takes a minute.
#
# **Not yet run on such a machine.** This page was executed on a machine without GPUs. Cells whose title says *needs
# GPUs* show the configuration and what is checked without one, and skip the rest with a printed line; on a machine with
# CUDA devices they run. What they printed there nobody has seen yet.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

import torch

from langchain_card import CARDChatModel, EngineConfig, Limits
from langchain_card.config import default_draft_model, default_model
from langchain_card.errors import CARDError
from langchain_card.models.loader import resolve

NAMES = {"model": default_model(), "draft_model": default_draft_model()}  # the built-in pair
GPUS = torch.cuda.device_count()
print(GPUS, "CUDA devices:", [torch.cuda.get_device_name(i) for i in range(GPUS)])

# %% [markdown]
# `resolve` is what the engine does first: it finds the models, the devices and the form of the weights, and reads none of
# them. This page asks it of every configuration, so that what is wrong is said, and how.


# %%
def show(**options):
    """What a configuration means here, or why it means nothing."""
    print(", ".join(f"{name}={value!r}" for name, value in options.items()) or "as it is by default")
    try:
        pair = resolve(EngineConfig(**NAMES, **options))
    except CARDError as error:
        print(f"    {type(error).__name__}: {error}")
        return
    for role, spec in (("target", pair.target), ("draft", pair.draft)):
        if spec is not None:
            where = ", ".join(map(str, spec.devices))
            print(f"    {role}: {spec.name} on {where}, {spec.quantization or spec.form}, {spec.dtype}")


def answer(needed, question="Write a Python function that reverses a string. Only the code.", **options):
    """Asks a chat model, where there are GPUs enough; says so where there are not."""
    if needed > GPUS:
        print(f"    skipped: it needs {needed} CUDA devices, this machine has {GPUS}")
        return None
    with CARDChatModel(**NAMES, max_tokens=64, **{"schedule": "auto", **options}) as model:
        message = model.invoke(question)
    card = message.response_metadata["card"]
    print(
        f"    {card['schedule']}, {card['tokens_per_second']:.0f} tokens/s, {card['mean_accepted_length']:.2f} a pass"
    )
    return message.text


show()

# %% [markdown]
# ## A device for each: needs 2 GPUs
#
# With two devices target and draft work at the same time at full speed; that is what CARD is for. By default the target
# takes the first CUDA device, and the draft one that the target leaves free. The draft then lives in a process of its
# own, and `schedule="auto"` is `parallel`.

# %%
apart = {"device": "cuda:0", "draft_device": "cuda:1"}
show(**apart)
answer(2, **apart)

# %% [markdown]
# A draft may stay on the CPU: `draft_device="cpu"`. It pays where the target is slow: a pass of it should take as long as
# several steps of the draft.

# %%
beside = {"device": "cuda:0", "draft_device": "cpu"}
show(**beside)
answer(1, **beside)

# %% [markdown]
# ## One model over several: needs 2 GPUs
#
# A target that no device can hold is spread: its layers in order, in proportion to the devices' memory. The first one
# holds embeddings and head as well. Without a third device the draft goes to the last of them. A pass goes through all
# devices one after the other, so that this makes room and not speed; the draft's guesses matter more, because each saved
# pass saves the whole way.

# %%
spread = {"device": "cuda:0,cuda:1"}
show(**spread)
answer(2, **spread)

# %% [markdown]
# ## Where the layers would go
#
# Which device holds what needs no GPU to be known: a model on the meta device has shapes and no weights. Here are the
# numbers of three sizes of Qwen 2.5, from their published configurations, in bfloat16. These are the functions that the
# engine uses; they are internals, and may change.

# %%
from transformers import AutoConfig

from langchain_card.runtime.families import empty_model, kv_shape
from langchain_card.models.placement import place, shares

SIZES = {  # hidden, intermediate, layers, heads, heads of keys and values
    "7B": (3584, 18944, 28, 28, 4),
    "32B": (5120, 27648, 64, 40, 8),
    "72B": (8192, 29568, 80, 64, 8),
}
POSITIONS, GIB = 8192, 1 << 30


def shape(size):
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    return AutoConfig.for_model(
        "qwen2",
        vocab_size=152064,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
    )


empty = {size: empty_model(shape(size)).to(torch.bfloat16) for size in SIZES}
for size, model in empty.items():
    layers = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name)
    count = sum(each.numel() for each in model.parameters())
    kv = kv_shape(shape(size)).numbers * POSITIONS * 2
    four = 0.53 * layers + 2 * (count - layers)  # embeddings and head stay as they are
    print(f"{size:>3}: {count / 1e9:4.1f} billion parameters, {2 * count / GIB:5.1f} GiB in bfloat16,", end=" ")
    print(f"some {four / GIB:4.1f} GiB in 4 bits, and {kv / GIB:.2f} GiB for each sequence of {POSITIONS:,} positions")

# %% [markdown]
# The 72B over two devices of 80 GiB, and over one of 80 and one of 48:

# %%
cards = [torch.device("cuda", 0), torch.device("cuda", 1)]
for memory in ((80, 80), (80, 48)):
    placed = place(empty["72B"], cards, memory)
    weights = sum(parameter.nbytes for parameter in empty["72B"].parameters())
    for card, (part, kv) in shares(empty["72B"], placed).items():
        layers = sum(device == card for name, device in placed.items() if ".layers." in name)
        room = f"{part * weights / GIB:5.1f} of {memory[card.index]} GiB"
        print(f"{card}: {layers} layers, {room} for weights, {kv:.0%} of the KV")
    print()

# %% [markdown]
# The second case does not fit: some 136 GiB of weights and 128 of memory. The next section makes them smaller.

# %% [markdown]
# ## Fewer bits: needs 1 GPU
#
# `quantization` takes the JSON of a transformers quantization config; its package must be installed (`pip install
# bitsandbytes` here). It holds for target and draft. Folders whose weights are quantized already (GPTQ, AWQ, FP8, ...)
# load as they are, without it. The answer is then the quantized target's own.

# %%
import importlib.util
import json

four_bits = json.dumps({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"})
few = {"device": "cuda:0", "quantization": four_bits}
show(**few)
if importlib.util.find_spec("bitsandbytes"):
    answer(1, **few)
else:
    print("    skipped: bitsandbytes is not installed")

# %% [markdown]
# On a CPU it is `quantization="file"`: the blocks of a GGUF file as they are, which the built-in models have by default,
# and which are exact row by row. `"int8"` and `"int4"` round other weights. With `quantization=None` they are float32:
# `resolve` then writes their weights to disk in that form first, 4.6 GB of them, as it does for GPUs.

# %%
show(device="cpu", quantization="file")

# %% [markdown]
# ## How steps are run: needs 1 GPU
#
# `execution="graphs"`, the default on CUDA, captures each shape of a step once and replays it. `"compiled"` compiles the
# layers as well: the first requests take longer, for minutes with a big model, and later ones less. `"eager"` does
# neither: take it to find out whether a problem comes from there. On a CPU none of them changes anything.

# %%
for execution in ("graphs", "compiled", "eager"):
    show(device="cuda:0", execution=execution)
    answer(1, device="cuda:0", execution=execution)

# %% [markdown]
# ## Bit for bit in 16 bits: needs 1 GPU
#
# In bfloat16 the last bits of a row depend on how many rows are computed with it, so that a near-tie may fall otherwise
# with a draft than without. `exact="strict"` gives every step one shape: an answer then equals plain decoding by the same
# engine bit for bit. It costs speed: every pass takes as long as a full one, and guesses are chains, not trees. By
# default there is room for one request in a pass then; `Limits(max_num_seqs=4)` makes room for four.

# %%
strict = {"device": "cuda:0", "exact": "strict"}
show(**strict)
drafted, plain = answer(1, **strict), answer(1, schedule="plain", **strict)
print("    equal:", drafted == plain if GPUS else "not tried")

# %% [markdown]
# ## Does it fit?
#
# Memory is added up before any weights are read: weights, keys and values of all sequences at their full length, and
# what a step needs. `langchain-card doctor --no-measure` does no more than that, and so tells in seconds about a pair
# whose files are here. `--device`, `--draft-device` and `--quantization` are its options, too.

# %%
import subprocess
import sys

pair = ["--model", NAMES["model"], "--draft-model", NAMES["draft_model"]]
command = [sys.executable, "-m", "langchain_card", "doctor", "--no-measure", *pair]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout or done.stderr)

# %% [markdown]
# Where it does not fit an error says what each part takes, and what would fit. Here four hundred sequences are asked
# for. Without a number the engine takes as many as half of the free memory has room for, 16 at most.

# %%
try:
    CARDChatModel(**NAMES, limits=Limits(max_num_seqs=400)).load()
except CARDError as error:
    print(error)

# %% [markdown]
# What makes room, in this order: a smaller `max_model_len`; fewer sequences; a quantized target; a second device; a
# smaller draft; `draft_model="ngram"`, which takes 64 MiB at most.
