"""Plug-ins are found by name: built in, registered here, or offered by an installed package."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.ports import Budget, Setting
from tests.support.packages import install


class Repeater:
    """Proposes the last token of the prompt, again and again."""

    name, paced = "repeater", False

    def __init__(self, setting: Setting, times: int = 2) -> None:
        self.times = times
        self._tokens: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._epoch = 0

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        self._tokens[request.request_id], self._lengths[request.request_id] = request.prompt_ids[-1], len(output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        self._lengths[request_id] = start + len(token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._propose(budget.request_id) for budget in budgets]

    def end(self, request_id: int) -> None:
        self._tokens.pop(request_id, None)

    def close(self) -> None:
        self._tokens.clear()

    def _propose(self, request_id: int) -> Proposal:
        self._epoch += 1
        chain = (self._tokens[request_id],) * self.times
        parents, scores = tuple(range(self.times)), (-0.1,) * self.times
        return Proposal(self.name, request_id, self._epoch, 0, self._lengths[request_id], 1, parents, chain, scores)


@pytest.fixture
def repeater(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    plugins.register("drafters", "repeater", Repeater)


def test_what_is_built_in_is_there() -> None:
    assert {"forced", "ngram"} <= {*plugins.names("drafters")}
    assert plugins.find("drafters", "ngram").factory.name == "ngram"


@pytest.mark.usefixtures("repeater")
def test_options_are_read_as_json_where_they_can_be() -> None:
    assert plugins.find("drafters", "repeater?times=5").make(Setting()).times == 5
    assert plugins.find("drafters", "repeater?times=a%26b").options == {"times": "a&b"}
    assert plugins.find("drafters", "repeater").options == {}
    for text, value in (("c++.ngrams", "c++.ngrams"), ("a%20b%2Bc", "a b+c"), (".3", 0.3), ("inf", math.inf),
                        ("5", 5), ("true", True), ("", ""), ("[" * 100_000, "[" * 100_000)):  # fmt: skip
        assert plugins.find("drafters", f"repeater?times={text}").options == {"times": value}
        assert plugins.take_option(f"x?block=4&a={text}", "block") == (f"x?a={text}", 4)


def test_a_setting_may_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter is its place, whatever may be said to it."""

    class Positional(Repeater):
        def __init__(self, setting: Setting, /, times: int = 2) -> None:
            super().__init__(setting, times)

    monkeypatch.setattr(plugins, "_registered", {})
    plugins.register("drafters", "positional", Positional)
    assert plugins.find("drafters", "positional?times=5").make(Setting()).times == 5
    with pytest.raises(InvalidInputError, match="'setting'"):
        plugins.find("drafters", "positional?setting=5")


def test_paths_with_a_plus_are_found_as_they_are_called(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"table = '.*/c\+\+\.ngrams': cannot be read"):
        plugins.find("drafters", f"ngram?table={tmp_path}/c++.ngrams").make(Setting())
    with pytest.raises(InvalidInputError, match=r"table = 0: must be the path of a file. Hint: write \./0"):
        plugins.find("drafters", "ngram?table=0").make(Setting())


@pytest.mark.usefixtures("repeater")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ngrm", "did you mean ngram"),
        ("repeater?tims=5", "option of drafters repeater = 'tims'.*did you mean times"),
        ("repeater?times=5&times=6", "drafters = 'repeater.times=5&times=6': names times twice"),
        ("repeater?setting=5", "option of drafters repeater = 'setting'"),
    ],
)
def test_what_is_misspelt_is_named(spec: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        plugins.find("drafters", spec)


class Nameless:
    paced = False


class Paceless:
    name = "paceless"
    paced: bool


class Unreadable:
    name, paced, __signature__ = "unreadable", False, "none"


@pytest.mark.usefixtures("repeater")
@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (Nameless, "has no attribute 'name' of type str"),
        (Paceless, "has no attribute 'paced' of type bool"),
        (Unreadable, "has no signature"),
    ],
)
def test_what_a_factory_lacks_is_named(factory: Any, said: str) -> None:
    plugins.register("drafters", "lacking", factory)
    with pytest.raises(InvalidInputError, match=f"draft_model = 'lacking': its factory {said}"):
        EngineConfig(draft_model="lacking", acceptance="loose")


def test_a_configuration_names_what_there_is() -> None:
    with pytest.raises(InvalidInputError, match=r"drafters = 'ngrm'.*did you mean ngram"):
        EngineConfig(drafters=("ngrm",))
    with pytest.raises(InvalidInputError, match="names a drafter twice"):
        EngineConfig(drafters=("ngram", "ngram?x=1"))
    for name in ("drafters", "stack"):
        with pytest.raises(InvalidInputError, match=rf"{name} = 'ngram': must be a tuple.*{name}=\('ngram',\)"):
            EngineConfig(**{name: "ngram"})
    with pytest.raises(InvalidInputError, match=r"stack = .*names block twice"):
        EngineConfig(stack=("ngram?block=4&block=5",))
    assert EngineConfig(draft_model="ngram").modelless_drafters == ("ngram",)
    assert EngineConfig(draft_model="ngram?x=1").modelless_drafters == ("ngram?x=1",)
    assert EngineConfig(draft_model=None).modelless_drafters == ()


