"""`just bench-against REV`: what is compared with what, and when it fails."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.harness import ROOT, Result, Variant
from tools.worktree import worktree

SLOW = [{"rate": rate, "cpu_each": 2.0} for rate in (50.0, 96.0, 96.0, 96.0, 200.0)]
REFERENCE = [{"rate": 100.0, "cpu_each": 1.0}] * len(SLOW)


def test_each_side_runs_its_own_code_on_a_database_of_its_own() -> None:
    found = against.suites("main", Path("/other"), 20_000, ["postgresql", "sqlite"], 0.97)
    assert len(found) == 2 * len(against.SCENARIOS)
    for suite in found:
        assert [(v.name, v.folder) for v in suite.variants] == [
            (against.NOW, ROOT),
            ("main", Path("/other")),
        ]
        assert len({(v.scenario, v.kind, str(v.options)) for v in suite.variants}) == 1
        assert suite.variants[0].options["count"] >= 1_000


@pytest.mark.parametrize(("least", "reached"), [(0.97, False), (0.95, True)])
def test_the_median_of_the_paired_ratios_decides(
    least: float,
    reached: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(variants: list[Variant], _rounds: int) -> dict[str, list[Result]]:
        return {variants[0].name: SLOW, variants[1].name: REFERENCE}

    monkeypatch.setattr(against, "interleaved", measured)
    suites = against.suites("main", Path("/other"), 20_000, ["sqlite"], least)
    assert against.compare(suites[:1], 5) is reached
    shown = capsys.readouterr().out
    assert "| 0.960" in shown
    assert "| 0.500 to 2.000 | 5 |" in shown
    assert "sqlite: consume, CPU of a message |  | 2.000 |" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["main", "--rounds", "8"], "--rounds must be 9 or more, got 8"),
        (["main", "--kinds", "oracle"], "--kinds must be of postgresql, mariadb, sqlite"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        against.main(arguments)
    assert text in capsys.readouterr().err


def test_a_folder_whose_processes_get_another_package_is_refused(tmp_path: Path) -> None:
    """The comparison would be of this tree with itself."""
    against.confirm(ROOT)
    with pytest.raises(RuntimeError, match="imports"):
        against.confirm(tmp_path)


def test_a_worktree_holds_the_revision_and_is_removed() -> None:
    with worktree("HEAD") as folder:
        package = folder / "faststream_sqlbroker" / "__init__.py"
        committed = subprocess.run(
            ["git", "show", "HEAD:faststream_sqlbroker/__init__.py"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        assert package.read_bytes() == committed.stdout
    assert not folder.exists()
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert str(folder) not in listed.stdout
