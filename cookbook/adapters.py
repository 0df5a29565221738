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
# # Adapters
#
# At the end of this page one model answers in two ways at once: as it is, and with a LoRA adapter trained here.
# Each call chooses the adapter. The weights are in memory once, and the draft stays as it is.
#
# It takes a minute on two CPU cores. You need `pip install peft`. The model is SmolLM2 135M, which is small enough
# to be trained while you watch.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from langchain_card import CARDChatModel
from langchain_card.models.store import ModelStore

warnings.filterwarnings("ignore", category=FutureWarning)  # PEFT uses an old name of transformers
logging.disable_progress_bar()
NAME = "smollm2-135m"

# %% [markdown]
# ## Training
#
# Letters to a shop, and the team that handles each. The adapter changes the last eight of thirty layers; its matrices
# have half a million numbers, the model has 135 million.

# %%
LETTERS = {
    "I was charged twice for my order.": "billing",
    "The invoice has a wrong address.": "billing",
    "Please refund the last payment.": "billing",
    "The app crashes when I open it.": "technical",
    "My password is not accepted.": "technical",
    "The screen of the device stays black.": "technical",
    "My parcel has not arrived yet.": "delivery",
    "The driver left the box in the rain.": "delivery",
    "The tracking page says it was lost.": "delivery",
}

base = ModelStore().prepare(NAME, "float")  # a folder that transformers reads
tokenizer = AutoTokenizer.from_pretrained(base)
torch.manual_seed(0)
trained = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
    LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
        layers_to_transform=list(range(22, 30)),
    ),
)


def example(letter: str, team: str) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, and its labels: the tokens of the answer alone."""
    turns = [{"role": "user", "content": letter}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    answer = tokenizer(f"team: {team}<|im_end|>")["input_ids"]
    return prompt + answer, [-100] * len(prompt) + answer


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


texts, labels = zip(*(example(letter, team) for letter, team in LETTERS.items()), strict=True)
batch = padded(list(texts), 0), padded(list(labels), -100)
optimizer = torch.optim.AdamW((p for p in trained.parameters() if p.requires_grad), lr=4e-3)
losses = []
for _ in range(7):
    loss = trained(input_ids=batch[0], labels=batch[1]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("loss:", *(f"{loss:.1f}" for loss in losses))

directory = TemporaryDirectory()
folder = Path(directory.name) / "team"
trained.save_pretrained(folder)
sorted(path.name for path in folder.iterdir())

# %% [markdown]
# ## Two answers of one model
#
# `adapters` names folders; `adapter=` chooses one for a call.

# %%
model = CARDChatModel(model=NAME, draft_model="ngram", max_tokens=24, adapters={"team": str(folder)}).load()
letter = "The app says that my card was declined."
print("as it is:", model.invoke(letter).text)
print("adapter: ", model.invoke(letter, adapter="team").text)

# %% [markdown]
# Requests with different adapters, or none, share their passes: here are letters to both. The answer is that of the
# target with the adapter, whatever the draft guesses: `schedule="plain"` does without a draft and writes the same.

# %%
new = ["I paid and got no receipt.", "Nobody has brought my parcel.", "The login page shows an error."]
options = [{}, {"adapter": "team"}]
requests = [(text, own) for text in new for own in options]


def ask(request, **more):
    text, own = request
    return model.invoke(text, **own, **more)


with ThreadPoolExecutor(len(requests)) as pool:
    answers = list(pool.map(ask, requests))
for (text, _), answer in zip(requests, answers, strict=True):
    print(f"{text:32} {answer.response_metadata['card'].get('adapter', '-'):5} {answer.text[:60]!r}")

plain = [ask(request, schedule="plain").text for request in requests]
print("same text:", plain == [answer.text for answer in answers])
assert all(answer.text.startswith("team: ") for answer in answers[1::2])
assert not any(answer.text.startswith("team: ") for answer in answers[::2])

# %% [markdown]
# A server lists adapters as models. `langchain-card serve --model smollm2-135m --draft-model ngram --adapters
# team=FOLDER` takes requests with `"model": "team"`. `docs/guides/models.md` says which adapters are supported.

# %%
model.close()
directory.cleanup()
