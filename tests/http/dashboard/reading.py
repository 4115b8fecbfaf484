"""Reads a page as a browser does, and refuses what could run."""

from html.parser import HTMLParser

import httpx

from tests.http.dashboard.conftest import EVIL

VOID = {"meta", "link", "input", "img", "br", "path", "rect", "polyline"}
TAGS = set(
    "html head meta title link script body a header p nav ul ol li bdi span main section h1 h2 h3 "
    "div dl dt dd table thead tbody tr th td form label input select option button progress svg "
    "polyline path rect g text defs marker code pre time strong details summary footer dialog "
    "kbd noscript".split()
)
"""All that a page may have: what a name brings in would be another one, or stand where none is."""


class Reader(HTMLParser):
    """Reads a page, and refuses what could run or is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.unlabelled: list[str] = []
        self._labelled: set[str] = set()
        self._inputs: list[dict[str, str | None]] = []
        self.landmarks: set[str] = set()
        self.feed(page)
        assert not self.open, self.open
        names = [given.get("id") for given in self._inputs if given.get("type") != "hidden"]
        self.unlabelled = [str(name) for name in names if name not in self._labelled]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag in TAGS, tag
        assert not {name for name in given if name.startswith("on") or name == "style"}, given
        assert not str(given.get("href", "")).lower().startswith(("javascript:", "data:", "//"))
        if tag == "script":
            assert str(given["src"]).endswith(("/ui/static/dashboard.js", "/ui/static/keys.js"))
        if tag in {"input", "select"}:
            self._inputs.append(given)
        if tag == "label":
            self._labelled.add(str(given["for"]))
        if tag in {"main", "nav", "header", "h1"}:
            self.landmarks.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert "script" not in self.open or not data.strip()
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def shown(answer: httpx.Response) -> Reader:
    """A page of any status, in which nothing runs."""
    assert EVIL not in answer.text
    is_page = answer.headers.get("content-type", "").startswith("text/html")
    return Reader(answer.text if is_page else "")
