"""The protocol of query and correct. This docstring is the table of contents of "the book".

The book is the part of the package that explains all of it: about 6,500 lines, in the order in which to read them.
Everything else (kernels, models, LangChain, the server, the command line, benchmarks) surrounds it.

Part one, the protocol. Pure functions of plain numbers: no torch, no thread, no clock, no randomness.

1.  core/messages.py        what drafters, target and core send each other
2.  core/request.py         a request, its decoding options, its statistics
3.  core/candidates.py      the shared cache of one request: a tree of candidate tokens
4.  core/walk.py            the exact rule: which candidates are committed
5.  core/coordinator.py     `handle(event) -> effects`: query, commit, correct
6.  core/state.py           the state of a request; core/scheduler.py: which requests run
7.  core/lifecycle.py       how a request begins and ends on the workers; core/workers.py: which workers are up
8.  core/drafter_state.py   the fences against late, lost and repeated proposals
9.  core/proposals.py       how proposals enter the cache
10. core/query.py           what a round verifies, and which draft steps it waits for
11. core/policy.py          the seam for decisions that need measurements
12. core/controller.py      the policy that learns: core/costs.py, core/schedules.py, core/pass_timing.py

Part two, the engine: what carries the effects out.

13. ports.py                the interfaces between all parts
14. engine/driver.py        the only loop; engine/inbox.py: events from any thread on their way to it
15. engine/target_worker.py windows become one forward pass, and logits become verdicts
16. engine/draft_worker.py  commands become draft steps
17. engine/generation.py    one answer while it is written
18. engine/engine.py        an engine: submit, close; engine/build.py: how it is put together

Part three, the draft.

19. drafters/tree.py        a drafter's own tree of candidates
20. drafters/draft_step.py  one step of a model drafter; drafters/lower_level.py: a drafter below it
21. drafters/model.py       the draft model itself
"""
