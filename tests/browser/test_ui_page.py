"""The page of `plan ui` in a real browser: sliders move the figures at once, by keyboard too, on a phone too."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.cli.app import run
from planner.cli.ui import HOST, Server, Shelf
from tests.browser.conftest import Browser

pytestmark = pytest.mark.processes

MODELS, GPUS = ("meta-llama/Llama-3.1-8B", "HuggingFaceTB/SmolLM2-135M"), ("rtx-4090", "t4")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [word for model in MODELS for word in ("--model", model)] + [
        word for gpu in GPUS for word in ("--gpu", gpu)
    ]
    assert run(["ui", "--static", str(folder), *words]) == 0
    return folder / "index.html"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Server((HOST, 0), Shelf(MODELS, GPUS)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://{HOST}:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def verdict(browser: Browser) -> str:
    return str(browser.js("return document.getElementById('verdict').textContent"))


def slide(browser: Browser, name: str, value: int) -> None:
    browser.js(
        "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
        "one.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def test_a_slider_moves_the_figures_at_once_and_asks_nobody(browser: Browser, site: Path) -> None:
    browser.open(site)
    before, asked = verdict(browser), len(browser.requests())
    assert "fits" in before
    slide(browser, "batch", 4)  # the figures are there when the event has been handled
    after = verdict(browser)
    assert after != before
    assert "It does not fit" in after
    assert "--batch-size" in browser.js("return document.getElementById('command').textContent")
    assert len(browser.requests()) == 0 or len(browser.requests()) <= asked
    assert browser.problems() == []


def test_another_model_and_card_are_loaded(browser: Browser, address: str) -> None:
    browser.visit(address)
    browser.js(
        "document.documentElement.dataset.ready = '';"
        "const one = document.getElementById('gpu'); one.value = 't4'; one.dispatchEvent(new Event('change'))"
    )
    browser.wait("document.documentElement.dataset.ready === 'true'")
    assert "does not fit" in verdict(browser)  # LoRA of 8 B in 16 bit
    browser.js(
        "const one = document.getElementById('method'); one.value = 'qlora'; one.dispatchEvent(new Event('change'))"
    )
    assert "fit" in verdict(browser)
    assert browser.all("#files a", "e.getAttribute('href')")[0].startswith("launch/")
    browser.js("document.getElementById('keep').click()")
    assert len(browser.all("#rows tr", "e.textContent")) == 1
    assert browser.problems() == []


def test_the_keyboard_is_enough(browser: Browser, site: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(site)
    box = browser.driver.find_element(By.ID, "length")
    before = verdict(browser)
    box.send_keys(Keys.ARROW_RIGHT)
    assert verdict(browser) != before
    assert browser.js("return document.getElementById('length').getAttribute('aria-valuetext')") == "4,096"
    order = browser.all("select, input, button", "e.id")
    assert order == ["model", "gpu", "method", "rank", "length", "batch", "checkpointing", "keep"]
    assert browser.all("select, input", "e.labels.length") == [1] * 7


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_with_enough_contrast(browser: Browser, site: Path, dark: bool) -> None:
    browser.open(site, width=420, dark=dark)
    assert browser.js("return document.documentElement.scrollWidth") <= browser.js("return window.innerWidth")
    pairs = browser.all(
        "#verdict, .note, label span, td",
        "[getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]",
    )
    assert pairs
    for ink, page in pairs:
        assert contrast(ink, page) >= 4.5, (ink, page)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05)."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
