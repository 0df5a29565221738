"""`Answers` without Ray: what becomes of good rows and bad ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from pydantic import ValidationError

from langchain_card import CARDChatModel
from langchain_card.cluster import Answers
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import DeviceLostError, EngineClosedError, InvalidInputError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def fields(tiny_pairs: dict[str, tuple[str, str]]) -> dict[str, Any]:
    target, draft = tiny_pairs["llama"]
    return {"model": target, "draft_model": draft, "dtype": "float64", "max_tokens": 8, "max_model_len": 256}


@pytest.fixture(scope="module")
def model(fields: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**fields) as model:
        yield model.load()


@pytest.fixture(scope="module")
def answers(fields: dict[str, Any], model: CARDChatModel) -> Answers:
    return Answers(**fields)


def column(*values: Any) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_rows_keep_their_columns_and_get_the_models_answers(answers: Answers, model: CARDChatModel) -> None:
    batch = {"custom_id": np.array(["a", "b", "c"]), "prompt": np.array(["one", "two", "three"]), "error": np.ones(3)}
    found, wanted = answers(batch), model.batch(["one", "two", "three"])
    assert [*found["custom_id"]] == ["a", "b", "c"] and [*found["prompt"]] == ["one", "two", "three"]
    assert [*found["answer"]] == [message.text for message in wanted] and len({*found["answer"]}) == 3
    assert [*found["finish_reason"]] == [message.response_metadata["finish_reason"] for message in wanted]
    for name in ("input_tokens", "output_tokens"):
        assert [*found[name]] == [(message.usage_metadata or {})[name] for message in wanted]
        assert found[name].dtype == np.int64
    assert [*found["error"]] == ["", "", ""]
    assert {*batch} == {"custom_id", "prompt", "error"}, "what Ray shares is not changed"


def test_a_bad_row_ends_alone(answers: Answers, model: CARDChatModel) -> None:
    bad = {
        "": "InvalidInputError: prompt = '': must be text or a list of messages, and not empty",
        None: "InvalidInputError: prompt = None: must be",
        float("nan"): "InvalidInputError: prompt = nan: must be",
        "far too long " * 1000: "ContextOverflowError: ",
    }
    messages: list[tuple[Any, str]] = [
        (column(), "InvalidInputError: prompt = []: must be"),
        (column({"role": "user"}), "ValueError: Message dict must contain"),
        (column({"role": "user", "content": column({"type": "image", "url": "x"})}), "UnsupportedContentError: "),
        (column(1), "NotImplementedError: "),
    ]
    rows = [("good", ""), *bad.items(), *messages, ("good, too", "")]
    found = answers({"prompt": column(*(prompt for prompt, _ in rows))})
    for text, error, (_, words) in zip(found["answer"], found["error"], rows, strict=True):
        assert error.startswith(words) and bool(error) == bool(words)
        assert bool(text) != bool(error)
    assert [found["answer"][0], found["answer"][-1]] == [each.text for each in model.batch(["good", "good, too"])]
    assert [*found["finish_reason"][1:-1]] == [""] * 8 and not found["output_tokens"][1:-1].any()


def test_messages_as_arrow_holds_them(fields: dict[str, Any], model: CARDChatModel) -> None:
    """A key that one message has is None in the others. The column stays one of messages, which any reader reads."""
    import pyarrow
    from ray.data.block import BlockAccessor

    parts = [{"type": "text", "text": "hi"}]
    rows: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": parts}, {"role": "user", "content": parts, "name": "ann"}],
        [
            {"role": "user", "content": parts},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": parts, "tool_call_id": "1"},
        ],
    ]
    block = pyarrow.table({"chat": rows})
    found = Answers(prompt="chat", answer="said", **fields)(BlockAccessor.for_block(block).to_numpy())
    assert [*found] == ["chat", "said", "finish_reason", "input_tokens", "output_tokens", "error"]
    assert [*found["error"]] == ["", ""]
    assert [*found["said"]] == [message.text for message in model.batch(rows)]
    assert BlockAccessor.batch_to_block(found).schema.field("chat").type == block.schema.field("chat").type


def test_rows_of_a_batch_are_decoded_together(fields: dict[str, Any]) -> None:
    sizes = []

    class Sizes(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **_: Any) -> None:
            sizes.append(response.generations[0][0].message.response_metadata["card"]["mean_batch_size"])

    Answers(**fields, callbacks=[Sizes()])({"prompt": column(*(f"number {number}" for number in range(8)))})
    assert len(sizes) == 8 and max(sizes) > 3


def test_an_empty_batch(answers: Answers) -> None:
    assert {name: len(values) for name, values in answers({"prompt": column()}).items()} == dict.fromkeys(
        ("prompt", "answer", "finish_reason", "input_tokens", "output_tokens", "error"), 0
    )


def test_what_no_row_is_to_blame_for_is_raised(fields: dict[str, Any], answers: Answers) -> None:
    with pytest.raises(InvalidInputError, match=r"prompt = 'prompt': is not a column; there is text, n\. Hint: "):
        answers({"text": column("a"), "n": np.ones(1)})
    with pytest.raises(ValidationError, match="did you mean max_tokens"):
        Answers(**fields, max_token=3)


def test_an_engine_that_is_gone_is_raised(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other failures of the engine end their row alone."""
    late = Answers(**fields, timeout=1e-6)({"prompt": column("a")})
    assert late["error"][0].startswith("GenerationTimeoutError: timeout = 1e-06")

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gone = Answers(**fields, limits={"max_num_seqs": 3})
    monkeypatch.setattr(TargetWorker, "verify", fail)
    with pytest.raises(DeviceLostError):
        gone({"prompt": column("a")})


def test_the_end_of_the_actor_closes_the_model(fields: dict[str, Any]) -> None:
    own = Answers(**fields, limits={"max_num_seqs": 2})
    engine = own._model.engine
    del own
    with pytest.raises(EngineClosedError):
        engine.submit([5])


def test_ray_is_not_needed() -> None:
    """Costs 3 s: a process imports the package."""
    code = "import sys; sys.modules['ray'] = None; from langchain_card.cluster import Answers; print(Answers.__name__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "Answers\n", done.stderr
