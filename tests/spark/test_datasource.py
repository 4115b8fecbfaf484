"""`spark.read.format("sqlbroker")`: the same rows as the table's, and no word of the password."""

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, datasource
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType
from sqlalchemy import make_url, select

from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError
from pyspark_sqlbroker import ARCHIVE_SCHEMA, MESSAGE_SCHEMA, read_archive
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.load import rows as source_rows
from pyspark_sqlbroker.source.options import parse_options
from pyspark_sqlbroker.source.scan import BatchReader, select_fields
from tests.spark.conftest import START, Archive

pytestmark = pytest.mark.capability('Spark: `spark.read.format("sqlbroker")`, without jars')

URL = "postgresql://user@host/name"
TIMES = [field.name for field in ARCHIVE_SCHEMA if field.dataType.simpleString() == "timestamp"]


def load(
    spark: SparkSession, archive: Archive, *, schema: str | None = None, **options: Any
) -> DataFrame:
    reader = spark.read.format("sqlbroker").option("url", archive.url).options(**options)
    return (reader if schema is None else reader.schema(schema)).load()


def as_numbers(frame: DataFrame) -> dict[int, dict[str, Any]]:
    """Rows by id; times as microseconds, which no time zone of Python's or Java's can move."""
    columns = [
        F.unix_micros(name).alias(name) if name in TIMES else F.col(name) for name in frame.columns
    ]
    found = [row.asDict() for row in frame.select(*columns).collect()]
    assert len({row["id"] for row in found}) == len(found), "a row came twice"
    return {
        row["id"]: row | {"headers": row["headers"] and json.loads(row["headers"])} for row in found
    }


def of_table(archive: Archive) -> dict[int, dict[str, Any]]:
    with archive.engine.connect() as connection:
        found = [dict(row) for row in connection.execute(select(archive.archive)).mappings()]
    for row in found:
        row |= {name: row[name] and to_microseconds(row[name]) for name in TIMES}
    return {row["id"]: row for row in found}


def odd_rows() -> list[dict[str, Any]]:
    """Everything that a column can hold and that has gone wrong somewhere."""
    spring = datetime(2026, 3, 8, 5, tzinfo=timezone.utc)
    autumn = datetime(2026, 11, 1, 4, tzinfo=timezone.utc)
    hours = [
        start + timedelta(minutes=30 * n, microseconds=n + 1)
        for start in (spring, autumn)
        for n in range(8)
    ]
    rows: list[dict[str, Any]] = [{"id": n, "archived_at": at} for n, at in enumerate(hours, 1)]
    rows += [
        {"id": 100, "queue": "00123", "key": "", "dedup_id": "a 'quoted' \\ name", "headers": None},
        {
            "id": 101,
            "queue": "schön 🎉",
            "headers": {"a": "ü🎉", "n": [1, None]},
            "payload": b"\xff\xfe\x00\x80",
        },
        {
            "id": 102,
            "payload": bytes(range(256)) * 4096,
            "state": "FAILED",
            "last_error": "E: é\n🎉" * 99,
        },
        {"id": 103, "payload": b"", "priority": -100, "reason": "why", "origin_id": 2**62},
        {
            "id": 2**62,
            "state": "DISCARDED",
            "expires_at": START,
            "first_attempt_at": None,
            "acquired_at": None,
        },
    ]
    return rows


def test_every_value_is_the_tables(spark: SparkSession, archive: Archive) -> None:
    """D4: all columns, in every zone; by ADBC, PyMySQL and sqlite3, without a JDBC driver."""
    archive.add(*odd_rows())
    archive.analyze()
    frame = load(spark, archive, numPartitions=3)
    assert frame.schema == ARCHIVE_SCHEMA
    found = as_numbers(frame)
    assert found == of_table(archive)
    assert found == as_numbers(read_archive(spark, archive.url))


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_infinite_times_are_those_of_read_archive(spark: SparkSession, archive: Archive) -> None:
    """The first or last moment, also cut by times; an overflow would make it the far past."""
    archive.add(*({"id": n, "expires_at": START} for n in (1, 2, 3)))
    # By JDBC, times before 1900 are exact where a row was archived then.
    archive.add({"id": 4, "archived_at": datetime(1500, 1, 1, tzinfo=timezone.utc)})
    for n, (archived, expires) in enumerate([(START, "infinity"), ("-infinity", "-infinity")], 1):
        archive.execute(
            "UPDATE message_archive SET archived_at = :archived, expires_at = :expires "
            "WHERE id = :n",
            archived=archived,
            expires=expires,
            n=n,
        )
    first, last = -62_135_424_000_000_000, 253_402_300_799_999_000
    found = as_numbers(load(spark, archive, numPartitions=2))
    assert found == as_numbers(read_archive(spark, archive.url))
    assert [found[n]["expires_at"] for n in (1, 2, 3)] == [last, first, to_microseconds(START)]
    assert found.pop(2)["archived_at"] == first
    del found[4]
    assert as_numbers(load(spark, archive, numPartitions=2, since="2026-01-01")) == found


