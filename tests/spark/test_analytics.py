"""Analytics of the archive: exact figures on small data (D4)."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from faststream_sqlbroker.core.reasons import NO_OUTCOME, RETRY_STRATEGY_ERROR, SETTLE_ERROR
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import (
    ARCHIVE_SCHEMA,
    MESSAGE_SCHEMA,
    analytics,
    decode_payload,
    read_archive,
)
from pyspark_sqlbroker.analytics import RESULTS
from tests.spark.conftest import START, Archive, archived
from tests.spark.frames import plain_frame

pytestmark = pytest.mark.capability("Spark: analytics and a report of the archive")

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
LATENCIES = (
    "phase string, messages bigint, mean double, p50 double, p75 double, p90 double, "
    "p95 double, p99 double, p999 double, max double"
)
ENDS = "completed bigint, failed bigint, discarded bigint"
SCHEMAS = {
    "throughput": (
        f"bucket timestamp, queue string, messages bigint, {ENDS}, per_second double, "
        "payload_bytes bigint"
    ),
    "latency": f"queue string, {LATENCIES}",
    "latency_trend": f"bucket timestamp, queue string, {LATENCIES}",
    "retry_histogram": f"queue string, attempts int, messages bigint, {ENDS}",
    "failure_rate": f"queue string, {ENDS}, moved bigint, rate double",
    "top_errors": "queue string, reason string, error_type string, messages bigint, share double, "
    "example string, last_id bigint, last_at timestamp",
    "dlq_age": "queue string, messages bigint, under_1h bigint, 1h_to_1d bigint, 1d_to_7d bigint, "
    "7d_to_30d bigint, over_30d bigint, oldest_at timestamp, oldest_age double",
    "duplicate_deliveries": "queue string, messages bigint, redelivered bigint, "
    "lost_deliveries bigint, share double, most int",
    "policy_effects": "queue string, effect string, state string, messages bigint, share double",
    "hot_keys": f"queue string, key string, messages bigint, share double, {ENDS}",
    "sessions": (
        "queue string, key string, started_at timestamp, ended_at timestamp, messages bigint, "
        "seconds double"
    ),
    "payload_schema": "queue string, messages bigint, decoded bigint, schema string",
}
"""Written by hand: what users rely on."""


@pytest.fixture
def frame_of(spark: SparkSession) -> Callable[..., DataFrame]:
    """A function that makes an archive of rows; what is not given has a value."""

    def make(*rows: dict[str, Any]) -> DataFrame:
        complete = [{"id": number, **row} for number, row in enumerate(rows, 1)]
        return frame(spark, [archived(**row) for row in complete])

    return make


def frame(
    spark: SparkSession, rows: list[dict[str, Any]], schema: Any = ARCHIVE_SCHEMA
) -> DataFrame:
    texts = {"headers": lambda v: v if v is None or isinstance(v, str) else json.dumps(v)}
    data = [tuple(texts.get(n, lambda v: v)(row.get(n)) for n in schema.names) for row in rows]
    return plain_frame(spark, data, schema)


def rows(found: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Rows in the order of their columns; moments in UTC."""
    chosen = found.select(*(f"`{name}`" for name in columns)) if columns else found
    plain = [
        tuple(v.astimezone(timezone.utc) if isinstance(v, datetime) else v for v in row)
        for row in chosen.collect()
    ]
    return sorted(
        plain,
        key=lambda row: [
            (v is None, str(v)) if not isinstance(v, datetime) else (False, v.isoformat())
            for v in row
        ],
    )


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(timezone.utc)


def dead(queue: str, **more: Any) -> dict[str, Any]:
    """Headers of what a dead letter queue took from `queue`."""
    origin = {"queue": queue, "reason": "rejected", "error": None, "attempts": 1, "deliveries": 1}
    return {"dead-letter": origin | more}


