"""Kept measurements: the code and settings of each, and the figures that pages quote of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import origin, quotes, report
from benchmarks.settings import DURABLE, filesystem, problems
from tools import servers

ROW = "consume without archive ÷ pgqueuer"


def _content(median: str = "1.00", **machine: str) -> dict[str, Any]:
    return {"machine": machine, "rows": [f"| {ROW} | ≥ 3.5 | {median} | 1.00 to 4.00 | 3 |"]}


def test_quoted_figures_are_those_that_are_kept() -> None:
    assert quotes.write(report.kept(), check=True) == 0


def test_durable_figures_come_first() -> None:
    contents = {"check": _content("3.60"), "check_durable": _content("3.10 **short**")}
    assert quotes.of_readme(contents).splitlines()[2:] == [f"| {ROW} | 3.10 | 3.60 |"]
    assert quotes.of_page(contents).splitlines()[2:] == [
        f"| {ROW} | ≥ 3.5 | 3.10 **short** (1.00 to 4.00) | 3.60 (1.00 to 4.00) |"
    ]
    assert next(iter(report.TITLES)) == "check_durable"


def test_a_figure_that_was_not_measured_is_a_dash() -> None:
    contents = {"check_durable": {**_content("3.60"), "rows": []}, "check": _content("3.60")}
    assert quotes.of_readme(contents).splitlines()[2:] == [f"| {ROW} | – | 3.60 |"]


def test_a_result_that_is_not_there_has_no_column() -> None:
    assert quotes.of_readme({"check": _content("3.60")}).splitlines()[2:] == [f"| {ROW} | 3.60 |"]


def test_the_report_names_results_of_other_code() -> None:
    same = {which: _content(code="a", commit="1") for which in ("own", "peers")}
    assert report.origin(same) == "All results are of the same code, that of commit 1."
    assert report.origin({**same, "scale": _content(code="b", commit="2")}) == (
        "**The results are of different code**: `own`, `peers` of commit 1 (code a); "
        "`scale` of commit 2 (code b)."
    )
    assert "`own` of commit unknown" in report.origin({"own": _content()})


def test_only_measured_code_changes_the_fingerprint(tmp_path: Path) -> None:
    names = ("faststream_sqlbroker/a.py", "benchmarks/peers/b.py", "benchmarks/report.py")
    for name in (*names, "docs/page", "benchmarks/results/own.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = origin.code(tmp_path)
    for name in ("docs/page", "benchmarks/results/own.json", "benchmarks/report.py"):
        (tmp_path / name).write_text("2")
    assert origin.code(tmp_path) == before
    seen = {before}
    for name in names[:2]:
        (tmp_path / name).write_text("2")
        seen.add(origin.code(tmp_path))
    assert len(seen) == 3
    assert origin.commit(tmp_path) == "unknown"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, of in DURABLE.items() for name in of]
)
def test_a_setting_that_may_lose_a_commit_is_named(kind: str, name: str) -> None:
    assert problems({kind: DURABLE[kind]}) == []
    [line] = problems({kind: {**DURABLE[kind], name: "0"}})
    assert line == f"{kind} has {name} = 0, not {DURABLE[kind][name]}"
    [line] = problems({kind: {**DURABLE[kind], "filesystem": "tmpfs"}})
    assert line == f"{kind} has its files on tmpfs, in memory"


def test_the_file_system_of_a_folder_is_known(tmp_path: Path) -> None:
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        pytest.skip("there is no /proc/mounts")
    assert f" {filesystem(tmp_path)} " in mounts.read_text()
    assert filesystem(tmp_path / "missing") == "unknown"


@pytest.mark.parametrize("kind", list(servers.VARIABLES))
def test_a_durable_server_loses_no_commit(kind: str) -> None:
    environment = dict(os.environ)
    for variable in servers.VARIABLES.values():
        environment.pop(variable, None)
    script = "import json; from benchmarks.settings import settings; print(json.dumps(settings()))"
    command = [sys.executable, "-m", "tools.servers", "run", "--durable", "--only", kind, "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", script],
        cwd=origin.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if f"no {kind} server" in done.stderr:
        pytest.skip(done.stderr)
    of = json.loads(done.stdout.splitlines()[-1])
    assert of.keys() == {kind, "sqlite"}
    # The folder for temporary files may itself be in memory.
    assert of[kind].pop("filesystem") == of["sqlite"].pop("filesystem")
    assert problems(of) == []
