"""Makes docs/page.png anew: `langchain-card serve` in one terminal, `python docs/screenshot.py` in another.

It needs Chromium (Debian: `apt-get install chromium`); fonts-inter and fonts-jetbrains-mono were there, too.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = (
    "What is a hash table? Answer in one sentence.",
    "Show me how to time a function in Python, in a few lines.",
)
SIZE = {"width": 760, "height": 1000}

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport=SIZE, device_scale_factor=1.5)
    page.goto(URL)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Schedule").select_option("parallel")
    page.keyboard.press("Escape")
    page.mouse.move(0, 0)
    for number, question in enumerate(QUESTIONS):
        page.get_by_label("Message").fill(question)
        page.keyboard.press("Enter")
        page.locator(".note").nth(number).wait_for(timeout=120_000)
    shots = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(500)  # colours fade
        shots.append(Image.open(io.BytesIO(page.screenshot())))
    browser.close()

width, height = shots[0].size
both = Image.new("RGB", (2 * width, height))
for number, shot in enumerate(shots):
    both.paste(shot, (number * width, 0))
both.quantize(128, dither=Image.Dither.NONE).save(Path(__file__).with_name("page.png"), optimize=True)
