"""The report's page and that of `plan ui` in a real browser: quiet, nothing asked of a network, plan.json's figures."""

import base64
import dataclasses
import itertools
import json
import math
import re
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.ui import HOST, Catalog, Server
from planner.core.units import GIB, gib
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Data
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.setup.outcome import Fidelity
from reports.extras import Extras, PeakTensor, Timeline, TimelinePhase
from reports.html import Entry, entry_of, plan_files, report_html
from reports.plan_json import plan_to_dict
from tests.browser.conftest import Browser, contrast
from tests.planner.helpers import plan_request as request_of
from tests.reports.factories import make_gpu, make_many, make_model, make_no_plan, make_plan, make_workload
from tests.reports.test_markdown import full_extras
from tests.whole import WHOLE

pytestmark = pytest.mark.processes

A4 = {"paperWidth": 8.27, "paperHeight": 11.69}
MAX_PAGE_BYTES = 2 * 1000**2
HOSTILE = "evil</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>'\"&{{7*7}}"
CHART_KINDS = {
    "memory-bars", "phase-peaks", "timeline", "speed-memory", "sensitivity", "time-parts", "accuracy", "search-history",
}  # fmt: skip
FOCUSED = "((e) => e.id || e.tagName + ('copy' in e.dataset ? '-copy' : ''))(document.activeElement)"
SEARCH = {
    "trials": [
        {"tokens_per_s": 2000.0, "feasible": True, "level": "probe"},
        {"tokens_per_s": None, "feasible": False, "reason": "out of memory", "level": "probe"},
        {"tokens_per_s": 2298.0, "feasible": True, "level": "probe"},
    ],
    "stop_reason": "no remaining candidate can beat the best by 1 %",
}


def timeline() -> Timeline:
    points = tuple((i, int((6 + 4 * math.sin(i / 127) + 0.3 * math.sin(i / 3)) * GIB)) for i in range(400))
    peak = max(points, key=lambda point: point[1])
    return Timeline(
        points=points,
        phases=(
            TimelinePhase(name="forward", start=0, end=150),
            TimelinePhase(name="loss", start=150, end=210),
            TimelinePhase(name="backward", start=210, end=370),
            TimelinePhase(name="step", start=370, end=399),
        ),
        peak_event=peak[0],
        peak_bytes=peak[1],
        tensors=(PeakTensor(name="logits [4, 2048, 152064]", category="loss", size_bytes=int(2.3 * GIB)),),
    )


def rich_extras() -> Extras:
    return dataclasses.replace(full_extras(), timeline=timeline())


@cache
def document() -> dict[str, Any]:
    """A plan.json with everything that a report can show."""
    plan = make_plan(
        make_workload(data=Data(epoch_tokens=12_000_000), price_per_hour=0.69), level=Fidelity.PROBE, search=SEARCH
    )
    texts = plan_files(plan, rich_extras(), html=False)
    values: dict[str, Any] = json.loads(texts["plan.json"])
    return values


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write(tmp_path, report_html([entry_of(document())]))


def write(folder: Path, text: str) -> Path:
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def series(browser: Browser, chart: str) -> dict[str, Any]:
    """Series name -> data of a live chart."""
    script = """
        const option = echarts.getInstanceByDom(document.getElementById(arguments[0])).getOption();
        return Object.fromEntries(option.series.map((one) => [one.name, one.data]));
    """
    data_by_name: dict[str, Any] = browser.js(script, chart)
    return data_by_name


def test_page_is_quiet_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.js("document.getElementById('theme').click(); window.scrollTo(0, 1e6);")
    assert browser.problems() == []
    away = [url for url in browser.requests() if url != page.as_uri() and not url.startswith("data:")]
    assert away == []
    assert page.stat().st_size < MAX_PAGE_BYTES