@pytest.mark.parametrize("name", [name for name in analytics.__all__ if name != "RESULTS"])
def test_schemas_are_the_documented_ones_and_hold_without_rows(
    spark: SparkSession, frame_of: Any, name: str
) -> None:
    """Empty in, empty out, of the same columns; rows of NULLs do no harm; a missing column is
    named."""
    function = getattr(analytics, name)
    assert [f"{field.name} {field.type}" for field in RESULTS[name]] == SCHEMAS[name].split(", ")
    for word in SCHEMAS[name].split(", "):
        assert word.split()[0] in function.__doc__, word
    empty = function(plain_frame(spark, [], ARCHIVE_SCHEMA))
    assert [f"{n} {t}" for n, t in empty.dtypes] == SCHEMAS[name].split(", ")
    assert empty.collect() == []
    nothing = frame(spark, [{"id": 1, "queue": "q", "state": "COMPLETED"}])
    found = function(nothing.unionAll(frame_of({"key": "k"})))
    assert found.schema == empty.schema
    assert {row.queue for row in found.collect()} <= {"q", "orders"}
    with pytest.raises(SetupError, match=f"{name} needs the columns .*; this frame lacks .*queue"):
        function(plain_frame(spark, [(1,)], "id int"))


def test_throughput(frame_of: Any) -> None:
    noon = at("2026-03-01T12:00:00+00:00")
    data = frame_of(
        {"archived_at": noon, "payload": b"12"},
        {
            "archived_at": noon + timedelta(seconds=59.999999),
            "payload": "é".encode(),
            "state": "FAILED",
        },
        {"archived_at": noon + timedelta(seconds=60), "payload": b""},
        {"archived_at": noon, "queue": "00123", "state": "DISCARDED", "payload": b"\xff"},
    )
    assert rows(analytics.throughput(data, "1m")) == [
        (noon, "00123", 1, 0, 0, 1, 1 / 60, 1),
        (noon, "orders", 2, 1, 1, 0, 2 / 60, 4),
        (noon + timedelta(minutes=1), "orders", 1, 1, 0, 0, 1 / 60, 0),
    ]
    whole = rows(analytics.throughput(data, DAY), "bucket", "queue", "messages", "per_second")
    assert whole == [(START, "00123", 1, 1 / 86400), (START, "orders", 3, 3 / 86400)]
    half = rows(analytics.throughput(data, 0.5), "bucket", "queue", "messages")
    assert (noon + timedelta(seconds=59.5), "orders", 1) in half
    for wrong in (0, -1, "1 minute", "0.1ms", None, float("nan")):
        with pytest.raises(SetupError, match="every"):
            analytics.throughput(data, wrong)


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kathmandu"])
def test_buckets_are_of_utc_in_every_zone(spark: SparkSession, frame_of: Any, zone: str) -> None:
    """M5: across both changes of clocks each hour is one bucket, and each day has 24; before 1970
    too."""
    days = at("2026-03-08T00:00:00+00:00"), at("2026-11-01T00:00:00+00:00")
    old = at("1969-12-31T23:59:59.5+00:00")
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        data = frame_of(
            {"archived_at": old},
            *({"archived_at": d + HOUR * n / 2} for d in days for n in range(48)),
        )
        hours = [
            (at("1969-12-31T23:00:00+00:00"), 1),
            *((d + HOUR * n, 2) for d in days for n in range(24)),
        ]
        assert rows(analytics.throughput(data, HOUR), "bucket", "messages") == hours
        whole = [(at("1969-12-31T00:00:00+00:00"), 1), *((day, 48) for day in days)]
        trend = analytics.latency_trend(data, "24h", by=()).where("phase = 'total'")
        assert rows(trend, "bucket", "messages") == whole
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def message(
    published: float,
    due: float,
    claimed: float | None,
    ended: float | None,
    archived_: float,
    **more: Any,
) -> Any:
    """A row by seconds after START."""
    times = {
        "created_at": published,
        "next_attempt_at": due,
        "acquired_at": claimed,
        "first_attempt_at": ended,
        "last_attempt_at": ended,
        "archived_at": archived_,
    }
    return {
        name: None if t is None else START + timedelta(seconds=t) for name, t in times.items()
    } | more


def phases(found: DataFrame) -> dict[tuple[Any, ...], tuple[int, float]]:
    """(messages, mean) by everything before."""
    return {
        tuple(row)[: found.columns.index("messages")]: (row.messages, round(row.mean, 6))
        for row in found.collect()
    }


