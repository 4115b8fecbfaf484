"""The report's page, drawn from figures that no session has computed."""

import builtins
import html
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from faststream_sqlbroker.exceptions import MissingExtraError
from pyspark_sqlbroker.report import write_report
from pyspark_sqlbroker.report.figures import MAX_BUCKETS, MAX_QUEUES, ReportFigures, to_datetime
from pyspark_sqlbroker.report.page import render_page
from pyspark_sqlbroker.report.plots import draw

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
FIRST, LAST = to_datetime(-(2**63)), to_datetime(2**63 - 1)
HOSTILE = "</title><b>&amp;'\"$x$\u202e\n"
SHOWN = html.escape("</title><b>&amp;'\"$x$\ufffd\ufffd", quote=False)
SPEEDS = {"p50": 0.0, "p90": 0.25, "p99": 3.0, "p999": 600.0}


def figures_of(queues: Sequence[str], start: datetime = START, every: float = 60) -> ReportFigures:
    """Something of every section, in each of the queues."""
    ends = {"completed": 5, "failed": 2, "discarded": 1}
    ages = {"under_1h": 1, "1h_to_1d": 0, "1d_to_7d": 2, "7d_to_30d": 0, "over_30d": 3}
    phases = ("wait", "work", "total")
    error = {"reason": "r", "error_type": "app.Broken", "error": "e", "example": None}
    totals = {"messages": 8, **ends, "queues": len(queues), "bytes": 2048}
    return ReportFigures(
        totals | {"first": start, "last": start},
        every,
        [*queues, "0 other queues"],
        {
            "throughput": [
                {"queue": q, "bucket": start, "messages": 8, "per_second": 0.125} for q in queues
            ],
            "latency": [
                {"queue": q, "phase": p, "messages": 8, **SPEEDS} for q in queues for p in phases
            ],
            "latency_all": [{"phase": p, "messages": 8, **SPEEDS} for p in phases],
            "latency_trend": [
                {"bucket": start, "phase": p, "messages": 8, **SPEEDS} for p in phases
            ],
            "failure_rate": [{"queue": q, **ends, "moved": 1, "rate": 0.375} for q in queues],
            "top_errors": [
                {"queue": q, **error, "messages": 2, "share": 0.5, "last_id": 1, "last_at": start}
                for q in queues
            ],
            "retry_histogram": [
                {"queue": q, "attempts": n, "messages": 8, **ends} for q in queues for n in (1, 20)
            ],
            "dlq_age": [{"queue": q, "messages": 6, **ages, "oldest_at": start} for q in queues],
            "hot_keys": [{"queue": q, "key": q, "messages": 8, "share": 0.25} for q in queues],
            "policy_effects": [
                {"queue": q, "effect": "no_key", "state": s, "messages": 3, "share": 0.1}
                for q in queues
                for s in ("DISCARDED", "FAILED")
            ],
            "duplicate_deliveries": [
                {"queue": q, "messages": 8, "lost_deliveries": 4} for q in queues
            ],
        },
    )


def hints_of(page: str) -> list[str]:
    """What the charts show where the mouse rests."""
    return [html.unescape(hint) for hint in re.findall(r"<title>([^<]*)</title>", page)[1:]]


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(figures_of(["orders", "mail"]), "t")


def test_charts_show_their_numbers_where_the_mouse_rests(page: str) -> None:
    hints = hints_of(page)
    assert "0.25 messages / s\norders: 0.125\nmail: 0.125" in hints
    orders = "orders\n50 %: at most 0 s\n90 %: at most 0.25 s\n99 %: at most 3 s"
    assert hints.count(f"{orders}\n99.9 %: at most 600 s") == 3
    assert any(h.startswith("2026-03-01 00:00:00\n") and "wait 99 %: 3 s" in h for h in hints)
    assert "queue: mail\nfailed: 25.00%\nto a dead letter queue: 12.50%" in hints
    ages = "under 1 h: 1\n1 h to 1 d: 0\n1 d to 7 d: 2\n7 d to 30 d: 0\nover 30 d: 3"
    assert f"queue in which they failed: orders\n{ages}" in hints
    assert "attempts: 20+\ncompleted: 10\nfailed: 4\ndiscarded: 2" in hints
    assert "queue: orders\nno key: 6" in hints


def test_rankings_show_their_numbers(page: str) -> None:
    assert re.search(r"<li>orders: app.Broken · r\s.*\s2 failures \(50.0%\)", page)
    assert re.search(r"<li>orders: orders\s.*\s8 messages \(25.0%\)", page)


