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
# # Writing a drafter
#
# At the end of this page a drafter of your own works in a chat model, has passed the first half of the suite that says
# what drafters owe, and you know how often it was right. It takes two minutes on two CPU cores.
#
# A drafter guesses what comes next. The target checks guesses and keeps those that it would have written: whatever a
# drafter does, the answer is the target's own. It need not be careful, only quick and often right.
#
# `docs/plugins.md` says what each method may rely on. You need the extra `testing` (docs/install.md), which brings pytest,
# for the suite.

# %% [markdown]
# ## The idea
#
# Where the last two tokens stood before, in the prompt or in the answer, the same may follow. So: remember for each pair
# of tokens what came after it, and propose that. (The built-in `ngram` does more of this, and better.)
#
# A drafter has six methods. Requests are told apart by their number, and several may be open. `begin` and `correct` tell
# it the text, `step` asks it, `end` and `close` let it forget. A proposal is a tree: node 0, the root, stands for the
# last token that is known; each new node says which one it hangs below, and how sure it is, as the logarithm of a chance.

# %%
import math
from dataclasses import dataclass, field

from langchain_card.core.messages import Proposal


@dataclass
class Text:
    """What is known of a request."""

    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # pair of tokens -> where the next one stands
    epoch: int = 0

    def extend(self, tokens):
        for token in tokens:
            if len(self.tokens) >= 2:
                self.places[self.tokens[-2], self.tokens[-1]] = len(self.tokens)
            self.tokens.append(token)

    def guess(self, depth):
        place = self.places.get(tuple(self.tokens[-2:]), len(self.tokens))
        return tuple(self.tokens[place : place + depth])


class Pairs:
    """Proposes what followed the last two tokens the last time."""

    name = "pairs"  # of its proposals; unique in an engine
    paced = False  # a step takes microseconds

    def __init__(self, setting, depth=4, chance=0.6):
        self.depth, self.score, self.texts = depth, math.log(chance), {}

    def begin(self, request, output_ids):
        self.texts[request.request_id] = text = Text(len(request.prompt_ids))
        text.extend([*request.prompt_ids, *output_ids])

    def correct(self, request_id, start, token_ids):
        if text := self.texts.get(request_id):
            known = len(text.tokens) - text.num_prompt
            text.extend(token_ids[known - start :])  # some may be repeated

    def step(self, budgets):
        return [self.propose(each.request_id) for each in budgets if each.request_id in self.texts]

    def propose(self, request_id):
        text = self.texts[request_id]
        text.epoch += 1  # numbers begin anew with each proposal
        chain = text.guess(self.depth)
        return Proposal(
            source=self.name,
            request_id=request_id,
            epoch=text.epoch,
            root=0,
            applied_len=len(text.tokens) - text.num_prompt,  # tokens of the answer that it knows
            first=1,
            parents=tuple(range(len(chain))),  # a chain: each node hangs below the one before it
            token_ids=chain,
            scores=(self.score,) * len(chain),
        )

    def end(self, request_id):
        self.texts.pop(request_id, None)

    def close(self):
        self.texts.clear()


# %% [markdown]
# ## By hand
#
# It needs no engine to be tried. The prompt is the tokens 1 2 3 4 5 1 2; then the target writes 3, and then 9, which
# nobody had guessed.

# %%
from langchain_card.core.request import Request, SamplingParams
from langchain_card.ports import Budget, Setting

drafter = Pairs(Setting())
drafter.begin(Request(0, (1, 2, 3, 4, 5, 1, 2), SamplingParams()), ())
answer = []
for committed in ([], [3], [9]):
    drafter.correct(0, len(answer), committed)
    answer += committed
    (proposal,) = drafter.step([Budget(0)])
    print(f"answer {answer}: knows {proposal.applied_len} of it, proposes {proposal.token_ids}")
drafter.end(0)

# %% [markdown]
# ## The suite
#
# `DrafterConformance` has some forty tests: the drafter alone, and in engines over tiny random models against a plain
# loop over transformers. In a package you write three lines and call `pytest`, which takes a minute:
#
# ```python
# from langchain_card.testing import DrafterConformance
#
# class TestPairs(DrafterConformance):
#     drafter = "pairs?depth=4"
# ```
#
# Here its first half, `DrafterContract`, tries the class of this page alone: messages that are lost, late, repeated and
# unknown, what refused guesses leave behind, whether an ended request is forgotten.