def test_phases_of_latency(frame_of: Any) -> None:
    """Only being behind others is waiting: no delay, no pause before a retry, no policy's slot."""
    data = frame_of(
        message(0, 0, 2, 5, 6, queue="plain"),
        message(0, 3600, 3602, 3605, 3606, queue="delayed"),
        # Tried at 1 and again at 101, after a pause of 99 seconds.
        message(0, 100, 101, 104, 105, queue="retried", attempts_count=2)
        | {"first_attempt_at": START},
        # Due in the past by its publisher's wish.
        message(50, 0, 52, 55, 56, queue="past"),
        # Its producer's clock is an hour ahead.
        message(3600, 0, 2, 5, 6, queue="ahead"),
        # Expired at its start: claimed, never attempted.
        message(0, 0, 2, None, 3, queue="expired", state="DISCARDED"),
        # Given up after two deliveries: the last claim led to no attempt.
        message(0, 10, 20, 9, 21, queue="given up", state="FAILED"),
        # Superseded: never claimed.
        message(0, 10, None, None, 11, queue="superseded", state="DISCARDED"),
    )
    assert phases(analytics.latency(data)) == {
        ("plain", "wait"): (1, 2),
        ("plain", "work"): (1, 3),
        ("plain", "total"): (1, 6),
        ("delayed", "wait"): (1, 2),
        ("delayed", "work"): (1, 3),
        ("delayed", "total"): (1, 3606),
        ("retried", "wait"): (1, 1),
        ("retried", "work"): (1, 3),
        ("retried", "total"): (1, 105),
        ("past", "wait"): (1, 2),
        ("past", "work"): (1, 3),
        ("past", "total"): (1, 6),
        ("ahead", "wait"): (1, 2),
        ("ahead", "work"): (1, 3),
        ("ahead", "total"): (1, 0),
        ("expired", "wait"): (1, 2),
        ("given up", "wait"): (1, 10),
        ("given up", "total"): (1, 21),
    }
    by_two = phases(analytics.latency(data, ("state", "priority")))
    assert by_two["FAILED", 0, "total"] == (1, 21)
    assert phases(analytics.latency(data, by=()))["work",] == (5, 3)
    assert phases(analytics.latency(data, "queue")) == phases(analytics.latency(data))
    halves = analytics.latency_trend(data.where("queue in ('plain', 'retried')"), "1m").where(
        "phase = 'total'"
    )
    assert rows(halves, "bucket", "queue", "p50") == [
        (START, "plain", 6.0),
        (START + timedelta(minutes=1), "retried", 105.0),
    ]
    for options in ({"by": "nothing"}, {"accuracy": 0}, {"accuracy": 2**31}):
        with pytest.raises(SetupError, match=r"nothing|accuracy"):
            analytics.latency(data, **options)


def test_latency_by_columns_of_any_name(frame_of: Any) -> None:
    """Only names that the result has anyway are refused, in any case of letters."""
    names = {"queue": "pair", "state": "took", "priority": "found"}
    data = frame_of({})
    for column, name in names.items():
        found = analytics.latency(
            data.withColumn(name, F.col(column)), by=name, accuracy=2**31 - 1
        ).first()
        assert (found[name], found.messages) == (data.first()[column], 1)
    for name in ("phase", "messages", "MAX"):
        with pytest.raises(
            SetupError, match=rf"by contains '{name}'.* column of the result .*phase.*: rename"
        ):
            analytics.latency(data.withColumn(name, F.lit(1)), by=("queue", name))
    bucketed = data.withColumn("bucket", F.lit("mine"))
    with pytest.raises(SetupError, match="by contains 'bucket'"):
        analytics.latency_trend(bucketed, by="bucket")
    assert analytics.latency(bucketed, by="bucket").first().bucket == "mine"


