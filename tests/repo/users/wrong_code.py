"""Mistakes that `mypy --strict` must find (tests/repo/test_typing.py): one on each line with the code of its error."""

from langchain_card import CARDChatModel, Engine, EngineConfig, Limits, SamplingParams

model = CARDChatModel()
words: int = model.invoke("hi")  # assignment
model.max_tokens = "many"  # assignment
model.schedule = "paralel"  # assignment
model.lode()  # attr-defined
model.get_num_tokens(5)  # arg-type
Limits(max_num_seq=1)  # call-arg
SamplingParams(max_tokens="many")  # arg-type
Engine(EngineConfig()).submit("text")  # arg-type
