"""Take the pictures of the page of `lmcore serve`, in docs/pictures.

    python docs/take_pictures.py [RUN]

Without a run with checkpoints after 300 and 1500 steps it trains one, of the bundled text, in a few
minutes.  It needs lmcore-serve, playwright and Debian's package `chromium`; the seeds are fixed, so
that a change of the page is all that changes a picture.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "pictures"
STEPS = (300, 1500)
PROMPT = "ROMEO:\nWhat light"
LMCORE = [sys.executable, "-m", "lmcore"]
CPU = ["--device", "cpu"]


def train(folder: Path) -> Path:
    """Train a small model, and return the run."""
    run = folder / "shakespeare"
    first, last = map(str, STEPS)
    steps = ["--train-iters", last, "--save-interval", first, "--save", str(run)]
    subprocess.run([*LMCORE, "train", *CPU, *steps], check=True)
    return run


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run `lmcore serve`, and return the address of its page."""
    command = [*LMCORE, "serve", *CPU, "--port", "0", "--access-log", "none", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"on (http://\S+)", line):
                break
        else:
            sys.exit("error: the server did not start; see above")
        try:
            yield found[1]
        finally:
            server.send_signal(signal.SIGINT)


def generated(browser: Any, address: str, tokens: int, **options: Any) -> Any:
    """Return a page on which a text was generated."""
    page = browser.new_context(**options).new_page()
    page.goto(address)
    page.locator("#facts b").first.wait_for()
    if page.locator("#max_tokens").is_hidden():
        page.locator("#settings summary").click()
    page.fill("#max_tokens", str(tokens))
    page.fill("#seed", "7")
    page.fill("#prompt", PROMPT)
    if options["viewport"]["width"] < 800:
        page.locator("#settings summary").click()
    page.press("#prompt", "Control+Enter")
    page.locator("#stop:disabled").wait_for()
    page.locator(".status", has_text="tokens in").first.wait_for()
    return page


def take(browser: Any, run: Path) -> None:
    """Take all pictures."""
    wide, phone = {"width": 1280, "height": 720}, {"width": 390, "height": 720}
    with served("--load", str(run)) as address:
        page = generated(browser, address, 100, viewport=wide)
        page.locator(".token", has_text=re.compile(r"\S")).nth(20).hover()
        page.screenshot(path=FOLDER / "page.png")
        page = generated(browser, address, 60, viewport=phone, color_scheme="dark")
        page.screenshot(path=FOLDER / "phone.png")
    checkpoints = [str(run / f"checkpoints/iter_{step:07d}") for step in STEPS]
    with served("--compare", *checkpoints) as address:
        page = generated(browser, address, 100, viewport=wide)
        page.screenshot(path=FOLDER / "compare.png")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path)
    run = parser.parse_args().run
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        take(browser, run or train(Path(folder)))
        browser.close()


if __name__ == "__main__":
    main()
