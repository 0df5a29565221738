"""Every error this package raises on purpose, and the checks of inputs that raise most of them.

```
CARDError
├── InvalidInputError (ValueError)      a field's value breaks a limit
│   ├── ContextOverflowError            prompt (+ answer) longer than the model's context
│   ├── UnsupportedContentError         images, audio, files: the model reads text only
│   ├── UnknownModelError               no such model name; carries the nearest names
│   ├── UnsupportedModelError           the engine cannot run this kind of model exactly
│   └── VocabularyMismatchError         draft and target have almost no tokens in common
├── DeviceError (RuntimeError)          the device is not there, or does not fit the model
├── ModelStoreError (RuntimeError)      getting weights on disk failed
│   ├── UnsafeModelError                the folder carries pickle weights or code
│   ├── CorruptModelError               a weight file is truncated or has the wrong hash
│   ├── DiskSpaceError                  not enough free disk
│   └── DownloadError                   no source could be reached
└── EngineError (RuntimeError)          the engine cannot serve the request
    ├── EngineBusyError                 the queue is full
    ├── EngineWaitError                 the request waited too long for its turn
    ├── EngineClosedError               the engine was closed
    ├── DeviceLostError                 a CUDA error: this process cannot use the device any longer
    ├── GenerationTimeoutError          the answer took longer than it was allowed to
    └── GenerationAbortedError          another part of the program ended the answer
```

Each error names the field, the value, the limit that was broken and one hint, and keeps them as attributes. Errors that
a chat model raises are also LangChain's: see `chat/error_mapping.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class CARDError(Exception):
    """The base class of all errors.

    Attributes:
        field: name of the argument, file or device at fault.
        value: the value that was given, shortened for display.
        limit: the rule that the value breaks.
        hint: one thing to try.
    """

    def __init__(self, field: str, value: object, limit: str, hint: str = "") -> None:
        self.field, self.value, self.limit, self.hint = field, value, limit, hint
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field} = {shown}: {limit}." + (f" Hint: {hint}." if hint else ""))

    def __reduce__(self) -> tuple[Callable[..., CARDError], tuple[Any, ...]]:
        return restored, (type(self), self.args, self.__dict__)


def restored(kind: type[CARDError], args: tuple[Any, ...], state: Mapping[str, Any]) -> CARDError:
    """Restore an error from a pickle.

    Args:
        kind: its class.
        args: its message.
        state: its attributes.
    """
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidInputError(CARDError, ValueError):
    """A field's value breaks a limit. Raised before any weights are loaded where possible."""


class ContextOverflowError(InvalidInputError):
    """The prompt, or prompt and answer together, are longer than the model's context."""


class UnsupportedContentError(InvalidInputError):
    """A message holds a block that is not text: an image, audio, a video, a file, or an unknown type."""


class UnknownModelError(InvalidInputError):
    """No such model: neither a built-in name, a folder, a GGUF file nor a hub id."""


class UnsupportedModelError(InvalidInputError):
    """The model keeps more state than keys and values, or its attention is not supported."""


class VocabularyMismatchError(InvalidInputError):
    """Draft and target have almost no tokens in common, or a tokenizer does not list its tokens."""


class DeviceError(CARDError, RuntimeError):
    """The device does not exist on this machine, or cannot hold the model."""


class ModelStoreError(CARDError, RuntimeError):
    """Getting a model's weights on disk failed."""


class UnsafeModelError(ModelStoreError):
    """The model folder has only pickle weights, or names code (`auto_map`); nothing of it was read further."""


class CorruptModelError(ModelStoreError):
    """A weight file is truncated or its sha256 differs."""


class DiskSpaceError(ModelStoreError):
    """The cache folder has too little free space."""


class DownloadError(ModelStoreError):
    """No source answered."""


class EngineError(CARDError, RuntimeError):
    """The engine cannot serve the request; other requests go on."""


class EngineBusyError(EngineError):
    """The queue is full; the request was refused."""


class EngineWaitError(EngineError):
    """The request waited too long for its turn, and was aborted."""


class EngineClosedError(EngineError):
    """The engine was closed before or while the request ran."""


class DeviceLostError(EngineError):
    """A CUDA error ended the use of the device by this process; only a new process can go on."""


class GenerationTimeoutError(EngineError):
    """The answer took longer than it was allowed to; the request was aborted."""


class GenerationAbortedError(EngineError):
    """Another part of the program ended the answer: its batch was left, or its stream dropped."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out: of most kinds, torch has only messages."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or any(text in str(error) for text in _NO_MEMORY))
    )


_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_device_failure(error: BaseException) -> bool:
    """Return whether an error of CUDA has made the device useless to this process: all later calls fail, too."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> None:
    """Raise `InvalidInputError` naming the nearest choice, or else a hint, unless `value` is one of `choices`."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        raise InvalidInputError(
            name, value, f"must be one of {', '.join(choices)}", f"did you mean {near[0]}" if near else hint
        )


def check_range(name: str, value: Any, low: float, high: float, hint: str = "") -> None:
    """Raise `InvalidInputError` unless `low <= value <= high` and `value` is a number; whole when `low` is an int."""
    kinds, word = (int, "a whole number") if isinstance(low, int) else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise InvalidInputError(name, value, f"must be {word} between {low:,} and {high:,}", hint)


def check_ids(name: str, token_ids: Sequence[Any], most: int, vocab_size: int = 2**31) -> None:
    """Raise `InvalidInputError` unless there are at most `most` token ids, all different and in the vocabulary."""
    if len(token_ids) > most:
        raise InvalidInputError(name, len(token_ids), f"at most {most:,} tokens", "name fewer")
    for token in token_ids:
        check_range(name, token, 0, vocab_size - 1, "token ids are the target tokenizer's")
    if len(set(token_ids)) < len(token_ids):
        raise InvalidInputError(name, token_ids, "names a token twice", "name each token once")
