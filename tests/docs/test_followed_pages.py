"""Pages of several files and commands, run as a reader would."""

from pathlib import Path

import pytest

from tests.docs.reader import ROOT, Reader

HOWTO = ROOT / "docs" / "howto"
TUTORIAL = ROOT / "docs" / "tutorial"
PAGES = ("first_message.md", "outbox.md", "failures.md", "testing.md", "once.md", "workers.md")
FOLLOWED = {"alembic.md", "api_and_workers.md", "configuration.md"}
"""Pages of docs/howto that have files and commands."""
SHORT = 'release_stuck_timeout="2s"'
LONG = 'release_stuck_timeout="30s"'
"""In place of `SHORT`: a worker that stands still for ten seconds keeps what it has in hand."""


@pytest.mark.timeout(600)  # fifteen processes, one after the other, and a lease that ends
async def test_the_tutorial_gives_what_its_pages_say(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    pages = {name: (TUTORIAL / name).read_text() for name in PAGES}
    assert [name for name in PAGES if "release_stuck_timeout" in pages[name]] == ["workers.md"]
    assert pages["workers.md"].count(SHORT) == 1
    for page in pages.values():
        await reader.follow(page.replace(SHORT, LONG))


def test_every_page_is_followed() -> None:
    """The tutorial on Spark is one program; test_examples runs it."""
    assert {path.name for path in TUTORIAL.glob("*.md")} == {*PAGES, "index.md", "spark.md"}
    index = (TUTORIAL / "index.md").read_text()
    assert [name for name in PAGES if f"({name})" not in index] == []


@pytest.mark.parametrize("name", sorted(FOLLOWED))
async def test_a_how_to_page_gives_what_it_says(tmp_path: Path, name: str) -> None:
    await Reader(tmp_path).follow((HOWTO / name).read_text())


def test_every_page_with_files_is_followed() -> None:
    """test_examples runs only the blocks without the name of a file."""
    pages = (path for path in (ROOT / "docs").rglob("*.md") if path.parent != TUTORIAL)
    assert {path.name for path in pages if "```python title=" in path.read_text()} == FOLLOWED
