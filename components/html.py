"""Self-contained HTML pages from one base template, without network or script, and their pictures."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from shardline.trainer.base.errors import printable

# Control characters except tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: Rows of a table of facts: (name, value).
Rows = list[tuple[str, str]]


def render_page(template: Path, **values: Any) -> str:
    """Renders a template that extends page.html.j2 and may include templates of its folder.

    All text except `Markup` is escaped, and control characters are written out.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template.name).render(**values)
    return _CONTROLS.sub(lambda found: printable(found[0]), page)


def page_path(artifact: Any) -> Path:
    """Adds .html to the URI of an HTML artifact; creates its folder and returns its path."""
    artifact.uri += ".html"
    path = Path(artifact.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def relink_page(page: str, old: Path, new: Path) -> str:
    """Returns a page for another directory: its relative links are adapted."""
    prefix = os.path.relpath(old, new)
    return re.sub(
        r'href="([^":#][^":]*)"', lambda link: f'href="{os.path.normpath(f"{prefix}/{link[1]}")}"', page
    )


def fact_rows(values: Mapping[str, Any], prefix: str = "") -> Rows:
    """Flattens nested settings: {"a": {"b": 1}} is one row, "a.b"."""
    rows: Rows = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += fact_rows(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value if isinstance(value, str) else json.dumps(value)))
    return rows


@dataclass(frozen=True)
class Picture:
    """An image as a data URI and its size in pixels; `large` for a photograph rather than a few pixels."""

    uri: str
    width: int
    height: int
    large: bool


def make_picture(image: bytes | Image.Image, largest_side: int = 192) -> Picture:
    """Shrinks an image, or an encoded one of any size and format, for people to look at."""
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image)) as opened:
            return make_picture(opened, largest_side)
    picture = image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB")
    picture.thumbnail((largest_side, largest_side))
    large, buffer = max(picture.size) > 64, io.BytesIO()
    # A small one is pixelated and lossless.
    kind, options = ("jpeg", {"quality": 85}) if large else ("png", {"optimize": True})
    picture.save(buffer, kind, **options)
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Picture(f"data:image/{kind};base64,{content}", *picture.size, large)