# %%
import os
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

import pytest

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed is not asked
TEST = """
from __main__ import {name}
from langchain_card.testing.calls import DrafterContract

class Test{name}(DrafterContract):
    factory = {name}
"""


class Lines:
    """A line for each test, in the place of what pytest writes on a terminal."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            print(f"{report.outcome}  {report.nodeid.rpartition('::test_')[2].replace('_', ' ')}")
        if report.failed:
            print(f"        {report.longrepr.reprcrash.message.splitlines()[0]}")


def try_contract(name):
    path = Path(tempfile.mkdtemp()) / f"test_{name.lower()}.py"
    path.write_text(TEST.format(name=name))
    pytest.main(["-p", "no:terminal", "-p", "no:cacheprovider", str(path)], plugins=[Lines()])


try_contract("Pairs")

# %% [markdown]
# It says what is wrong, too. This one forgets nothing, and takes what is repeated for new:


# %%
class Careless(Pairs):
    def correct(self, request_id, start, token_ids):
        if text := self.texts.get(request_id):
            text.extend(token_ids)

    def end(self, request_id):
        pass


try_contract("Careless")

# %% [markdown]
# ## In a chat model
#
# `register` makes the class known in this process: enough for a notebook. A package has an entry point in its
# `pyproject.toml` in its place, and is found wherever it is installed, in processes of their own as well:
#
# ```toml
# [project.entry-points."langchain_card.drafters"]
# pairs = "my_package:Pairs"
# ```
#
# `draft_model="pairs?depth=8"` has it work alone, with an option as in a URL.

# %%
from langchain_card import CARDChatModel, plugins

plugins.register("drafters", "pairs", Pairs)

edit = """Rename the variable `x` to `price` and repeat the whole function, only the code:

def total(items, rate):
    x = 0
    for item in items:
        x += item.cost * item.count
    if x > 100:
        x -= x * rate
    return x
"""


model = CARDChatModel(draft_model=None, max_tokens=80).load()  # others share its weights


def ask(**options):
    with CARDChatModel(max_tokens=80, **options) as other:
        answer = other.invoke(edit)
    card = answer.response_metadata["card"]
    print(f"{answer.usage_metadata['output_tokens']} tokens in {card['rounds']} passes")
    for source, verified in card["verified_by_source"].items():
        accepted = card["accepted_by_source"].get(source, 0)
        print(f"  {source}: {accepted} of {verified} candidates accepted, {accepted / verified:.0%}")
    return answer.text


plain = model.invoke(edit).text
print(plain, end="\n\n")
alone = ask(draft_model="pairs?depth=8", drafters=())
print("same text:", alone == plain)

# %% [markdown]
# ## Honest scores
#
# The engine verifies the candidates that pay, by what their drafter says of them and by how often that came true before.
# Who says too much is believed less after a while; who says too little is not asked. The default here, 0.6 for each
# token, is a guess: measure yours on your own texts.

# %%
for chance in (0.05, 0.6, 0.99):
    print(f"chance={chance}:", end=" ")
    print("same text:", ask(draft_model=f"pairs?depth=8&chance={chance}", drafters=()) == plain)

# %% [markdown]
# ## Beside the others
#
# With a draft model, drafters grow one tree together. A candidate of several counts for the one that had it first, so
# that `pairs` may not be named at all: what it knows, n-grams and the model may know as well. A drafter is worth its
# place where it knows something that no other does.

# %%
together = ask(drafters=("ngram", "pairs"))
print("same text:", together == plain)

# %% [markdown]
# ## From here
#
# The full suite is the next step. `docs/plugins.md` has its options, all attributes of a drafter and all fields of a
# proposal.
#
# - A step that takes device time, as one of a model does, says `paced = True` and tells in each proposal what it took.
# - What is learnt across requests belongs to a tenant (`request.params.tenant`), and has a bound.
# - `langchain-card bench --methods plain card --draft-model pairs` measures it against plain decoding, once a package
#   offers it.

# %%
model.close()
