"""The documentation's site: built strictly, complete, searchable, and without other hosts."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import faststream_sqlbroker

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.timeout(900)  # the whole site, on a machine that may be busy
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
"""What a browser fetches by itself when it shows a page."""
NOT_FETCHED = {"canonical", "prev", "next"}
"""Kinds of <link> that only name an address."""


class Page(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.classes |= set(values.get("class", "").split())
        if tag == "link" and set(values.get("rel", "").split()) & NOT_FETCHED:
            return
        for name, value in values.items():
            if (tag, name) in LOADED:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 15
    return found


def searched(site: Path) -> list[dict[str, str]]:
    index = json.loads((site / "search" / "search_index.json").read_text())
    docs: list[dict[str, str]] = index["docs"]
    return docs


@pytest.mark.parametrize("words", ["debounce", "dead letter", "pgbouncer", "lease", "outbox"])
def test_a_search_finds(site: Path, words: str) -> None:
    found = {
        entry["location"].partition("#")[0]
        for entry in searched(site)
        if words in f"{entry['title']} {entry['text']}".lower()
    }
    assert len(found) > 1, found


def test_links_inside_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses are those of the server's root
            continue
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            checked += 1
            anchor = unquote(parts.fragment)
            known = pages.get(target)
            if not target.exists() or (known and anchor and anchor not in known.anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert checked > 500
    assert broken == []


def test_pages_load_nothing_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    addresses = [link for page in pages.values() for link in page.loaded]
    for sheet in site.rglob("*.css"):
        addresses += re.findall(r"url\(['\"]?([^'\")]+)", sheet.read_text())
        addresses += re.findall(r"@import\s+['\"]([^'\"]+)", sheet.read_text())
    assert len(addresses) > 50
    elsewhere = [link for link in addresses if re.match(r"(https?:)?//", link)]
    assert elsewhere == []


def test_no_diagram_is_drawn_by_a_script(pages: dict[Path, Page]) -> None:
    """The theme would fetch Mermaid from another host for it."""
    assert [path for path, page in pages.items() if "mermaid" in page.classes] == []


def test_every_public_name_has_its_place_in_the_reference(pages: dict[Path, Page]) -> None:
    [api] = [page for path, page in pages.items() if path.name == "api.html"]
    of_faststream = {"TestApp"}
    names = {
        name
        for name in faststream_sqlbroker.__all__
        if not any(anchor.rpartition(".")[2] == name for anchor in api.anchors)
    }
    assert names - of_faststream == set()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The site's settings over a page whose link leads nowhere."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(settings)
    return tmp_path / "mkdocs.yml"


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("[x](nowhere.md) [y](#nowhere)", ["link 'nowhere.md'", "link '#nowhere'"]),
        ("::: faststream_sqlbroker.No", ["faststream_sqlbroker.No"]),
    ],
    ids=["links", "names"],
)
def test_a_page_with_a_mistake_fails_the_build(
    tmp_path: Path, broken: Path, text: str, mistakes: list[str]
) -> None:
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    done = build(broken, tmp_path / "site")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert [each for each in mistakes if each not in said] == [], said


def test_pages_that_other_files_name_are_there() -> None:
    """Error texts, docstrings and tools say where something is documented."""
    files = [
        path
        for folder in ("faststream_sqlbroker", "pyspark_sqlbroker", "tools", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    files += [*ROOT.glob("*.md"), ROOT / "justfile"]
    named = {
        (path.name, page)
        for path in files
        for page in re.findall(r"(?<![/\w])docs/[\w/]+\.(?:md|json|svg)\b", path.read_text())
    }
    assert len(named) > 20
    assert [(file, page) for file, page in sorted(named) if not (ROOT / page).exists()] == []
