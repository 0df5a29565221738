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
# # What happens inside
#
# At the end of this page you have seen one answer being written: which passes the target made, what the draft did
# meanwhile, what it was told, and which guesses came true; as numbers, as a picture, and as a file for a trace viewer. It
# takes a minute on two CPU cores.
#
# You need the extra `bench` (docs/install.md), which brings matplotlib. `langchain-card trace` does the same on the
# command line.

# %% [markdown]
# ## An engine that is watched
#
# An *observer* is a function that sees every event of the protocol, and what follows from it. `Tracer` is one that draws
# up a timeline for each answer. `CARDChatModel` has no observer; the engine below it has.
#
# The pair is the built-in one, or the one that the variables `LANGCHAIN_CARD_MODEL` and `LANGCHAIN_CARD_DRAFT_MODEL`
# name. Without a draft model the second lane of the picture is empty: looking up n-grams takes no time that could be
# drawn.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that this page does not need

from langchain_card import Engine, EngineConfig, SamplingParams
from langchain_card.bench.timeline import Tracer
from langchain_card.config import default_draft_model, default_model

config = EngineConfig(model=default_model(), draft_model=default_draft_model())
tracer = Tracer()
engine = Engine(config, observe=tracer)
print(config.model, "with", config.draft_model, "on", engine.devices)

# %% [markdown]
# The first answer is not looked at: kernels are compiled, and the engine learns what a step costs here. It belongs to
# another *tenant*, so that nothing is drafted from it.

# %%
question = "In one short sentence: what is a median? Then a Python function for it, only the code."
prompt_ids = engine.tokenizer.apply_chat_template(
    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
)


def ask(schedule, max_tokens=72, tenant=""):
    params = SamplingParams(max_tokens=max_tokens, schedule=schedule, tenant=tenant or schedule)
    generation = engine.submit(prompt_ids, params)
    done = generation.result()
    return done, tracer.timelines[generation.request.request_id]


for schedule in ("sequential", "parallel"):
    ask(schedule, max_tokens=16, tenant="warm-up")
done, timeline = ask("parallel")
print(done.text)

# %% [markdown]
# ## Rounds
#
# A *round* is one pass of the target: it checks a window of candidates and writes those that it would have chosen, and
# one token of its own behind them. The first one reads the prompt. After a *hit* the target's own token was among the
# candidates already, so that the draft goes on where it is; after a *miss* it starts anew.

# %%
decode = engine.tokenizer.decode
begun = timeline.submitted
for number, one in enumerate(timeline.rounds[:12]):
    then = {True: "hit", False: "miss", None: "end"}[one.hit]
    took = f"{1e3 * (one.begin - begun):6.0f} ms + {1e3 * (one.end - one.begin):4.0f} ms"
    print(
        f"{number:2}  {took}  checked {one.rows - 1:2}, wrote {len(one.token_ids)}, {then:4}  {decode(one.token_ids)!r}"
    )

# %%
stats = timeline.stats
print(f"{stats.output_tokens} tokens in {stats.rounds} passes: mean accepted length {stats.mean_accepted_length:.2f}")
print(
    f"{stats.hits} rounds hit ({stats.hit_rate:.0%}), {stats.tokens_per_second:.1f} tokens/s, ended by {timeline.reason.value}"
)
for lane in ("target", *timeline.sources):
    print(f"{lane} was busy {timeline.busy(lane):.0%} of the time between first and last token")

# %% [markdown]
# ## Who had guessed it
#
# Candidates come from several drafters: the draft model, n-grams, a grammar. One that several proposed counts for the
# first. *Dropped* are those that came too late: the answer had left their branch.

# %%
for source, verified in stats.verified_by_source.items():
    accepted = stats.accepted_by_source.get(source, 0)
    print(f"{source}: {accepted} of {verified} candidates that were checked came true ({accepted / verified:.0%})")
print(f"the target's own: {stats.output_tokens - stats.accepted} tokens; dropped: {stats.dropped} candidates")

# %% [markdown]
# Where in the answer? What the draft model had is between ⟦ ⟧, what n-grams had between ⟨ ⟩; the rest is the target's.

# %%
import itertools

MARKS = {"model": "⟦{}⟧", "ngram": "⟨{}⟩"}
for source, pieces in itertools.groupby(done.pieces, key=lambda piece: piece.source):
    print(MARKS.get(source, "{}").format("".join(piece.text for piece in pieces)), end="")

# %% [markdown]
# ## The picture
#
# Above the draft, below it the target: green where a hit followed, red where a miss did. Arrows are corrections: from
# the end of a pass to the first draft step that knows of it. At the bottom is what each pass wrote, on blue what had been
# guessed.

# %%
# %matplotlib inline
from langchain_card.bench.plots import draw_timeline

lanes = {"target": config.model, "model": config.draft_model}
draw_timeline(timeline, decode, lanes, first=1, count=6)

# %% [markdown]
# Under `sequential` draft and target take turns: a draft step is taken only where it pays. No step slows the other one
# down, but one of the two always waits. Misses are more common, because nobody guesses while the target checks: what it
# writes behind the last candidate is new to the draft. Where both share the cores of a CPU, `auto` measures which of the
# schedules is faster.

# %%
in_turns, turns = ask("sequential")
print("same text:", in_turns.text == done.text)
draw_timeline(turns, decode, lanes, first=1, count=6)

# %% [markdown]
# ## What the draft was told
#
# After each pass all drafters get a *correction*: the tokens that were committed. What a drafter holds below them stays
# valid. `corrections` finds for each round the first draft step that knew of it; the time between both is what a miss
# costs at least.

# %%
from langchain_card.bench.timeline import corrections

found = corrections(timeline)
waits = [1e3 * max(0.0, step.begin - one.end) for one, step in found]
for (one, step), wait in list(zip(found, waits))[:5]:
    outcome = {True: "hit", False: "miss", None: "end"}[one.hit]
    print(f"after a {outcome:4} {step.source} worked on {wait:5.1f} ms later and proposed {step.published} candidates")
print(f"{len(found)} corrections in {len(timeline.rounds)} rounds")

# %% [markdown]
# ## Messages
#
# The protocol itself is small. An observer of your own is any function of an event and its effects; here it counts them.
# Events come in (`Proposed`, `TargetReady`, `Verified`), effects go out (`Verify`, `Emit`, `Correct`, `Grow`).

# %%
from collections import Counter

counts = Counter()


def count(event, effects):
    counts[f"in   {type(event).__name__}"] += 1
    counts.update(f"out  {type(effect).__name__}" for effect in effects)


with Engine(config, observe=count) as counted:  # the weights are there already, and are shared
    counted.submit(prompt_ids, SamplingParams(max_tokens=24)).result()
for message, number in sorted(counts.items()):
    print(f"{message:18} {number}")

# %% [markdown]
# ## A file for Perfetto
#
# Open it at https://ui.perfetto.dev or in chrome://tracing: one track each for the answer, the target and every drafter,
# with corrections as arrows between them. The file stays on your machine; the page reads it there.

# %%
import json
import tempfile
from pathlib import Path

from langchain_card.bench.timeline import to_perfetto

path = Path(tempfile.mkdtemp()) / "answer.json"
path.write_text(json.dumps(to_perfetto(timeline, decode)))
events = json.loads(path.read_text())["traceEvents"]
print(path.name, f"{path.stat().st_size / 1e3:.0f} kB,", len(events), "events")
print(next(event for event in events if event["ph"] == "X" and event["name"].endswith(("hit", "miss", "end"))))

# %%
engine.close()
