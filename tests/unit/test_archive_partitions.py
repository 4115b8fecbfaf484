"""The bounds of the archive's partitions, and what is refused."""

from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest

from faststream_sqlbroker import SetupError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.exceptions import NotSupportedError
from faststream_sqlbroker.schema.config import (
    PARTITIONS_AHEAD,
    get_next_partition_start,
    get_partition_start,
    list_required_partitions,
)

WEEKS = SqlBrokerSchemaConfig(archive_partitions="week")


def test_bounds_are_midnights_of_utc() -> None:
    late = datetime(2026, 12, 30, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
    assert get_partition_start(late, "day") == datetime(2026, 12, 31, tzinfo=timezone.utc)
    assert get_partition_start(late, "week") == datetime(2026, 12, 28, tzinfo=timezone.utc)
    assert get_partition_start(late, "month") == datetime(2026, 12, 1, tzinfo=timezone.utc)
    january = datetime(2027, 1, 1, tzinfo=timezone.utc)
    assert get_next_partition_start(get_partition_start(late, "month"), "month") == january
    assert get_next_partition_start(january, "month") == datetime(2027, 2, 1, tzinfo=timezone.utc)
    for size in ("day", "week", "month"):
        found = list_required_partitions(late, size)
        assert len(found) == PARTITIONS_AHEAD + 1
        assert found[0][0] <= late < found[0][1]
        assert all(one[1] == two[0] for one, two in pairwise(found))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(SetupError, match="archive_partitions must be one of 'day', 'week'"):
        SqlBrokerSchemaConfig(archive_partitions="year")
    with pytest.raises(SetupError, match="archive_partitions needs an archive"):
        SqlBrokerSchemaConfig(message_archive_table_name=None, archive_partitions="day")


@pytest.mark.parametrize("url", ["sqlite+aiosqlite:///none.db", "mysql+aiomysql://a@localhost/b"])
def test_other_databases_refuse(url: str) -> None:
    with pytest.raises(NotSupportedError, match="archive_partitions requires PostgreSQL"):
        SqlBroker(url, schema=WEEKS)
