"""What a `CARDChatModel` says of itself from files alone: its profile, and how many tokens a prompt has."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_card import CARDChatModel
from langchain_card.chat import base as contract
from langchain_card.chat.base import profile_of
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.shared import EngineLease
from langchain_card.errors import ContextOverflowError, ModelStoreError
from langchain_card.limits import Limits
from langchain_card.models import headers
from langchain_card.models.download import BUILTINS
from langchain_card.models.store import ModelStore
from langchain_card.runtime import families
from tests.support import SMALL, tiny
from tests.support.tiny import tiny_gguf

CONVERSATION = [SystemMessage("Be brief."), HumanMessage("How many?"), AIMessage("Three."), HumanMessage("Sure?")]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, socket_disabled: None) -> None:
    """Neither an engine nor a network."""

    def refuse(_: EngineLease) -> Any:
        raise AssertionError("an engine was asked for")

    monkeypatch.setattr(EngineLease, "engine", refuse)


@pytest.fixture
def hub(tmp_path: Path, toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository in the hub's cache on this machine."""
    snapshot = tmp_path / "models--someone--toy" / "snapshots" / "abc"
    shutil.copytree(toy["model"], snapshot)
    (tmp_path / "models--someone--toy" / "refs").mkdir()
    (tmp_path / "models--someone--toy" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    return "someone/toy"


# Profiles


def test_profiles_are_read_without_torch() -> None:
    code = """if True:
        import sys
        from langchain_card import CARDChatModel
        print(CARDChatModel(model=sys.argv[1], draft_model=None).profile["max_input_tokens"])
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    run = subprocess.run([sys.executable, "-c", code, SMALL], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.strip() == str(8192 - 16 - 1)


def test_what_it_can_do(toy: dict[str, Any]) -> None:
    profile = CARDChatModel(**toy).profile
    assert profile is not None
    tools = {"tool_calling", "tool_choice", "tool_call_streaming", "structured_output"}
    expected = {"text_inputs", "text_outputs", "temperature", *tools}
    assert {name for name, value in profile.items() if value is True} == expected
    assert profile["max_input_tokens"] == profile["max_output_tokens"] == 2048 - 16 - 1
    given = CARDChatModel(**toy, profile={"max_input_tokens": 5}).profile
    assert given == {"max_input_tokens": 5}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_model_len": 100},
        {"max_model_len": 64, "limits": Limits(max_window=4)},
        {"max_model_len": 80, "limits": Limits(max_output_tokens=20)},
    ],
)
def test_the_limits_are_the_engines_own(toy: dict[str, Any], fields: dict[str, Any]) -> None:
    with CARDChatModel(**{**toy, **fields, "max_tokens": 8}) as model:
        assert model.profile is not None
        most, longest = model.profile["max_input_tokens"], model.profile["max_output_tokens"]
        engine: Engine = model.load()._engine()
        params = SamplingParams(max_tokens=9)
        assert engine.submit([65] * most, params).result().stats.output_tokens == 1
        with pytest.raises(ContextOverflowError):
            engine.submit([65] * (most + 1), params)
        asked = min(longest + 50, model.limits.max_output_tokens)
        params = SamplingParams(max_tokens=asked, banned_ids=engine.eos_ids)
        assert engine.submit([65], params).result().stats.output_tokens == longest


@pytest.mark.parametrize("name", tiny.CONFIGS | tiny.FAMILIES)
def test_config_files_say_what_transformers_reads_from_them(name: str, tmp_path: Path) -> None:
    config = (tiny.CONFIGS | tiny.FAMILIES)[name]()
    config.save_pretrained(tmp_path)
    assert headers.context_length(str(tmp_path)) == families.context_length(config)


LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32, "short_factor": [1], "long_factor": [2]}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 3}, 64),
        ({"n_positions": 48}, 48),
        ({"max_position_embeddings": 64, "rope_parameters": LONG_ROPE}, 32),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": LONG_ROPE}}, 32),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "longrope"},
            },
            16,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2}}, 64),
        ({}, None),
        ([], None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": -5}, None),
        ({"max_position_embeddings": 64, "rope_scaling": "no"}, None),
    ],
)
def test_odd_configs(tmp_path: Path, config: Any, length: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert headers.context_length(str(tmp_path)) == length
    profile = CARDChatModel(model=str(tmp_path), draft_model=None).profile
    assert profile is not None and profile["text_inputs"]
    assert profile.get("max_input_tokens") == (None if length is None else max(length - 17, 0))


def test_odd_folders(tmp_path: Path) -> None:
    assert headers.context_length(str(tmp_path)) is None
    (tmp_path / "config.json").write_bytes(b"\xff[")
    assert headers.context_length(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "x": "' + "y" * (1 << 20) + '"}')
    assert headers.context_length(str(tmp_path)) is None, "a config of a megabyte is none"
    assert headers.context_length("nobody/has-this") is None
    profile = profile_of(EngineConfig(model=str(tmp_path), max_model_len=100))
    assert profile["max_input_tokens"] == 83, "what the user says is known"


def test_gguf_headers(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf")
    assert headers.context_length(str(path)) == 32
    whole = path.read_bytes()
    for cut in (0, 3, 20, 40, 100):
        path.write_bytes(whole[:cut])
        assert headers.context_length(str(path)) is None
    path.write_bytes(b"GGML" + whole[4:])
    assert headers.context_length(str(path)) is None


def test_the_table_of_built_in_models_is_that_of_their_files() -> None:
    found = [name for name in BUILTINS if ModelStore()._source(name).exists()]
    assert SMALL in found
    for name in found:
        assert headers.context_length(str(ModelStore()._source(name))) == BUILTINS[name].context_length


def test_models_in_the_hubs_cache(hub: str) -> None:
    assert headers.context_length(hub) == 2048
    assert CARDChatModel(model=hub, draft_model=None).profile["max_input_tokens"] == 2031  # type: ignore[index]


# Token counts


def test_counts_are_those_of_the_answers(
    toy: dict[str, Any], no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CARDChatModel(**toy) as model:
        counted = model.get_num_tokens_from_messages(CONVERSATION)
        assert model.get_token_ids("abc") == tiny.byte_tokenizer()("abc").input_ids
        assert model.get_num_tokens("abc") == 3
        monkeypatch.undo()
        usage = model.invoke(CONVERSATION).usage_metadata
    assert usage is not None and usage["input_tokens"] == counted


def test_counting_loads_no_weights_of_a_built_in_model(no_weights: None) -> None:
    model = CARDChatModel(model=SMALL, draft_model="ngram")
    assert model.get_num_tokens("one two three") == 3
    assert model.get_num_tokens_from_messages([HumanMessage("one two three")]) > 10


def test_counting_works_offline_with_models_of_the_hubs_cache(hub: str, no_weights: None) -> None:
    model = CARDChatModel(model=hub, draft_model=None)
    assert model.get_num_tokens_from_messages([HumanMessage("hi")]) > 2


def test_a_gguf_files_tokenizer_needs_no_conversion(tmp_path: Path, no_weights: None) -> None:
    store = ModelStore(tmp_path)
    source = tmp_path / "models" / SMALL / "source.gguf"
    source.parent.mkdir(parents=True)
    source.symlink_to(ModelStore().pull(SMALL))
    assert store.tokenizer_source(SMALL) == source
    copy = tmp_path / "mine.gguf"
    copy.symlink_to(source)
    assert store.tokenizer_source(str(copy)) == copy.resolve()


@pytest.mark.slow
def test_a_conversions_tokenizer_is_that_of_the_gguf_file() -> None:
    from langchain_card.models.tokenizer import read_tokenizer

    converted = ModelStore().prepare(SMALL, "file")
    from_gguf = read_tokenizer(ModelStore().pull(SMALL))
    assert ModelStore().tokenizer_source(SMALL).parent == converted.parent
    text = "def f(x):\n    return x  # \u4e2d\u6587"
    assert read_tokenizer(converted).encode(text) == from_gguf.encode(text)
    assert read_tokenizer(converted).chat_template == from_gguf.chat_template


def test_tokenizers_are_read_once_and_anew_when_their_files_change(tmp_path: Path, toy: dict[str, Any]) -> None:
    from langchain_card.models.tokenizer import read_tokenizer

    folder = shutil.copytree(toy["model"], tmp_path / "model")
    first = read_tokenizer(folder)
    assert read_tokenizer(folder) is first
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    template.write_text("{{ 'changed' }}") if template.exists() else config.update(chat_template="{{ 'changed' }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_tokenizer(folder).chat_template == "{{ 'changed' }}"


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, toy: dict[str, Any]) -> None:
    folder = shutil.copytree(toy["model"], tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelStoreError, match=r"tokenizer = .*transformers cannot read it"):
        CARDChatModel(model=str(folder), draft_model=None).get_num_tokens("hi")


class Weather(BaseModel):
    """The weather of a place."""

    place: str


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_tools_are_counted_as_the_template_is_given_them(
    toy: dict[str, Any], no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def encode(conversation: Sequence[Any], tokenizer: Any, model: str, **options: Any) -> list[int]:
        seen.append(options)
        return [1] * (5 + len(options.get("tools", ())))

    monkeypatch.setattr(contract, "encode", encode)
    model = CARDChatModel(**toy)
    assert model.get_num_tokens_from_messages(CONVERSATION) == 5
    assert model.get_num_tokens_from_messages(CONVERSATION, tools=[]) == 5
    assert model.get_num_tokens_from_messages(CONVERSATION, tools=[Weather, add]) == 7
    assert seen[0] == seen[1] == {"tools": []}
    assert [given["function"]["name"] for given in seen[2]["tools"]] == ["Weather", "add"]
    assert {given["type"] for given in seen[2]["tools"]} == {"function"}


@pytest.fixture(scope="module")
def own(toy: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**toy, custom_get_token_ids=lambda text: [7] * 5) as model:
        yield model


def test_a_function_of_the_users_counts_texts(own: CARDChatModel, no_weights: None) -> None:
    assert own.get_token_ids("x") == [7] * 5
    assert own.get_num_tokens("x") == 5


def test_a_template_that_knows_thoughts_shows_in_the_profile(toy: dict[str, Any], tmp_path: Path) -> None:
    assert CARDChatModel(**toy).profile["reasoning_output"] is False  # type: ignore[index]
    folder = shutil.copytree(toy["model"], tmp_path / "thinker")
    (folder / "chat_template.jinja").write_text("{% if thinking %}<think>{% endif %}")
    assert CARDChatModel(**{**toy, "model": str(folder)}).profile["reasoning_output"] is True  # type: ignore[index]
