"""A real Chromium for tests of the viewer's page, and what a test asks it."""

from __future__ import annotations

import shutil
import time
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

PATIENCE_S = 30.0
NEEDED = ("chromium", "chromedriver")


def missing_programs() -> list[str]:
    """The programs that these tests need and that are not here."""
    return [name for name in NEEDED if shutil.which(name) is None]


class Page:
    """One window of a headless Chromium on the viewer's page."""

    def __init__(self, url: str) -> None:
        """``url`` is what ``hearth view`` prints, with its key."""
        options = Options()
        options.binary_location = str(shutil.which("chromium"))
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
        self.driver.set_page_load_timeout(PATIENCE_S)
        self.root = url.split("/?")[0]
        self.resize(1440, 900)
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        """Set the size of what is visible, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Set the system's theme, ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, path: str) -> None:
        """Load a view anew."""
        self.driver.get(self.root + path)

    def wait_for(self, selector: str, text: str = "") -> None:
        """Return when an element that a selector finds has a text."""
        found = "[...document.querySelectorAll(arguments[0])]"
        self.wait(f"return {found}.some(e => e.innerText.includes(arguments[1]))", selector, text)

    def wait_for_texts(self, selector: str, texts: list[str]) -> None:
        """Return when the elements that a selector finds have just these texts."""
        found = "JSON.stringify([...document.querySelectorAll(arguments[0])].map(e => e.innerText))"
        self.wait(f"return {found} === JSON.stringify(arguments[1])", selector, texts)

    @property
    def path(self) -> str:
        """The path and query of the view."""
        return self.driver.current_url.removeprefix(self.root)

    def ask(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    @property
    def text(self) -> str:
        """All text on the page, as it is visible."""
        return self.ask("return document.body.innerText")

    def texts(self, selector: str) -> list[str]:
        """The text of each element that a selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
        return self.ask(script, selector)

    def wait(self, script: str, *arguments: Any) -> Any:
        """What a script returns as soon as that is true; the error says what was on the page."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.ask(script, *arguments)
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{script} {arguments} never came true on:\n{self.text[:3000]}")

    def wait_for_text(self, text: str) -> None:
        """Return when a text is on the page."""
        self.wait("return document.body.innerText.includes(arguments[0])", text)

    def wait_for_path(self, start: str) -> None:
        """Return when the view's path and query begin so."""
        self.wait("return (location.pathname + location.search).startsWith(arguments[0])", start)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def write(self, text: str) -> None:
        """Write over the text of the field that has the focus."""
        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys("a").key_up(
            Keys.CONTROL
        ).send_keys(text).perform()

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds, as a mouse does."""
        self.wait("return document.querySelector(arguments[0])", selector)
        self.driver.find_element("css selector", selector).click()

    def problems(self) -> list[str]:
        """What the console said since the last call: errors, and what the policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()
