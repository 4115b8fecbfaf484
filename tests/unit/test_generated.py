"""Files generated from the code match it; `just docs` compares the table of capabilities."""

from pathlib import Path

import pytest

from faststream_sqlbroker.core.states import MessageState
from tools import (
    attacks,
    capabilities,
    diagram,
    golden_sql,
    openapi,
    picture,
    reference,
    render_migrations,
)
from tools.files import update_block, with_block, write_or_compare


@pytest.mark.parametrize("tool", [golden_sql, render_migrations], ids=["golden SQL", "migrations"])
def test_nothing_has_drifted(tool: object) -> None:
    """`just sql` and `just migrations` write them; the diff is the review."""
    folder: Path = tool.FOLDER  # type: ignore[attr-defined]
    wanted: dict[Path, str] = tool.files()  # type: ignore[attr-defined]
    assert wanted
    assert write_or_compare(wanted, folder, check=True) == []


def test_the_openapi_document_is_todays() -> None:
    assert all(path.read_text() == text for path, text in openapi.files().items())


def test_the_table_of_attacks_is_todays() -> None:
    assert len(attacks.rows()) > 10
    assert update_block(attacks.PAGE, attacks.NAME, attacks.table(attacks.rows()), check=True) == 0


def test_drift_is_found_and_mended(tmp_path: Path) -> None:
    wanted = {tmp_path / "a" / "x.sql": "SELECT 1\n"}
    stale = tmp_path / "a" / "old.sql"
    stale.parent.mkdir()
    stale.write_text("SELECT 0\n")
    assert write_or_compare(wanted, tmp_path, check=True) == sorted([*wanted, stale])
    write_or_compare(wanted, tmp_path, check=False)
    assert write_or_compare(wanted, tmp_path, check=True) == []
    assert not stale.exists()


def test_the_diagrams_and_the_tables_of_the_reference_are_todays() -> None:
    for page, name, content in (
        *((file, name, make()) for name, (file, make) in diagram.BLOCKS.items()),
        (picture.PAGE, "arrows", picture.table()),
        *(
            (reference.FOLDER / page, name, make())
            for (page, name), make in reference.BLOCKS.items()
        ),
    ):
        assert f"<!-- {name} -->" in page.read_text()
        assert with_block(page.read_text(), name, content) == page.read_text()


def test_the_picture_of_the_states_is_todays() -> None:
    assert picture.PICTURE.read_text() == picture.picture()
    assert [f">{state.name}<" in picture.picture() for state in MessageState] == [True] * 6


def test_a_block_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    assert update_block(page, "x", "new\n", check=True) == 1
    assert update_block(page, "x", "new\n", check=False) == 0
    assert update_block(page, "x", "new\n", check=True) == 0
    assert page.read_text() == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"


def test_the_table_of_capabilities_tells_databases_apart() -> None:
    found = {"b": {"sqlite"}, "a": set(capabilities.DATABASES), "c": {"mariadb"}}
    assert capabilities.table(found).splitlines()[2:] == [
        "| a | yes | yes | yes | yes |",
        "| b | – | – | – | yes |",
        "| c | – | yes | untested | – |",
    ]
