"""A hook of mkdocs: writes tables from the code where a page has `<!-- generated: NAME -->`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ |= {"LANGCHAIN_CARD_MODEL": "", "LANGCHAIN_CARD_DRAFT_MODEL": ""}  # defaults are the package's

from mkdocs.exceptions import PluginError

from langchain_card import CARDChatModel, cli, errors
from langchain_card.chat import answer, field_docs, sampling_options
from langchain_card.chat import error_mapping as boundary
from langchain_card.config import Limits
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.serve import error_bodies as problems
from langchain_card.serve import metrics

MARK = re.compile(r"^<!-- generated: (\w+) -->$(?:\n\*Only the site has .*)?", re.MULTILINE)
CALL_WORDS: Mapping[str, str] = {
    "stop": "Strings that end the answer, in place of the field's.",
    "max_completion_tokens": "The same as `max_tokens`.",
    "model": "Another target for this call; it is loaded, and kept until `close()`.",
    "draft_model": "Another draft for this call; None for plain decoding.",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "See `bind_tools`."),
    "response_format": "A JSON schema that the answer obeys, in OpenAI's form; `with_structured_output` writes it.",
}
CARD_WORDS: Mapping[str, str] = {
    "adapter": "Name of the target's adapter; only if the call chose one.",
    "lossy": "Whether the rule in force may put tokens into this answer that the target did not choose.",
    "rescued": "Accepted candidates that the target did not choose; only if `lossy` is true.",
    "resumed": "How often another engine went on with the answer, by reason: the one before `died` or `left` (also "
    "where the reader had paused); `other machine` as well if it rounds otherwise than the engine that began the "
    "answer does. Only if that happened.",
    "waited": "Share of the time after the first token in which rounds waited for their draft.",
    "verified_by_source": "Candidates that the target checked, by drafter; one of several counts for the first.",
    "accepted_by_source": "Candidates that became tokens of the answer, by drafter.",
    "draft_busy": "Share of the time after the first token in which the draft took steps.",
    "target_busy": "Share of the time after the first token in which the target took steps.",
    "seed": "Seed of the draw; chosen for the call if none was given.",
    "time_to_first_token": "Seconds from the call to the first token: work on the prompt, queueing and reading. "
    "`load_time` is apart.",
    "load_time": "Seconds that the call waited for weights; near 0 if they were loaded.",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its tables; an unknown name (`KeyError`) or a missing description ends the build."""
    return MARK.sub(lambda found: TABLES[found[1]](), markdown)


def table(heads: str, lines: Iterable[tuple[str, ...]]) -> str:
    """Return a table; the last cell of each row is the description, and may not be empty."""
    written = [f"| {heads} |", re.sub(r"[^|]+", " --- ", f"|{heads}|")]
    for line in lines:
        if not line[-1].strip():
            raise PluginError(f"{line[0]} says nothing of itself")
        written.append("| " + " | ".join(" ".join(cell.split()) for cell in (*line[:-1], sentence(line[-1]))) + " |")
    return "\n".join(written)


def sentence(text: str) -> str:
    """Add a capital and a full stop."""
    return text[0].upper() + text[1:] + "." * (text[-1] not in ".!?")


def code(value: object) -> str:
    """Format as code; an empty value stays empty."""
    return f"`{value}`" if value else ""


def fields() -> str:
    """Return the fields of the chat model, its own first."""
    infos = sorted(CARDChatModel.model_fields.items(), key=lambda named: named[0] in field_docs.INHERITED)
    lines = []
    for name, info in infos:
        kind = re.sub(r"[a-z_]+\.", "", inspect.formatannotation(info.annotation))
        default = field_docs._default(info).removeprefix("default ")
        lines.append((code(name), code(kind), code(default), field_docs.described(name, info)))
    return table("field | type | default | meaning", lines)


def limits() -> str:
    """Return the table of the fields of `Limits`."""
    words = field_docs.attribute_docs(Limits)
    names = ((field.name, field.default) for field in dataclasses.fields(Limits))
    return table("bound | default | meaning", ((code(name), code(default), words[name]) for name, default in names))


def calls() -> str:
    """Return the table of the options of a call."""
    own = sampling_options.SamplingOptions.model_fields
    words = {name: f"{info.description}" for name, info in own.items()} | CALL_WORDS
    names = dict.fromkeys([*own, *sampling_options._CALL_OPTIONS])
    return table("option | meaning", ((code(name), words.get(name, "")) for name in names))


