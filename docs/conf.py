"""The documentation as a site: `make docs` builds it with Sphinx from these Markdown files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

project = "Shardline"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Shardline"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
#: Links to headings, as GitHub makes them.
myst_heading_anchors = 3
#: Quotes and dashes are often typed as they are.
smartquotes = False
#: Blocks without a language are commands and output.
highlight_language = "text"
exclude_patterns = ["conf.py"]
_PAGES = "https://github.com/shardline/shardline/raw/main/docs"


def setup(app: Any) -> None:
    """Is called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _write_llms)


def _add_contents(app: Any, page: str, source: list[str]) -> None:
    """Adds the tables of contents, from the first page's own lists, and the help of all commands."""
    if page == "cli":
        sys.path.insert(0, str(Path(app.srcdir).parent))
        from docs.reference import reference

        source[0] += reference()
    if page != "index":
        return
    sections = re.split(r"^## (.+)\n", source[0], flags=re.MULTILINE)[1:]
    for caption, text in zip(sections[::2], sections[1::2], strict=True):
        pages = "\n".join(re.findall(r"^- \[.+?\]\((\S+)\.md\)", text, re.MULTILINE))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def _write_llms(app: Any, failure: Exception | None) -> None:
    """Writes llms.txt (llmstxt.org): the first page's lists, with addresses of the pages as Markdown."""
    text = Path(app.srcdir, "index.md").read_text(encoding="utf-8").partition("## Words")[0]
    text = re.sub(r"\((\S+\.md)\)", rf"({_PAGES}/\1)", text.replace("\n\n", "\n\n> ", 1))
    Path(app.outdir, "llms.txt").write_text(text, encoding="utf-8")
