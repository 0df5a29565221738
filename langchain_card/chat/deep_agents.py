"""The harness of deepagents for this package's models, which deepagents finds by two entry points.

`ShortTools` is for every model of the provider `card`, whatever its size: deepagents' file tools are described in one
line each. `PlannedSteps` is for the built-in models, which are too small to see a task of several steps through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, cast

from deepagents import (
    GeneralPurposeSubagentProfile,
    HarnessProfile,
    ProviderProfile,
    register_harness_profile,
    register_provider_profile,
)
from langchain.agents.middleware import AgentMiddleware, AgentState, ExtendedModelResponse, ModelRequest, ModelResponse
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.constants import TAG_NOSTREAM
from langgraph.types import Command
from typing_extensions import NotRequired, TypedDict, override

from langchain_card.errors import InvalidInputError
from langchain_card.models.download import BUILTINS

PROVIDER = "card"
"""The provider of `CARDChatModel` in LangChain's terms."""

SUFFIX = "You work with functions. Paths of files are absolute, such as /notes.txt."
"""The end of the system message."""

MAX_STEPS = 8
"""Most steps of a plan."""

MAX_INSTRUCTION = 200
"""Most characters of a step's instruction."""

_PLAN = """\
Split the task of the user into its steps, in their order. Each step is one call of one function:
{functions}"""
_INSTRUCTION = "a sentence that says what to do in this step, with all names, paths and texts that it needs"
_STEP = "Do step {number} of {count} now: {instruction}"
_END = "All steps are done. Answer in one sentence."


def register_harness() -> None:
    """Register `ShortTools` for the provider, and `PlannedSteps` for the built-in models.

    There is no subagent unless the caller of `create_deep_agent` passes some. Tools of the caller stay as they are,
    whatever their names.
    """
    subagent = GeneralPurposeSubagentProfile(enabled=False)
    short = HarnessProfile(
        system_prompt_suffix=SUFFIX, extra_middleware=[ShortTools()], general_purpose_subagent=subagent
    )
    register_harness_profile(PROVIDER, short)
    for name in BUILTINS:
        register_harness_profile(f"{PROVIDER}:{name}", HarnessProfile(extra_middleware=[PlannedSteps()]))


def register_provider() -> None:
    """Register an error for names such as "card:smollm2-135m": LangChain has a closed list of such providers."""
    register_provider_profile(PROVIDER, ProviderProfile(pre_init=_refuse))


def _refuse(name: str) -> None:
    model = name.partition(":")[2]
    raise InvalidInputError("model", name, "cannot be made from a name", f"pass CARDChatModel(model={model!r})")


Request = ModelRequest[Any]
Response = ModelResponse[Any]