@pytest.mark.usefixtures("repeater", "one_thread")
@pytest.mark.parametrize("draft_model", ["repeater", "model"])
def test_an_engine_asks_a_plug_in(tiny_pairs: dict[str, tuple[str, str]], draft_model: str) -> None:
    target, draft = tiny_pairs["llama"]
    params = SamplingParams(max_tokens=24, logit_bias=((5, 100.0),))  # it says nothing but 5
    drafters = ("repeater?times=3",) if draft_model == "model" else ()
    config = EngineConfig(target, draft if drafters else draft_model, drafters=drafters, dtype="float64")
    with Engine(config) as engine:
        done = engine.submit([1, 2, 5], params).result()
    assert done.token_ids == (5,) * 24 and done.stats.accepted_by_source["repeater"] > 0


@pytest.mark.usefixtures("repeater", "one_thread")
def test_two_of_one_name_are_refused(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    """What is accepted is counted by name."""
    plugins.register("drafters", "again", Repeater)
    config = EngineConfig(tiny_pairs["llama"][0], "repeater", drafters=("again",), dtype="float64")
    with pytest.raises(InvalidInputError, match="drafters = 'again': is called 'repeater' as another one is"):
        Engine(config)


@pytest.mark.usefixtures("repeater")
@pytest.mark.parametrize("name", ["model", "target"])
def test_names_of_the_engines_own_are_refused(
    tiny_pairs: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Repeater, "name", name)
    monkeypatch.setattr(Repeater, "__init__", lambda *_: pytest.fail("it is made"))
    with pytest.raises(InvalidInputError, match=f"drafters = 'repeater': is called '{name}' as a worker of the engine"):
        Engine(EngineConfig(*tiny_pairs["llama"], drafters=("repeater",), dtype="float64"))


@pytest.mark.parametrize("field", ["draft_model", "drafters", "stack"])
@pytest.mark.parametrize(
    ("spec", "said"),
    [("ngram?max_nodes=0", "max_nodes = 0"), ("ngram?nodes=1", "'nodes'"), ("ngram?table=/x", "table = ")],
)
def test_bad_options_are_named_before_weights_are_read(
    tiny_pairs: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, field: str, spec: str, said: str
) -> None:
    monkeypatch.setattr(build, "acquire_model", lambda spec: pytest.fail("weights are read"))
    target, draft = tiny_pairs["llama"]
    named: dict[str, Any] = {"draft_model": draft, field: spec if field == "draft_model" else (spec,)}
    with pytest.raises(InvalidInputError, match=said):
        Engine(EngineConfig(target, **named, dtype="float64"))


@pytest.mark.usefixtures("repeater")
def test_who_works_already_is_closed_where_another_cannot_be_made(
    tiny_pairs: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are made on threads of their own, the second one of which fails."""

    class Impossible(Repeater):
        name = "impossible"

        def __init__(self, setting: Setting) -> None:
            raise OSError("no such device")

    monkeypatch.setattr(Repeater, "paced", True)
    plugins.register("drafters", "impossible", Impossible)
    closed = list[Repeater]()
    monkeypatch.setattr(Repeater, "close", lambda self: closed.append(self))
    with pytest.raises(InvalidInputError, match="no such device"):
        Engine(EngineConfig(tiny_pairs["llama"][0], "repeater", drafters=("impossible",), dtype="float64"))
    assert len(closed) == 1
    assert not [thread.name for thread in threading.enumerate() if "repeater" in thread.name]


@pytest.mark.usefixtures("repeater")
def test_what_was_made_is_closed_where_weights_cannot_be_read(
    tiny_pairs: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[Repeater]()
    monkeypatch.setattr(Repeater, "close", lambda self: closed.append(self))
    monkeypatch.setattr(build, "acquire_model", lambda spec: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(EngineConfig(tiny_pairs["llama"][0], "repeater", dtype="float64"))
    assert len(closed) == 1


@pytest.mark.slow
def test_the_tests_of_plug_ins_cost_nothing_until_they_are_used() -> None:
    """Toys and the explorer run without torch, and nobody else needs pytest."""
    code = "import sys, langchain_card.testing as t; assert not {'torch', 'pytest', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", f"{code}; t.DrafterConformance; assert 'pytest' in sys.modules"], check=True)


@pytest.mark.usefixtures("one_thread")
def test_an_installed_package_is_found(tmp_path: Path) -> None:
    """As `pip` leaves it: a module, and metadata with an entry point. A broken one is named, and no others suffer."""
    (tmp_path / "echoing.py").write_text(
        "class Echo:\n    name, paced = 'echo', True\n    def __init__(self, setting, paced): ..."
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    install(tmp_path, "echoing", echo="echoing:Echo", lost="gone:Echo", broken="broken:Echo")
    code = """
        import sys
        from langchain_card import plugins
        assert "echoing" not in sys.modules and {"echo", "lost", "ngram"} <= {*plugins.names("drafters")}
        print(plugins.find("drafters", "echo?paced=false").factory.__name__)
        for name in ("lost", "broken"):
            try:
                plugins.find("drafters", name)
            except ValueError as error:
                print(error)
    """
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=True
    )
    found, lost, broken = run.stdout.splitlines()
    assert "drafters = 'broken': cannot be imported (ZeroDivisionError" in broken
    assert found == "Echo" and "drafters = 'lost': cannot be imported" in lost and "gone" in lost
