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
# At the end of this page one model answers in two ways at once: as it is, and with a LoRA adapter that was trained here.
# The adapter is chosen by each call; the weights are in memory once, and the draft knows nothing of it.
#
# It takes two minutes on two CPU cores. You need `pip install peft`. The model is SmolLM2 135M, small enough to be
# trained while you watch.

# %%
import warnings
from pathlib import Path
from tempfile import mkdtemp

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from langchain_card import CARDChatModel
from langchain_card.models.store import ModelStore

warnings.filterwarnings("ignore")
logging.disable_progress_bar()
NAME = "smollm2-135m"

# %% [markdown]
# ## Training
#
# Twelve letters and what the support team does with each. An adapter of rank 8 has 0.5 million numbers beside the
# model's 135 million.

# %%
LETTERS = {
    "I was charged twice for my order.": "billing",
    "The invoice has a wrong address.": "billing",
    "Please refund the last payment.": "billing",
    "Why is the price higher than on the website?": "billing",
    "The app crashes when I open it.": "technical",
    "My password is not accepted.": "technical",
    "The screen of the device stays black.": "technical",
    "After the update nothing works any more.": "technical",
    "My parcel has not arrived yet.": "delivery",
    "The driver left the box in the rain.": "delivery",
    "Can you send it to another address?": "delivery",
    "The tracking page says it was lost.": "delivery",
}

base = ModelStore().prepare(NAME, "float")  # a folder that transformers reads
tokenizer = AutoTokenizer.from_pretrained(base)
torch.manual_seed(0)
trained = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
    LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
)


def example(letter: str, team: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a conversation, and those of the answer alone as labels."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": letter}], add_generation_prompt=True)[
        "input_ids"
    ]
    answer = tokenizer(f"team: {team}<|im_end|>")["input_ids"]
    return torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])


optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
for epoch in range(6):
    losses = []
    for letter, team in LETTERS.items():
        ids, labels = example(letter, team)
        loss = trained(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
print("loss of the last epoch below 0.5:", sum(losses) / len(losses) < 0.5)

folder = Path(mkdtemp()) / "team"
trained.save_pretrained(folder)
sorted(path.name for path in folder.iterdir())

# %% [markdown]
# ## Two answers of one model
#
# `adapters` names folders; `adapter=` chooses one for a call. Both requests below share their passes.

# %%
model = CARDChatModel(model=NAME, draft_model="ngram", max_tokens=24, adapters={"team": str(folder)}).load()
letter = "The app says that my card was declined."
plain, tuned = model.invoke(letter), model.invoke(letter, adapter="team")
print("as it is:", plain.text)
print("adapter: ", tuned.text)

# %%
new = ["I paid and got no receipt.", "Nobody has brought my parcel.", "The login page shows an error."]
for text, answer in zip(new, model.bind(adapter="team").batch(new), strict=True):
    card = answer.response_metadata["card"]
    print(f"{answer.text:20} {text:32} adapter {card['adapter']}, {card['mean_accepted_length']:.1f} tokens a pass")

# %% [markdown]
# ## Exactness
#
# The answer is that of the target with the adapter, whatever the draft guesses.

# %%
same = [model.invoke(text, adapter="team", schedule="plain").text for text in new]
print("same text:", same == [model.invoke(text, adapter="team").text for text in new])

# %% [markdown]
# A server lists adapters as models: `langchain-card serve --model smollm2-135m --draft-model ngram --adapters
# team=FOLDER`, and a request names `"model": "team"`. What kinds of adapters run is said in `docs/guides/models.md`.

# %%
model.close()
