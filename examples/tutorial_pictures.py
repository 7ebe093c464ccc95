"""Photograph the pages of the tutorial in a folder of folder_workflow.sh (`make tutorial-pictures`).

Pages are photographed in a headless Chromium, as a user sees them.
"""

import argparse
import io
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps
from playwright.sync_api import Browser, Locator, Page, sync_playwright

WIDTH = 900
TILE, GAP, LABEL = 64, 6, 70
SHOWN = 10  # images of a class
LARGEST = 200_000  # bytes of a picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workflow", type=Path, help="the folder that folder_workflow.sh has made")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    arguments = parser.parse_args()
    workflow, out = arguments.workflow.resolve(), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    save(contact_sheet(workflow / "images" / "eval"), out / "images.png")
    figure = Image.open(workflow / "explanation" / "explanation.png")
    save(ImageOps.contain(figure, (WIDTH, WIDTH)), out / "explanation.png")
    with browser() as chromium:
        for version, name in (("v3", "forgotten"), ("v4", "kept")):
            page = opened(chromium, (workflow / f"model/versions/{version}/report.html").as_uri())
            photograph(page, out / f"{name}.png", page.locator("h3").first)
        page = opened(chromium, (workflow / "evaluation/evaluation.html").as_uri())
        page.locator("[data-chart=classes] svg").first.wait_for()
        photograph(page, out / "evaluation.png", page.locator("[data-chart=classes] ~ .scroll").first)
        with served(workflow / "model") as address:
            photograph_served(chromium, address, workflow, out)


def contact_sheet(folder: Path) -> Image.Image:
    """A row for every class."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    size = (LABEL + SHOWN * (TILE + GAP), GAP + len(classes) * (TILE + GAP))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for row, of_class in enumerate(classes):
        top = GAP + row * (TILE + GAP)
        pen.text((GAP, top + TILE / 2), of_class.name, fill="black", anchor="lm", font_size=17)
        for column, path in enumerate(sorted(of_class.iterdir())[:SHOWN]):
            with Image.open(path) as picture:
                tile = picture.resize((TILE, TILE), Image.Resampling.BICUBIC)
            sheet.paste(tile, (LABEL + column * (TILE + GAP), top))
    return sheet


@contextmanager
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        sys.exit("The pages are photographed in Chromium, which is not installed.")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(chromium: Browser, address: str) -> Page:
    page = chromium.new_page(viewport={"width": WIDTH, "height": 1000}, color_scheme="light")
    page.goto(address)
    return page


def photograph(page: Page, path: Path, end: Locator | None = None) -> None:
    """The page down to where `end` begins, or all of it."""
    page.wait_for_function("[...document.images].every(image => image.complete)")
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    box = None if end is None else end.bounding_box()
    save(picture.crop((0, 0, picture.width, int(box["y"]) if box else picture.height)), path)


def photograph_served(chromium: Browser, address: str, workflow: Path, out: Path) -> None:
    page = opened(chromium, address)
    page.locator("#model-facts:not(:empty)").wait_for()
    images = workflow / "images" / "new"
    page.set_input_files("#choose", [images / "013.png", images / "005.png"])
    page.locator(".why").click()
    page.locator(".explanation .stack").nth(1).wait_for()
    photograph(page, out / "served.png")
    page.get_by_role("tab", name="Versions").click()
    page.locator("#version-v2 .verdict").wait_for()
    page.set_viewport_size({"width": WIDTH, "height": 700})
    page.locator("#version-v2").scroll_into_view_if_needed()
    save(Image.open(io.BytesIO(page.locator("#version-v2").screenshot())), out / "version.png")


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of `medcil serve` while it runs."""
    command = [sys.executable, "-m", "medcil", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        try:
            if address is None:
                sys.exit("medcil serve has not started.")
            yield address.group()
        finally:
            server.send_signal(signal.SIGINT)


def save(picture: Image.Image, path: Path) -> None:
    """As it is, or where that is too large, in 256 colors."""
    colored = picture.convert("RGB")
    for candidate in (colored, colored.quantize(palette=colored.quantize(kmeans=3))):
        buffer = io.BytesIO()
        candidate.save(buffer, "PNG", optimize=True)
        if buffer.tell() <= LARGEST:
            break
    path.write_bytes(buffer.getvalue())
    print(f"{path}  {picture.width} x {picture.height}, {candidate.mode}, {buffer.tell() / 1000:.0f} kB")


if __name__ == "__main__":
    main()
