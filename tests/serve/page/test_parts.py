"""The parts of the page by themselves, in a real browser: the lanes of the timeline, and tokens of any form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from langchain_card import CARDChatModel
from tests.support.browsed import Tab, needs_chromium, started
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import says, served

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_chromium]

TALE = "".join(f"{number} men went to mow.\n" for number in range(60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 2000}).load() as model:
        yield model


@pytest.fixture(scope="module")
def tab(model: CARDChatModel) -> Iterator[Tab]:
    with served(model) as url, started() as browser:
        tab = Tab(browser, url)
        yield tab
        assert tab.complaints == []


@pytest.mark.parametrize("schedule", ["plain", "parallel"])
def test_lanes_show_who_worked(model: CARDChatModel, tab: Tab, schedule: str) -> None:
    tab.page.reload()
    tab.set(schedule=schedule)
    with says(model, TALE):
        tab.answered()
    works = schedule != "plain"
    assert tab.page.locator(".lane:visible span:first-child").all_inner_texts() == ["target", "draft"][: 1 + works]
    assert set(legend(tab)) == {*tab.tinted(), ""} and bool(tab.tinted()) == works
    drawn = {lane: tab.page.locator(f"#{lane} path").get_attribute("d") or "" for lane in ("target", "draft")}
    expect(tab.page.locator("#ran")).to_have_text(schedule)
    assert drawn["target"].count("M") > 2 and ("M" in drawn["draft"]) == works
    assert (tab.page.locator("#draft + span").text_content() == "0 %") == (schedule == "plain")


def test_without_a_draft_model_none_is_spoken_of(tmp_path: Path, tab: Tab) -> None:
    fields = make_pair(tmp_path) | {"draft_model": "ngram"}
    with CARDChatModel(**fields).load() as model, served(model) as url, says(model, TALE[:100] * 3):
        other = Tab(tab.page.context.browser, url)
        other.answered()
        assert legend(other) == ["ngram", ""] and other.page.locator(".lane:visible").count() == 1
        other.page.close()


def legend(tab: Tab) -> list[str]:
    """The sources of tokens that are explained; "" is the target."""
    return [each.get_attribute("data-source") or "" for each in tab.page.locator(".legend > span:visible").all()]


def test_lanes_are_as_high_as_what_was_measured(tab: Tab) -> None:
    samples = [(0.01, 0.01, 0.0), (0.1, 0.05, 0.0), (0.2, 0.05, 0.12), (0.3, 0.15, 0.12), (13.3, 13.15, 6.62)]
    draw = """async (samples) => {
        const { Lanes, WINDOW } = await import("/page/lanes.js");
        const [target, draft] = ["target", "draft"].map((id) => document.getElementById(id));
        const lanes = new Lanes(target, draft), drawn = [];
        for (const [seconds, target_busy_seconds, draft_busy_seconds] of samples) {
          lanes.add({ seconds, target_busy_seconds, draft_busy_seconds });
          drawn.push([target, draft].map((svg) => svg.querySelector("path").getAttribute("d")));
        }
        return [WINDOW, drawn];
    }"""
    window, drawn = tab.page.evaluate(draw, samples)
    assert window == 12 and drawn[0] == ["", ""]  # too short for a block of its own

    def blocks(path: str) -> list[list[float]]:
        """Left, top and right of each, in seconds and shares."""
        found = re.findall(r"M([\d.-]+) 100V([\d.-]+)H([\d.-]+)V100Z", path)
        return [[float(x) / 1000 * 12, 1 - float(y) / 100, float(z) / 1000 * 12] for x, y, z in found]

    near = lambda *values: pytest.approx(values, abs=0.03)  # noqa: E731
    (first,) = blocks(drawn[1][0])
    assert first == near(0, 0.5, 0.1)
    assert blocks(drawn[3][0]) == [near(0, 0.5, 0.1), near(0.2, 1, 0.3)]
    assert blocks(drawn[3][1]) == [near(0.1, 1, 0.2), near(0.2, 0.2, 0.3)]  # what does not fit goes on
    assert blocks(drawn[4][1]) == [near(-1, 0.5, 12)]


def test_escape_stops_where_there_are_no_popovers(model: CARDChatModel, tab: Tab) -> None:
    tab.page.evaluate("""() => {
        const of = Element.prototype.matches, supports = CSS.supports;
        Element.prototype.matches = function (selector) {
          if (selector.includes("popover")) throw new SyntaxError(selector);
          return of.call(this, selector);
        };
        CSS.supports = (...said) => !said.join().includes("popover") && supports(...said);
    }""")
    with says(model, TALE):
        tab.ask("Q")
        wait_until(lambda: len(tab.said()) > 20)
        tab.page.keyboard.press("Escape")
        expect(tab.notes.last).to_contain_text("Stopped")
    tab.page.reload()


def test_code_is_copied(model: CARDChatModel, tab: Tab) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    with says(model, "So:\n```python\nif a != b:\n    c()\n```\nor\n```\nd\n```\n"):
        tab.answered()
        button = tab.answers.last.get_by_role("button").first
        expect(button).to_have_text("Copy")
        button.focus()
        tab.page.keyboard.press("Enter")
        expect(button).to_have_text("Copied")
        assert tab.page.evaluate("navigator.clipboard.readText()") == "if a != b:\n    c()\n"
        tab.page.context.clear_permissions()
        expect(button).to_have_text("Copy")
        assert (
            tab.answers.last.get_by_role("button").count() == 2 and tab.color("pre", "fontVariantLigatures") == "none"
        )
        tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
        tab.answered()
        expect(tab.answers.last.get_by_role("button")).to_have_count(0)
    tab.page.reload()


@pytest.mark.parametrize("width", [320, 360, 1280])
def test_the_name_of_the_model_is_read_in_full(model: CARDChatModel, tab: Tab, width: int) -> None:
    name = "qwen2.5-coder-7b-instruct"
    with served(model, model_names=(name,)) as url:
        other = Tab(tab.page.context.browser, url, viewport={"width": width, "height": 640})
        expect(other.page.locator("#model")).to_have_text(name)
        fits = "heading => heading.scrollWidth <= heading.clientWidth && heading.scrollHeight <= heading.clientHeight"
        assert other.page.locator("h1").evaluate(fits) and other.page.locator("#model").get_attribute("title") == name
        assert other.page.evaluate("document.documentElement.scrollWidth") == width and other.complaints == []
        other.page.close()


SPLITS = [
    # (tokens, kind and text of each block)
    (["a\n\nb\n", "c"], [("prose", "a\n\nb\nc")]),
    (["a\n```py\nb\n```\nc"], [("prose", "a\n"), ("fence", "py"), ("pre", "b\n"), ("fence", ""), ("prose", "c")]),
    (
        ["`", "``", "p", "y\n", " ``", "`", "\n\n"],
        [("prose", ""), ("fence", "py"), ("pre", ""), ("fence", " "), ("prose", "\n")],
    ),
    (["a ```b``` c\n", "`d`"], [("prose", "a ```b``` c\n`d`")]),
    (["", "```", "", "\n", ""], [("prose", ""), ("fence", ""), ("pre", "")]),
]


@pytest.mark.parametrize(("tokens", "blocks"), SPLITS)
def test_each_token_counts_once_wherever_its_lines_go(
    tab: Tab, tokens: list[str], blocks: list[tuple[str, str]]
) -> None:
    write = """async (tokens) => {
        const { Answer } = await import("/page/answer.js");
        const answer = new Answer();
        for (const token of tokens) answer.write(token, "model");
        const shown = [...answer.element.querySelectorAll(".prose, .fence, pre")];
        return [
          answer.text,
          shown.map((block) => [block.className || "pre", block.textContent]),
          answer.element.querySelectorAll(".token[data-source=model]").length,
          answer.element.querySelectorAll("span:not([data-source])").length,
        ];
    }"""
    text, shown, count, untinted = tab.page.evaluate(write, tokens)
    assert text == "".join(tokens) and [tuple(block) for block in shown] == blocks
    assert count == len(tokens) and untinted == 0
