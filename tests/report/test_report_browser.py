"""The page in a real browser: it asks for nothing, says first what was found, and fits a phone, the dark and paper."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
import study_results
from chromium import Chromium
from PIL import Image

from nomax import report
from nomax._figures import INK, PAPER, PHI

pytestmark = pytest.mark.skipif(
    chromium.FOUND is None, reason="there is no chromium here: apt install chromium, or set CHROMIUM to its path"
)

PHONE, DESK = 400, 1400
ROOT = Path(__file__).parents[2]
TABLE = "document.querySelector('figure .sheet')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return report.write([study_results.results(folder / "results")], folder / "report.html").path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of what was found here."""
    return report.write([ROOT / "results"], tmp_path_factory.mktemp("real") / "report.html").path


@pytest.fixture(scope="module")
def running() -> Iterator[Chromium]:
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture
def browser(running: Chromium) -> Iterator[Chromium]:
    """The browser; whatever a test does in it, the console has to stay silent."""
    yield running
    assert running.complaints() == []


def header(name: str) -> str:
    """The header of a column of the first figure's table, as a JavaScript expression."""
    return f"Array.from({TABLE}.tHead.rows[0].cells).find((cell) => cell.textContent === {json.dumps(name)})"


def column(browser: Chromium, name: str) -> list[str]:
    """The texts of a column from top to bottom."""
    place = browser.evaluate(f"{header(name)}.cellIndex")
    found: list[str] = browser.evaluate(f"Array.from({TABLE}.tBodies[0].rows, (row) => row.cells[{place}].textContent)")
    return found