def test_page_draws_every_chart_of_plan_json_numbers_and_says_it_in_words(browser: Browser, page: Path) -> None:
    browser.open(page)
    kinds = browser.all(".chart", "e.dataset.kind")
    assert set(kinds) == CHART_KINDS
    assert kinds.count("sensitivity") == 3
    drawn = browser.js(
        "return [...document.querySelectorAll('.chart')].map((one) => one.querySelectorAll('svg path').length)"
    )
    assert all(paths >= 3 for paths in drawn)
    memory_chart_shows_plan_json_numbers(browser)
    other_charts_show_plan_json_numbers(browser)
    text_shows_plan_json_numbers_to_the_digit(browser)
    every_chart_has_words_for_those_who_cannot_see_it(browser)


def memory_chart_shows_plan_json_numbers(browser: Browser) -> None:
    shown = series(browser, "plan-1-chart-memory")
    plan = document()
    candidates = [plan["chosen"], *(alternative["candidate"] for alternative in plan["alternatives"])]
    levels = [candidate["dry_run"] or candidate["formula"] for candidate in candidates]
    assert shown["weights"] == [prediction["terms"]["weights"] for prediction in levels]
    assert shown["activations"] == [prediction["terms"]["activations"] for prediction in levels]
    stacked = [
        sum(values) for values in zip(*(data for name, data in shown.items() if "measured" not in name), strict=True)
    ]
    assert stacked == [prediction["peak_device_bytes"] for prediction in levels]
    assert shown["measured device peak"] == [[plan["chosen"]["probe"]["peak_device_bytes"], 0]]
    words = browser.js("return document.getElementById('plan-1-chart-memory').textContent")
    assert f"card {gib(plan['workload']['memory_bytes'])}" in words
    assert f"budget {gib(plan['workload']['budget_bytes'])}" in words


def other_charts_show_plan_json_numbers(browser: Browser) -> None:
    plan = document()
    speed = series(browser, "plan-1-chart-speed")
    measured = plan["chosen"]["probe"]
    assert [point["value"] for point in speed["the plan"]] == [
        [measured["peak_device_bytes"], measured["tokens_per_s"]]
    ]
    assert series(browser, "plan-1-chart-timeline")["allocated"] == plan["timeline"]["points"]
    for number, parameter in enumerate(("lora_rank", "seq_len_tokens", "micro_batch_seqs"), 1):
        points = [point for point in plan["sensitivity"] if point["parameter"] == parameter]
        shown = series(browser, f"plan-1-chart-sensitivity-{number}")
        assert shown["device peak"] == [point["peak_device_bytes"] for point in points]
        assert shown["tokens/s"] == [point["tokens_per_s"] for point in points]
    peaks = plan["chosen"]["dry_run"]["phase_peaks_bytes"]
    assert series(browser, "plan-1-chart-phases")["allocated peak"] == list(peaks.values())
    assert series(browser, "plan-1-chart-time")["time"] == list(plan["chosen"]["formula"]["time_parts_s"].values())
    history = series(browser, "plan-1-chart-search")
    assert history["fits"] == [[1, 2000.0], [3, 2298.0]]
    assert history["does not fit"] == [[2, 0]]


def text_shows_plan_json_numbers_to_the_digit(browser: Browser) -> None:
    text = browser.js(
        "document.querySelectorAll('details').forEach((d) => { d.open = true; }); return document.body.innerText"
    )
    plan = document()
    for level in ("formula", "dry_run", "probe"):
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"):
            assert gib(plan["chosen"][level][key]) in text
    for alternative in plan["alternatives"]:
        assert f"{alternative['candidate']['formula']['tokens_per_s']:,.0f} tokens/s" in text
        assert alternative["trade"] in text
    for answer in plan["walk"]:
        assert answer["reason"] in text
        for cut in answer["cuts"]:
            assert cut["branch"] in text
            assert cut["reason"] in text


WATCH_WORDS = """
    const button = document.querySelector('[data-copy]');
    window.words = [];
    new MutationObserver(() => window.words.push(button.textContent)).observe(button, { childList: true });
"""