def test_percentiles_are_numpys(frame_of: Any, spark: SparkSession) -> None:
    """Exact up to `accuracy` messages, and no further away than 1 / accuracy in rank beyond."""
    random = np.random.default_rng(5)
    micros = (random.lognormal(12, 2, 3000)).astype(int)
    base = message(0, 0, 0, 0, 0)
    data = frame(spark, [archived(**base, id=0, queue="q")]).crossJoin(
        plain_frame(spark, [(int(m),) for m in micros], "m long")
    )
    data = data.withColumn(
        "archived_at", F.timestamp_micros(F.unix_micros("created_at") + F.col("m"))
    )
    total = analytics.latency(data).where("phase = 'total'").first()
    shares = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
    for name, share in shares.items():
        assert total[name] == np.quantile(micros, share, method="inverted_cdf") / 1e6, name
    assert (total.messages, total.max) == (3000, micros.max() / 1e6)
    assert total["mean"] == pytest.approx(micros.mean() / 1e6)
    rough = analytics.latency(data, accuracy=100).where("phase = 'total'").first()
    for name, share in shares.items():
        near = (
            np.quantile(micros, [share - 0.01, min(1, share + 0.01)], method="inverted_cdf") / 1e6
        )
        assert near[0] <= rough[name] <= near[1], name


def test_retries_and_failure_rates(frame_of: Any) -> None:
    data = frame_of(
        {},
        {"attempts_count": 3},
        {"attempts_count": 3, "state": "FAILED"},
        {"attempts_count": 0, "state": "DISCARDED"},
        {"queue": "letters", "headers": dead("orders")},
        {"queue": "letters", "headers": dead("orders"), "state": "FAILED"},
        {"queue": "dropped", "state": "DISCARDED", "headers": None},
        {"queue": "odd", "headers": '{"dead-letter": 5}'},
        {"queue": "odd", "headers": "{broken"},
    )
    assert rows(
        analytics.retry_histogram(data.where("queue = 'orders'")),
        "attempts",
        "messages",
        *ENDS.split()[::2],
    ) == [
        (0, 1, 0, 0, 1),
        (1, 1, 1, 0, 0),
        (3, 2, 1, 1, 0),
    ]
    assert rows(analytics.failure_rate(data)) == [
        ("dropped", 0, 0, 1, 0, None),
        ("letters", 1, 1, 0, 0, 0.5),
        ("odd", 2, 0, 0, 0, 0.0),
        ("orders", 2, 1, 1, 2, 3 / 5),
    ]


def test_top_errors(frame_of: Any) -> None:
    lost = "app.errors.Lost: gone: 5\ncaused by OSError: x\n  File"
    data = frame_of(
        {"state": "FAILED", "reason": "max_attempts", "last_error": lost},
        {
            "state": "FAILED",
            "reason": "max_attempts",
            "last_error": "app.errors.Lost: 7",
            "archived_at": START + HOUR,
        },
        {"state": "FAILED", "reason": "rejected", "last_error": None},
        {"state": "FAILED", "reason": None, "last_error": "KeyError"},
        {"last_error": "ValueError: retried, and went well"},
        {
            "queue": "letters",
            "headers": dead("orders", reason="max_attempts", error=lost),
            "last_error": lost,
        },
        {
            "queue": "letters",
            "headers": dead("mail"),
            "state": "FAILED",
            "reason": "rejected",
            "last_error": ": odd",
        },
    )
    latest = START + HOUR
    assert [tuple(row)[:-1] for row in analytics.top_errors(data).collect()] == [
        ("orders", "max_attempts", "app.errors.Lost", 3, 3 / 7, "app.errors.Lost: 7", 2),
        ("letters", "rejected", None, 1, 1 / 7, ": odd", 7),
        ("mail", "rejected", None, 1, 1 / 7, None, 7),
        ("orders", None, "KeyError", 1, 1 / 7, "KeyError", 4),
        ("orders", "rejected", None, 1, 1 / 7, None, 3),
    ]
    assert rows(analytics.top_errors(data, 1), "messages", "last_at") == [(3, latest)]
    assert analytics.top_errors(data, None).count() == 5
    with pytest.raises(
        SetupError, match="limit must be a whole number of 1 or more or None, got 0"
    ):
        analytics.top_errors(data, 0)


