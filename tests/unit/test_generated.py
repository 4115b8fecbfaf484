"""Files generated from the code match it."""

from pathlib import Path

import pytest

from tools import golden_sql, render_migrations
from tools.files import write_or_compare


@pytest.mark.parametrize("tool", [golden_sql, render_migrations], ids=["golden SQL", "migrations"])
def test_nothing_has_drifted(tool: object) -> None:
    """`just sql` and `just migrations` write them; the diff is the review."""
    folder: Path = tool.FOLDER  # type: ignore[attr-defined]
    wanted: dict[Path, str] = tool.files()  # type: ignore[attr-defined]
    assert wanted
    assert write_or_compare(wanted, folder, check=True) == []


def test_drift_is_found_and_mended(tmp_path: Path) -> None:
    wanted = {tmp_path / "a" / "x.sql": "SELECT 1\n"}
    stale = tmp_path / "a" / "old.sql"
    stale.parent.mkdir()
    stale.write_text("SELECT 0\n")
    assert write_or_compare(wanted, tmp_path, check=True) == sorted([*wanted, stale])
    write_or_compare(wanted, tmp_path, check=False)
    assert write_or_compare(wanted, tmp_path, check=True) == []
    assert not stale.exists()
