"""`just test-versions`: what is kept of its runs, and the page and classifiers made from it."""

import base64
import hashlib
import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import embedded_postgresql, unstable, version_cells, versions

REPORT = """<testsuites><testsuite>
<testcase classname="tests.contract.test_claim" name="test_a[postgresql]" />
<testcase classname="tests.contract.test_claim" name="test_b"><skipped message="no" /></testcase>
<testcase classname="tests.plans.test_jobs" name="test_c">
<failure message="AssertionError: Seq Scan&#10;assert 1 == 2">all of it</failure></testcase>
<testcase classname="tests.plans.test_jobs" name="test_d"><error message="gone" /></testcase>
</testsuite></testsuites>"""


def test_the_page_and_the_classifiers_are_of_the_kept_results() -> None:
    results = versions.read()
    assert set(results) <= {cell.name for cell in version_cells.cells()}
    assert versions.write(results, check=True) == 0
    listed = tomllib.loads(version_cells.PROJECT.read_text())["project"]["classifiers"]
    own = [line for line in listed if line.startswith("Programming Language :: Python :: ")]
    only = "Programming Language :: Python :: 3 :: Only"
    assert own == [only, *versions.classifiers(results)]


def test_a_version_with_a_failure_is_no_classifier() -> None:
    results = {
        "python-3.12": {"failed": {}},
        "python-3.13": {"failed": {"tests/flow/test_x.py::test_x": "no"}},
        "python-3.14t": {"missing": "nowhere"},
    }
    names = [
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ]
    assert versions.classifiers(results) == names
    project = """classifiers = [
    "Framework :: AsyncIO",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.14",
    "Programming Language :: Python :: Free Threading :: 2 - Beta",
    "Typing :: Typed",
]
"""
    wanted = versions.project_with(project, results)
    assert tomllib.loads(wanted)["classifiers"] == [
        "Framework :: AsyncIO",
        "Programming Language :: Python :: 3 :: Only",
        *names,
        "Typing :: Typed",
    ]
    assert versions.project_with(wanted, results) == wanted


@pytest.mark.parametrize(
    ("wanted", "used", "fits"),
    [
        ("3.14t", "3.14.0t", True),
        ("3.14t", "3.14.0", False),
        ("3.14", "3.14.0t", False),
        ("3.1", "3.14.0", False),
        ("0.23.0", "", False),
        ("", "3.3.9", True),
    ],
)
def test_what_runs_must_be_the_version(wanted: str, used: str, *, fits: bool) -> None:
    assert version_cells.Cell("Python", wanted).is_version(used) == fits


def test_a_report_is_counted_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = versions.read_report(tmp_path / "report.xml")
    assert found == {
        "passed": 1,
        "skipped": 1,
        "failed": {
            "tests/plans/test_jobs.py::test_c": "AssertionError: Seq Scan",
            "tests/plans/test_jobs.py::test_d": "gone",
        },
    }
    used = {"Python": "3.11.7", "PostgreSQL": "18.4", "SQLite": "3.40.1", "asyncpg": "0.32.0"}
    kept = {"with": used, "on": "2026-12-01", **found}
    lines = versions.table({"postgresql-18": kept, "python-3.12": {"missing": "no"}}).splitlines()
    [row] = [line for line in lines if line.startswith("| PostgreSQL 18.4 |")]
    assert "| Python 3.11.7, asyncpg 0.32.0 |" in row
    assert row.endswith("| 1 | 1 | 2 | 2026-12-01 |")
    assert "| Python 3.12 | untested: no | | | | | |" in lines
    assert "* PostgreSQL 18.4: `tests/plans/test_jobs.py::test_d`: gone" in lines


def test_what_cannot_be_had_here_takes_nothing_away(tmp_path: Path) -> None:
    file = tmp_path / "versions.json"
    ran = {"with": {}, "passed": 1, "skipped": 0, "failed": {}, "on": "2026-12-01"}
    versions.keep("python-3.12", {"missing": "at first"}, file)
    versions.keep("python-3.12", ran, file)
    versions.keep("python-3.12", {"missing": "no interpreter"}, file)
    versions.keep("mysql-8.4", {"missing": "nowhere"}, file)
    assert versions.read(file) == {"mysql-8.4": {"missing": "nowhere"}, "python-3.12": ran}


def test_an_unknown_cell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert versions.main(["postgresql-13"]) == 2
    assert "there is no postgresql-13: choose among postgresql-14, " in capsys.readouterr().out


def test_a_version_that_no_registry_has_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert versions.main(["mysql-8.4", "--", "tests/contract"]) == 0
    assert "mysql-8.4 is untested: Debian, PyPI and npm have no" in capsys.readouterr().out


def test_an_interpreter_that_does_not_answer_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyenv's on PATH while another version is chosen."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    shim, real = tmp_path / "python3.98", tmp_path / ".pyenv/versions/3.98.1/bin/python3.98"
    for path, code in ((shim, 127), (real, 0)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
    assert versions.interpreter("3.98") == real
    real.unlink()
    with pytest.raises(versions.MissingError, match=r"no python3\.98, and none is on PATH"):
        versions.interpreter("3.98")


def test_postgresql_is_unpacked_with_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """npm's archives have none."""
    made = tmp_path / "package" / "native"
    for path in ("bin/postgres", "lib/libpq.so.5.18"):
        (made / path).parent.mkdir(parents=True)
        (made / path).touch(0o644)
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\n[ "$5" = "" ] && cp {tmp_path}/packed p.tgz && echo "$4" >&2\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def unpack(source: str, name: str, pinned: str = "") -> Path:
        links = [{"source": source, "target": "native/lib/libpq.so.5"}]
        (made / "pg-symlinks.json").write_text(json.dumps(links))
        packed = tmp_path / "packed"
        subprocess.run(["tar", "-czf", packed, "-C", tmp_path, "package"], check=True)
        digest = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        pin = pinned or f"sha512-{digest}"
        monkeypatch.setitem(embedded_postgresql.INTEGRITY, "18", pin)
        folder = tmp_path / name
        folder.mkdir()
        embedded_postgresql._unpack(folder, "18")
        return folder / "unpacked"

    folder = unpack("native/lib/libpq.so.5.18", "good")
    assert (folder / "lib/libpq.so.5").readlink() == Path("libpq.so.5.18")
    assert os.access(folder / "bin/postgres", os.X_OK)
    with pytest.raises(unstable.DownloadError, match="has a link that leaves its folder"):
        unpack("../../../etc/passwd", "outside")
    with pytest.raises(unstable.DownloadError, match="expected sha512-other, got sha512-"):
        unpack("native/lib/libpq.so.5.18", "changed", "sha512-other")
    npm.write_text("#!/bin/sh\necho no route >&2\nexit 1\n")
    with pytest.raises(unstable.DownloadError, match=r"linux-x64@18.* failed: no route"):
        embedded_postgresql._unpack(folder, "18")
