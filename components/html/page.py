"""A self-contained HTML page: one template over the shared frame, without network or script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

#: Rows of a table of facts: (name, value).
Rows = list[tuple[str, str]]


def render(template: Path, **values: Any) -> str:
    """Renders a template that extends page.html.j2.

    Args:
        template: The template; it may include its neighbours.
        values: What it shows. All text is escaped, but for `Markup`.

    Returns:
        An HTML page. The same arguments give the same page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)


def fact_rows(values: Mapping[str, Any], prefix: str = "") -> Rows:
    """Flattens nested settings: {"a": {"b": 1}} is one row, "a.b"."""
    rows: Rows = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += fact_rows(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value if isinstance(value, str) else json.dumps(value)))
    return rows
