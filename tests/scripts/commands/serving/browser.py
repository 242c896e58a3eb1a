"""A page in headless Chromium."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pytest

from tests.scripts.commands.serving.client import WAIT_S, Client

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESK = 360, 1200


@contextlib.contextmanager
def opened(
    client: Client, width: int = DESK, scheme: Literal["light", "dark"] = "light"
) -> Iterator["Page"]:
    """Opens the page of a server; skips without Chromium; no error may reach the console."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra test)")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is on the path")
    messages: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        size = {"width": width, "height": 740}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.set_default_timeout(WAIT_S * 1000)
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(f"http://127.0.0.1:{client.port}/")
        page.wait_for_selector("#send[aria-disabled=false]")
        yield page
        browser.close()
    assert not messages
