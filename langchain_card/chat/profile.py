"""Capabilities of a chat model as LangChain's `ModelProfile`, read without loading weights."""

from __future__ import annotations

from langchain_core.language_models.model_profile import ModelProfile

from langchain_card.chat.reasoning import OPEN
from langchain_card.config import EngineConfig
from langchain_card.models.headers import DEFAULT_MAX_LEN, chat_template, context_length


def profile_of(config: EngineConfig) -> ModelProfile:
    """Return the profile of the model that an engine of this configuration runs.

    `max_input_tokens` is the longest prompt that the engine accepts, `max_output_tokens` the longest answer; both are
    left out if the model's files do not state the length of its context.
    """
    profile = ModelProfile(
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=OPEN in chat_template(config.model),
        tool_calling=True,
        tool_choice=True,
        tool_call_streaming=True,
        structured_output=True,
        temperature=True,
    )
    trained = context_length(config.model)
    length = config.max_model_len or (trained and DEFAULT_MAX_LEN)
    if length is not None:
        room = min(length, trained or length) - config.limits.max_window - 1  # and a token for answer or prompt
        profile["max_input_tokens"] = max(room, 0)
        profile["max_output_tokens"] = max(min(room, config.limits.max_output_tokens), 0)
    return profile
