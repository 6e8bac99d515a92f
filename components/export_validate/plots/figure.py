"""A figure that becomes an <svg> element: its style, its colours, its text for screen readers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

# Drawn in these colours, which nothing else uses, and then replaced by the page's own.
INK, LINE, SOFT, FIRST, SECOND = "#010203", "#040506", "#050607", "#070809", "#0a0b0c"
_PAGE_COLOURS = {
    INK: "currentColor",
    LINE: "var(--line)",
    SOFT: "var(--soft)",
    FIRST: "var(--train)",
    SECOND: "var(--validation)",
}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}


@contextmanager
def page_style(name: str) -> Iterator[None]:
    """Draws what is drawn meanwhile in the page's style.

    Args:
        name: Of the figure, different from others on the page: names inside the element derive from it.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield


def share_axes(figure: Figure, x: str, y: str) -> Any:
    """Returns axes that both show shares, 0..1, as a square.

    Args:
        figure: Gets the axes.
        x: Name of what lies across.
        y: Name of what lies upwards.
    """
    axes = figure.subplots()
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=x, ylabel=y, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(0.2))
    axes.grid()
    axes.set_axisbelow(True)
    return axes


def to_svg(figure: Figure, description: str) -> str:
    """Returns the figure as an element that can stand in a page beside others.

    Args:
        figure: What to draw. The caller's style context must still be open.
        description: What a screen reader says instead.
    """
    text = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with warnings.catch_warnings():
        # The browser has the glyphs that matplotlib's own font lacks; here they are only measured.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(text, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # Its style sheet would apply to the whole page, which has the same rule for plots alone.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    # Numbered in each figure anew, they would not be unique in the page; nothing refers to them.
    svg = re.sub(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"', "", svg)
    for drawn, shown in _PAGE_COLOURS.items():
        svg = svg.replace(drawn, shown)
    width, height = figure.get_size_inches() * 72
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{_escape(description)}" style="max-width:{width * 1.35:.0f}px">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
