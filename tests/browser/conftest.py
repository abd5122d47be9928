"""A real headless Chromium for the report pages; without one, these tests are skipped with the reason.

Debian: apt-get install chromium chromium-driver. PyPI: selenium.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import own_port

PATIENCE_S = 600
"""What the page has not done by then, it never does."""
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-component-update", "--disable-background-networking",
    "--disable-default-apps", "--disable-sync",
)  # fmt: skip
"""Nothing but the pages that are opened: no start page, which asks the network, and no services beside it."""


class Browser:
    """Opens pages and keeps what the page did: console messages and requests."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, dark: bool = False, width: int = 1150, height: int = 1400) -> None:
        """The page of a file, once its script says it is ready."""
        self.visit(path.as_uri(), dark=dark, width=width, height=height)

    def visit(self, address: str, *, dark: bool = False, width: int = 1150, height: int = 1400) -> None:
        """The page at an address, once its script says it is ready."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.set_window_size(width, height)
        self.driver.get(address)
        self.wait("document.documentElement.dataset.ready === 'true'")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: self.js(f"return {condition}"))

    def all(self, selector: str, expression: str) -> list[Any]:
        """`expression` of `e`, for every element that the selector finds."""
        script = f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})"
        values: list[Any] = self.js(script, selector)
        return values

    def js(self, script: str, *arguments: Any) -> Any:
        """What the script returns."""
        return self.driver.execute_script(script, *arguments)

    def problems(self) -> list[str]:
        """Every message of the console that is a warning or worse."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened; the browser's own start page is not counted."""
        addresses = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                parameters = message["params"]
                if not parameters["documentURL"].startswith(("chrome://", "chrome-untrusted://")):
                    addresses.append(parameters["request"]["url"])
        return addresses


def contrast(color: str, other: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05)."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of a file: one that only waits still takes a sixth of a core."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("chromium")
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with own_port() as port:  # selenium would choose a free one, give it back and tell chromedriver to take it
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver, port=port))
    driver.set_page_load_timeout(PATIENCE_S)
    driver.set_script_timeout(PATIENCE_S)
    driver.command_executor.client_config.timeout = PATIENCE_S
    try:
        yield Browser(driver)
    finally:
        driver.quit()
