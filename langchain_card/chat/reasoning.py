"""`Thoughts`: separates a model's reasoning from its answer while the text is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_card.text.tool_form import BLANKS, MAX_BLANKS
from langchain_card.text.tool_grammar import Thinking

OPEN, CLOSE = "<think>", "</think>"
"""Marks around thoughts in the templates of Qwen 3, DeepSeek R1 and later models of their kind."""

_MARK_TOKENS = 8
"""Tokens at the end of a prompt that are searched for the mark of a thought."""


def thinking_of(tokenizer: Any, prompt_ids: Sequence[int]) -> Thinking:
    """Return whether an answer may begin with a thought: the chat template then contains the marks of thoughts."""
    if OPEN not in str(tokenizer.chat_template or ""):
        return "never"
    return "begun" if tokenizer.decode(prompt_ids[-_MARK_TOKENS:]).rstrip().endswith(OPEN) else "first"


def without_thought(tokenizer: Any, prompt_ids: Sequence[int]) -> list[int]:
    """Return tokens after which an answer begins without a thought; none if the model does not think."""
    text = {"never": "", "first": f"{OPEN}\n\n{CLOSE}\n\n", "begun": f"\n{CLOSE}\n\n"}[
        thinking_of(tokenizer, prompt_ids)
    ]
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def hidden_marks(tokenizer: Any) -> dict[int, str]:
    """Return the marks that are control tokens, by id; they are missing from an answer's text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token_id: token.content for token_id, token in added if token.special and token.content in (OPEN, CLOSE)}


class Thoughts:
    """A splitter of one answer into thought and content.

    Args:
        begun: whether the prompt already ends within a thought, as in some templates.

    Attributes:
        num_tokens: pieces of the thought so far.
    """

    def __init__(self, *, begun: bool = False) -> None:
        self._where: Literal["before", "within", "behind"] = "within" if begun else "before"
        self._pending = ""  # may become a mark
        self._at_start = True  # of the thought or of the content after it, where blanks are left out
        self.num_tokens = 0

    def push(self, text: str) -> tuple[str, str]:
        """Add a piece of the answer; return the thought and the content that are certain now."""
        self._pending += text
        thought = content = ""
        if self._where == "before":
            self._find_opening()
        if self._where == "within":
            self.num_tokens += 1
            thought = self._take_thought()
        if self._where == "behind":
            content, self._pending = self._without_first_blanks(self._pending), ""
        return thought, content

    def finish(self) -> tuple[str, str]:
        """Return the thought and the content that were held back until the end of the answer."""
        rest, self._pending = self._pending, ""
        return (rest, "") if self._where == "within" else ("", rest)

    def _find_opening(self) -> None:
        text = self._pending.lstrip(BLANKS)
        too_late = len(self._pending) - len(text) > MAX_BLANKS
        if text.startswith(OPEN) and not too_late:
            self._where, self._pending = "within", text[len(OPEN) :]
        elif too_late or not OPEN.startswith(text):
            self._where, self._at_start = "behind", False

    def _take_thought(self) -> str:
        thought, mark, rest = self._pending.partition(CLOSE)
        if not mark:
            open_ = next((n for n in range(len(CLOSE) - 1, 0, -1) if thought.endswith(CLOSE[:n])), 0)
            thought, rest = thought[: len(thought) - open_], thought[len(thought) - open_ :]
        thought, self._pending = self._without_first_blanks(thought), rest
        if mark:
            self._where, self._at_start = "behind", True
        return thought

    def _without_first_blanks(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip(BLANKS)
            self._at_start = not text
        return text
