"""The report page in a real browser: no messages, no requests, no overflow; sorting, filter, theme, keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from helpers.browser import page_requests
from helpers.sample_records import CPU, GPU, bench, record
from weft.workbench.report import page

# Without selenium conftest.py skips these tests with a reason; in CI it fails them.
if importlib.util.find_spec("selenium"):
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser

# The ridge of this device is far at the left, without a row near it: the labels of the slope do not fit. Its
# sizes span three powers of ten: a wide screen shows ticks at 1, 2 and 5, which do not fit on a phone.
STEEP = {**CPU, "device": "Steep", "ceilings": {"copy": 6.8e10, "read": 9e10, "matrix": {"fp32": 1.9e11}}}
LONG = "dropout_add_layer_norm"
RECORDS = [
    *bench(GPU),
    *bench(CPU),
    *(
        record(
            operator=f"{LONG}_{i}", case=f"bf16-{2**i}x50304-zipf-master", nbytes=2**i, flops=0.0, **changes
        )
        for i in range(20, 33)
        for changes in (
            {"machine": GPU},
            {"machine": GPU, "direction": "backward", "implementation": "cuda/06-vectorised-by-clusters"},
            {"machine": STEEP, "flags": ("suspect: below the floor", "noisy", "throttled: power")},
        )
        if i <= 28 or changes["machine"] is GPU
    ),
    *(
        record(
            operator="matmul",
            case=f"fp32-{n}",
            nbytes=12 * n**2,
            flops=2.0 * n**3,
            rate="fp32",
            machine=STEEP,
        )
        for n in (1024, 1100)
    ),
]
TIMED = [r for r in RECORDS if r.timing is not None and r.machine is GPU]
SCREENS = [(w, t) for w in (400, 800, 1400) for t in ("light", "dark")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(page(RECORDS, torn=1), encoding="utf-8")
    return Path(file).as_uri()


def open_page(browser: webdriver.Chrome, address: str, width: int = 1280, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("performance")
    browser.get(address)


@pytest.mark.parametrize(("width", "theme"), SCREENS)
def test_no_messages_no_requests_and_no_overflow(
    browser: webdriver.Chrome, address: str, width: int, theme: str
) -> None:
    open_page(browser, address, width, theme)
    assert browser.get_log("browser") == []
    assert [u for u in page_requests(browser) if not u.startswith("data:")] == [address]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    overflowing = browser.execute_script(
        "return [...document.querySelectorAll('h2,h3,p,figure,.row,.scroll,text')]"
        ".filter(e => !e.closest('table') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.textContent.slice(0, 60))"
    )
    assert overflowing == []


# Hidden text has an empty box. A plot shows its text inside its frame, a bar chart inside its track.
CUT_TEXT = """
  return [...document.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBoundingClientRect();
    const outer = (text.closest(".frame, svg.track") ?? text.ownerSVGElement).getBoundingClientRect();
    return box.width && (box.left < outer.left - 1 || box.right > outer.right + 1
      || box.top < outer.top - 1 || box.bottom > outer.bottom + 1);
  }).map((text) => text.textContent);
"""
# Pairs of texts of one plot whose boxes overlap: its ticks, and the names of its roofs and columns.
COLLIDING_TEXT = """
  const pairs = [];
  for (const selector of ["text.tick", "text.roof, text.column"]) {
    for (const plot of document.querySelectorAll("svg.plot, svg.track")) {
      const boxes = [...plot.querySelectorAll(selector)]
        .map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
      // A box has one pixel of room above and below the letters.
      boxes.forEach(([name, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
        if (a.left < b.right && b.left < a.right && a.top + 1 < b.bottom - 1 && b.top + 1 < a.bottom - 1)
          pairs.push(`${name} / ${other}`);
      }));
    }
  }
  return pairs;
"""
# A badge is cut by its own box, or by an ancestor that hides what overflows it.
CUT_BADGES = """
  return [...document.querySelectorAll(".flag, .direction, .chip, .status")].filter((badge) => {
    const box = badge.getBoundingClientRect();
    if (!box.width) return false;
    if (badge.scrollWidth > badge.clientWidth && getComputedStyle(badge).display !== "inline") return true;
    for (let e = badge.parentElement; e !== document.body; e = e.parentElement) {
      const outer = e.getBoundingClientRect();
      const outside = box.right > outer.right + 1 || box.left < outer.left - 1;
      if (outside && getComputedStyle(e).overflowX === "hidden") return true;
    }
    return false;
  }).map((badge) => badge.parentElement.textContent.trim());
