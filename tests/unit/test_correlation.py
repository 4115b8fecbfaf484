"""Correlation ids made of a message's id and the bits of its database."""

from uuid import RFC_4122, UUID

import pytest

from faststream_sqlbroker.core.correlation import CorrelationIds, create_database_id, is_database_id

IDS = [0, 1, 1234, 2**31, 2**48 - 1, 2**48, 2**60, -1, -(2**40), -(2**61)]


def test_they_are_uuids_that_differ_by_message_and_by_database() -> None:
    made = [CorrelationIds(create_database_id()) for _ in range(50)]
    found = [ids.build_id(message_id) for ids in made for message_id in IDS]
    assert len(set(found)) == len(found)
    for each in found:
        as_uuid = UUID(each)
        assert (str(as_uuid), as_uuid.version, as_uuid.variant) == (each, 8, RFC_4122)


@pytest.mark.parametrize("message_id", [n for n in IDS if 0 <= n < 2**48])
def test_the_last_part_is_the_messages_id(message_id: int) -> None:
    ids = CorrelationIds("5f0c1e2a-93d4-8b17")
    assert int(ids.build_id(message_id)[-12:], 16) == message_id
    assert ids.build_id(1234) == "5f0c1e2a-93d4-8b17-8000-0000000004d2"


def test_the_messages_own_id_until_the_database_is_known() -> None:
    ids = CorrelationIds()
    assert ids.build_id(7) == "7"
    ids.database_id = create_database_id()
    assert UUID(ids.build_id(7)).version == 8


@pytest.mark.parametrize(
    "value", [None, 5, "", "5f0c1e2a-93d4-4b17", "5F0C1E2A-93D4-8B17", "5f0c1e2a-93d4-8b17-8000"]
)
def test_what_is_no_database_id(value: object) -> None:
    assert not is_database_id(value)
    assert is_database_id(create_database_id())
