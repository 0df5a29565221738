"""The parts of the page by themselves, in a real browser: the lanes of the timeline, and tokens of any form."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browsed import Tab, needs_chromium, started
from played import make_pair
from playwright.sync_api import expect
from served import says, served

from langchain_card import CARDChatModel

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
    tab.set(schedule=schedule)
    with says(model, TALE):
        tab.answered()
    drawn = {lane: tab.page.locator(f"#{lane} path").get_attribute("d") or "" for lane in ("target", "draft")}
    expect(tab.page.locator("#ran")).to_have_text(schedule)
    assert drawn["target"].count("M") > 2 and ("M" in drawn["draft"]) == (schedule != "plain")
    assert (tab.page.locator("#draft + span").inner_text() == "0 %") == (schedule == "plain")


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
