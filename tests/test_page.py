"""The report page in a real browser: quiet, offline, sortable, and no wider than the screen."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sample_records import CPU, GPU, bench
from weft.workbench.report import page

# Without it conftest.py says so at each test: it is skipped, and in CI it fails.
if importlib.util.find_spec("selenium"):
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser

RECORDS = bench(GPU) + bench(CPU)
TIMED = [r for r in bench(GPU) if r.timing is not None]
SCREENS = [(w, t) for w in (375, 1280) for t in ("light", "dark")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(page(RECORDS, torn=1), encoding="utf-8")
    return Path(file).as_uri()


def look(browser: webdriver.Chrome, address: str, width: int = 1280, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    browser.get_log("performance")
    browser.get(address)


def requested(browser: webdriver.Chrome) -> list[str]:
    events = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [p["request"]["url"] for p in sent]


@pytest.mark.parametrize(("width", "theme"), SCREENS)
def test_quiet_offline_and_no_wider_than_the_screen(
    browser: webdriver.Chrome, address: str, width: int, theme: str
) -> None:
    look(browser, address, width, theme)
    assert browser.get_log("browser") == []
    assert [u for u in requested(browser) if not u.startswith("data:")] == [address]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    past = browser.execute_script(
        "return [...document.querySelectorAll('h2,h3,p,figure,.row,.scroll,text')]"
        ".filter(e => !e.closest('table') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.textContent.slice(0, 60))"
    )
    assert past == []


def test_the_roofline_has_a_mark_for_each_timed_record(
    browser: webdriver.Chrome, address: str
) -> None:
    look(browser, address)
    first = browser.find_element(By.CSS_SELECTOR, "#device-1")
    marks = first.find_elements(By.CSS_SELECTOR, ".roofline .mark")
    assert len(marks) == len(TIMED)
    assert all(m.get_attribute("aria-label") for m in marks)
    assert len(first.find_elements(By.CSS_SELECTOR, "rect.bar")) == len(TIMED)
    torn = len(first.find_elements(By.CSS_SELECTOR, ".tear"))
    assert len(first.find_elements(By.CSS_SELECTOR, ".whisker")) == len(TIMED) - torn


def test_no_mark_of_an_honest_record_stands_over_its_roof(
    browser: webdriver.Chrome, address: str
) -> None:
    look(browser, address)
    gap = browser.execute_script("""
        const plot = document.querySelector("#device-1 .roofline");
        const box = plot.getBoundingClientRect();
        const roof = plot.querySelector("path.roof:not(.second)").getBoundingClientRect();
        const at = (m) => ["x", "y"].map((side) => Number.parseFloat(m.getAttribute(side)));
        const line = (x) => {
          const along = (box.left + x * box.width / 100 - roof.left) / roof.width;
          return (roof.bottom - along * roof.height - box.top) / box.height * 100;
        };
        return Math.min(...[...plot.querySelectorAll(".mark")]
          .filter((m) => m.getAttribute("aria-label").startsWith("gelu"))
          .map((m) => at(m)[1] - line(at(m)[0])));
    """)
    assert gap > -0.2  # percent of the plot's height, the stroke's own width allowed


def column(browser: webdriver.Chrome, table: str, index: int) -> list[str]:
    script = (
        "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
        ".map(r => r.cells[arguments[1]].dataset.value)"
    )
    found = browser.execute_script(script, table, index)
    assert isinstance(found, list)
    return found


def test_sorting_by_keyboard_with_empty_cells_last(browser: webdriver.Chrome, address: str) -> None:
    look(browser, address)
    head = browser.find_elements(By.CSS_SELECTOR, "#device-1-table thead th")[5]
    button = head.find_element(By.TAG_NAME, "button")
    for wanted, falling in (("ascending", False), ("descending", True)):
        button.send_keys(Keys.ENTER)
        assert head.get_attribute("aria-sort") == wanted
        cells = column(browser, "#device-1-table", 5)
        values = [float(c) for c in cells if c]
        assert values == sorted(values, reverse=falling)
        assert cells[: len(values)] == [c for c in cells if c]
    sorted_heads = browser.find_elements(By.CSS_SELECTOR, '#device-1-table th[aria-sort$="ending"]')
    assert len(sorted_heads) == 1


def test_the_filter_keeps_the_rows_with_every_word(browser: webdriver.Chrome, address: str) -> None:
    look(browser, address)
    box = browser.find_element(By.CSS_SELECTOR, "#device-1 .filter input")
    box.send_keys("softmax triton backward")
    shown = browser.execute_script(
        "return document.querySelectorAll('#device-1-table tbody tr:not([hidden])').length"
    )
    assert shown == 1
    told = browser.find_element(By.CSS_SELECTOR, "#device-1 .filter output").text
    assert told == f"1 of {len(bench(GPU))}"


def test_the_theme_toggle_changes_the_paper(browser: webdriver.Chrome, address: str) -> None:
    look(browser, address, theme="dark")
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    paper = "return getComputedStyle(document.body).backgroundColor"
    button = browser.find_element(By.ID, "theme")
    seen = {}
    for _ in range(3):
        seen[button.text] = browser.execute_script(paper)
        button.click()
    assert seen["Theme: auto"] == seen["Theme: dark"] != seen["Theme: light"]


def test_a_chip_hides_its_backend(browser: webdriver.Chrome, address: str) -> None:
    look(browser, address)
    chip = browser.find_element(By.CSS_SELECTOR, '[data-toggle="triton"]')
    marks = browser.find_elements(By.CSS_SELECTOR, '.mark[data-backend="triton"]')
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert {m.value_of_css_property("display") for m in marks} == {"none"}
    chip.click()
    assert marks[0].value_of_css_property("display") != "none"


def test_one_tab_stop_a_plot_and_arrows_inside(browser: webdriver.Chrome, address: str) -> None:
    look(browser, address)
    stops = browser.find_elements(By.CSS_SELECTOR, '#device-1 .bytes .mark[tabindex="0"]')
    assert len(stops) == 1
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus()", stops[0])
    assert tip.text == stops[0].get_attribute("aria-label")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert tip.is_displayed() and tip.text != stops[0].get_attribute("aria-label")
    left, right = (tip.rect["x"], tip.rect["x"] + tip.rect["width"])
    assert left >= 0 and right <= 1280


def test_the_page_can_be_printed_and_works_with_no_script(
    browser: webdriver.Chrome, address: str
) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        look(browser, address)
        printed = browser.execute_cdp_cmd("Page.printToPDF", {})
        assert len(printed["data"]) > 10_000
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
