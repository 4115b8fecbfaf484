"""`just bench-check`: which targets it has, what it keeps, and when it fails."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import counters, harness, report, scaling, serving, targets
from benchmarks.compare import Comparison, Suite, alone
from benchmarks.harness import Result, Variant
from benchmarks.settings import PEERS_SYNCHRONOUS

TARGETS = {
    "dispatch of a typed message, CPU ÷ FastStream's": "≤ 0.2",
    "consume + archive, typed dict ÷ FastStream's own dispatch": "≥ 1.5",
    "consume + archive with msg: SqlBrokerMessage ÷ without": "≥ 0.85",
    "consume + archive with one middleware ÷ FastStream's dispatch with it": "≥ 1.1",
    "consume + archive ÷ faststream-sqlbroker 0.1.0a11": "≥ 11",
    "consume without archive ÷ faststream-outbox": "≥ 8",
    "consume without archive ÷ pgqueuer": "≥ 3.5",
    "consume + archive, typed dict ÷ raw claim + archive": "≥ 0.45",
    "batch handler + archive ÷ raw claim + archive": "≥ 0.65",
    "mariadb: consume + archive ÷ faststream-sqlbroker 0.1.0a11": "≥ 4.0",
    "sqlite: consume + archive ÷ faststream-sqlbroker 0.1.0a11": "≥ 5.5",
    "publish single ÷ raw asyncpg INSERT autocommit": "≥ 0.85",
    "publish, 20 concurrent ÷ raw group commit": "≥ 0.82",
    "publish 1 000 in the caller's transaction ÷ raw": "≥ 0.85",
    "publish_batch(1 000) ÷ raw unnest insert": "≥ 1.0",
    "idle latency, p50 ÷ pgqueuer's": "≤ 1.2",
    "(2 processes ÷ 1) ÷ (2 × own CPU ÷ all CPU a message)": "≥ 0.9",
    "idle: statements a minute of five subscribers": "≤ 65",
    "idle: statements in ten minutes with max_fetch_interval=None": "≤ 0",
}


def _suite(name: str, *, aside: bool = False, least: float | None = None) -> Suite:
    variants = [Variant(name, "run", None)]
    rate = Comparison(f"rate of {name}", alone(name, "rate"), least)
    return Suite(name, variants, [rate], aside=aside)


def _measures(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    suites: list[Suite],
    code: str = "a",
    databases: dict[str, dict[str, str]] | None = None,
) -> None:
    """`suites` instead of all, which measure 10.0 each; results are kept in `tmp_path`."""

    def measured(variants: list[Variant], rounds: int) -> dict[str, list[Result]]:
        return {variant.name: [{"rate": 10.0}] * rounds for variant in variants}

    about = {"taken": "2026-01-01", "cores": 2, "cpu": "x", "python": "3"}
    about |= {"packages": {}, "databases": {}, "code": code, "commit": code}
    monkeypatch.setattr(bench, "interleaved", measured)
    monkeypatch.setattr(bench, "machine", lambda: about)
    monkeypatch.setattr(bench, "settings", lambda: databases or {})
    monkeypatch.setenv(PEERS_SYNCHRONOUS, "NORMAL")  # restored at the end
    monkeypatch.setattr(targets, "check", lambda *_: suites)
    for module in (harness, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path)


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str, which: str = "check") -> int:
    monkeypatch.setattr("sys.argv", ["benchmarks", which, "--rounds", "2", *arguments])
    return bench.main()


def test_it_has_every_figure_with_its_target() -> None:
    suites = targets.check(60_000, Path)
    found = {c.name: c for suite in suites for c in suite.comparisons}
    for name, wanted in TARGETS.items():
        one = found[name]
        assert wanted in (f"≥ {one.least}", f"≤ {one.most}"), name


@pytest.mark.parametrize(("least", "code"), [(10.0, 0), (10.1, 1)])
def test_it_fails_if_a_target_is_missed(
    least: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _measures(monkeypatch, tmp_path, [_suite("first"), _suite("second", least=least)])
    assert _run(monkeypatch) == code


def test_the_counters_of_the_machine_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _measures(monkeypatch, tmp_path, [_suite("first")])
    _run(monkeypatch)
    kept = json.loads((tmp_path / "check.json").read_text())["counters"]["first"]
    assert kept.keys() >= {"load_before", *counters.counters()}


def test_a_part_of_it_leaves_what_is_kept_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suites = [_suite("first"), _suite("second"), _suite("the second one")]
    _measures(monkeypatch, tmp_path, suites)
    _run(monkeypatch, "--only", "first")
    _run(monkeypatch, "--only", "second")
    kept = json.loads((tmp_path / "check.json").read_text())
    # A name that is whole means that suite alone.
    assert list(kept["results"]) == list(kept["counters"]) == ["first", "second"]
    assert [row.split("|")[1].strip() for row in kept["rows"]] == [
        "rate of first",
        "rate of second",
    ]
    _run(monkeypatch, "--only", "one, first")
    kept = json.loads((tmp_path / "check.json").read_text())
    assert set(kept["results"]) == {"first", "second", "the second one"}
    assert len(kept["rows"]) == 3


def test_a_part_of_it_says_that_the_rest_is_of_other_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suites = [_suite("first"), _suite("second")]
    for only, code, kept in (
        ("first,second", "a", "a"),
        ("first", "b", "a and b"),
        ("first,second", "b", "b"),
        ("first", "b", "b"),
    ):
        _measures(monkeypatch, tmp_path, suites, code)
        _run(monkeypatch, "--only", only)
        assert _kept(tmp_path, "check")["machine"]["code"] == kept


def _kept(folder: Path, which: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((folder / f"{which}.json").read_text())
    return kept


def test_durable_results_are_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suites = [_suite("busy"), _suite("idle", aside=True)]
    _measures(monkeypatch, tmp_path, suites, databases={"sqlite": {"synchronous": "FULL"}})
    assert _run(monkeypatch, "--durable") == 0
    assert list(_kept(tmp_path, "check_durable")["results"]) == ["busy"]
    assert os.environ[PEERS_SYNCHRONOUS] == "FULL"
    _run(monkeypatch)
    assert list(_kept(tmp_path, "check")["results"]) == ["busy", "idle"]
    assert list(_kept(tmp_path, "check_durable")["results"]) == ["busy"]


def test_durable_is_refused_on_a_server_that_may_lose_a_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    databases = {"postgresql": {"fsync": "off"}}
    _measures(monkeypatch, tmp_path, [_suite("busy")], databases=databases)
    with pytest.raises(SystemExit, match="postgresql has fsync = off, not on"):
        _run(monkeypatch, "--durable")
    assert list(tmp_path.iterdir()) == []


def test_durable_is_refused_where_nothing_is_kept_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--durable", which="rate")
    assert "--durable is of own, peers, check, not of rate" in capsys.readouterr().err


def test_a_part_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _measures(monkeypatch, tmp_path, [_suite("first"), _suite("second")])
    with pytest.raises(SystemExit, match="'third' is in the name of none of: first; second"):
        _run(monkeypatch, "--only", "first,third")


def test_what_needs_no_processor_runs_while_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _measures(monkeypatch, tmp_path, [_suite("idle", aside=True), _suite("busy")])
    began = threading.Event()
    ended = threading.Event()

    def measured(variants: list[Variant], rounds: int) -> dict[str, list[Result]]:
        [variant] = variants
        if variant.name == "idle":
            began.set()
            assert ended.wait(60)
        else:
            assert began.wait(60)
            ended.set()
        return {variant.name: [{"rate": 10.0}] * rounds}

    monkeypatch.setattr(bench, "interleaved", measured)
    assert _run(monkeypatch) == 0
    kept = json.loads((tmp_path / "check.json").read_text())
    assert list(kept["results"]) == ["busy", "idle"]


def test_each_figure_of_many_rows_has_a_title() -> None:
    shown = {name for suite in scaling.scale(1, large=False) for name in suite.shows}
    assert shown <= report.FIGURES.keys()


def test_a_process_next_to_the_consumer_tells_why_it_failed() -> None:
    load = serving.Load("no URL of a database", 1, 0)
    with pytest.raises(
        RuntimeError, match=r"(?s)the server next .* ended with 1: .*Could not parse"
    ):
        asyncio.run(load.begin())