def test_headers_that_are_a_bare_number_are_text(new_database: Any) -> None:
    """Another program's; SQLite makes a number of them."""
    archive = new_database("sqlite")
    archive.add({"id": 1}, {"id": 2}, {"id": 3})
    archive.execute(
        "UPDATE message_archive SET headers = "
        "CASE id WHEN 1 THEN '5' WHEN 2 THEN '1.5' ELSE 'x' END"
    )
    [found] = read(archive, StructType([ARCHIVE_SCHEMA["id"], ARCHIVE_SCHEMA["headers"]]))
    assert [(row["id"], row["headers"]) for row in found] == [(1, "5"), (2, "1.5"), (3, "x")]


def rows_of(reader: BatchReader) -> list[list[dict[str, Any]]]:
    """What Spark would be given, cut by cut."""
    return [
        [row for batch in reader.read(cut) for row in batch.to_pylist()]
        for cut in reader.partitions()
    ]


def read(archive: Archive, schema: StructType, **options: str) -> list[list[dict[str, Any]]]:
    return rows_of(
        BatchReader(parse_options({"url": archive.url, **options}, streaming=False), schema)
    )


needs_filters = pytest.mark.skipif(
    not hasattr(datasource, "Filter"), reason="Spark before 4.1 pushes no filters to Python"
)


def decide(given: Any, row: dict[str, Any]) -> bool | None:
    """The filter of a row, as Spark defines it; None is NULL."""
    kind = type(given).__name__
    if kind == "Not":
        inner = decide(given.child, row)
        return None if inner is None else not inner
    value = row[given.attribute[0]]
    if kind in ("IsNull", "IsNotNull"):
        return (value is None) == (kind == "IsNull")
    if kind == "EqualNullSafe":
        return value is not None and value == given.value
    if value is None:
        return None
    if kind == "In":
        return True if value in given.value else (None if None in given.value else False)
    answers = {"EqualTo": value == given.value, "GreaterThan": value > given.value}
    answers |= {"GreaterThanOrEqual": value >= given.value, "LessThan": value < given.value}
    return (answers | {"LessThanOrEqual": value <= given.value})[kind]