def test_names_are_shown_as_they_are() -> None:
    """M5: in legends, on axes, in hints and in tables; none is a formula or a second line."""
    page = render_page(figures_of([HOSTILE]), HOSTILE)
    assert f"<h1>{SHOWN}" in page.replace("&#39;", "'").replace("&#34;", '"')
    assert f">{SHOWN}</text>" in page
    assert f"queue: {html.unescape(SHOWN)}\nno key: 6" in hints_of(page)
    assert "\u202e" not in page
    assert page.count("<b>") == 9


def test_names_that_look_alike_are_numbered() -> None:
    hints = hints_of(render_page(figures_of(["a\x01", "a\x02", "a\ufffd (2)"]), "t"))
    for label in ("a\ufffd", "a\ufffd (2)", "a\ufffd (2) (2)"):
        assert f"queue: {label}\nno key: 6" in hints


@pytest.mark.parametrize("name", ['a"b', "a'b", "a\"b'c"])
def test_a_name_may_have_quotes(name: str) -> None:
    assert f"queue: {name}\nno key: 6" in hints_of(render_page(figures_of([name]), "t"))


def test_long_names_are_short_and_different() -> None:
    chart, _ = draw("dlq_age", figures_of(["q" * 40, "q" * 41, "q" * 30]))
    beginning = "q" * 29 + "…"
    for label in (beginning, f"{beginning} (2)", "q" * 30):
        assert f">{label}</text>" in chart


def test_letters_that_the_measuring_font_lacks_are_drawn() -> None:
    chart, _ = draw("dlq_age", figures_of(["队列"]))
    assert ">队列</text>" in chart


def test_a_page_is_the_same_for_the_same_figures_and_changes_no_settings(page: str) -> None:
    before = {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}
    assert render_page(figures_of(["orders", "mail"]), "t") == page
    assert before == {name: mpl.rcParams[name] for name in before}


def test_charts_have_names_and_ask_no_other_host(page: str) -> None:
    assert page.count('role="img" aria-label="') == page.count("<svg ") == 7
    addresses = set(re.findall(r'"(https?://[^"]*)"', page))
    assert addresses == {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:script|link|img|iframe|image)|@import|url\((?!#)", page)
    assert "NaN" not in page


@pytest.mark.parametrize("start", [FIRST, START, LAST])
@pytest.mark.parametrize("every", [1, 86_400 * 25_000])
def test_any_moment_can_be_drawn(start: datetime, every: float) -> None:
    """PostgreSQL's infinity is read as the first or last moment that Python has."""
    figures = figures_of(["orders"], start, every)
    for name in ("throughput", "latency_trend"):
        draw(name, figures)


def test_all_moments_can_be_drawn_together() -> None:
    figures = figures_of(["orders"], FIRST, 86_400 * 25_000)
    later = figures_of(["orders"], LAST)
    for name in ("throughput", "latency_trend"):
        figures.tables[name] += later.tables[name]
        draw(name, figures)


def test_a_page_of_many_buckets_is_small() -> None:
    """Thousands of buckets of twelve queues, which a width of the user's may give."""
    figures = figures_of([f"queue {n}" for n in range(MAX_QUEUES)], every=1)
    size = 0
    for name in ("throughput", "latency_trend"):
        figures.tables[name] = [
            row | {"bucket": START + timedelta(seconds=n), "p50": n, "p99": n % 7}
            for row in figures.tables[name]
            for n in range(MAX_BUCKETS)
        ]
        size += len(draw(name, figures)[0])
    assert size < 1_200_000


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is read."""
    imported = builtins.__import__

    def refuse(name: str, *given: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *given, **named)

    for module in ("page", "plots"):
        monkeypatch.delitem(sys.modules, f"pyspark_sqlbroker.report.{module}", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    frame: Any = None
    with pytest.raises(MissingExtraError, match=r"'matplotlib' .* 'sqlbroker\[report\]'"):
        write_report(frame, tmp_path / "report.html")


def test_the_extra_is_imported_when_a_report_is_drawn_and_no_pyplot() -> None:
    program = (
        "import sys; from pyspark_sqlbroker import write_report; "
        "print({'matplotlib', 'jinja2', 'pandas'} & sys.modules.keys()); "
        "import pyspark_sqlbroker.report.page; print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\nFalse\n"