"""


@pytest.mark.parametrize(("width", "theme"), SCREENS)
def test_no_text_is_cut_and_no_labels_collide(
    browser: webdriver.Chrome, address: str, width: int, theme: str
) -> None:
    open_page(browser, address, width, theme)
    shown = (
        "return [...document.querySelectorAll('svg.plot text')].filter(t => t.getBoundingClientRect().width)"
    )
    assert browser.execute_script(f"{shown}.length") > 60
    assert browser.execute_script(CUT_TEXT) == []
    assert browser.execute_script(COLLIDING_TEXT) == []
    assert browser.execute_script("return document.querySelectorAll('.flag').length") > 30
    assert browser.execute_script(CUT_BADGES) == []


@pytest.mark.parametrize(("width", "theme"), SCREENS)
def test_share_of_the_limit_is_visible_without_scrolling_the_table(
    browser: webdriver.Chrome, address: str, width: int, theme: str
) -> None:
    open_page(browser, address, width, theme)
    table = browser.find_element(By.ID, "device-1-table")
    heads = [h.text.split("\n")[0] for h in table.find_elements(By.CSS_SELECTOR, "thead th")]
    script = """
        const [table, column] = arguments, scroll = table.parentElement;
        const right = (e) => e.getBoundingClientRect().right;
        const ends = [...table.rows].map((row) => right(row.cells[column]));
        const first = table.tBodies[0].rows[0].cells[0];
        const outer = Math.min(right(scroll), innerWidth) - Math.max(...ends);
        scroll.scrollLeft = 200;
        return [outer, first.getBoundingClientRect().left - scroll.getBoundingClientRect().left];
    """
    margin, first_column = browser.execute_script(script, table, heads.index("of the limit"))
    assert margin >= 0
    assert 0 <= first_column <= 2  # it stays when the table is scrolled; 1 pixel is the border


def test_roofline_has_a_mark_for_each_timed_record(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address)
    first = browser.find_element(By.CSS_SELECTOR, "#device-1")
    marks = first.find_elements(By.CSS_SELECTOR, ".roofline .mark")
    assert len(marks) == len(TIMED)
    assert all(m.get_attribute("aria-label") for m in marks)
    assert len(first.find_elements(By.CSS_SELECTOR, "rect.bar")) == len(TIMED)
    truncated = len(first.find_elements(By.CSS_SELECTOR, ".truncated"))
    assert len(first.find_elements(By.CSS_SELECTOR, ".whisker")) == len(TIMED) - truncated


def test_no_mark_is_above_its_roof(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address)
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
    values = browser.execute_script(script, table, index)
    assert isinstance(values, list)
    return values


def test_sorting_by_keyboard_with_empty_cells_last(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address)
    head = browser.find_elements(By.CSS_SELECTOR, "#device-1-table thead th")[2]
    button = head.find_element(By.TAG_NAME, "button")
    for order, descending in (("ascending", False), ("descending", True)):
        button.send_keys(Keys.ENTER)
        assert head.get_attribute("aria-sort") == order
        cells = column(browser, "#device-1-table", 2)
        values = [float(c) for c in cells if c]
        assert values == sorted(values, reverse=descending)
        assert cells[: len(values)] == [c for c in cells if c]
    sorted_heads = browser.find_elements(By.CSS_SELECTOR, '#device-1-table th[aria-sort$="ending"]')
    assert len(sorted_heads) == 1


def test_filter_shows_the_rows_with_every_word(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address)
    box = browser.find_element(By.CSS_SELECTOR, "#device-1 .filter input")
    box.send_keys("softmax triton backward")
    shown = browser.execute_script(
        "return document.querySelectorAll('#device-1-table tbody tr:not([hidden])').length"
    )
    assert shown == 1
    count = browser.find_element(By.CSS_SELECTOR, "#device-1 .filter output").text
    assert count == f"1 of {len(bench(GPU)) + 26}"


def test_theme_button_changes_the_background(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address, theme="dark")
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    background = "return getComputedStyle(document.body).backgroundColor"
    button = browser.find_element(By.ID, "theme")
    colours = {}
    for _ in range(3):
        colours[button.text] = browser.execute_script(background)
        button.click()
    assert colours["Theme: auto"] == colours["Theme: dark"] != colours["Theme: light"]


def test_legend_button_hides_its_backend(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address)
    chip = browser.find_element(By.CSS_SELECTOR, '[data-toggle="triton"]')
    marks = browser.find_elements(By.CSS_SELECTOR, '.mark[data-backend="triton"]')
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert {m.value_of_css_property("display") for m in marks} == {"none"}
    chip.click()
    assert marks[0].value_of_css_property("display") != "none"


def test_each_plot_is_one_tab_stop_with_arrow_keys_inside(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address)
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


def test_page_prints_without_scripts(browser: webdriver.Chrome, address: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_page(browser, address)
        printed = browser.execute_cdp_cmd("Page.printToPDF", {})
        assert len(printed["data"]) > 10_000
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