@needs_filters
def test_pushed_filters_decide_as_sparks(archive: Archive) -> None:
    """Each by itself and negated; what is not the database's stays Spark's."""
    from pyspark_sqlbroker.source.filters import FilteringReader

    instants = [START + timedelta(microseconds=n) for n in range(3)]
    odd = ["a", "A", "a ", "ä", "a'b\\\\%s", ""]
    archive.add(
        *({"id": n, "archived_at": at, "reason": None} for n, at in enumerate(instants, 1)),
        *({"id": n, "queue": text, "key": text} for n, text in enumerate(odd, 10)),
        {"id": 20, "key": None, "state": "FAILED", "expires_at": instants[1], "headers": None},
        {"id": 21, "key": "b", "state": "DISCARDED", "priority": -1, "origin_id": 2**62},
    )
    zone = timezone(timedelta(hours=-5))
    spark = datasource
    taken = [
        *(spark.EqualTo((name,), text) for name in ("queue", "key") for text in odd),
        *(spark.EqualNullSafe(("key",), text) for text in odd),
        spark.In(("key",), tuple(odd[:3])),
        spark.In(("state",), ("FAILED", "failed", "DISCARDED")),
        spark.In(("id",), (1, 20, 2**62)),
        spark.EqualNullSafe(("origin_id",), 2**62),
        spark.EqualTo(("priority",), -1),
        *(
            kind((name,), instants[1].astimezone(zone))
            for name in ("archived_at", "expires_at")
            for kind in (
                spark.EqualTo,
                spark.EqualNullSafe,
                spark.GreaterThan,
                spark.GreaterThanOrEqual,
                spark.LessThan,
                spark.LessThanOrEqual,
            )
        ),
        spark.In(("archived_at",), tuple(instants[:2])),
        spark.GreaterThan(("id",), 11),
        spark.LessThanOrEqual(("id",), 11),
        spark.IsNull(("headers",)),
        spark.IsNotNull(("key",)),
    ]
    left = [
        spark.In(("key",), ("a", None)),
        spark.In(("key",), ()),
        spark.EqualTo(("key",), None),
        spark.EqualTo(("key",), "nul \0"),
        spark.EqualTo(("key",), "\N{REPLACEMENT CHARACTER}"),
        spark.EqualTo(("headers",), "{}"),
        spark.EqualTo(("payload",), b"x"),
        spark.EqualTo(("id",), True),
        spark.EqualTo(("id",), 1.5),
        spark.EqualTo(("id", "part"), 1),
        spark.GreaterThan(("key",), "a"),
        spark.GreaterThan(("archived_at",), datetime(2026, 3, 1)),
        spark.GreaterThan(("archived_at",), datetime(800, 1, 1, tzinfo=timezone.utc)),
        spark.StringStartsWith(("key",), "a"),
        spark.StringContains(("queue",), "%"),
    ]
    with archive.engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(select(archive.archive)).mappings()]
    options = parse_options({"url": archive.url}, streaming=False)
    database = get_database(options.address)
    with database.connect() as connection:
        for given in [*taken, *map(spark.Not, taken)]:
            reader = FilteringReader(options, ID)
            assert list(reader.pushFilters([given, *left])) == left
            source = reader._options.selection.build_from_clause(database)
            found = connection.exec_driver_sql(f"SELECT id {source} ORDER BY id").scalars().all()
            assert found == [row["id"] for row in rows if decide(given, row)], given
    assert list(FilteringReader(options, ID).pushFilters([spark.Not(each) for each in left])) == [
        spark.Not(each) for each in left
    ]


@needs_filters
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_spark_pushes_filters_where_it_is_told_to(spark: SparkSession, archive: Archive) -> None:
    """And without the setting all is as before; the same rows either way."""
    archive.add_many(30)
    late = START + timedelta(hours=1)
    archive.add({"id": 100, "queue": "queue 1", "key": "k", "archived_at": late})
    wanted = "queue = 'queue 1' AND NOT (key <=> 'k') AND id % 2 = 0 AND state <> 'FAILED' "
    wanted += "AND archived_at >= TIMESTAMP '2026-02-28 19:00:05-05:00' AND id NOT IN (5, 8)"
    found = []
    for setting in ("false", "true"):
        spark.conf.set("spark.sql.python.filterPushdown.enabled", setting)
        try:
            frame = load(spark, archive).where(wanted).select("id")
            found.append(sorted(row.id for row in frame.collect()))
            plan = frame._jdf.queryExecution().toString()
        finally:
            spark.conf.unset("spark.sql.python.filterPushdown.enabled")
        _, physical = plan.split("== Physical Plan ==")
        assert ("queue 1" in physical) == (setting == "false"), plan
    expected = [n for n in range(1, 31) if n % 3 == 2 and n % 2 == 0 and n >= 6 and n != 8]
    assert found == [expected, expected]


ID = StructType([StructField("id", LongType())])


@pytest.mark.parametrize("since", [None, "2026-01-01"], ids=["all", "since"])
def test_partitions_take_every_row_once(archive: Archive, since: str | None) -> None:
    """By ids, and by time."""
    archive.add_many(300)
    archive.analyze()
    options = {"numPartitions": "3", "fetchSize": "7"}
    if since is not None:
        options["since"] = since
    cuts = read(archive, ID, **options)
    assert sorted(row["id"] for rows in cuts for row in rows) == list(range(1, 301))
    assert len(cuts) == 3
    assert all(cuts)


