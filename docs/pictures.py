"""Makes the pictures of README.md anew, in docs/_static: `python -m docs.pictures`.

- report.png: the top of the report of `shardline run compiled/retrain.yaml`; needs Chromium or Chrome
- two-workers.svg: efficiency of two workers, from benchmarks/training.csv
- retrain.svg: the tasks of compiled/retrain.yaml
"""

from __future__ import annotations

import graphlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import plots
from docs.outputs import ROOT, Scratch
from shardline.pipelines.spec import load_pipeline

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


class Graph:
    """The tasks of a compiled pipeline in a row, in the order of their dependencies; groups have a frame.

    Coordinates are pixels from the left end and from the middle of the row.
    """

    _WIDTH, _HEIGHT, _GAP, _PADDING = 72, 40, 17, 11

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._components = spec["components"]
        self._figure, self._axes = plots.empty_figure("")
        self._axes.set_axis_off()
        right, top, bottom = self._row(spec["root"]["dag"]["tasks"], 1)
        self._axes.set(xlim=(0, right + 1), ylim=(bottom - 1, top + 1))
        self._axes.set_position((0, 0, 1, 1))
        self._figure.set_layout_engine("none")
        self._figure.set_size_inches((right + 1) / 96, (top - bottom + 2) / 96)

    def save(self, path: Path) -> None:
        """Writes the picture as SVG, whose texts can be searched."""
        from matplotlib import rc_context

        with rc_context({"svg.fonttype": "none"}):
            self._figure.savefig(path, metadata={"Date": None})

    def _row(self, tasks: Mapping[str, Any], left: float) -> tuple[float, float, float]:
        """Draws tasks, each after those that it depends on; returns the row's right end, top and bottom."""
        # KFP lists the producers of a task's inputs there, too.
        needs = {name: task.get("dependentTasks", []) for name, task in tasks.items()}
        order, ends, heights = list(graphlib.TopologicalSorter(needs).static_order()), {}, []
        for name in order:
            right, *height = self._task(tasks[name], left)
            ends[name], left = (left, right), right + self._GAP
            heights.append(height)
        for before, after in [(before, name) for name in order for before in needs[name]]:
            start, end, bend = (ends[before][1], 0.0), (ends[after][0], 0.0), 0.0
            if order.index(after) > order.index(before) + 1:  # below the tasks in between
                start, end = ((sum(ends[name]) / 2, -self._HEIGHT / 2) for name in (before, after))
                bend = 0.3
                heights.append([0, start[1] - (end[0] - start[0]) * bend / 2])
            look = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "color": "#57606a"}
            self._axes.annotate("", end, start, arrowprops={**look, "connectionstyle": f"arc3,rad={bend}"})
        return right, max(top for top, _ in heights), min(bottom for _, bottom in heights)

    def _task(self, task: Mapping[str, Any], left: float) -> tuple[float, float, float]:
        """Draws a task, or the frame of a group; returns its right end, top and bottom."""
        from matplotlib.patches import Rectangle

        name, conditional = task["taskInfo"]["name"], "condition" in task.get("triggerPolicy", {})
        group = self._components[task["componentRef"]["name"]].get("dag", {}).get("tasks")
        if not group:
            right, top, bottom = left + self._WIDTH, self._HEIGHT / 2, -self._HEIGHT / 2
            look = {"facecolor": "#ddf4ff", "edgecolor": "#0969da"}
            place = {"x": (left + right) / 2, "y": 0, "ha": "center", "va": "center"}
        elif len(group) == 1 and not conditional:  # a pipeline around a condition
            return self._task(*group.values(), left)
        else:
            right, top, bottom = self._row(group, left + self._PADDING)
            right, top, bottom = right + self._PADDING, top + 2 * self._PADDING, bottom - self._PADDING
            look = {"fill": False, "edgecolor": "#57606a", "linestyle": "--" if conditional else "-"}
            place = {"x": left + 5, "y": top - 4, "ha": "left", "va": "top"}
        self._axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, zorder=0, **look))
        self._axes.text(s=f"if {name}" if conditional else name.replace("-", "-\n"), fontsize=9, **place)
        return right, top, bottom


if __name__ == "__main__":
    plots.rings()
    Graph(load_pipeline(ROOT / "compiled" / "retrain.yaml")).save(STATIC / "retrain.svg")
    if found := next(filter(None, map(shutil.which, BROWSERS)), None):
        report(found)
    else:
        print(f"report.png is left as it is: none of {', '.join(BROWSERS)} is on the PATH", file=sys.stderr)
