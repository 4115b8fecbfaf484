"""The table of failovers: what fails the command, and what only has its column."""

from typing import Any

from tests.faults.failover import FAILOVERS
from tools.reliability.failover import _problems, render

NAME = next(iter(FAILOVERS))


def result(**fields: Any) -> dict[str, Any]:
    return {
        "name": NAME,
        "seeds": [1, 2],
        "rounds": 4,
        "broken": {"2 message_id of one message": 0, "7 order": 0},
        "examples": [],
        "unfinished": [],
        "skipped": "",
        "lost": 15,
        "forgotten": 7,
        "recoveries": {"proxy": [0.2, 0.4, 0.9]},
        "server": "PostgreSQL 15.18",
        "day": "2026-12-01",
        "code": "new",
        **fields,
    }


def row_of(found: dict[str, Any]) -> str:
    [line] = [line for line in render("new", [found]) if line.startswith(f"| {NAME} |")]
    return line


def test_what_the_database_has_lost_breaks_no_promise() -> None:
    assert "| 4 (2) | 0 | 0 | 0 | 15 | 7 | proxy 0.4, 0.9 | 2026-12-01," in row_of(result())
    assert _problems(result()) == []


def test_a_missed_target_is_marked() -> None:
    late = result(recoveries={"proxy": [0.2, 2.4]})
    assert "**proxy 1.3, 2.4**" in row_of(late)
    assert _problems(late) == ["missed: proxy: 2.4 s"]
    never = result(recoveries={"proxy": [0.2, None]})
    assert "**proxy 0.2, 0.2, 1 never**" in row_of(never)
    assert _problems(never) == ["missed: proxy: never"]


def test_a_broken_promise_is_named() -> None:
    found = result(broken={"7 order": 2}, examples=["seed 2, 7 order: message 5"])
    assert "| 4 (2) | 2 |" in row_of(found)
    assert f"* {NAME}: seed 2, 7 order: message 5" in render("new", [found])
    assert _problems(found)


def test_the_row_says_why_nothing_was_run_and_names_other_code() -> None:
    assert "not run: no PostgreSQL" in row_of(result(seeds=[], skipped="no PostgreSQL"))
    assert "code `old`" in row_of(result(code="old"))
