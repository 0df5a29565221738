"""`ToolsAndSchemas`: chat models that call tools and answer with objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableBranch, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from typing_extensions import override

from langchain_card.chat.base import ChatContract
from langchain_card.chat.error_mapping import langchain_errors
from langchain_card.chat.parameters import is_pydantic
from langchain_card.chat.schemas import response_format_dict, tool_choice_form, tool_dict, tool_dicts
from langchain_card.constraints.compiler import check_package
from langchain_card.errors import InvalidInputError, check_choice

_METHODS = ("json_schema", "function_calling", "json_mode")


class ToolsAndSchemas(ChatContract):
    """A chat model with `bind_tools` and `with_structured_output`, which check tools and schemas at once."""

    @override
    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call.

        Args:
            tools: LangChain tools, functions, pydantic classes, TypedDicts, or dicts in a form that LangChain knows.
            tool_choice: `"auto"` or None leaves the choice to the model; `"any"`, `"required"` or True requires a call,
                a tool's name a call of this tool; `"none"` forbids calls. OpenAI's dicts are accepted, too.
            strict: True makes each property of the arguments required and allows no others, as with OpenAI.
            parallel_tool_calls: False allows one call per answer.
            **kwargs: other options of each call, such as `response_format` or `temperature`.

        Raises:
            InvalidInputError: a tool cannot be read, the chosen tool does not exist, an option is unknown, or the
                package llguidance is missing.
        """
        with langchain_errors():
            options: dict[str, Any] = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, **kwargs}
            dicts = tool_dicts(tools, strict, distinct=False)  # LangChain's tests bind some twice; calls refuse them
            tool_choice_form(tool_choice, dicts)
            if dicts:
                check_package("tools")
            if not isinstance(parallel_tool_calls, bool | None):
                raise InvalidInputError("parallel_tool_calls", parallel_tool_calls, "must be True, False or None")
            if kwargs.get("response_format") is not None:
                options["response_format"] = response_format_dict(kwargs["response_format"])
        return self.bind(tools=dicts, **{name: value for name, value in options.items() if value is not None})

    @override
    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers that are objects of a schema.

        Args:
            schema: a pydantic class (of version 2 or 1), for instances of it; or a TypedDict, a JSON schema or a tool's
                dict, for dicts. It may be None for `json_mode`.
            method: `"json_schema"` writes JSON by the schema, `"function_calling"` calls a tool with these arguments,
                `"json_mode"` is another name of `"json_schema"`.
            include_raw: whether to return `{"raw": message, "parsed": object, "parsing_error": error}`, with None for
                a missing object or error.
            strict: for `function_calling` as in `bind_tools`; for `json_schema`, True refuses a schema of which a part
                cannot be enforced.
            tools: tools that may be called instead; `parsed` is then None. They need `include_raw=True`.
            **kwargs: other options of each call.

        Raises:
            InvalidInputError: the schema cannot be read, the method or an option is unknown, or the package llguidance
                is missing.
        """
        with langchain_errors():
            check_choice("method", method, _METHODS)
            check_package("schema")
            if schema is None and method != "json_mode":
                raise InvalidInputError("schema", schema, f"is needed by {method}", "json_mode does without one")
            if tools is not None and (method == "function_calling" or not include_raw):
                hint = "leave method as it is and set include_raw=True"
                raise InvalidInputError("tools", tools, "would have their calls taken for the answer", hint)
            traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
            options = {"ls_structured_output_format": traced, **kwargs}
            parser: Runnable[Any, Any]
            if method == "function_calling":
                tool = tool_dict(schema, strict, "schema")
                choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
                options = {"tool_choice": choice, "parallel_tool_calls": False, **options}
                model, parser = self.bind_tools([tool], **options), _call_parser(schema, tool)
            else:
                options["response_format"] = _format(schema, strict)
                model = self.bind(**options) if tools is None else self.bind_tools(tools, strict=strict, **options)
                parser = _text_parser(schema)
                parser = parser if tools is None else RunnableBranch((_calls, lambda _: None), parser)
        return _with_raw(model, parser) if include_raw else model | parser


def _format(schema: Any, strict: bool | None) -> dict[str, Any]:
    form = {"type": "json_object"} if schema is None else response_format_dict(schema, strict, "schema")
    if schema is not None and form["type"] != "json_schema":
        raise InvalidInputError("schema", schema, "holds no schema", "use json_mode without a schema for any object")
    return form


def _text_parser(schema: Any) -> Runnable[Any, Any]:
    return PydanticOutputParser(pydantic_object=schema) if is_pydantic(schema) else JsonOutputParser()


def _call_parser(schema: Any, tool: Mapping[str, Any]) -> Runnable[Any, Any]:
    if is_pydantic(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=tool["function"]["name"], first_tool_only=True)


def _calls(message: AIMessage) -> bool:
    return bool(message.tool_calls)


def _with_raw(model: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    raw = model | RunnableMap(raw=RunnablePassthrough())  # options of a call go to the first step
    return raw | parsed.with_fallbacks([unparsed], exception_key="parsing_error")