def test_dead_letters_age(spark: SparkSession, frame_of: Any) -> None:
    """Each bound belongs to the older class; a dead letter counts for the queue it failed in."""
    now = START + 40 * DAY
    tick = timedelta(microseconds=1)
    ages = [
        timedelta(),
        HOUR - tick,
        HOUR,
        DAY - tick,
        DAY,
        7 * DAY - tick,
        7 * DAY,
        30 * DAY - tick,
        30 * DAY,
    ]
    data = frame_of(
        *({"state": "FAILED", "archived_at": now - age} for age in ages),
        {"archived_at": now + HOUR},
        {"state": "FAILED", "queue": "letters", "headers": dead("mail"), "archived_at": now - DAY},
    )
    oldest = now - 30 * DAY, 30 * 86400.0
    mail = ("mail", 1, 0, 0, 1, 0, 0, now - DAY, 86400.0)
    assert rows(analytics.dlq_age(data, now)) == [mail, ("orders", 9, 2, 2, 2, 2, 1, *oldest)]
    later = [(queue, age + 3600) for queue, age in (("mail", 86400.0), ("orders", oldest[1]))]
    assert rows(analytics.dlq_age(data), "queue", "oldest_age") == later
    assert rows(analytics.dlq_age(data, now - 8 * DAY), "queue", "messages") == [("orders", 2)]
    waiting = {"id": 1, "queue": "letters", "next_attempt_at": now - 2 * DAY}
    live = frame(
        spark, [waiting | {"headers": dead("mail")}, waiting | {"headers": None}], MESSAGE_SCHEMA
    )
    found = rows(
        analytics.dlq_age(data, now.isoformat(), live=live), "queue", "messages", "1d_to_7d"
    )
    assert found == [("mail", 2, 2), ("orders", 9, 2)]
    with pytest.raises(SetupError, match=r"as_of .* has no time zone"):
        analytics.dlq_age(data, "2026-03-01T00:00:00")


def test_a_retried_dead_letter_is_not_counted(frame_of: Any) -> None:
    """An export has the row of each time that it was archived; as of then it was still dead."""
    published = {"created_at": START - HOUR}
    data = frame_of(
        {"id": 1, "state": "FAILED", **published},
        {"id": 1, "archived_at": START + DAY, **published},
        {"id": 2, "state": "FAILED", **published},
        {"id": 2, "state": "FAILED", "archived_at": START + DAY, **published},
    )
    assert rows(analytics.dlq_age(data), "messages", "oldest_at") == [(1, START + DAY)]
    assert rows(analytics.dlq_age(data, START + HOUR), "messages", "oldest_at") == [(2, START)]
    assert rows(analytics.dlq_age(data.drop("id")), "messages") == [(3,)]
    # The database has lost the dead letter 3, and given its id again.
    other = frame_of({"id": 3, "state": "FAILED"}, {"id": 3, "archived_at": START + DAY})
    assert rows(analytics.dlq_age(other), "messages", "oldest_at") == [(1, START)]


def test_a_dead_letter_that_is_due_later_moves_no_clock(spark: SparkSession, frame_of: Any) -> None:
    """Its next attempt in 2099 is not taken for now; it counts, with age 0."""
    far = datetime(2099, 1, 1, tzinfo=timezone.utc)
    data = frame_of({"state": "FAILED"}, {"archived_at": START + HOUR})
    live = frame(
        spark,
        [{"id": 9, "queue": "letters", "headers": dead("mail"), "next_attempt_at": far}],
        MESSAGE_SCHEMA,
    )
    found = rows(analytics.dlq_age(data, live=live), "queue", "messages", "oldest_age")
    assert found == [("mail", 1, 0.0), ("orders", 1, 3600.0)]