def card() -> str:
    """Return the keys of `response_metadata["card"]`, described as in `RequestStats` where they are the same."""
    words = field_docs.attribute_docs(RequestStats)
    words |= {name: each.__doc__ for name, each in vars(RequestStats).items() if isinstance(each, property)}
    keys = answer.statistics(RequestStats(lossy=True, resumed={"died": 1}), SamplingParams(adapter="tuned"), called=0.0)
    return table("key | meaning", ((code(key), CARD_WORDS.get(key) or words.get(key, "")) for key in keys))


def counted() -> str:
    """Return the table of the metrics."""
    registry, lines = metrics.Metrics()._registry, []
    labels = {name: each._labelnames for each, names in registry._collector_to_names.items() for name in names}
    for each in registry.collect():
        name = code(each.name + "_total" * (each.type == "counter"))
        lines.append((name, each.type, ", ".join(map(code, labels[each.name])), each.documentation))
    return table("metric | kind | labels | meaning", lines)


def error_table() -> str:
    """Return the tree of errors, with LangChain's class and the server's answer for each."""
    tree, lines = inspect.cleandoc(errors.__doc__ or "").split("```")[1].strip("\n"), []
    for kind in (each for name, each in vars(errors).items() if name.endswith("Error")):
        combined = boundary.langchain_kind(kind).__mro__
        known = next(base.__name__ for base in combined if base.__module__.startswith("langchain_core"))
        seen = problems.problem_of(kind("field", "value", "limit"), "prompt")
        lines.append((code(kind.__name__), code(known), f"{seen.status} {code(seen.code)}", kind.__doc__ or ""))
    return f"```text\n{tree}\n```\n\n" + table("error | LangChain's kind | over HTTP | meaning", lines)


def commands() -> str:
    """Return every command with its options, read from the parsers: each Python lays out `--help` differently."""
    parser = argparse.ArgumentParser(prog="langchain-card")
    subparsers = parser.add_subparsers()
    for name in cli.COMMANDS:
        importlib.import_module(f"{cli.__name__}.{name}").register(subparsers)
    return "\n\n".join(command_parts(parser))


def command_parts(parser: argparse.ArgumentParser, said: str = "") -> Iterator[str]:
    """Return the heading, the description and the table of a command, then of its subcommands."""
    within = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if said:
        yield f"## {code(parser.prog)}\n\n{sentence(said)}"
    if lines := [option(each) for each in parser._actions if said and each not in within and each.dest != "help"]:
        yield table("option | value | meaning", lines)
    for action in within:
        for listed in action._choices_actions:
            yield from command_parts(action.choices[listed.dest], listed.help or "")


def option(action: argparse.Action) -> tuple[str, str, str]:
    """Return a row: names, value and meaning of an option."""
    takes = action.metavar or action.dest.upper()
    value = ", ".join(map(code, action.choices or [takes])) if action.option_strings and action.nargs != 0 else ""
    words = (action.help or "%(default)s where it is not said") % {**vars(action), "prog": "langchain-card"}
    return ", ".join(map(code, action.option_strings or [takes])), value, words


FOLDERS = (
    "", "core", "constraints", "runtime", "runtime/cpu", "runtime/cpu/blocks", "models", "text", "heads", "acceptance",
    "drafters", "drafters/ngram", "engine", "engine/transports", "engine/relay", "engine/isolated", "train", "chat",
    "decisions", "testing", "bench", "bench/peers", "serve", "serve/openai", "serve/langserve", "serve/page", "cluster",
    "cli",
)  # fmt: skip
"""The folders of the package, in the order of its layers."""


def module_tables() -> str:
    """Return every module with the first line of its docstring, one table per folder; an unlisted folder fails."""
    package, parts = Path(errors.__file__).parent, []
    found = {path.parent.relative_to(package).as_posix().removeprefix(".") for path in package.rglob("*.py")}
    if found != {*FOLDERS}:
        raise PluginError(f"folders of the package and of docs/modules.md differ: {sorted(found ^ {*FOLDERS})}")
    for folder in FOLDERS:
        lines = []
        for path in sorted((package / folder).glob("*.py")):
            words = ast.get_docstring(ast.parse(path.read_text())) or ""
            if not path.name.startswith("_"):
                lines.append((code(path.name), words.split("\n\n")[0]))
        parts.append(f"## {folder or 'langchain_card'}/\n\n" + table("module | what it is", lines))
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    "fields": fields, "limits": limits, "calls": calls, "card": card, "metrics": counted, "errors": error_table,
    "commands": commands, "modules": module_tables,
}  # fmt: skip
