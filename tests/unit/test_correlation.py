"""Correlation ids made of a message's id and the bits of its database."""

from datetime import timedelta
from typing import Any
from uuid import RFC_4122, UUID

import pytest

from faststream_sqlbroker.core.correlation import (
    MAX_ID,
    CorrelationIds,
    build_message_id,
    create_database_id,
    is_database_id,
    parse_message_id,
)
from faststream_sqlbroker.core.times import (
    EPOCH,
    MAX_TIMESTAMP,
    MIN_TIMESTAMP,
    TICK,
    from_microseconds,
)
from faststream_sqlbroker.exceptions import SetupError

TIMES = [from_microseconds(n) for n in (MIN_TIMESTAMP, -1, 0, 1_772_366_400_000_001, MAX_TIMESTAMP)]
IDS = [0, 1, 1234, 2**31, 2**48 - 1, 2**48, 2**60, -1, -(2**40), -(2**61)]


def test_they_are_uuids_that_differ_by_id_time_and_database() -> None:
    made = [CorrelationIds(create_database_id()) for _ in range(50)]
    found = [ids.build_id(n, time) for ids in made for n in IDS for time in TIMES]
    assert len(set(found)) == len(found)
    for each in found:
        as_uuid = UUID(each)
        assert (str(as_uuid), as_uuid.version, as_uuid.variant) == (each, 8, RFC_4122)


@pytest.mark.parametrize("message_id", [n for n in IDS if 0 <= n < 2**48])
def test_the_last_part_is_the_messages_id(message_id: int) -> None:
    ids = CorrelationIds("5f0c1e2a-93d4-8b17")
    assert int(ids.build_id(message_id, TIMES[3])[-12:], 16) == message_id
    assert ids.build_id(1234, EPOCH) == "5f0c1e2a-93d4-8b17-8000-0000000004d2"
    assert ids.build_id(1234, EPOCH + 0xFF * TICK) == "5f0c1e2a-93d4-8be8-8000-0000000004d2"


def test_the_message_id_until_the_database_is_known() -> None:
    ids = CorrelationIds()
    assert ids.build_id(7, EPOCH + timedelta(seconds=1)) == "7-1000000"
    ids.database_id = create_database_id()
    assert UUID(ids.build_id(7, EPOCH)).version == 8


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("row_id", [*IDS, MAX_ID, -MAX_ID])
def test_a_message_id_is_read_again(row_id: int, time: Any) -> None:
    assert parse_message_id(build_message_id(row_id, time)) == (row_id, time)
    assert parse_message_id(row_id) == parse_message_id(str(row_id)) == (row_id, None)


@pytest.mark.parametrize(
    "value",
    [
        *("", "x", "-", "1-", "--1", "1 ", "1-2-3", "1_2", "1.5", "1-x", "9" * 19, "1-" + "9" * 18),
        *(f"1-{MAX_TIMESTAMP + 1}", MAX_ID + 1, -MAX_ID - 1, 1.0, True, None),
    ],
)
def test_what_is_no_message_id(value: Any) -> None:
    with pytest.raises(SetupError, match="message_id must be a 64-bit integer"):
        parse_message_id(value)


@pytest.mark.parametrize(
    "value", [None, 5, "", "5f0c1e2a-93d4-4b17", "5F0C1E2A-93D4-8B17", "5f0c1e2a-93d4-8b17-8000"]
)
def test_what_is_no_database_id(value: object) -> None:
    assert not is_database_id(value)
    assert is_database_id(create_database_id())