def test_a_waiting_dead_letter_is_as_old_as_its_last_attempt_there(
    spark: SparkSession, frame_of: Any
) -> None:
    """Its next attempt is none yet; a message that was moved back waits in no dead letter queue."""
    letter = {"queue": "letters", "headers": dead("mail"), "next_attempt_at": START + DAY}
    retried = letter | {"last_attempt_at": START + HOUR}
    back = retried | {"queue": "mail"}
    live = frame(spark, [{"id": n, **row} for n, row in enumerate([retried, back])], MESSAGE_SCHEMA)
    figures = "queue", "messages", "oldest_at", "oldest_age"
    data = frame_of({})
    assert rows(analytics.dlq_age(data, live=live), *figures) == [("mail", 1, START + HOUR, 0.0)]
    later = rows(analytics.dlq_age(data, START + 2 * HOUR, live=live), *figures)
    assert later == [("mail", 1, START + HOUR, 3600.0)]
    untried = frame(spark, [{"id": 1, **letter}], MESSAGE_SCHEMA)
    assert rows(analytics.dlq_age(data, live=untried), *figures) == [("mail", 1, START + DAY, 0.0)]


def test_duplicate_deliveries(frame_of: Any) -> None:
    expired = message(0, 0, 2, None, 3, state="DISCARDED", attempts_count=0)
    data = frame_of(
        {},
        {"attempts_count": 2, "deliveries_count": 2},
        {"attempts_count": 1, "deliveries_count": 4},
        expired | {"deliveries_count": 1},
        expired | {"deliveries_count": 2},
        # Postponed: deliveries are uncharged, attempts are not counted.
        {"attempts_count": 1, "deliveries_count": 0},
        {"queue": "quiet"},
    )
    assert rows(analytics.duplicate_deliveries(data)) == [
        ("orders", 6, 2, 4, 2 / 6, 3),
        ("quiet", 1, 0, 0, 0.0, 0),
    ]


def test_policy_effects(frame_of: Any) -> None:
    gone = [
        ("superseded", "superseded"),
        ("superseded by 4", "superseded"),
        ("duplicate of 9", "duplicate"),
        ("expired", "expired"),
        ("throttled", "throttled"),
        ("superseded by no id", "other"),
        (None, "other"),
    ]
    failed = ["throttled", "no_key", "failed_once", "unknown_outcome", "max_deliveries"]
    failed += [NO_OUTCOME, RETRY_STRATEGY_ERROR, SETTLE_ERROR]
    data = frame_of(
        *({"state": "DISCARDED", "reason": reason} for reason, _ in gone),
        *(
            {"state": "FAILED", "reason": reason}
            for reason in (*failed, "max_attempts", "rejected", None)
        ),
        {"reason": "expired"},
        {},
    )
    assert rows(analytics.policy_effects(data)) == sorted(
        [
            ("orders", "superseded", "DISCARDED", 2, 2 / 20),
            ("orders", "other", "DISCARDED", 2, 2 / 20),
            *(
                ("orders", effect, "DISCARDED", 1, 1 / 20)
                for effect in ("duplicate", "expired", "throttled")
            ),
            *(("orders", effect, "FAILED", 1, 1 / 20) for effect in failed),
        ]
    )


def test_hot_keys(frame_of: Any) -> None:
    keyed = [{"key": key} for key in "aaab"]
    data = frame_of(
        *keyed,
        {"key": "b", "state": "FAILED"},
        {},
        {"key": "a", "queue": "other", "headers": {"tenant": "t"}},
    )
    assert rows(analytics.hot_keys(data)) == [
        ("orders", "a", 3, 3 / 6, 3, 0, 0),
        ("orders", "b", 2, 2 / 6, 1, 1, 0),
        ("other", "a", 1, 1.0, 1, 0, 0),
    ]
    assert [row.key for row in analytics.hot_keys(data, 2).collect()] == ["a", "b"]
    tenants = analytics.hot_keys(data, key=F.get_json_object("headers", "$.tenant"))
    assert rows(tenants, "queue", "key", "share") == [("other", "t", 1.0)]


