"""The page's files, the key that it asks for, and what it says of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest
from playwright.sync_api import Browser, expect

from langchain_card import CARDChatModel
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import EngineError
from langchain_card.serve import Settings, create_app, page
from langchain_card.serve.page import PAGE_PATHS
from tests.support.browsed import Tab, needs_chromium, started
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import CHAT, NAME, ask, error_of, num_open, says, served

pytestmark = pytest.mark.usefixtures("one_thread")

TALE = "".join(f"{number} men went to mow.\n" for number in range(60))
REFUSED = re.compile("Failed to load resource: .*")  # the browser's own words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 6000}).load() as model:
        yield model


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as browser:
        yield browser


# Files.


def test_every_file_is_served_and_none_else(model: CARDChatModel) -> None:
    """To everybody: they hold no secrets."""
    names = {each.name for each in files(page).iterdir() if not each.name.startswith("__")}
    assert {path.rpartition("/")[2] or "index.html" for path in PAGE_PATHS} == names
    kinds = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    with served(model, api_keys=("key",)) as url:
        for path in PAGE_PATHS:
            response = httpx.get(url + path)
            assert response.status_code == 200, path
            assert response.headers["content-type"].partition(";")[0] == kinds[path.rpartition(".")[2].strip("/")]
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
        allowed = {"authorization": "Bearer key"}
        for path in ("/page", "/page/", "/page/__init__.py", "/page/..%2fapp.py", "/page/../app.py", "/page/index.html",
                     "/page//page.js", "/page/page.js%00", "/favicon.ico"):  # fmt: skip
            assert error_of(httpx.get(url + path, headers=allowed))["code"] == "not_found"
        assert httpx.post(url, headers=allowed).status_code == 405
        assert not set(httpx.get(f"{url}/openapi.json", headers=allowed).json()["paths"]) & set(PAGE_PATHS)


def test_files_are_plain_and_ask_for_nothing_elsewhere() -> None:
    for each in files(page).iterdir():
        if each.name.startswith("__"):
            continue
        text = each.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert len(text.splitlines()) <= 300 and not re.search(r"https?:|//\w+\.|@import|url\(", text), each.name
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
                       " style=", " onclick", "<style", "localStorage", "cookie"):  # fmt: skip
            assert unsafe not in text, (each.name, unsafe)


async def test_the_page_is_there_while_the_server_is_draining(model: CARDChatModel) -> None:
    app = create_app(model, Settings(model_names=(NAME,)))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        app.state.service.draining = True
        assert (await http.get("/")).status_code == 200 and (await http.post(CHAT, json=ask())).status_code == 503


# Keys.


@needs_chromium
def test_it_asks_for_the_key(model: CARDChatModel, browser: Browser) -> None:
    with served(model, api_keys=("the-key",)) as url, says(model, "Yes."):
        tab = Tab(browser, url)
        dialog, key = tab.page.get_by_role("dialog"), tab.page.get_by_label("Key", exact=True)
        expect(dialog).to_contain_text("asks for a key")
        expect(key).to_be_focused()
        tab.page.keyboard.type("wrong")
        tab.page.keyboard.press("Enter")
        expect(dialog).to_contain_text("not one of its keys")
        tab.page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        tab.ask("Q")
        expect(dialog).to_be_visible()  # again, now that it is needed
        expect(tab.log.get_by_role("alert")).to_contain_text("Bearer KEY")
        key.fill("the-key")
        key.press("Enter")
        expect(tab.notes).to_contain_text("drafted")  # what was asked is answered
        expect(tab.log.get_by_role("alert")).to_have_count(0)
        assert tab.said() == "Yes." and tab.answered("again") == "Yes."
        stored = "() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        assert tab.page.evaluate(stored) == [["the-key"], [], ""]
        tab.page.reload()
        expect(tab.page.locator("#model")).to_have_text(NAME)
        expect(dialog).to_be_hidden()
        assert all(map(REFUSED.fullmatch, tab.complaints)) and not any("the-key" in each for each in tab.urls)
        other = Tab(browser, url)  # another tab knows nothing of it
        expect(other.page.get_by_role("dialog")).to_be_visible()
        other.page.close()
        tab.page.close()


# Errors.


@needs_chromium
def test_what_is_refused_is_said_and_tried_again(model: CARDChatModel, browser: Browser) -> None:
    prompts: list[str] = []
    with served(model) as url, says(model, "Yes.", prompts):
        tab, alert = Tab(browser, url), None
        tab.set(temperature=99)
        tab.ask("one")
        alert = tab.log.get_by_role("alert")
        expect(alert).to_contain_text("temperature = 99")
        expect(tab.button).to_have_text("Send")
        tab.set(temperature=0)
        alert.get_by_role("button", name="Try again").click()
        expect(tab.notes).to_contain_text("drafted")
        expect(alert).to_have_count(0)
        expect(tab.prompt).to_be_focused()
        assert tab.said() == "Yes." and len(prompts) == 1 and prompts[0].count("one") == 1
        assert all(map(REFUSED.fullmatch, tab.complaints))
        tab.page.close()


@needs_chromium
def test_what_cannot_be_answered_is_given_back_and_not_told_again(model: CARDChatModel, browser: Browser) -> None:
    prompts: list[str] = []
    with served(model) as url, says(model, "Yes.", prompts):
        tab, text = Tab(browser, url), "long" * 2250
        alert, questions = tab.log.get_by_role("alert"), tab.log.get_by_label("You")
        tab.ask(text)
        expect(alert).to_contain_text("8,192 tokens")
        expect(tab.page.locator("#status")).to_have_text("The answer failed.")
        expect(tab.prompt).to_have_value(text)
        alert.get_by_role("button", name="Try again").click()
        expect(alert).to_have_count(1)
        expect(tab.prompt).to_have_value(text)
        expect(questions).to_have_text([text])
        assert tab.answered("Hi") == "Yes." and tab.answered("So?") == "Yes."
        expect(tab.prompt).to_have_value("")
        expect(questions).to_have_text([f"{text}Not answered", "Hi", "So?"])
        assert not any("long" in prompt for prompt in prompts) and len(prompts) == 2
        assert "Hi" in prompts[1] and "Yes." in prompts[1] and all(map(REFUSED.fullmatch, tab.complaints))
        tab.ask(text)
        expect(alert).to_have_count(2)
        tab.prompt.fill("mine")
        alert.get_by_role("button", name="Try again").click()
        expect(alert).to_have_count(2)
        expect(tab.button).to_have_text("Send")
        expect(tab.prompt).to_have_value("mine")  # what the reader writes is left alone
        tab.page.close()


@needs_chromium
def test_answers_that_fail_in_the_middle(
    model: CARDChatModel, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Generation] = []
    prompts: list[str] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *args: found.append(submit(*args)) or found[-1])
    with served(model) as url, says(model, TALE, prompts):
        tab = Tab(browser, url)
        alert = tab.log.get_by_role("alert")
        for number in (1, 2):
            tab.ask("one") if number == 1 else alert.get_by_role("button").click()
            wait_until(lambda: len(tab.said()) > 20)
            found[-1].abort(EngineError("step", 1, "/secret"))
            expect(alert).to_contain_text("The engine could not answer")
            expect(tab.answers).to_have_count(1)
        said = tab.said()
        assert prompts[0] == prompts[1] and said in TALE and len(said) > 20
        assert tab.answered("two") == TALE  # or the conversation goes on with what there is
        expect(alert.get_by_role("button")).to_have_count(0)
        assert said in prompts[2] and "two" in prompts[2] and tab.complaints == []
        tab.page.close()


@needs_chromium
def test_a_server_that_is_gone(model: CARDChatModel, browser: Browser) -> None:
    with served(model) as url:
        tab = Tab(browser, url)
        expect(tab.page.locator("#model")).to_have_text(NAME)
    tab.ask("Q")
    expect(tab.log.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    tab.page.close()


@needs_chromium
def test_who_closes_the_tab_frees_the_engine(model: CARDChatModel, browser: Browser) -> None:
    with served(model) as url, says(model, TALE):
        tab = Tab(browser, url)
        tab.ask("Q")
        wait_until(lambda: num_open(model) == 1)
        tab.page.close()
        assert wait_until(lambda: num_open(model) == 0) < 2.0
