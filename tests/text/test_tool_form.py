"""How models are told of tools, calls and results: by their own templates, or written out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_card import CARDChatModel
from langchain_card.chat.schemas import tool_dicts
from langchain_card.text.prompt import encode, to_conversation
from langchain_card.text.tool_form import DONE, FENCED, NEXT, PLAN, STEP, SYSTEM, TAGGED, describe_tools, tool_form
from tests.support import tiny, vocabularies
from tests.support.scripted import add, call, weather

TOOLS = tool_dicts([add, weather])
TAGS = ("<tool_call>", "</tool_call>")
NO_RESULTS = vocabularies.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
AS_TEXT = vocabularies.CHATML.replace("call.function.arguments | tojson", "call.function.arguments | string")


def tokenizer(template: str, tags: Sequence[str] = (), *, special: bool = False) -> Any:
    found = tiny.byte_tokenizer()
    found.chat_template = template
    found.add_tokens([*tags], special_tokens=special)
    return found


def prompt(messages: Sequence[BaseMessage], template: str | None = None, tools: Any = TOOLS) -> str:
    by = tokenizer(template or tiny.byte_tokenizer().chat_template)
    return str(by.decode(encode(to_conversation(messages, "toy"), by, "toy", tools)))


# Which form.


@pytest.mark.parametrize(
    ("template", "native"),
    {
        "tags": (vocabularies.CHATML, True),
        "no tools": (vocabularies.smollm2().chat_template, False),
        "doubled braces": (vocabularies.CHATML.replace('{"name"', '{{ "{{" }}"name"'), False),
        "no descriptions": (vocabularies.CHATML.replace("{{ tool | tojson }}", "{{ tool.function.name }}"), False),
        "no results": (NO_RESULTS, False),
        "arguments of Python": (AS_TEXT, False),
        "other tags": (vocabularies.CHATML.replace("tool_call>", "call>"), False),
        "deepseek": (vocabularies.DEEPSEEK, False),
        "claude": (vocabularies.CLAUDE, False),
        "mistral": (vocabularies.MISTRAL, False),
        "gemma": (vocabularies.GEMMA, False),
        "breaks": ("{{ raise_exception('no') }}", False),
        "adds": ("{{ messages + 1 }}", False),
    }.values(),
)
def test_a_template_is_used_as_it_is_only_when_it_tells_all(template: str, native: bool) -> None:
    assert tool_form(tokenizer(template)) is (TAGGED if native else FENCED)


def test_tags_that_are_not_shown_are_not_used() -> None:
    assert tool_form(tokenizer(vocabularies.CHATML, TAGS)) is TAGGED
    assert tool_form(tokenizer(vocabularies.CHATML, TAGS, special=True)) is FENCED


# How conversations read that are written out.

CALLS = [call("add", {"a": 1, "b": 2}), {**call("weather", {"place": "Ō"}), "id": "call_2"}]
WRITTEN = (
    '```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\n'
    '```json\n{"name": "weather", "arguments": {"place": "Ō"}}\n```\n'
)
SAID = [{"type": "text", "text": "So: "}, {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}, "go"]
HISTORIES: dict[str, tuple[list[BaseMessage], str]] = {
    "parallel calls and results": (
        [
            AIMessage("", tool_calls=CALLS),
            ToolMessage("3", tool_call_id="call_1"),
            ToolMessage("rain", tool_call_id="call_2"),
        ],
        f"<assistant>{WRITTEN}<user>Result of add:\n3\n<user>Result of weather:\nrain\n",
    ),
    "results in another order": (
        [
            AIMessage("", tool_calls=CALLS),
            ToolMessage("rain", tool_call_id="call_2"),
            ToolMessage("3", tool_call_id="call_1"),
        ],
        f"<assistant>{WRITTEN}<user>Result of weather:\nrain\n<user>Result of add:\n3\n",
    ),
    "text before a call": ([AIMessage("So.", tool_calls=CALLS)], f"<assistant>So.\n{WRITTEN}"),
    "blocks": ([AIMessage(SAID, tool_calls=CALLS)], f"<assistant>So: go\n{WRITTEN}"),  # type: ignore[arg-type]
    "empty blocks": ([AIMessage([], tool_calls=CALLS)], f"<assistant>{WRITTEN}"),
    "an unknown call": ([ToolMessage("3", tool_call_id="x")], "<user>Result of the function:\n3\n"),
    "a named result": ([ToolMessage("3", tool_call_id="x", name="sub")], "<user>Result of sub:\n3\n"),
    "a result of blocks": (
        [ToolMessage([{"type": "text", "text": "日"}, "本"], tool_call_id="x")],
        "<user>Result of the function:\n日本\n",
    ),
    "a result without an id": ([ChatMessage("3", role="tool")], "<user>Result of the function:\n3\n"),
    "an error": (
        [ToolMessage("no such place", tool_call_id="x", name="weather", status="error")],
        "<user>Result of weather:\nError: no such place\n",
    ),
    "an error that says so": (
        [ToolMessage("Error invoking tool", tool_call_id="x", name="add", status="error")],
        "<user>Result of add:\nError invoking tool\n",
    ),
    "an error without words": (
        [ToolMessage("", tool_call_id="x", name="add", status="error")],
        "<user>Result of add:\nError\n",
    ),
    "a human's results": (
        [
            AIMessage("", tool_calls=CALLS[:1]),
            HumanMessage([{"type": "tool_result", "tool_use_id": "call_1", "content": "3", "is_error": True}]),
        ],
        '<assistant>```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\n<user>Result of add:\nError: 3\n',
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_that_are_written_out(name: str) -> None:
    messages, text = HISTORIES[name]
    assert prompt([HumanMessage("Q"), *messages], tools=()) == f"<user>Q\n{text}<ai>"


def test_errors_reach_templates_that_know_results() -> None:
    error = ToolMessage("no such place", tool_call_id="call_2", status="error")
    read = prompt([HumanMessage("Q"), AIMessage("", tool_calls=CALLS), error], vocabularies.CHATML)
    assert "<|im_start|>tool\nError: no such place<|im_end|>" in read
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Ō"}}\n</tool_call>' in read


@pytest.mark.parametrize(
    ("system", "begins"),
    [
        ([], SYSTEM),
        ([SystemMessage("Be terse.")], "Be terse."),
        ([SystemMessage([{"type": "text", "text": "Be "}, "terse."])], "Be terse."),
        ([SystemMessage("")], ""),
    ],
)
def test_tools_are_described_in_the_system_message(system: list[BaseMessage], begins: str) -> None:
    read = prompt([*system, HumanMessage("Q")])
    head, functions, *_ = read.partition("\n\n# Functions\n\nYou can call these functions:\n")
    assert head == f"<system>{begins}" and functions and read.endswith("in plain text.\n<user>Q\n<ai>")
    described = [json.loads(line) for line in read.splitlines() if line.startswith('{"name"') and "descr" in line]
    assert described == [tool["function"] for tool in TOOLS]
    assert '{"name": "function_name", "arguments": {"argument": "value"}}' in read
    assert prompt([*system, HumanMessage("Q")], tools=()).count("<system>") == len(system)


def test_templates_without_a_system_role_tell_the_user() -> None:
    for template, begins in ((vocabularies.GEMMA, "<start_of_turn>user\n"), (vocabularies.MISTRAL, "<s>[INST] ")):
        messages = [HumanMessage("Q"), AIMessage("", tool_calls=CALLS), *HISTORIES["an error"][0], HumanMessage("R")]
        read = prompt(messages, template)
        if template is vocabularies.GEMMA:
            assert read.startswith(begins + SYSTEM)
        assert "# Functions" in read and WRITTEN.strip() in read
        assert f"Result of weather:\nError: no such place\n\n{NEXT}\n\nR" in read


# Plans.


def planned(text: str, *results: str, called: str = "add", question: str = "Q") -> list[BaseMessage]:
    """Return a message with a call, after a text, and results with calls between them."""
    messages: list[BaseMessage] = [HumanMessage(question)]
    for number, result in enumerate(results):
        made = call("weather" if number else called, {"a": 1, "b": 2}) | {"id": f"call_{number}"}
        said = AIMessage("" if number else text, tool_calls=[made])
        messages += [said, ToolMessage(result, tool_call_id=f"call_{number}")]
    return messages


def step(name: str) -> str:
    return STEP.format(name=name, question="Q")


FINISHED = DONE.format(question="Q")


@pytest.mark.parametrize(
    ("messages", "advice"),
    [
        (planned("Plan: add, weather", "3"), step("weather")),
        (planned("\n Plan:add,weather , add\nSo.", "3"), step("weather")),
        (planned("Plan: add, weather, add", "3", "4"), step("add")),
        (planned("Plan: add", "3"), FINISHED),
        (planned("Plan: add, weather", "3", "4"), FINISHED),
        (planned("Plan: add", "3", "4"), NEXT),
        (planned("Plan: add, add", "3", "4"), NEXT),
        (planned("Plan: weather, add", "3"), NEXT),
        (planned("Plan: add, weather", "error: no"), NEXT),
        (planned("Plan: add, weather, add", "Error: no", "4"), NEXT),
        (planned("Plan: add, subtract", "3"), NEXT),
        (planned("Plan: I add.", "3"), NEXT),
        (planned("Plan:", "3"), NEXT),
        (planned("I add.", "3"), NEXT),
        (planned("Plan: add, weather", "3", question="Q" * 401), NEXT),
        ([HumanMessage("P"), *planned("Plan: add, weather", "3")], step("weather")),
        ([*planned("Plan: add, weather", "3"), AIMessage("no"), *planned("Plan: add", "3")], FINISHED),
        ([HumanMessage("Plan: add, weather"), ToolMessage("3", tool_call_id="x")], NEXT),
        ([AIMessage("Plan: add, weather"), ToolMessage("3", tool_call_id="x")], NEXT),
    ],
)
def test_results_are_followed_by_the_next_call_of_the_plan(messages: list[BaseMessage], advice: str) -> None:
    assert prompt(messages).endswith(f"\n\n{advice}\n<ai>")


def test_a_plan_is_left_out_once_its_call_is_made() -> None:
    read = prompt(planned("Plan: add, weather\nFirst I add.", "3"))
    assert read.count(PLAN) == 1 and "<assistant>First I add.\n```json" in read, "the description has its form"
    assert prompt([HumanMessage("Q"), AIMessage("Plan: add"), HumanMessage("R")]).count(PLAN) == 2


def test_the_advice_of_an_earlier_step_stays_as_it_was() -> None:
    """Prompts of later steps go on where those of earlier ones ended, so that little of them is read again."""
    messages = planned("Plan: add, weather, add", "3", "4")
    assert prompt(messages).startswith(prompt(messages[:3]).removesuffix("\n<ai>"))


def test_long_plans_are_read_once() -> None:
    """A megabyte of plan before each of 200 results took minutes when each result read all of it again."""
    messages = planned("Plan: " + "add, " * 50_000, "3") + planned("", "3")[1:] * 200
    begun = time.process_time()
    describe_tools(to_conversation(messages, "toy"), TOOLS)
    assert time.process_time() - begun < 2


def test_plans_are_requested_only_where_an_answer_may_be_text() -> None:
    by = tokenizer(tiny.byte_tokenizer().chat_template)
    turns = to_conversation([HumanMessage("Q"), *HISTORIES["parallel calls and results"][0]], "toy")
    assert PLAN in str(by.decode(encode(turns, by, "toy", TOOLS)))
    read = str(by.decode(encode(turns, by, "toy", TOOLS, planned=False)))
    assert PLAN not in read and read.endswith(f"{NEXT}\n<ai>")


@pytest.mark.parametrize("template", [vocabularies.CHATML, vocabularies.DEEPSEEK, vocabularies.GEMMA, None])
def test_no_script_is_escaped(template: str | None) -> None:
    words = "Ōsaka 大阪 🙂 é"
    told = {"type": "function", "function": {**TOOLS[1]["function"], "description": words}}
    called = AIMessage("", tool_calls=[call("weather", {"place": words, words: [words]})])
    read = prompt([HumanMessage("Q"), called, ToolMessage(words, tool_call_id="call_1")], template, [told])
    assert read.count(words) == 5 and "\\u" not in read


# Control tokens in them stay text.


def bad_history(word: str) -> Iterator[BaseMessage]:
    yield HumanMessage("Q")
    yield AIMessage(word, tool_calls=[call(f"add{word}", {"a": word, word: {"b": [word]}})])
    yield ToolMessage(word, tool_call_id="call_1", name=f"add{word}")
    yield ToolMessage(word, tool_call_id=word, status="error")


@pytest.mark.parametrize("template", [vocabularies.CHATML, vocabularies.GEMMA, None])
@pytest.mark.parametrize("word", ["<|im_end|>", "<tool_call>", "</tool_call>", "<|end|>", "<end_of_turn>", "```"])
def test_control_tokens_in_tools_calls_and_results_are_text(template: str | None, word: str) -> None:
    marks = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", *TAGS)
    by = tokenizer(template or tiny.byte_tokenizer().chat_template, marks)

    def ids(word: str) -> list[int]:
        parameters = {"type": "object", "properties": {word: {"type": "string", "description": word, "enum": [word]}}}
        told = {"type": "function", "function": {"name": "add", "description": word, "parameters": parameters}}
        return encode(to_conversation([*bad_history(word)], "toy"), by, "toy", [told])

    assert vocabularies.controls(ids(word), by) == vocabularies.controls(ids("word"), by)
    assert by.decode(ids(word)) == by.decode(ids("w-o-r-d")).replace("w-o-r-d", word)


# Token counts.


@pytest.mark.parametrize("template", [vocabularies.CHATML, vocabularies.DEEPSEEK, None])
async def test_counted_tokens_are_those_that_are_read(toy: dict[str, Any], tmp_path: Any, template: str | None) -> None:
    import transformers

    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_pretrained(toy["model"]).save_pretrained(folder)
    by = tokenizer(template or tiny.byte_tokenizer().chat_template, () if template is None else TAGS)
    by.save_pretrained(folder)
    history = [SystemMessage("Be terse."), HumanMessage("Q"), AIMessage("So.", tool_calls=CALLS)]
    history += [ToolMessage("3", tool_call_id="call_1", status="error"), HumanMessage("日本 <tool_call>?")]
    with CARDChatModel(**{**toy, "model": str(folder)}) as model:
        for tools in ([add, weather], TOOLS, [add], []):
            counted = model.get_num_tokens_from_messages(history, tools=tools)
            for options in ({"tools": tools}, {"tools": tools, "stream": True}):
                read: Any = model.invoke(history, max_tokens=1, **options)
                assert read.usage_metadata["input_tokens"] == counted
            *_, last = [chunk async for chunk in model.astream(history, tools=tools, max_tokens=1)]
            assert last.usage_metadata is not None and last.usage_metadata["input_tokens"] == counted
        assert model.get_num_tokens_from_messages(history, tools=[add]) > model.get_num_tokens_from_messages(history)
