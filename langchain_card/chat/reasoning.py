"""What a model thinks before it speaks, told from what it says, while the text comes."""

from __future__ import annotations

from typing import Any, Literal

OPEN, CLOSE = "<think>", "</think>"
"""Around thoughts, in the templates of Qwen 3, DeepSeek R1 and models made after them."""


def thinks(tokenizer: Any) -> bool:
    """Whether a model marks its thoughts: its chat template knows how."""
    return OPEN in str(tokenizer.chat_template or "")


class Thoughts:
    """Splits one answer.

    Args:
        begun: whether the prompt ends within a thought already, as some templates have it.

    Attributes:
        num_tokens: pieces so far that ended within the thought.
    """

    def __init__(self, *, begun: bool = False) -> None:
        self._where: Literal["before", "within", "behind"] = "within" if begun else "before"
        self._kept = ""  # may become a mark
        self._at_start = True  # of the thought, or of what is said after it: blank space is left out
        self.num_tokens = 0

    def push(self, text: str) -> tuple[str, str]:
        """Takes a piece of the answer; what was thought and what was said in it."""
        self._kept += text
        thought = said = ""
        if self._where == "before":
            self._look_for_the_mark()
        if self._where == "within":
            self.num_tokens += 1
            thought = self._until_the_mark()
        if self._where == "behind":
            said, self._kept = self._from_start(self._kept), ""
        return thought, said

    def finish(self) -> tuple[str, str]:
        """What was kept back, at the end of the answer."""
        rest, self._kept = self._kept, ""
        return (rest, "") if self._where == "within" else ("", rest)

    def _look_for_the_mark(self) -> None:
        begin = self._kept.lstrip()
        if begin.startswith(OPEN):
            self._where, self._kept = "within", begin[len(OPEN) :]
        elif not OPEN.startswith(begin):
            self._where, self._at_start = "behind", False

    def _until_the_mark(self) -> str:
        thought, mark, rest = self._kept.partition(CLOSE)
        if not mark:
            open_ = next((n for n in range(len(CLOSE) - 1, 0, -1) if thought.endswith(CLOSE[:n])), 0)
            thought, rest = thought[: len(thought) - open_], thought[len(thought) - open_ :]
        thought, self._kept = self._from_start(thought), rest
        if mark:
            self._where, self._at_start = "behind", True
        return thought

    def _from_start(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text
