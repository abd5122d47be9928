"""The page of `plan ui` in a real browser: its first button finds what `plan` chooses, a model is found by what people
call it, what is red is mended by a button; sliders move the figures at once, by keyboard too, on a phone too."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.ui import HOST, Catalog, Server
from planner.core.units import gib
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Data
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from tests.browser.conftest import Browser, contrast

pytestmark = pytest.mark.processes

MODELS, GPUS = ("openai-community/gpt2", "EleutherAI/gpt-j-6b"), ("t4", "a100-80gb")
"""Models of few positions, whose grids cost least."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert run(["ui", "--static", str(folder), "--model", MODELS[0], "--gpu", GPUS[0]]) == 0
    return folder / "index.html"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Server((HOST, 0), Catalog(MODELS, GPUS)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://{HOST}:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def text(browser: Browser, name: str) -> str:
    return str(browser.js("return document.getElementById(arguments[0]).textContent", name))


def change(browser: Browser, name: str, value: object, event: str = "change") -> None:
    browser.js(
        "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
        "one.dispatchEvent(new Event(arguments[2]))",
        name,
        value,
        event,
    )
    browser.wait("!document.body.dataset.busy")


def slide(browser: Browser, name: str, value: int) -> None:
    change(browser, name, value, "input")


def plan_of(model: str, gpu: str, **options: object) -> Plan:
    spec = catalogue.load(model)
    plan = plan_workload(PlanRequest(**options).workload(spec, find_gpu(gpu)))  # type: ignore[arg-type]
    assert isinstance(plan, Plan)
    return plan


def test_the_first_button_finds_what_plan_chooses(browser: Browser, address: str) -> None:
    """With its time and its cost, for the tokens that are said."""
    browser.visit(address)
    assert browser.all("button", "e.id")[0] == "fastest"
    assert browser.all("button", "e.textContent")[0] == "Find the fastest"
    slide(browser, "batch", 2)
    assert " --batch-size 32 --micro-batch 4 " in text(browser, "command")
    moved = [text(browser, name) for name in ("verdict", "setup", "command")]
    browser.driver.refresh()  # the address holds what is shown
    browser.wait("document.documentElement.dataset.ready === 'true'")
    assert [text(browser, name) for name in ("verdict", "setup", "command")] == moved
    for words, state in (("20 MB", "true"), ("-5", "true"), ("20M", "false")):
        change(browser, "tokens", words)
        assert browser.js("return document.getElementById('tokens').getAttribute('aria-invalid')") == state
    browser.wait("!document.body.dataset.busy")
    browser.js("document.getElementById('fastest').click()")
    plan = plan_of(MODELS[0], GPUS[0], data=Data(epoch_tokens=20_000_000))
    chosen, setup = plan.chosen, plan.chosen.setup
    peak = gib(chosen.formula.peak_device_bytes)
    assert text(browser, "verdict").startswith(f"Fits: {peak} of {gib(chosen.budget_bytes)}")
    assert f"about {chosen.tokens_per_s:,.0f} tokens/s" in text(browser, "verdict")
    assert text(browser, "setup").startswith("What plan chooses: ")
    assert f"micro-batch {setup.micro_batch_seqs} × {setup.seq_len_tokens:,} tokens" in text(browser, "setup")
    tiles = text(browser, "tiles")
    price = plan.workload.price_per_hour
    assert f"${20e6 / chosen.tokens_per_s / 3600 * price:.2f}" in tiles
    assert "1 epoch of 20,000,000 tokens" in tiles
    assert "2026-" in browser.js("return document.getElementById('price').nextElementSibling.textContent")
    assert text(browser, "command") == (
        f"plan {MODELS[0]} --gpu {GPUS[0]} --seq-len 1024 --dataset-tokens 20000000 --out my-plan"
    )
    assert browser.problems() == []


def test_a_model_is_found_and_what_is_red_is_mended(browser: Browser, address: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.visit(address)
    box = browser.driver.find_element(By.ID, "model")
    box.click()
    box.send_keys("gptj 6b")
    browser.wait("document.querySelectorAll('#found [role=option]').length === 1")
    box.send_keys(Keys.ENTER)
    browser.wait("!document.body.dataset.busy")
    assert box.get_attribute("value") == MODELS[1]
    assert text(browser, "verdict").startswith("Fits: ")
    box.send_keys("gpt 2", Keys.ENTER)  # what is typed next replaces the name, and need not wait for the list
    browser.wait(f"document.getElementById('model').value === '{MODELS[0]}'")
    box.send_keys("gptj", Keys.TAB)  # takes the first of the list as Enter does
    browser.wait(f"document.getElementById('model').value === '{MODELS[1]}' && !document.body.dataset.busy")
    box.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE, Keys.TAB)  # nothing typed chooses nothing
    browser.wait(f"document.getElementById('model').value === '{MODELS[1]}'")
    change(browser, "method", "full")
    assert text(browser, "verdict").startswith("Does not fit")
    assert "QLoRA rank" in text(browser, "fix")
    match = re.search(r"\((.* GiB), ([\d,]+ tokens/s)\)", text(browser, "fix"))
    assert browser.js("return document.getElementById('verdict').className") == "verdict no"
    browser.js("document.getElementById('fix').click()")
    assert text(browser, "verdict").startswith(f"Fits: {match[1]}")
    assert match[2] in text(browser, "verdict")
    assert not browser.js("return document.getElementById('repair').offsetParent")
    change(browser, "gpu", GPUS[1])
    assert browser.all("#files a", "e.getAttribute('href')")[0].startswith("launch/")
    browser.js("document.getElementById('keep').click()")
    assert len(browser.all("#rows tr", "e.textContent")) == 1
    assert browser.problems() == []


def test_a_slider_moves_the_figures_at_once_and_asks_nobody(browser: Browser, site: Path) -> None:
    browser.open(site)
    before, num_requests = text(browser, "verdict"), len(browser.requests())
    assert before.startswith("Fits: ")
    slide(browser, "batch", 0)  # the figures are there when the event has been handled
    slide(browser, "length", 0)
    after = text(browser, "verdict")
    assert after != before
    assert "--batch-size" in text(browser, "command")
    assert len(browser.requests()) == 0 or len(browser.requests()) <= num_requests
    assert browser.problems() == []


def test_the_keyboard_is_enough(browser: Browser, site: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(site)
    box = browser.driver.find_element(By.ID, "length")
    before = text(browser, "verdict")
    box.send_keys(Keys.ARROW_LEFT)
    assert text(browser, "verdict") != before
    assert browser.js("return document.getElementById('length').getAttribute('aria-valuetext')") == "512 tokens"
    order = browser.all("select, input, button", "e.id")
    field_ids = ["model", "gpu", "tokens", "epochs", "price"]
    assert order == [*field_ids, "fastest", "fix", "method", "rank", "length", "batch", "checkpointing", "keep"]
    assert browser.all("select, input", "e.labels.length") == [1] * 10
    search = browser.driver.find_element(By.ID, "model")
    search.click()
    search.send_keys("gpt")
    search.send_keys(Keys.ESCAPE)
    assert (search.get_attribute("value"), search.get_attribute("aria-expanded")) == (MODELS[0], "false")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_with_enough_contrast(browser: Browser, site: Path, dark: bool) -> None:
    browser.open(site, width=420, dark=dark)
    assert browser.js("return document.documentElement.scrollWidth") <= browser.js("return window.innerWidth")
    pairs = browser.all(
        "#verdict, #setup, .note, label span, label small, .legend li",
        "[getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]",
    )
    assert pairs
    for ink, page in pairs:
        assert contrast(ink, page) >= 4.5, (ink, page)
