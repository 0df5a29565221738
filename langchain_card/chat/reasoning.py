"""What a model thinks before it speaks, told from what it says, while the text comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_card.text.tool_form import BLANKS, MAX_BLANKS
from langchain_card.text.tool_grammar import Thinking

OPEN, CLOSE = "<think>", "</think>"
"""Around thoughts, in the templates of Qwen 3, DeepSeek R1 and models made after them."""


_MARK_TOKENS = 8
"""Tokens at the end of a prompt that may be the mark of a thought."""


def thinking_of(tokenizer: Any, prompt_ids: Sequence[int]) -> Thinking:
    """Whether a model may think before it answers a prompt: its chat template knows the marks of thoughts."""
    if OPEN not in str(tokenizer.chat_template or ""):
        return "never"
    return "begun" if tokenizer.decode(prompt_ids[-_MARK_TOKENS:]).rstrip().endswith(OPEN) else "first"


def hidden_marks(tokenizer: Any) -> dict[int, str]:
    """The marks that are control tokens, by id: an answer's text leaves them out."""
    added = tokenizer.added_tokens_decoder.items()
    return {token_id: token.content for token_id, token in added if token.special and token.content in (OPEN, CLOSE)}


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
        begin = self._kept.lstrip(BLANKS)
        far = len(self._kept) - len(begin) > MAX_BLANKS
        if begin.startswith(OPEN) and not far:
            self._where, self._kept = "within", begin[len(OPEN) :]
        elif far or not OPEN.startswith(begin):
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
            text = text.lstrip(BLANKS)
            self._at_start = not text
        return text