def test_options_choose_rows(archive: Archive) -> None:
    archive.add_many(30)
    archive.add({"id": 99, "queue": "a,b", "state": "FAILED", "archived_at": START})

    def ids(**options: str) -> list[int]:
        return sorted(row["id"] for rows in read(archive, ID, **options) for row in rows)

    assert ids(since="2026-03-01T00:00:10+00:00", until="2026-03-01T00:00:12+00:00") == [11, 12]
    assert ids(QUEUES=" queue 0, queue 1 ", until="2026-03-01T00:00:04Z") == [1, 2, 4]
    assert ids(queues='["a,b"]', states="failed") == [99]
    assert ids(queues="[]") == []


def test_the_live_table(archive: Archive) -> None:
    """Cut by ids: a row claimed during the read gets another place in PostgreSQL's table, but
    keeps its id."""
    with archive.engine.begin() as connection:
        connection.execute(
            archive.message.insert(),
            [{"queue": f"q{n % 2}", "payload": b"\xff", "headers": {"n": n}} for n in range(200)],
        )
    archive.analyze()
    options = parse_options({"url": archive.url, "kind": "messages", "numPartitions": "2"})
    reader = BatchReader(options, MESSAGE_SCHEMA)
    first, second = reader.partitions()
    found = [row for batch in reader.read(first) for row in batch.to_pylist()]
    archive.execute("UPDATE message SET priority = 1")
    found += [row for batch in reader.read(second) for row in batch.to_pylist()]
    assert len({row["id"] for row in found}) == len(found) == 200
    assert all(set(row) == set(MESSAGE_SCHEMA.names) for row in found)
    assert {(row["queue"], row["state"], row["payload"]) for row in found} == {
        ("q0", "PENDING", b"\xff"),
        ("q1", "PENDING", b"\xff"),
    }


@pytest.mark.parametrize("more", [{}, {"numPartitions": "2"}])
def test_a_missing_table_is_named(archive: Archive, more: dict[str, str]) -> None:
    reader = BatchReader(
        parse_options({"url": archive.url, "table": "typo", **more}), ARCHIVE_SCHEMA
    )
    with pytest.raises(SetupError, match="there is no table 'typo' in the database"):
        reader.partitions()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, '"url" is missing'),
        ({"url": URL, "fetchsizes": "1"}, "unknown option 'fetchsizes'; allowed are url, user"),
        ({"url": URL, "kind": "lake"}, "kind must be one of 'archive', 'messages'"),
        (
            {"url": URL, "states": "pending"},
            "states must contain only COMPLETED, FAILED, DISCARDED, got 'pending'",
        ),
        ({"url": URL, "since": "yesterday"}, "since 'yesterday' is not an ISO 8601 time"),
        (
            {"url": URL, "numPartitions": "many"},
            'numPartitions must be a whole number from 1 to 1000 or "auto"',
        ),
        ({"url": URL, "fetchSize": "0"}, "fetchSize must be a whole number of 1 or more"),
        ({"url": URL, "pushFilters": "true"}, "unknown option 'pushFilters'"),
        ({"url": URL, "partitioner": "id"}, "unknown option 'partitioner'"),
        ({"url": URL, "queues": "[1]"}, "queues must be comma-separated names or a JSON list"),
        ({"url": URL, "safetyLag": "soon"}, "safetyLag"),
        (
            {"url": URL, "maxWindowPerTrigger": "0s"},
            "maxWindowPerTrigger must be longer than 0 seconds",
        ),
        (
            {"url": URL, "table": "a", "path": "b"},
            'load(…) and the option "table" give different tables',
        ),
        (
            {"url": URL, "password": "a", "passwordEnv": "b"},
            "password and passwordEnv are both given",
        ),
        (
            {"url": URL, "passwordEnv": "NOT_THERE"},
            "passwordEnv names the variable 'NOT_THERE', which was not set",
        ),
        ({"url": "no url of sesam"}, "the option 'url' must be a URL"),
        ({"url": "sqlite:///:memory:"}, "in-memory"),
        ({"url": URL, "primary": "sesam"}, "the option 'primary' must be a URL"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError) as caught:
        parse_options(options)
    assert words in str(caught.value)
    assert "sesam" not in str(caught.value)