def test_sessions(frame_of: Any) -> None:
    """Exactly the gap apart is another session; queues and keys have their own."""
    gap = timedelta(minutes=30)
    tick = timedelta(microseconds=1)
    moments = [START, START + gap - tick, START + 2 * gap - tick, START + 5 * gap]
    data = frame_of(
        *({"key": "a", "created_at": moment} for moment in moments),
        {"key": "b", "created_at": START},
        {"key": "a", "queue": "other", "created_at": START},
        {"key": None},
    )
    found = rows(analytics.sessions(data, gap))
    assert found == [
        ("orders", "a", START, moments[1], 2, (gap - tick).total_seconds()),
        ("orders", "a", moments[2], moments[2], 1, 0.0),
        ("orders", "a", moments[3], moments[3], 1, 0.0),
        ("orders", "b", START, START, 1, 0.0),
        ("other", "a", START, START, 1, 0.0),
    ]
    assert all(b[2] - a[3] >= gap for a, b in pairwise(found[:3]))
    with pytest.raises(SetupError, match="gap"):
        analytics.sessions(data, 0)


def test_payload_schemas(frame_of: Any) -> None:
    data = frame_of(
        {"payload": b'{"user": 1, "amount": 9.5}'},
        {"payload": b'{"user": 2, "tags": ["x"]}'},
        {"payload": b"\xff"},
        {"queue": "texts", "headers": {"content-type": "text/plain"}, "payload": b"hello"},
        {"queue": "bytes", "headers": None, "payload": b"\x00"},
    )
    assert rows(analytics.payload_schema(data)) == [
        ("bytes", 1, 0, "VOID"),
        ("orders", 3, 2, "STRUCT<amount: DECIMAL(2,1), tags: ARRAY<STRING>, user: BIGINT>"),
        ("texts", 1, 1, "STRING"),
    ]


def test_payload_schemas_decode_the_payloads(frame_of: Any) -> None:
    """D4: whatever the names of fields; of one that is always null, and of an empty list or object,
    too."""
    bodies = [
        {
            "user": {"id": 1, "empty": {}},
            "list": [{"a": 1.5}, {"b": None}],
            "none": [],
            "OBJECT": {"VOID": None},
        },
        {
            "OBJECT<`x` OBJECT<": {"y z": 1},
            "é.b": True,
            "``": {"OBJECT<": {}},
            "": {},
            "select": 10**20,
        },
    ]
    for body in bodies:
        data = frame_of({"payload": json.dumps(body).encode()})
        schema = analytics.payload_schema(data).first().schema
        found = decode_payload(data, schema, error="error").first()
        assert found.error is None, schema
        assert json.loads(json.dumps(found.body.asDict(recursive=True), default=float)) == {
            **body,
            **({"list": [{"a": 1.5, "b": None}, {"a": None, "b": None}]} if "list" in body else {}),
        }, schema


def test_figures_from_a_database(spark: SparkSession, archive: Archive) -> None:
    """D4, M5: the same figures on every database, in a session whose zone is New York's."""
    archive.add(
        {"id": 1, "queue": "00123", "key": "a", **message(0, 3600, 3602.5, 3603, 3604)},
        {
            "id": 2,
            "queue": "00123",
            "key": "a",
            "state": "FAILED",
            "last_error": "KeyError: 'x'",
            "reason": "rejected",
        },
        {
            "id": 3,
            "queue": "b",
            "headers": dead("00123", error="OSError: no"),
            "payload": b"\xff\x00",
        },
        {
            "id": 4,
            "queue": "b",
            "state": "DISCARDED",
            "reason": "superseded",
            "related_id": 3,
            "acquired_at": None,
        },
    )
    data = read_archive(spark, archive.url)
    assert rows(
        analytics.throughput(data, HOUR), "bucket", "queue", "messages", "payload_bytes"
    ) == [
        (START, "00123", 1, 26),
        (START, "b", 2, 28),
        (START + HOUR, "00123", 1, 26),
    ]
    assert phases(analytics.latency(data.where("id = 1"))) == {
        ("00123", "wait"): (1, 2.5),
        ("00123", "work"): (1, 0.5),
        ("00123", "total"): (1, 3604.0),
    }
    assert rows(analytics.failure_rate(data), "queue", "moved", "rate") == [
        ("00123", 1, 2 / 3),
        ("b", 0, 0.0),
    ]
    assert rows(analytics.top_errors(data), "queue", "error_type") == [
        ("00123", "KeyError"),
        ("00123", "OSError"),
    ]
    assert rows(analytics.policy_effects(data), "queue", "effect", "share") == [
        ("b", "superseded", 0.5)
    ]