class ShortTools(AgentMiddleware[Any, Any, Any]):
    """Shortens deepagents' file tools: the first line of each description, and no descriptions of parameters."""

    @override
    def wrap_model_call(self, request: Request, handler: Callable[[Request], Response]) -> Response:
        return handler(_with_short_tools(request))

    @override
    async def awrap_model_call(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
        return await handler(_with_short_tools(request))


def _with_short_tools(request: Request) -> Request:
    return request.override(tools=[_short(tool) for tool in request.tools])


def _short(tool: BaseTool | dict[str, Any]) -> BaseTool | dict[str, Any]:
    """Return a file tool of deepagents with short texts, and any other tool as it is."""
    schema: Any = getattr(tool, "args_schema", None)
    if not isinstance(tool, BaseTool) or getattr(schema, "__module__", "") != "deepagents.middleware.filesystem":
        return tool
    parameters = _without_texts(schema.model_json_schema())
    return tool.model_copy(update={"description": tool.description.partition("\n")[0], "args_schema": parameters})


def _without_texts(schema: Any) -> Any:
    """Return a JSON schema without its titles and descriptions; properties of these names stay."""
    if isinstance(schema, list):
        return [_without_texts(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_texts(part) for key, part in schema.items() if not _is_text(key, part)}


def _is_text(key: str, part: Any) -> bool:
    return key in ("title", "description") and isinstance(part, str)


class Step(TypedDict):
    """A step of a plan.

    Attributes:
        instruction: what is to be done.
        function: name of the tool that does it.
    """

    instruction: str
    function: str


class PlanState(AgentState[Any]):
    """The state of an agent, and the plan for the last message of the user."""

    plan: NotRequired[Annotated[list[Step], PrivateStateAttr]]


class PlannedSteps(AgentMiddleware[PlanState, Any, Any]):
    """Splits a task into steps with a tool each, requires one call for each, and then an answer in text.

    A small model chooses and fills one call well, but stops after the first. Here it first writes a plan, whose form is
    enforced. Then each step's tool is its `tool_choice`, with the step as the last message. The messages that say so
    are in requests only, not in the state. A step whose tool fails is not repeated.
    """

    state_schema = PlanState

    @override
    def wrap_model_call(
        self, request: Request, handler: Callable[[Request], Response]
    ) -> Response | ExtendedModelResponse[Any]:
        if not _is_first(request):
            return handler(_for_step(request, _plan(request)))
        plan = _planner(request).invoke(_planning(request))["steps"]
        return _with_plan(handler(_for_step(request, plan)), plan)

    @override
    async def awrap_model_call(
        self, request: Request, handler: Callable[[Request], Awaitable[Response]]
    ) -> Response | ExtendedModelResponse[Any]:
        if not _is_first(request):
            return await handler(_for_step(request, _plan(request)))
        plan = (await _planner(request).ainvoke(_planning(request)))["steps"]
        return _with_plan(await handler(_for_step(request, plan)), plan)


def _plan(request: Request) -> list[Step]:
    return cast(PlanState, request.state).get("plan", [])


def _with_plan(response: Response, plan: list[Step]) -> ExtendedModelResponse[Any]:
    return ExtendedModelResponse(model_response=response, command=Command(update={"plan": plan}))


def _num_results(request: Request) -> int:
    """Count the results of tools after the user's last message."""
    types = [message.type for message in request.messages]
    return types[len(types) - types[::-1].index("human") :].count("tool") if "human" in types else 0


def _is_first(request: Request) -> bool:
    """Return whether a task begins, and tools may be called."""
    return bool(request.tools) and not request.tool_choice and _num_results(request) == 0


def _functions(request: Request) -> dict[str, str]:
    """Return the names of the tools, and what each is for."""
    functions = [convert_to_openai_tool(tool)["function"] for tool in request.tools]
    return {function["name"]: function.get("description", "").partition("\n")[0] for function in functions}


def _planner(request: Request) -> Runnable[Any, Any]:
    """Return the model, whose answers are plans."""
    step = {
        "type": "object",
        "properties": {
            "instruction": {"type": "string", "maxLength": MAX_INSTRUCTION, "description": _INSTRUCTION},
            "function": {"enum": [*_functions(request)]},
        },
        "required": ["instruction", "function"],
        "additionalProperties": False,
    }
    steps = {"type": "array", "maxItems": MAX_STEPS, "items": step}
    properties = {"title": "plan", "type": "object", "properties": {"steps": steps}, "required": ["steps"]}
    planner = request.model.with_structured_output({**properties, "additionalProperties": False})
    return planner.with_config(run_name="plan", tags=[TAG_NOSTREAM])  # not in streams of messages


def _planning(request: Request) -> list[AnyMessage]:
    lines = [f"- {name}: {use}" for name, use in _functions(request).items()]
    return [SystemMessage(_PLAN.format(functions="\n".join(lines))), *request.messages]


def _for_step(request: Request, plan: Sequence[Step]) -> Request:
    """Return the request for the next step of a plan, or for the answer after the last."""
    done = _num_results(request)
    if not plan or request.tool_choice:
        return request
    if done < len(plan):
        text = _STEP.format(number=done + 1, count=len(plan), instruction=plan[done]["instruction"])
        return request.override(messages=[*request.messages, HumanMessage(text)], tool_choice=plan[done]["function"])
    return request.override(messages=[*request.messages, HumanMessage(_END)], tool_choice="none")
