"""The archive on one page, looked at in a browser (D4)."""

import gc
import html
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from datetime import timedelta
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from typer.testing import CliRunner

from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.cli.session import read_rows
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import (
    ARCHIVE_SCHEMA,
    MESSAGE_SCHEMA,
    read_archive,
    write_report,
)
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from pyspark_sqlbroker.report import figures as figures_
from pyspark_sqlbroker.report.figures import compute_figures
from pyspark_sqlbroker.report.page import render_page
from tests.helpers import eventually
from tests.spark.conftest import START, archived
from tests.spark.frames import plain_frame
from tests.spark.test_analytics import dead, frame, message
from tools.packages import install

CHARTS = (
    "throughput",
    "latency",
    "latency_trend",
    "failure_rate",
    "retry_histogram",
    "dlq_age",
    "policy_effects",
)
RANKINGS = ("top_errors", "hot_keys")
SCRIPT = "<script>document.body.dataset.harm=1</script>"
LINK = "<b>a</b><a href='javascript:alert(1)'>x</a>"
HOSTILE = [
    SCRIPT,
    LINK,
    "</script><img src=x onerror=document.body.dataset.harm=2>",
    "%{x} ${y} {{z}} $title",
    "'\"`&amp;\u2028\x00\u202e",
    "https://example.org/x.js",
]


def hostile_rows() -> list[dict[str, Any]]:
    """Something of every section, in queues and errors of names that would do harm."""
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(HOSTILE):
        for step in range(4):
            at = START + timedelta(minutes=37 * (4 * number + step))
            times = {
                "created_at": at - timedelta(seconds=3),
                "next_attempt_at": at - timedelta(seconds=3),
            }
            rows.append({"queue": name, "archived_at": at, "key": name, "acquired_at": at, **times})
        failed = {"state": "FAILED", "reason": name, "last_error": f"{name}: {name}\nmore"}
        rows += [
            {"queue": name, **failed},
            {"queue": "letters", "headers": dead(name, reason=name, error=name)},
        ]
        rows.append(
            {
                "queue": name,
                "state": "DISCARDED",
                "reason": "superseded",
                "related_id": number,
                "attempts_count": 0,
            }
        )
    return [
        archived(**{"id": number, "deliveries_count": 2, **row})
        for number, row in enumerate(rows, 1)
    ]


@pytest.fixture(scope="module")
def page(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert write_report(frame(spark, hostile_rows()), path, title=SCRIPT) == path
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    return path


@pytest.fixture(scope="module")
def chromium() -> str:
    """Its path; skip where it cannot be installed, fail in CI."""
    if (found := _find_chromium()) is not None:
        return found
    problem = install("chromium") or "chromium was installed and is not in PATH"
    if (found := _find_chromium()) is not None:
        return found
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)


