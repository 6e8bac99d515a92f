"""HTML pages as tests read them."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Gathers the text of a page, its tags, the rows of its tables, its pictures, and what it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.pictures: list[dict[str, str | None]] = []
        self.ids: list[str | None] = []
        self.references: list[str | None] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [v for name, v in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        elif tag in ("img", "svg"):
            self.pictures.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()

    def row(self, start: str) -> list[str]:
        """Returns the first row that starts with a text."""
        return next(row for row in self.rows if row and row[0].startswith(start))
