"""The page in a browser, served by the command as a user starts it."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medcil.clinic.update import rollback

from .conftest import picture

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not tested"),
]
RED, GREEN = (200, 60, 60), (60, 200, 60)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "medcil", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        if found is None:
            server.kill()
            pytest.fail(server.stderr.read())
        try:
            yield found.group()
        except BaseException:
            server.kill()  # else a test that fails would wait for it
            raise
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) == 0
        assert server.stderr.read() == ""


@pytest.fixture(scope="module")
def address(model) -> Iterator[str]:
    with serving(model) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def blank_page(browser):
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_default_timeout(120_000)  # milliseconds: a machine may be busy with other tests
    return page


@pytest.fixture
def page(browser, address, tmp_path):
    """Opened, and afterwards found to have asked nobody else and to have broken nothing."""
    opened = blank_page(browser)
    asked, troubles = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    opened.goto(address)
    opened.get_by_text("version v2, 4 classes").wait_for()
    yield opened
    opened.close()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert troubles == []


@pytest.fixture
def images(tmp_path) -> dict[str, Path]:
    contents = {
        "red.png": picture(RED),
        "green <b>.jpg": picture(GREEN, file_format="JPEG"),
        "scan.tif": picture(RED, file_format="TIFF"),
        "notes.png": b"no image",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


def test_images_are_answered(page, images):
    assert "not a medical device" in page.locator("#notice").inner_text()
    page.set_input_files("#choose", list(images.values()))
    page.locator(".result .error").wait_for()
    assert page.locator(".result h2").all_inner_texts() == ["alpha", "beta", "alpha"]
    assert page.locator(".result .name").all_inner_texts() == list(images)
    first = page.locator(".result").first
    shares = [float(text[:-1]) for text in first.locator(".share").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    widths = [box.bounding_box()["width"] for box in first.locator(".fill").all()]
    track = first.locator(".track").first.bounding_box()["width"]
    assert [100 * width / track for width in widths] == pytest.approx(shares, abs=1)
    assert "cannot be read as an image" in page.locator(".result .error").inner_text()
    page.get_by_text("no preview").wait_for()  # of the TIFF
    page.locator("#prior").select_option("training")
    page.wait_for_function(
        "was => document.querySelector('.share').innerText !== was", arg=f"{shares[0]:.1f}%"
    )
    page.locator("#clear").click()
    assert page.locator(".result").count() == 0


def test_an_answer_is_explained(page, images):
    page.set_input_files("#choose", images["red.png"])
    page.get_by_text("Why this answer?").click()
    page.locator(".stack").nth(1).wait_for()
    assert page.locator(".nearest img").count() == 8
    drawn = page.evaluate(
        "[...document.querySelectorAll('.explanation img')].every(i => i.naturalWidth > 20)"
    )
    assert drawn
    assert page.locator(".explanation h3").first.inner_text().startswith("alpha: ")


def test_what_an_update_cost_is_told(page):
    page.get_by_role("tab", name="Versions").click()
    page.locator("#version-v2 .verdict").wait_for()
    assert "served here" in page.locator("#version-v2 h2").inner_text()
    rows = page.locator("#version-v2 .forgetting tbody").first.locator("tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["alpha", "beta", "gamma", "delta"]
    assert page.locator("#version-v1 .verdict").count() == 0
    page.get_by_role("tab", name="Model card").click()
    assert "not a medical device" in page.locator("#card-text").inner_text()
    assert page.locator("#history").is_hidden()


def test_a_version_that_cannot_be_read_is_named_among_the_others(browser, model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "versions/v1/metrics.json").write_text("{")
    with serving(copy) as address:
        page = blank_page(browser)
        page.goto(address)
        page.get_by_role("tab", name="Versions").click()
        page.locator("#version-v2 .verdict").wait_for()
        assert "metrics.json was changed or damaged" in page.locator("#version-v1 .error").inner_text()
        page.close()


def test_an_image_of_something_else_is_flagged(page, tmp_path):
    (tmp_path / "gray.png").write_bytes(picture((128, 128, 128)))
    page.set_input_files("#choose", tmp_path / "gray.png")
    page.get_by_text("Unlike anything known: do not rely").wait_for()


def test_all_answers_on_the_page_are_of_one_version(browser, model, images, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    with serving(copy) as address:
        page = blank_page(browser)
        page.goto(address)
        page.get_by_text("version v2, 4 classes").wait_for()
        page.set_input_files("#choose", images["red.png"])
        page.get_by_text("1 image done.").wait_for()
        assert page.locator(".share").count() == 4
        rollback(copy, "v1")
        page.set_input_files("#choose", images["green <b>.jpg"])
        page.get_by_text("2 images done.").wait_for()
        page.get_by_text("version v1, 3 classes").wait_for()
        assert page.locator(".share").count() == 6
        assert page.locator(".result h2").all_inner_texts() == ["beta", "alpha"]
        assert page.locator("#stale").is_hidden()
        page.close()