def test_options_of_the_other_way_are_refused() -> None:
    with pytest.raises(
        SetupError, match=r"'until' is not allowed with spark.readStream; allowed are .*safetyLag"
    ):
        parse_options({"url": URL, "until": "2026-03-01"}, streaming=True)
    with pytest.raises(
        SetupError, match=r"'maxRowsPerTrigger' is not allowed with spark.read; allowed are .*since"
    ):
        parse_options({"url": URL, "maxRowsPerTrigger": "9"}, streaming=False)
    with pytest.raises(NotSupportedError, match="unsupported database 'oracle'"):
        parse_options({"url": "oracle://user@host/name"})


def test_credentials_come_from_options_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_PASSWORD", "s@/ %&=?#'\\")
    found = parse_options(
        {
            "URL": URL,
            "User": "other",
            "passwordEnv": "SOURCE_PASSWORD",
            "primary": "postgresql://p/d",
        }
    )
    assert found.address.properties["user"] == "other"
    assert found.address.properties["password"] == "s@/ %&=?#'\\"
    assert found.primary is not None
    assert (found.primary.username, found.primary.password) == ("other", "s@/ %&=?#'\\")
    assert "s@/" not in repr(found)
    # libpq's own reading of what ADBC gets.
    from psycopg.conninfo import conninfo_to_dict

    assert conninfo_to_dict(source_rows.build_conninfo(found.address))["password"] == "s@/ %&=?#'\\"


def test_a_schema_is_a_choice_of_columns(spark: SparkSession, new_database: Any) -> None:
    archive = new_database("sqlite")
    archive.add({"id": 1, "payload": b"\xff"})
    found = load(spark, archive, schema="payload binary, created_at timestamp, id long").collect()
    assert [(bytes(row.payload), row.id) for row in found] == [(b"\xff", 1)]
    for wrong in ("id int", "ID long", "nothing string"):
        with pytest.raises(
            Exception, match=r"is not in the table; allowed are id bigint, queue string"
        ):
            load(spark, archive, schema=wrong).collect()


def test_columns_of_a_schema_are_checked_without_spark() -> None:
    selection = parse_options({"url": URL}).selection
    assert select_fields(ARCHIVE_SCHEMA, selection) == list(selection.fields)


def test_batches_are_bounded(archive: Archive) -> None:
    """M5: 1 MiB payloads come in batches of about 8 MB, many small rows in batches of fetchSize."""
    archive.add(
        *({"id": n, "payload": b"\xff" * (1 << 20), "archived_at": START} for n in range(12))
    )
    archive.add(*({"id": 100 + n, "payload": b"", "archived_at": START} for n in range(50)))
    options = parse_options({"url": archive.url})
    fields = select_fields(ARCHIVE_SCHEMA, options.selection)
    database = get_database(options.address)
    names = ", ".join(database.build_jdbc_column(field) for field in fields)
    table = options.selection.get_table_name(database)
    batches = list(
        source_rows.read_batches(
            options.address, f"SELECT {names} FROM {table} ORDER BY id", fields, 20
        )
    )
    assert sum(batch.num_rows for batch in batches) == 62
    assert max(batch.num_rows for batch in batches) <= 20
    assert len([batch for batch in batches if batch.nbytes > 1 << 20]) >= 2
    assert max(batch.nbytes for batch in batches) < 10 << 20


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_the_password_shows_nowhere(
    spark: SparkSession, new_database: Any, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """D5: plans, logs and errors; and a wrong password is told as one sentence of the server's."""
    archive = new_database(kind)
    secret = "se@s/am %&=?#'\\x"
    url = make_url(archive.url).set(password=secret, username="nobody")
    reader = spark.read.format("sqlbroker").option("url", url.render_as_string(hide_password=False))
    reader = reader.option("password", secret)
    frame = reader.load()
    for mode in ("extended", "formatted", "codegen", "cost"):
        frame.explain(mode=mode)
    with pytest.raises(Exception, match="nobody") as caught:
        frame.collect()
    shown = "".join(capfd.readouterr()) + str(caught.value)
    assert "nobody" in shown
    for hidden in (secret, "se%40s", "sesam", "se@s"):
        assert hidden not in shown


def test_finding_the_format_costs_other_sessions_little() -> None:
    """Spark imports it wherever a session names a format written in Python."""
    check = (
        "import sys, pyspark_sqlbroker as p; "
        "assert p.DefaultSource.name() == 'sqlbroker'; print(*sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"faststream", "faststream_sqlbroker", "sqlalchemy"} & set(found)
