"""weft inspect of one kernel: its source, PTX and SASS, and its page in a real browser."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import page_requests
from helpers.inspecting import weft

if importlib.util.find_spec("selenium"):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Inspect one Triton kernel: its JSON with all texts, and its page."""
    file = tmp_path_factory.mktemp("page") / "kernel.html"
    case = ["--case", "bf16-8192x8192x8192", "--direction", "forward"]
    arguments = ["inspect", "matmul", "--impl", "triton", *case, "--html", str(file)]
    done = weft("-m", "weft", *arguments, "--json", "--source", "--ptx", "--sass")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), file


def test_the_command_shows_source_ptx_and_sass_of_one_kernel(shown: tuple[dict[str, Any], Path]) -> None:
    (kernel,) = shown[0]["kernels"]
    assert kernel["kernel"] == "matmul_descriptors" and kernel["target"] == "sm_90a"
    assert kernel["threads"] == 256 and kernel["shared_dynamic"] > 100 << 10
    assert kernel["occupancy"]["blocks"] == 1
    assert any(name.startswith("HGMMA") for name in kernel["counts"]["tensor"])
    lines = kernel["sass"].splitlines()
    under = [i for i, line in enumerate(lines) if "HGMMA" in line]
    above = [next(x for x in lines[i::-1] if not x.startswith(" ")) for i in under]
    # The scheduler reorders instructions: some are listed under the load before them.
    assert any("with_triton.py" in line and "tl.dot(" in line for line in above)
    assert "wgmma.mma_async" in kernel["ptx"] and "tl.dot(" in kernel["source"]


def marked(browser: Any, column: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    texts = browser.execute_script(script, f'[data-column="{column}"] .on code')
    assert isinstance(texts, list)
    return texts


@pytest.mark.browser
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (375, "light")])
def test_the_page_loads_nothing_logs_nothing_and_fits_the_screen(
    browser: Any, shown: tuple[dict[str, Any], Path], width: int, theme: str
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get_log("performance")
    address = shown[1].as_uri()
    browser.get(address)
    assert browser.get_log("browser") == []
    assert [u for u in page_requests(browser) if not u.startswith("data:")] == [address]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == (theme == "dark")


@pytest.mark.browser
def test_pointing_at_a_line_marks_the_lines_that_came_from_it(
    browser: Any, shown: tuple[dict[str, Any], Path]
) -> None:
    browser.get(shown[1].as_uri())
    # The product's line of the source: its wgmma in the PTX, its HGMMA in the SASS.
    line = browser.execute_script(
        "return [...document.querySelectorAll('[data-column=source] [data-key]')]"
        ".find(e => e.textContent.includes('tl.dot('))"
    )
    browser.execute_script("arguments[0].click()", line)
    assert any("HGMMA" in text for text in marked(browser, "sass"))
    assert any("wgmma.mma_async" in text for text in marked(browser, "ptx"))
    assert len(marked(browser, "source")) == 1
    seen = "const a = arguments[0].getBoundingClientRect(), b = arguments[0].parentElement"
    inside = f"{seen}.getBoundingClientRect(); return a.top >= b.top - 1 && a.bottom <= b.bottom"
    first = browser.find_element(By.CSS_SELECTOR, '[data-column="sass"] .on')
    assert browser.execute_script(inside, first)
    # Back from the SASS, by keyboard: an instruction marks its one PTX line and its source.
    sass_column = browser.find_element(By.CSS_SELECTOR, '[data-column="sass"]')
    sass_column.send_keys(Keys.ESCAPE)
    assert marked(browser, "sass") == []
    sass_column.send_keys(Keys.ARROW_DOWN)
    assert len(marked(browser, "sass")) == 1 == len(marked(browser, "ptx"))
    assert marked(browser, "source")
