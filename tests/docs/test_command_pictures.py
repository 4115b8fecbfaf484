"""The pictures of the command line: what the commands print today, and nothing of other hosts."""

import re
from xml.etree import ElementTree as ET

import pytest

from docs.pictures import __main__ as pictures
from docs.pictures import terminal
from faststream_sqlbroker.cli.app import COMMANDS, OPERATIONS, CommandGroup, CommandRef, LazyCommand
from tools.files import with_block, write_or_compare

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    """As a build draws them that asks for colors: it must not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("TTY_COMPATIBLE", "1")
        return terminal.svgs()


def test_the_pictures_and_the_page_are_what_the_commands_print(drawn: dict[str, str]) -> None:
    """`just generate` writes them; the diff is the review."""
    files = {pictures.COMMANDS / f"{name}.svg": made for name, made in drawn.items()}
    assert write_or_compare(files, pictures.COMMANDS, check=True, suffix="svg") == []
    page = pictures.COMMANDS_PAGE.read_text()
    assert with_block(page, "views", terminal.page()) == page


def _operations() -> set[CommandRef]:
    return {place for group in OPERATIONS.values() for place in group.commands.values()}


def test_every_command_for_messages_and_tables_has_a_picture() -> None:
    shown = {terminal.place_of(words) for words in terminal.VIEWS.values()}
    names = _operations() | {terminal.place_of(words) for words in (["check"], ["audit"], ["jobs"])}
    # The partitions are PostgreSQL's, and the shop is in SQLite.
    assert [place.function for place in names - shown] == ["partitions"]


def test_every_command_is_on_the_page() -> None:
    """Also those that print no picture."""
    lines = pictures.COMMANDS_PAGE.read_text().splitlines()
    for name, place in COMMANDS.items():
        assert f"## {name}" in lines
        for word in place.commands if isinstance(place, CommandGroup) else ():
            assert f"### {name} {word}" in lines


def test_every_command_for_messages_and_tables_prints_json() -> None:
    for place in _operations():
        params = LazyCommand(place.function, place).load().params
        assert "as_json" in {parameter.name for parameter in params}, place


def test_a_picture_is_well_formed_and_asks_no_other_host(drawn: dict[str, str]) -> None:
    for name, made in drawn.items():
        root = ET.fromstring(made)
        lines = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
        assert any(terminal.VIEWS[name][0] in line for line in lines), name
        assert "http" not in re.sub(r'xmlns="[^"]*"', "", made), name
        assert "@font-face" not in made