def open_table(browser: Chromium, page: Path, width: int = DESK) -> None:
    browser.open(page, width)
    browser.click("document.querySelector('.study > summary')")
    browser.click(f"{TABLE}.closest('details').querySelector('summary')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_figure_is_seen_and_the_page_is_not_wider_than_the_window(
    width: int, dark: bool, page: Path, browser: Chromium
) -> None:
    browser.open(page, width, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    seen = browser.evaluate(
        """Array.from(document.querySelectorAll("img"), (image) => {
            const box = image.getBoundingClientRect();
            const drawn = image.complete && image.naturalWidth > 0;
            return drawn && box.width > 200 && box.height > 80 && box.left >= 0 && box.right <= innerWidth;
        })"""
    )
    assert len(seen) == 4 + 2 + 1  # three figures and the maps, a chart for each of two groups, row statistics
    assert all(seen)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    for details in (False, True):
        browser.evaluate(f"document.querySelectorAll('details').forEach((one) => one.open = {str(details).lower()})")
        assert browser.evaluate("document.documentElement.scrollWidth") == width


def test_a_click_on_a_header_sorts_and_a_second_one_turns_it_round(page: Path, browser: Chromium) -> None:
    open_table(browser, page)
    assert column(browser, "L") == ["16"] * 5 + ["100", "49"]
    browser.click(f"{header('L')}.querySelector('button')")
    assert column(browser, "L") == ["16"] * 5 + ["49", "100"]
    assert column(browser, "α")[:5] == ["0", "0.5", "1", "1.5", "2"]  # equals keep their order
    assert browser.evaluate(f"{header('L')}.ariaSort") == "ascending"
    browser.click(f"{header('L')}.querySelector('button')")
    assert column(browser, "L") == ["100", "49"] + ["16"] * 5
    assert browser.evaluate(f"{header('L')}.ariaSort") == "descending"
    browser.click(f"{header('model')}.querySelector('button')")
    assert browser.evaluate(f"{header('L')}.ariaSort") == "none"
    assert column(browser, "model") == ["pico/10"] + ["relu"] * 5 + ["softmax"]


def test_numbers_sort_as_numbers_and_what_is_not_known_comes_last(page: Path, browser: Chromium) -> None:
    open_table(browser, page, PHONE)
    browser.click(f"{header('in words')}.querySelector('button')")
    assert column(browser, "in words") == ["−3 ± 1", "9.5 ± 0.1"] + ["71.2 ± 0.4"] * 5
    for order in (["0", "0.25", "0.5", "1", "1.5", "2", "–"], ["2", "1.5", "1", "0.5", "0.25", "0", "–"]):
        browser.click(f"{header('α')}.querySelector('button')")
        assert column(browser, "α") == order


def test_the_keyboard_sorts_too(page: Path, browser: Chromium) -> None:
    open_table(browser, page)
    browser.press("Tab", 9)  # from the summary to the box, which scrolls with the arrow keys
    assert browser.evaluate("document.activeElement.className") == "box"
    browser.press("Tab", 9)
    assert browser.evaluate("document.activeElement.textContent") == "L"
    browser.press("Enter", 13, "\r")
    assert browser.evaluate(f"{header('L')}.ariaSort") == "ascending"


def test_the_page_asks_for_nothing_and_runs_nothing_but_its_own_script(page: Path, browser: Chromium) -> None:
    browser.open(page, DESK)
    asked = [address for address in browser.requests() if not address.startswith("data:")]
    assert asked == [page.resolve().as_uri()]
    assert browser.evaluate("document.title") == "Attention without softmax: what the studies found"
    assert browser.evaluate("document.scripts.length") == 1
    ids = browser.evaluate("Array.from(document.querySelectorAll('[id]'), (one) => one.id)")
    assert len(set(ids)) == len(ids)
    lost = "Array.from(document.querySelectorAll('a'), (a) => a.hash).filter((id) => !document.querySelector(id))"
    assert browser.evaluate(lost) == []


def test_everything_that_shows_something_says_what_it_shows(page: Path, browser: Chromium) -> None:
    browser.open(page, DESK)
    images = "document.querySelectorAll('img, svg:not([aria-hidden])')"
    said = browser.evaluate(f"Array.from({images}, (image) => image.alt || image.ariaLabel)")
    assert all(len(words) > 20 for words in said)
    unnamed = "Array.from(document.querySelectorAll('button, summary, a'), (one) => one.textContent.trim())"
    assert all(browser.evaluate(unnamed))


def test_the_command_is_copied_or_selected(page: Path, browser: Chromium) -> None:
    browser.open(page, PHONE)
    browser.click("document.querySelector('.study > summary')")
    browser.click("document.querySelector('.copy')")
    wait = "new Promise((done) => setTimeout(() => done(document.querySelector('.copy').textContent), 200))"
    assert browser.evaluate(wait) in ("Copied", "Selected")


def test_a_figure_can_be_enlarged_on_a_phone(page: Path, browser: Chromium) -> None:
    browser.open(page, PHONE)
    browser.click("document.querySelector('.enlarge')")
    assert browser.evaluate("document.querySelector('.panel img').getBoundingClientRect().width") == 730
    assert browser.evaluate("document.querySelector('.enlarge').ariaPressed") == "true"
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_first_screen_says_what_was_found_with_one_figure(dark: bool, real: Path, browser: Chromium) -> None:
    browser.open(real, 1280, 800, dark=dark)
    box = "document.querySelector('{}').getBoundingClientRect().bottom"
    for part in (".found", ".lead img", ".lead figcaption", ".verdict"):
        assert 0 < browser.evaluate(box.format(part)) < 800
    shown = "Array.from(document.images).filter((image) => image.checkVisibility()).length"
    assert browser.evaluate(shown) == 1
    assert browser.evaluate("document.querySelector('.found').textContent").startswith("relu/L ")
    assert browser.evaluate("document.documentElement.scrollHeight") < 3 * 800  # all else is folded away


def test_on_a_phone_the_first_screens_are_the_same_words_and_figure(real: Path, browser: Chromium) -> None:
    browser.open(real, PHONE, 800)
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE
    assert browser.evaluate("document.querySelector('.lead img').getBoundingClientRect().bottom") < 800


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_turn_dark_with_the_page(dark: bool, real: Path, browser: Chromium) -> None:
    scheme = "dark" if dark else "light"
    browser.open(real, 1280, 800, dark=dark)
    image = Image.open(io.BytesIO(browser.picture())).convert("RGB")
    box = browser.evaluate("document.querySelector('.lead img').getBoundingClientRect().toJSON()")
    drawn = image.crop(tuple(round(box[side]) for side in ("left", "top", "right", "bottom")))
    used = {f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in drawn.getcolors(1 << 20) or []}
    for colour in (PAPER, INK, PHI["softmax"], PHI["relu"]):
        assert getattr(colour, scheme) in used
    assert drawn.getpixel((1, 1)) == image.getpixel((1, 1))  # it has the page's own background


def test_a_link_to_a_study_or_a_verdict_opens_it(page: Path, browser: Chromium) -> None:
    browser.open(page, DESK)
    browser.click("document.querySelector('.lead a[href^=\"#study\"]')")
    assert browser.evaluate("document.querySelector('#study-alpha').checkVisibility()") is True
    assert browser.evaluate("document.querySelectorAll('.study[open]').length") == 1


def test_on_paper_are_verdicts_and_figures_and_no_tables(real: Path, browser: Chromium) -> None:
    browser.open(real, 800, media="print")
    for what, visible in (
        ("img:not(.screen img)", True),
        (".verdict > div", True),
        ("table, dl:not(.sides), button", False),
    ):
        shown = browser.evaluate(f"Array.from(document.querySelectorAll('{what}'), (one) => one.checkVisibility())")
        assert shown
        assert set(shown) == {visible}, what
    pages = browser.pdf()
    assert 2 < len(re.findall(rb"/Type\s*/Page\b", pages)) < 15