def _find_chromium() -> str | None:
    names = "chromium", "chromium-browser", "google-chrome"
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def look(chromium: str, page: Path, tmp_path: Path) -> str:
    """The document as it is after its scripts have run."""
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1280,1600",
        "--virtual-time-budget=20000",
    )
    environment = os.environ | {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [chromium, *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=True, env=environment
    )
    return done.stdout


class Elements(HTMLParser):
    """What a document is made of."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes += [(tag, *pair) for pair in attrs]


def drawn_part(document: str, name: str) -> str:
    """The plot's part of the document."""
    parts = re.split(r'<div id="(\w+)" class="plot', document)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[name]


def test_every_chart_is_drawn_and_nothing_of_a_message_runs(
    chromium: str, page: Path, tmp_path: Path
) -> None:
    """D4, M5: names of queues, keys and errors are text, in tables and in charts."""
    document = look(chromium, page, tmp_path)
    body = re.search("<body([^>]*)>", document)
    assert body is not None
    assert "data-harm" not in body[1]
    for name in CHARTS:
        chart = drawn_part(document, name)
        assert "<svg " in chart, name
        assert 'class="mark"' in chart, name
        assert "NaN" not in chart, name
    for name in RANKINGS:
        assert f'<ol id="{name}" class="ranking">' in document
    seen = Elements(document)
    assert seen.counts["script"] == 0
    assert seen.counts["b"] == 9
    assert not set("\u2028\u202e\x00") & set(document)
    assert not {"img", "iframe", "object", "embed", "form", "link", "i"} & set(seen.counts)
    assert not [
        name for _, name, _ in seen.attributes if name.startswith("on") or name in {"src", "srcdoc"}
    ]
    links = {value for tag, name, value in seen.attributes if name.endswith("href")}
    anchors = {f"#{value}" for _, name, value in seen.attributes if name == "id"}
    assert links
    assert links <= anchors
    for name in (SCRIPT, HOSTILE[2], HOSTILE[3]):
        assert f"<td>{html.escape(name, quote=False)}</td>" in document
    label = html.escape(SCRIPT[:29], quote=False) + "…</text>"
    assert label in drawn_part(document, "failure_rate")
    assert f"<h1>{html.escape(SCRIPT, quote=False)}</h1>" in document


def test_the_page_needs_no_network(page: Path) -> None:
    """Nothing in it is fetched, and its policy lets no script run."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(?:script|link|img|iframe)", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert "script-src" not in policy[1]
    assert len(text) < 1_500_000


def test_errors_lead_to_their_messages_and_to_the_command_that_publishes_them(
    spark: SparkSession, new_database: Any, tmp_path: Path
) -> None:
    """The command publishes the failed ones and the moved ones, and none that completed since."""
    archive = new_database("sqlite")
    failed = {"queue": "it's", "state": "FAILED", "reason": "max_attempts"}
    archive.add(
        *({"id": n, **failed, "last_error": "app.Broken: no"} for n in range(1, 8)),
        {"id": 8, **failed, "last_error": "app.Other: no"},
        {
            "id": 9,
            "queue": "letters",
            "headers": dead("it's", reason="max_attempts", error="app.Broken: moved"),
        },
        {"id": 10, "queue": "it's"},
        {
            "id": 11,
            "queue": "it's",
            "headers": dead("it's", reason="max_attempts", error="app.Broken: mended"),
        },
    )
    data = read_archive(spark, archive.url)
    out = tmp_path / "report.html"
    write_report(data, out, message_url="https://ops.example/ui/messages/{id}")
    text = out.read_text(encoding="utf-8")
    for number in (11, 9, 7, 6, 5):
        assert f'<a href="#m{number}">{number}</a>' in text
        assert f'id="m{number}"><a href="https://ops.example/ui/messages/{number}">' in text
    assert 'href="#m2"' not in text
    commands = [html.unescape(found) for found in re.findall("<code>(.*?)</code>", text)]
    by_error = {w[w.index("--into=it's") - 1]: w for w in map(shlex.split, commands)}
    words = by_error["--error-type=app.Broken"]
    assert words[:3] == ["sqlbroker", "archive", "replay"]
    environment = {"SQLBROKER_URL": archive.url}
    for expected in ("Publish 8 messages", "No rows to publish."):
        done = CliRunner(env=environment).invoke(
            app, words[1:], input="y\n", catch_exceptions=False
        )
        assert done.exit_code == 0
        assert expected in done.output


def test_the_period_before_stands_next_to_this_one(spark: SparkSession) -> None:
    failed = {"state": "FAILED", "reason": "r", "last_error": "app.Broken: no"}
    now = [{"queue": "q", **failed}, {"queue": "q"}, {"queue": "q", **failed, "reason": "new"}]
    then = [{"queue": "q", **failed}] * 3 + [{"queue": "q"}] * 3
    frames = [
        frame(spark, [archived(**{"id": n, **row}) for n, row in enumerate(rows)])
        for rows in (now, then)
    ]
    figures = compute_figures(frames[0], before=frames[1])
    assert figures.before is not None
    assert figures.before.totals["messages"] == 6
    errors = [
        (row["queue"], row["reason"], row["error_type"], row["messages"])
        for row in figures.before.tables["top_errors"]
    ]
    assert errors == [("q", "r", "app.Broken", 3)]
    text = render_page(figures, "t")
    assert "<b>3</b><span>messages</span><small>before: 6 (-50%)</small>" in text
    assert "<td>q</td><td>3</td><td>6</td><td>66.67%</td><td>50.00%</td>" in text
    assert "<td>new</td><td>1</td><td>– (new)</td>" in text
    assert "<td>r</td><td>1</td><td>3</td>" in text
    empty = compute_figures(frames[0], before=frames[1].limit(0))
    assert "The previous period has no messages." in render_page(empty, "t")


def test_odd_times_give_no_negative_durations(spark: SparkSession, new_database: Any) -> None:
    """Clocks that were ahead, moments that PostgreSQL calls infinite, and times in any order."""
    archive = new_database("postgresql")
    names = ("created_at", "next_attempt_at", "acquired_at", "last_attempt_at", "archived_at")
    orders = [
        {name: START + timedelta(hours=place) for name, place in zip(names, order, strict=True)}
        for order in permutations(range(5))
    ]
    archive.add(*({"id": n, **times} for n, times in enumerate(orders, 1)))
    with archive.engine.begin() as connection:
        for place, name in enumerate(names):
            for sign in ("", "-"):
                number = 1 + 2 * place + (sign == "")
                sql = f"UPDATE message_archive SET {name} = '{sign}infinity' WHERE id = {number}"
                connection.execute(sqlalchemy.text(sql))
    figures = compute_figures(read_archive(spark, archive.url))
    for table, rows in figures.tables.items():
        for row in rows:
            numbers = [v for v in row.values() if isinstance(v, int | float)]
            assert all(number >= 0 for number in numbers), (table, row)
    assert figures.tables["latency_all"]
    assert not re.search(r">-\d", render_page(figures, "t"))


def _kept(spark: SparkSession) -> set[int]:
    """Frames that the session keeps in memory, by the ids of their RDDs."""
    return set(spark.sparkContext._jsc.getPersistentRDDs())


async def test_figures_of_the_page(spark: SparkSession) -> None:
    """Few queues by name, the others together; buckets in UTC; dead letters of the live table."""
    before = _kept(spark)
    rows = [
        {
            "id": n,
            "queue": f"q{n % 30:02}",
            "archived_at": START + timedelta(hours=n),
            "attempts_count": n,
        }
        for n in range(60)
    ]
    rows += [
        {"id": 100 + n, "queue": "q29", "archived_at": START, "headers": dead("orders")}
        for n in range(3)
    ]
    data = frame(spark, [archived(**row) for row in rows])
    waiting = {"id": 1, "queue": "letters", "next_attempt_at": START, "headers": dead("mail")}
    live = frame(spark, [waiting], MESSAGE_SCHEMA)
    figures = compute_figures(data, live=live, every=None, as_of=None)
    assert figures.totals | {"bytes": 0} == {
        "messages": 63,
        "completed": 63,
        "failed": 0,
        "discarded": 0,
        "queues": 30,
        "bytes": 0,
        "first": START,
        "last": START + timedelta(hours=59),
    }
    assert (figures.every, figures.queues[-1]) == (1800, "19 other queues")
    assert figures.queues[:-1] == ["q29", *(f"q{n:02}" for n in range(10))]
    counts: dict[str, int] = {}
    for row in figures.tables["throughput"]:
        counts[row["queue"]] = counts.get(row["queue"], 0) + row["messages"]
    assert counts == {"q29": 5, **{f"q{n:02}": 2 for n in range(10)}, "19 other queues": 38}
    assert (
        max(row["attempts"] for row in figures.tables["retry_histogram"]) == figures_.MAX_ATTEMPTS
    )
    ages = {row["queue"]: row["1d_to_7d"] for row in figures.tables["dlq_age"]}
    assert ages == {"mail": 1}
    assert figures.tables["failure_rate"][0] == {
        "queue": "orders",
        "completed": 0,
        "failed": 0,
        "discarded": 0,
        "moved": 3,
        "rate": 1.0,
    }
    assert len(render_page(figures, "t")) < 1_500_000

    def let_go() -> bool:
        # A broadcast that the optimizer did not wait for may cache the frame again: Java's
        # collector ends that, once Python has let go of it.
        gc.collect()
        spark.sparkContext._jvm.System.gc()
        return _kept(spark) <= before

    await eventually(let_go, step=0.2)


@pytest.fixture
def only_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the page's tables only those of its list of queues have rows: each of the others costs
    Spark a second."""
    results = figures_._compute_results
    kept = {"failure_rate", "duplicate_deliveries"}

    def emptied(*given: Any) -> dict[str, DataFrame]:
        return {name: t if name in kept else t.limit(0) for name, t in results(*given).items()}

    monkeypatch.setattr(figures_, "_compute_results", emptied)


@pytest.mark.usefixtures("only_queues")
def test_a_queue_in_the_table_has_a_rate_however_many_others_fail(spark: SparkSession) -> None:
    letters = [{"queue": "letters", "headers": dead(f"source {n:02}")} for n in range(30)]
    rows = [archived(**{"id": n, **row}) for n, row in enumerate([{"queue": "fine"}, *letters])]
    figures = compute_figures(frame(spark, rows), live=None, every=None, as_of=None)
    assert figures.queues == ["letters", "fine", "0 other queues"]
    rates = figures.tables["failure_rate"]
    assert len(rates) == 2 * figures_.MAX_QUEUES
    assert [row["queue"] for row in rates[:2]] == ["source 00", "source 01"]
    for queue in ("fine", "letters"):
        assert re.search(
            rf"<td>{queue}</td><td>\d+</td><td>0.00%</td>", render_page(figures, "t")
        ), queue


@pytest.mark.usefixtures("only_queues")
def test_dead_letters_of_a_small_queue_count_where_they_came_from(spark: SparkSession) -> None:
    """M5: also where small queues share one name; a queue known only from dead letters is none."""
    large = [{"queue": f"large {n:02}"} for n in range(11) for _ in range(40)]
    small = [{"queue": "small"}] * 30 + [{"queue": "tiny", "state": "FAILED"}]
    letters = [
        {"queue": "large 00", "headers": dead(origin)} for origin in ("small",) * 10 + ("gone",)
    ]
    rows = [archived(**{"id": n, **row}) for n, row in enumerate([*large, *small, *letters])]
    figures = compute_figures(frame(spark, rows), live=None, every=None, as_of=None)
    rates = {row["queue"]: row for row in figures.tables["failure_rate"]}
    assert rates["2 other queues"] == {
        "queue": "2 other queues",
        "completed": 30,
        "failed": 1,
        "discarded": 0,
        "moved": 10,
        "rate": 11 / 41,
    }
    assert (rates["gone"]["moved"], rates["gone"]["rate"]) == (1, 1.0)
    assert rates.keys() == {"2 other queues", "gone", *(f"large {n:02}" for n in range(11))}
    assert rates["large 00"]["rate"] == 0.0


def test_widths_of_buckets(spark: SparkSession) -> None:
    def chosen(span: float, every: Any = None) -> float:
        return figures_._choose_width(
            {"first": START, "last": START + timedelta(seconds=span)}, every
        )

    assert [chosen(s) for s in (0, 150, 151, 86_400, 7 * 86_400, 366 * 86_400)] == [
        1,
        1,
        5,
        600,
        10_800,
        259_200,
    ]
    assert chosen(100, "2s") == 2
    with pytest.raises(
        SetupError, match=r"every='1s' gives 2,001 buckets, more than 2,000: set every to 2 seconds"
    ):
        chosen(2001, "1s")
    assert figures_._choose_width({"first": None, "last": None}, "1s") == 1


def test_impossible_options_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    data = plain_frame(spark, [], ARCHIVE_SCHEMA)
    with pytest.raises(SetupError, match="nowhere' does not exist"):
        write_report(data, tmp_path / "nowhere" / "x.html")
    with pytest.raises(SetupError, match="is a folder: give a file"):
        write_report(data, tmp_path)
    with pytest.raises(SetupError, match="this frame lacks payload"):
        write_report(data.drop("payload"), tmp_path / "x.html")
    with pytest.raises(SetupError, match=r"as_of .* has no time zone"):
        write_report(data, tmp_path / "x.html", as_of="2026-03-01T00:00:00")
    for address in ("https://ops.example/ui/messages/", "javascript:{id}"):
        with pytest.raises(SetupError, match="message_url must begin with"):
            write_report(data, tmp_path / "x.html", message_url=address)
    assert list(tmp_path.iterdir()) == []


def test_the_command(spark: SparkSession, new_database: Any, tmp_path: Path) -> None:
    """D4: one page from a database; the password of its URL is nowhere."""
    archive = new_database("postgresql")
    archive.add(*({"id": n, "queue": "00123", **message(0, 0, 1, 2, 3 + n)} for n in range(5)))
    archive.add(
        {"id": 9, "queue": "other"},
        {"id": 10, "queue": "00123", "archived_at": START + timedelta(days=9)},
    )
    out = tmp_path / "report.html"
    options = [
        "--since",
        "2026-03-01",
        "--until",
        "2026-03-05",
        "--queue",
        "00123",
        "--every",
        "1s",
        "--title",
        "a & b",
    ]
    done = CliRunner().invoke(
        app,
        ["archive", "report", "--url", archive.url, "--out", str(out), *options],
        catch_exceptions=False,
    )
    assert (done.exit_code, done.output) == (0, f"wrote {out}\n")
    text = out.read_text(encoding="utf-8")
    assert (
        "<td>00123</td><td>5</td><td>0</td><td>0.00%</td><td>–</td><td>1 s</td><td>1 s</td>" in text
    )
    assert (
        "Archived from 2026-03-01 00:00:03 to 2026-03-01 00:00:07 UTC, in buckets of 1 s." in text
    )
    assert "<title>a &amp; b</title>" in text
    password = archive.engine.url.password
    assert password is None or password not in text.replace(str(out), "")
    with pytest.raises(SetupError, match="use --url or SQLBROKER_URL"):
        CliRunner(env={"SQLBROKER_URL": ""}).invoke(
            app, ["archive", "report", "--out", "x"], catch_exceptions=False
        )


def test_the_command_on_an_export(spark: SparkSession, chromium: str, tmp_path: Path) -> None:
    """Folders by date, the same limits; a period without messages gives a page without plots."""
    rows = [
        {"id": n, "queue": f"00{n % 2}", "archived_at": START + timedelta(days=n)} for n in range(6)
    ]
    lake = str(tmp_path / "lake")
    data = frame(spark, [archived(**row) for row in rows])
    data.withColumn("date", F.to_date("archived_at")).write.partitionBy("date").parquet(lake)

    def read(**limits: Any) -> set[int]:
        chosen = select_rows(ARCHIVE, **limits)
        return {row.id for row in read_rows(spark, None, lake, chosen).collect()}

    assert read() == set(range(6))
    assert read(since="2026-03-02", until="2026-03-05T00:00:00+00:00") == {1, 2, 3}
    assert read(since="2026-03-02", queues=["000"]) == {2, 4}
    out = tmp_path / "empty.html"
    command = ["archive", "report", "--path", lake, "--since", "2027-01-01", "--out", str(out)]
    assert (
        CliRunner(env={"SQLBROKER_URL": "sqlite:///x"})
        .invoke(app, command, catch_exceptions=False)
        .exit_code
        == 0
    )
    document = look(chromium, out, tmp_path)
    assert "<svg" not in document
    assert "This period has no messages." in document
    assert document.count("No messages in this period.") == len(CHARTS + RANKINGS) + 1
