"""`Answers`: answers to the prompts of a Ray Data dataset, as columns beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from langchain_core.messages import AIMessage

from langchain_card.chat_model import CARDChatModel
from langchain_card.core.messages import TARGET
from langchain_card.errors import EngineError, InvalidInputError
from langchain_card.ports import Health

Column = np.ndarray[Any, np.dtype[Any]]


class Answers:
    """A chat model for `ray.data.Dataset.map_batches`, one in each actor.

    ```python
    answered = questions.map_batches(
        Answers, fn_constructor_kwargs={"model": "qwen2.5-7b"}, concurrency=2, num_gpus=1, batch_size=64
    )
    ```

    A prompt is text or a list of messages, as `CARDChatModel.invoke` takes it. The rows of a batch are decoded
    together. Each row keeps its columns and gets, in place of any of the same names:

    - the answer's text, without thoughts;
    - `finish_reason`: "stop", "length" or "tool_calls";
    - `input_tokens` and `output_tokens`;
    - `error`: why there is no answer, "" where there is one. The other columns of such a row hold "" and 0.

    An actor that dies needs no setting: Ray Data starts it again and repeats the blocks that it was working on, unless
    `max_restarts` or `max_task_retries` say otherwise. Each row comes out once. If a `temperature` is given, a `seed`
    makes a repeated row get the same answer.

    Args:
        prompt: name of the column that holds the prompts.
        answer: name of the column for the answers.
        fields: fields of `CARDChatModel`, the same for all rows.

    Raises:
        pydantic.ValidationError: a field is misspelt or breaks a limit; no weights were loaded.
        CARDError: the models cannot be loaded.
    """

    def __init__(self, *, prompt: str = "prompt", answer: str = "answer", **fields: Any) -> None:
        self._prompt, self._answer = prompt, answer
        self._model = CARDChatModel(**fields).load()

    def __call__(self, batch: Mapping[str, Column]) -> dict[str, Column]:
        """Return a batch with the answers to its prompts.

        Raises:
            InvalidInputError: there is no column of prompts.
            EngineError: the engine is gone for good. What is wrong with a row is in its column `error` instead.
        """
        if self._prompt not in batch:
            limit = f"is not a column; there is {', '.join(batch)}"
            raise InvalidInputError("prompt", self._prompt, limit, "prompt=NAME names the column of prompts")
        prompts = [_plain(value) for value in batch[self._prompt]]
        rows = [*self._rows(prompts)]
        return {
            **batch,
            self._prompt: _objects(prompts),  # messages in arrays would make Ray pickle the column
            self._answer: _objects([row.text for row in rows]),
            "finish_reason": _objects([row.finish_reason for row in rows]),
            "input_tokens": np.array([row.input_tokens for row in rows], np.int64),
            "output_tokens": np.array([row.output_tokens for row in rows], np.int64),
            "error": _objects([row.error for row in rows]),
        }

    def __del__(self) -> None:
        if model := getattr(self, "_model", None):
            model.close()

    def _rows(self, prompts: Sequence[Any]) -> Iterator[_Row]:
        """Yield a row for each prompt."""
        given = [prompt for prompt in prompts if _is_prompt(prompt)]
        answers = iter(self._model.batch(given, return_exceptions=True))
        limit = "must be text or a list of messages, and not empty"
        for prompt in prompts:
            yield self._row(next(answers) if _is_prompt(prompt) else InvalidInputError(self._prompt, prompt, limit))

    def _row(self, answer: AIMessage | Exception) -> _Row:
        if isinstance(answer, AIMessage):
            counts = answer.usage_metadata or {"input_tokens": 0, "output_tokens": 0}
            reason = answer.response_metadata["finish_reason"]
            return _Row(answer.text, reason, counts["input_tokens"], counts["output_tokens"])
        if isinstance(answer, EngineError) and self._model.engine.health().get(TARGET, Health()).state == "given up":
            raise answer
        return _Row(error=f"{type(answer).__name__}: {answer}")


class _Row(NamedTuple):
    """What is added to a row."""

    text: str = ""
    finish_reason: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def _objects(values: Sequence[Any]) -> Column:
    """Return a column of one dimension, whatever the values are; texts take no more memory than each needs."""
    column: Column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _is_prompt(value: Any) -> bool:
    return isinstance(value, (str, list)) and bool(value)


def _plain(value: Any) -> Any:
    """Return a value of a column in Python's types."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
