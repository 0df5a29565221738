"""The page of the web application in a real Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")


@contextmanager
def started() -> Iterator[Browser]:
    """A browser without a window."""
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


class Tab:
    """A tab that shows the page.

    Args:
        browser: where it is opened.
        url: of the server.
        options: of a browser's context.

    Attributes:
        page: the tab itself.
        complaints: what the browser had to say against the page, in its console or as errors.
        urls: all that were asked for.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.page: Page = browser.new_page(**options)
        self.page.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(url)
        self.log, self.prompt = self.page.get_by_role("log"), self.page.get_by_label("Message")
        self.answers, self.notes = self.log.get_by_label("Answer"), self.log.locator(".note")
        self.button = self.page.locator("#send")

    def ask(self, text: str) -> None:
        """Sends a message."""
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def answered(self, text: str = "Q") -> str:
        """Sends a message; what the answer says, small print left out, when it is complete."""
        count = self.notes.count()
        self.ask(text)
        self.notes.nth(count).wait_for()
        return self.said()

    def said(self) -> str:
        """What the last answer says so far."""
        found: str = self.answers.last.evaluate(
            "answer => [...answer.querySelectorAll('.prose, .fence, pre')].map(each => each.textContent).join('')"
        )
        return found

    def set(self, **fields: Any) -> None:
        """Fills in settings: temperature, max_tokens, schedule."""
        self.page.get_by_role("button", name="Settings").click()
        for name, value in fields.items():
            field = self.page.locator(f"#{name.replace('_', '-')}")
            if name == "schedule":
                field.select_option(value)
            else:
                field.fill(str(value))
        self.page.keyboard.press("Escape")

    def tinted(self) -> dict[str, int]:
        """Tokens of the last answer that a draft had proposed, by drafter."""
        sources = self.answers.last.locator(".token[data-source]").evaluate_all("all => all.map(e => e.dataset.source)")
        return {source: sources.count(source) for source in set(sources)}

    def color(self, selector: str, name: str) -> str:
        """A computed colour."""
        found: str = self.page.locator(selector).first.evaluate("(e, name) => getComputedStyle(e)[name]", name)
        return found
