"""Makes the pictures of README.md anew, in docs/_static: `python -m docs.pictures`.

- report.png: the top of the report of `shardline run compiled/retrain.yaml`; needs Chromium or Chrome
- two-workers.svg: efficiency of two workers, from benchmarks/training.csv
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import plots
from docs.outputs import Scratch

STATIC = Path(__file__).parent / "_static"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Width and height in pixels: the verdict, the numbers and the first rules.
SIZE = (1040, 610)


def report(browser: str) -> None:
    """Runs the pipeline and takes a picture of its report."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory).resolve() / "home"
        page, picture = home.with_name("report.html"), home.with_name("report.png")
        page.write_text(Scratch(home).output("cat runs/latest/report.html"), encoding="utf-8")
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={home.with_name('profile')}",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
        shutil.copy(picture, STATIC / "report.png")


if __name__ == "__main__":
    plots.rings()
    if found := next(filter(None, map(shutil.which, BROWSERS)), None):
        report(found)
    else:
        print(f"report.png is left as it is: none of {', '.join(BROWSERS)} is on the PATH", file=sys.stderr)
