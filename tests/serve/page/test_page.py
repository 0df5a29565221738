"""The page at `/`, in a real browser: a chat that streams, stops and goes on, and shows how it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from langchain_card import CARDChatModel, Limits
from tests.support.browsed import Tab, needs_chromium, started
from tests.support.held import held
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import CHAT, LONG, NAME, body, num_open, numbers, posted, says, served
from tests.support.vocabularies import THINKS

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_chromium]

TALE = "".join(f"{number} men went to mow.\n" for number in range(60))
SAGA = TALE * 15
CODE = "Look:\n\n```python\nif a:\n    b()\n```\n\nSo `b` is called.\n```\nend"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt;"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    """One answer at a time."""
    fields = make_pair(tmp_path_factory.mktemp("pair"), THINKS) | {"max_tokens": 6000}
    with CARDChatModel(**fields, limits=Limits(max_num_seqs=1)).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Tab]:
    """Neither errors nor breaches of the policy, and nothing from elsewhere, whatever a test does."""
    tab = Tab(browser, url)
    yield tab
    assert tab.complaints == [] and {each for each in tab.urls if not each.startswith(f"{url}/")} == set()
    tab.page.close()


# Answers.


def test_tokens_stream(model: CARDChatModel, browser: Browser) -> None:
    with served(model) as url, says(model, TALE):
        tab, seen = Tab(browser, url), [""]
        expect(tab.page.get_by_role("heading", name="langchain-card")).to_contain_text(NAME)
        tab.ask("Q")
        expect(tab.button).to_have_text("Stop")
        while not tab.notes.count():
            seen.append(tab.said())
        assert len(set(seen)) > 4 and all(TALE.startswith(text) for text in seen) and seen == sorted(seen, key=len)
        assert tab.said() == TALE
        expect(tab.button).to_have_text("Send")
        with httpx.Client(base_url=url) as http:
            wait_until(lambda: ("output_tokens_total",) in numbers(http))
            accepted = {key[1]: of for key, of in numbers(http).items() if key[0] == "accepted_tokens_total"}
            total = numbers(http)["output_tokens_total",]
        assert tab.tinted() == accepted and sum(accepted.values()) > 100
        assert tab.answers.last.locator(".token").count() >= total
        assert f"{sum(accepted.values()):.0f} of {total:.0f} tokens drafted" in tab.notes.inner_text()
        for figure in ("speed", "hits", "length", "first"):
            expect(tab.page.locator(f"#{figure}")).to_have_text(re.compile(r"\d"))
        tab.page.close()


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_what_is_stopped_stays(model: CARDChatModel, tab: Tab, how: str) -> None:
    prompts: list[str] = []
    with says(model, SAGA, prompts):
        tab.ask("one")
        wait_until(lambda: len(tab.said()) > 20)
        expect(tab.page.locator("#speed")).to_have_text(re.compile(r"\d"))
        assert num_open(model) == 1
        tab.button.click() if how == "button" else tab.page.keyboard.press(how)
        assert wait_until(lambda: num_open(model) == 0) < 2.0
    expect(tab.notes).to_contain_text("Stopped")
    expect(tab.button).to_have_text("Send")
    said = tab.said()
    assert 20 < len(said) < len(SAGA) and SAGA.startswith(said)
    with says(model, "Yes.", prompts):
        assert tab.answered("two") == "Yes."
        tab.answered("three")
    asked = f"<user>one\n<assistant>{said}\n<user>two\n"
    assert prompts[1:] == [f"{asked}<ai>", f"{asked}<assistant>Yes.\n<user>three\n<ai>"]


def test_what_is_stopped_before_it_begins_is_dropped(model: CARDChatModel, url: str, tab: Tab) -> None:
    prompts: list[str] = []
    with posted(url, CHAT, body(CHAT, **LONG)):
        wait_until(lambda: model.engine.num_running == 1)
        tab.ask("one")
        wait_until(lambda: num_open(model) == 2)
        tab.page.keyboard.press("Escape")
        wait_until(lambda: num_open(model) == 1)
        expect(tab.answers).to_have_count(0)
        expect(tab.log).to_contain_text("Not answered")
        expect(tab.prompt).to_have_value("one")
    with says(model, "Yes.", prompts):
        assert tab.answered("two") == "Yes."
    assert prompts == ["<user>two\n<ai>"]


def test_a_new_chat(model: CARDChatModel, tab: Tab) -> None:
    prompts: list[str] = []
    with says(model, TALE, prompts):
        tab.ask("one")
        wait_until(lambda: len(tab.said()) > 20)
        tab.page.get_by_role("button", name="New chat").click()
        expect(tab.log).to_contain_text("Ask something.")
        expect(tab.answers).to_have_count(0)
        wait_until(lambda: num_open(model) == 0)
        assert tab.answered("two") == TALE and prompts[1] == "<user>two\n<ai>"


def test_thoughts_are_apart(model: CARDChatModel, tab: Tab) -> None:
    prompts: list[str] = []
    with says(model, "<think>I see.</think>So.", prompts):
        tab.answered("one")
        thoughts = tab.log.locator(".thoughts")
        expect(thoughts.locator(".prose")).to_be_hidden()
        thoughts.get_by_text("Thoughts").click()
        expect(thoughts.locator(".prose")).to_have_text("I see.")
        expect(tab.answers.last.locator(":scope > .prose")).to_have_text("So.")
        tab.answered("two")
    assert prompts[1] == "<user>one\n<assistant>So.\n<user>two\n<ai>"


def test_thoughts_alone_are_no_answer(model: CARDChatModel, tab: Tab) -> None:
    prompts: list[str] = []
    with says(model, "<think>I see.</think>", prompts):
        tab.answered("one")
        expect(tab.log.get_by_label("You")).to_contain_text("Not answered")
    with says(model, "Yes.", prompts):
        assert tab.answered("two") == "Yes."
    assert prompts == ["<user>one\n<ai>", "<user>two\n<ai>"]


def test_code_is_in_blocks(model: CARDChatModel, tab: Tab) -> None:
    with says(model, CODE):
        tab.answered()
        shown = tab.answers.last.locator(".prose, .fence, pre").evaluate_all(
            "all => all.map(each => [each.className || 'pre', each.textContent])"
        )
    before, after = "Look:\n\n", "\nSo `b` is called.\n"
    assert shown == [["prose", before], ["fence", "python"], ["pre", "if a:\n    b()\n"], ["fence", ""],
                     ["prose", after], ["fence", ""], ["pre", "end"]]  # fmt: skip
    drafted = re.search(r"(\d+) of (\d+) tokens", tab.notes.inner_text())
    assert drafted and sum(tab.tinted().values()) == int(drafted[1]) and int(drafted[2]) == len(CODE) + 1


@pytest.mark.parametrize("form", ["{}", "```\n{}\n```", "```{}\n", "<think>{}</think>"])
def test_answers_are_text(model: CARDChatModel, tab: Tab, form: str) -> None:
    with says(model, form.format(HOSTILE)):
        tab.answered(HOSTILE)
    expect(tab.log.locator("img, script, b")).to_have_count(0)
    for each in tab.log.locator("article").all():
        assert HOSTILE in (each.text_content() or "")
    assert tab.page.title() == "langchain-card"


# Keyboards, sizes, colours.


def test_with_the_keyboard_alone(model: CARDChatModel, tab: Tab) -> None:
    keys, prompts = tab.page.keyboard, []
    settings = tab.page.get_by_role("button", name="Settings")
    with says(model, SAGA, prompts):
        keys.type("a")
        keys.press("Shift+Enter")
        keys.type("b")
        keys.press("Enter")
        wait_until(lambda: len(tab.said()) > 20)
        settings.focus()
        keys.press("Enter")
        expect(tab.page.locator("#settings")).to_be_visible()
        keys.press("Escape")
        expect(tab.page.locator("#settings")).to_be_hidden()
        assert num_open(model) == 1  # only a second one would stop the answer
        tab.prompt.focus()
        keys.press("Tab")
        expect(tab.button).to_be_focused()
        keys.press("Enter")
        wait_until(lambda: num_open(model) == 0)
        assert prompts == ["<user>a\nb\n<ai>"]
    settings.focus()
    with says(model, TALE, prompts):
        keys.press("Enter")
        keys.press("Tab")
        expect(tab.page.get_by_label("Temperature")).to_be_focused()
        keys.press("Tab")
        keys.type("7")
        keys.press("Escape")
        expect(tab.page.locator("#settings")).to_be_hidden()
        tab.prompt.focus()
        keys.type("c")
        keys.press("Enter")
        expect(tab.notes.last).to_contain_text("of 7 tokens")
    assert prompts[1].endswith("<user>c\n<ai>") and tab.said() == TALE[:7]


def test_on_a_phone(model: CARDChatModel, browser: Browser, url: str) -> None:
    tab = Tab(browser, url, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    with says(model, f"{'long' * 100}\n```\n{'longer' * 100}\n```\n{TALE}"):
        tab.answered("x" * 400)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.log.evaluate("log => log.scrollWidth - log.clientWidth") == 0
    for each in (tab.prompt, tab.button, tab.page.get_by_role("button", name="Settings")):
        expect(each).to_be_in_viewport(ratio=1)
    assert float(tab.color("#prompt", "fontSize").removesuffix("px")) >= 16
    assert (tab.log.bounding_box() or {})["height"] > 200 and tab.complaints == []
    tab.page.close()


def test_light_and_dark(model: CARDChatModel, tab: Tab) -> None:
    with says(model, TALE[:200]):
        tab.answered()
    seen = []
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        tints = ("model-tint", "ngram-tint", "forced-tint")
        names = ("ink", "soft", "wrong", "ground", "raised", "target", "model", *tints)
        read = "(html, name) => getComputedStyle(html).getPropertyValue(name)"
        of = {name: tab.page.locator("html").evaluate(read, f"--{name}") for name in names}
        for ground in ("ground", "raised"):
            assert contrast(of["ink"], of[ground]) > 7 and contrast(of["soft"], of[ground]) > 4.5
            assert contrast(of["target"], of[ground]) > 3 and contrast(of["model"], of[ground]) > 3
        assert contrast(of["wrong"], of["ground"]) > 4.5
        assert all(contrast(of["ink"], of[tint]) > 7 for tint in tints)
        seen.append((of, tab.color("body", "backgroundColor"), tab.color("article [data-source]", "backgroundColor")))
    assert all(light != dark for light, dark in zip(*seen, strict=True))
    tab.page.get_by_label("Tint").uncheck()
    assert tab.color("article [data-source]", "backgroundColor") == "rgba(0, 0, 0, 0)"


def test_a_long_prompt_shows_how_much_of_it_was_read(
    model: CARDChatModel, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits, bar = held(model.engine, monkeypatch), tab.log.locator(".reading progress")
    with says(model, "Yes."):
        tab.ask("A long text. " * 150)
        permits.release(2)
        expect(tab.log.locator(".reading")).to_have_text(re.compile(r"^Reading 1,9\d\d tokens$"))
        wait_until(lambda: bar.evaluate("bar => bar.value") == 1024)
        assert 1900 < bar.evaluate("bar => bar.max") < 2000
        assert bar.evaluate("bar => bar.getBoundingClientRect().width") > 100
        permits.release(999)
        expect(tab.notes).to_have_count(1)
    assert tab.said() == "Yes." and bar.count() == 0


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG has it."""
    bright = []
    for color in (one, other):
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        bright.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(bright) / min(bright)


def test_the_end_stays_in_sight_unless_the_reader_leaves_it(model: CARDChatModel, tab: Tab) -> None:
    left = "log => log.scrollHeight - log.clientHeight - log.scrollTop"
    with says(model, SAGA):
        tab.ask("Q")
        wait_until(lambda: len(tab.said()) > 1200)
        wait_until(lambda: tab.log.evaluate(left) < 60)
        tab.log.hover()
        tab.page.mouse.wheel(0, -400)
        wait_until(lambda: tab.log.evaluate(left) > 300)
        place = tab.log.evaluate("log => log.scrollTop")
        wait_until(lambda: len(tab.said()) > 2000)
        assert tab.log.evaluate("log => log.scrollTop") == place
        wait_until(lambda: tab.page.mouse.wheel(0, 100_000) or tab.log.evaluate(left) < 60)
        length = len(tab.said())
        wait_until(lambda: len(tab.said()) > length + 500)
        wait_until(lambda: tab.log.evaluate(left) < 60)
        tab.page.keyboard.press("Escape")
        wait_until(lambda: num_open(model) == 0)