def click_copy(browser: Browser) -> str:
    """What the first copy button says when it is clicked; a little later it says "Copy" again."""
    browser.js(WATCH_WORDS)
    browser.js("document.querySelector('[data-copy]').scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.driver.find_element("css selector", "[data-copy]").click()
    browser.wait("window.words.length > 0 && document.getElementById('said').textContent !== ''")
    words: str = browser.js("return window.words[0]")
    assert browser.js("return document.getElementById('said').textContent") == words
    return words


def test_copy_buttons_copy_the_command(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    assert click_copy(browser) == "Copied"
    copied = browser.driver.execute_async_script(
        "const a = arguments; navigator.clipboard.readText().then(a[0], a[0]);"
    )
    assert copied == document()["launch"][0]["run"]


def test_copy_buttons_work_where_the_clipboard_is_refused(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.js("navigator.clipboard.writeText = () => Promise.reject(new Error('refused'))")
    assert click_copy(browser) == "Copied"


def test_keyboard_reaches_everything_and_arrows_walk_through_a_chart(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    browser.js(
        f"window.reached = []; document.addEventListener('focusin', () => {{ window.reached.push({FOCUSED}); }})"
    )
    tabs = ActionChains(browser.driver, duration=0)
    for _ in range(80):
        tabs.send_keys(Keys.TAB)
    tabs.perform()
    reached = set(browser.js("return window.reached"))
    charts = set(browser.all(".chart", "e.id"))
    assert charts <= reached
    assert {"theme", "SUMMARY", "BUTTON-copy", "A"} <= reached
    chart = browser.driver.find_element("id", "plan-1-chart-memory")
    chart.send_keys(Keys.ARROW_RIGHT)
    words = browser.js("return document.getElementById('plan-1-chart-memory').textContent")
    assert f"device peak: {gib(document()['chosen']['dry_run']['peak_device_bytes'])}" in words


def every_chart_has_words_for_those_who_cannot_see_it(browser: Browser) -> None:
    labels = browser.all(".chart", "[e.getAttribute('role'), e.getAttribute('aria-label')]")
    assert all(role == "img" and label for role, label in labels)
    assert browser.js(
        "return [...document.querySelectorAll('button')].every((one) => one.textContent || one.ariaLabel)"
    )
    levels = browser.all("h1, h2, h3", "+e.tagName[1]")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_light_and_dark_follow_the_system_and_the_button(browser: Browser, page: Path) -> None:
    pictures = {}
    for dark in (False, True):
        browser.open(page, dark=dark)
        ink, paper = browser.js("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
        assert contrast(ink, paper) > 7
        pictures[dark] = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert pictures[False] != pictures[True]
    browser.js("document.getElementById('theme').click()")
    assert browser.js("return document.documentElement.dataset.theme") == "light"
    assert browser.js("return getComputedStyle(document.body).backgroundColor") == pictures[False]


@pytest.mark.parametrize("width", [380, 1600])
def test_page_never_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_pictures_are_drawn_anew_for_another_width(browser: Browser, page: Path) -> None:
    """As on a phone that is turned: what was made for a wide page has its legend over the words, ticks over ticks."""
    shape = """
        const option = echarts.getInstanceByDom(document.getElementById('plan-1-chart-memory')).getOption();
        return [option.grid[0].top, option.xAxis[0].interval];
    """
    browser.open(page, width=1280)
    wide = browser.js(shape)
    browser.driver.set_window_size(520, 1400)
    browser.wait("document.querySelector('.chart').clientWidth < 500")
    browser.wait("echarts.getInstanceByDom(document.querySelector('.chart')).getWidth() < 500")
    turned = browser.js(shape)
    browser.open(page, width=520)
    assert turned == browser.js(shape) != wide


def test_page_prints(browser: Browser, page: Path) -> None:
    browser.open(page, dark=True)
    browser.js("dispatchEvent(new Event('beforeprint'))")
    drawn = browser.all(".chart svg", "[e.getBoundingClientRect().width, +e.getAttribute('width')]")
    assert drawn
    assert all(shown == declared <= 680 for shown, declared in drawn)
    card = browser.js("return document.getElementById('plan-1-chart-memory').textContent")
    assert "card 23.51 GiB" in card
    browser.js("dispatchEvent(new Event('afterprint'))")
    printed = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    assert browser.problems() == []
    assert browser.js("return document.documentElement.dataset.theme || 'auto'") == "auto"


@pytest.mark.skipif(not WHOLE, reason="8 CPU seconds; one plan's page prints above (TESTS_WHOLE=1)")
def test_real_plans_print_on_seven_pages_and_four_compare_on_a_few_screens(browser: Browser, tmp_path: Path) -> None:
    """Pages of A4; 6,000 px at 1,280 and on a phone. What is closed comes back with a link to it."""
    wishes: list[tuple[str, str, dict[str, Any]]] = [
        ("meta-llama/Llama-3.1-8B", "rtx-4090", {}),
        ("Qwen/Qwen2.5-32B", "a100-80gb", {"cluster": make_cluster(find_gpu("a100-80gb"), 8)}),
        ("Qwen/Qwen2.5-7B", "a100-80gb", {"fixed": {"objective": ("dpo",)}, "data": Data(epoch_tokens=20_000_000)}),
        ("Qwen/Qwen2.5-72B", "t4", {}),
    ]
    entries = [
        Entry(plan=plan_workload(request_of(name, gpu, **plan_request)), name=str(number))
        for number, (name, gpu, plan_request) in enumerate(wishes)
    ]
    for entry in entries[1:3]:
        browser.open(write(tmp_path, report_html([entry])), width=1280)
        printed = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", A4)["data"])
        assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 7
    page = write(tmp_path, report_html(entries))
    for width in (420, 1280):
        browser.open(page, width=width)
        assert browser.js("return document.documentElement.scrollHeight") <= 6000
    assert not any(browser.all("details.whole", "e.open"))
    browser.js("location.hash = 'plan-2'")
    browser.wait("document.querySelector('#plan-2 details.whole').open")
    browser.wait("document.querySelector('#plan-2 .chart svg')")
    assert browser.problems() == []


def test_hostile_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    model, gpu = make_model(HOSTILE), make_gpu(name=HOSTILE, source=HOSTILE)
    plan = make_plan(make_workload(model=model, gpu=gpu), notes=(HOSTILE,), search={"trials": [{"reason": HOSTILE}]})
    plan = dataclasses.replace(
        plan,
        alternatives=tuple(
            dataclasses.replace(alternative, label=HOSTILE, trade=HOSTILE) for alternative in plan.alternatives
        ),
        tree=tuple(
            dataclasses.replace(answer, question=HOSTILE, choice=HOSTILE, reason=HOSTILE) for answer in plan.tree
        ),
    )
    for entries in ([Entry(plan=plan)], [Entry(plan=plan, name=HOSTILE), Entry(plan=make_no_plan(), name=HOSTILE)]):
        browser.open(write(tmp_path, report_html(entries)))
        browser.all("details.whole", "e.open = true")
        browser.wait("[...document.querySelectorAll('.chart')].every((e) => e.firstElementChild)")
        for chart in browser.driver.find_elements("css selector", ".chart"):
            chart.send_keys("\ue014\ue014")  # arrow right twice: the tooltip is HTML
        assert browser.js("return window.hacked === undefined")
        assert browser.js("return document.querySelectorAll('img').length") == 0
        assert HOSTILE in browser.js("return document.body.textContent")
        assert "49" not in browser.js("return document.querySelector('h1').textContent")
        assert browser.problems() == []


def test_refusal_page(browser: Browser, tmp_path: Path) -> None:
    no_plan = make_no_plan()
    browser.open(write(tmp_path, report_html([Entry(plan=no_plan)])))
    text = browser.js("return document.body.innerText")
    assert f"Nothing fits: {gib(no_plan.missing_bytes)} missing." in text
    for suggestion in no_plan.suggestions:
        assert suggestion.action in text
    assert browser.problems() == []


def test_comparison_page(browser: Browser, tmp_path: Path) -> None:
    plans = [make_plan(make_workload(gpu=make_gpu(key, key.upper(), memory), price_per_hour=price))
             for key, memory, price in (("rtx-4090", 23.51, 0.69), ("h200", 139.8, 3.59))]  # fmt: skip
    entries = [*(Entry(plan=plan, name=plan.workload.gpu.key) for plan in plans), Entry(plan=make_no_plan(), name="t4")]
    browser.open(write(tmp_path, report_html(entries)))
    assert series(browser, "comparison-speed")["tokens/s"] == [plan.chosen.tokens_per_s for plan in plans]
    cards = series(browser, "comparison-memory")["card"]
    assert [card[0] for card in cards] == [entry.plan.workload.memory_bytes for entry in entries]
    assert browser.problems() == []
    assert browser.js("return document.querySelectorAll('article').length") == 3
    ids = browser.all("[id]", "e.id")
    assert len(ids) == len(set(ids))
    links = browser.js(
        "return [...document.querySelectorAll('a[href^=\"#\"]')].map((one) => one.getAttribute('href').slice(1))"
    )
    assert set(links) <= set(ids)


def test_comparison_is_sorted_by_a_click_on_a_column(browser: Browser, tmp_path: Path) -> None:
    """Largest peak last, then first; what does not fit has no speed and stands last either way."""
    entries = [Entry(plan=make_plan(), name="a"), Entry(plan=make_no_plan(), name="b")]
    browser.open(write(tmp_path, report_html(entries)))
    table = "document.querySelector('table[data-sortable]')"
    heads = browser.js(f"return [...{table}.tHead.rows[0].cells].map((c) => c.textContent)")
    peaks = [gib(plan.memory_evidence.peak_device_bytes) for plan in (make_plan().chosen, make_no_plan().nearest)]

    def sorted_by(name: str, column: str) -> list[str]:
        browser.js(f"{table}.tHead.rows[0].cells[{heads.index(name)}].querySelector('button').click()")
        at = heads.index(column)
        cells: list[str] = browser.js(f"return [...{table}.tBodies[0].rows].map((r) => r.cells[{at}].textContent)")
        return cells

    rising = sorted(peaks, key=lambda words: float(words.split()[0]))
    assert sorted_by("peak", "peak") == rising
    assert sorted_by("peak", "peak") == rising[::-1]
    assert [sorted_by("speed", "speed")[-1] for _ in range(2)] == ["-", "-"]


COUNT_DRAWN = """
    const init = echarts.init;
    window.drawn = [];
    echarts.init = (element, ...more) => { window.drawn.push(element.id); return init(element, ...more); };
    document.getElementById('theme').click();
    echarts.init = init;
    return window.drawn;
"""


def test_two_thousand_candidates_stay_responsive(browser: Browser, tmp_path: Path) -> None:
    """What the browser has to do does not grow with the candidates: their chart is one canvas, the page has no more
    elements than one of 20, and a change of theme draws each chart once and leaves nothing of the old ones."""
    elements = {}
    for num in (20, 2000):
        page = write(tmp_path, report_html([Entry(plan=make_many(num), extras=rich_extras())]))
        browser.open(page)
        elements[num] = browser.js("return document.querySelectorAll('*').length")
    assert elements[2000] < 1.5 * elements[20]
    assert page.stat().st_size < MAX_PAGE_BYTES
    canvas = "return document.querySelectorAll('#plan-1-chart-speed canvas').length"
    assert browser.js(canvas) == 1
    assert sorted(browser.js(COUNT_DRAWN)) == sorted(browser.all(".chart", "e.id"))
    assert browser.js(canvas) == 1
    points = series(browser, "plan-1-chart-speed")
    assert sum(len(data) for name, data in points.items() if name != "Pareto front") == 2000


def test_page_from_plan_json_is_the_page_from_the_plan() -> None:
    plan = make_plan(level=Fidelity.PROBE)
    extras = rich_extras()
    from_json = report_html([entry_of(json.loads(plan_files(plan, extras, html=False)["plan.json"]))])
    assert from_json == report_html([Entry(plan=plan, extras=extras)])
    assert plan_to_dict(plan)["kind"] == "plan"


# The page of `plan ui` in a real browser: its first button finds what `plan` chooses, a model is found by what people


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
    slide(browser, "batch", 1)
    assert " --batch-size 32 --micro-batch 2 " in text(browser, "command")
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
