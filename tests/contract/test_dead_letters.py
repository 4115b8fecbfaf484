"""Dead letters in groups: by the fingerprint of the error, not by its text."""

from typing import Any
from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.overview import DeadLetters
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database import stored_messages
from faststream_sqlbroker.database.parts import message_walks
from tests.contract.conftest import Bench
from tests.contract.test_message_lists import archive, page

pytestmark = pytest.mark.capability("`broker.admin`: dead letters by their errors")
FAILED = {"state": MessageState.FAILED}
ONE = "1" * 16
TWO = "2" * 16


async def fail(bench: Bench, count: int, queue: str = "q", **fields: Any) -> list[int]:
    return await archive(bench, count, queue, **FAILED, **fields)


async def groups(bench: Bench, limit: int = 50, **filters: Any) -> DeadLetters:
    wanted = Filters(archived=True, **FAILED, **filters)
    return await bench.store.messages.group_dead_letters(wanted, limit)


async def test_errors_with_one_fingerprint_are_one_group(bench: Bench) -> None:
    first = await fail(bench, 2, error="ValueError: 1", fingerprint=ONE, reason="max_attempts")
    other = await fail(bench, 1, error="KeyError: 3", fingerprint=TWO, reason="max_attempts")
    await fail(bench, 2, reason="rejected")
    await fail(bench, 4, "slow", reason="expired too late")
    last = await fail(bench, 1, "slow", error="ValueError: 2", fingerprint=ONE, reason="rejected")
    await archive(bench, 3)
    await archive(bench, 2, state=MessageState.DISCARDED, reason="expired")
    found = await groups(bench)
    assert found.scanned_until is None
    assert found.count == 10
    shown = [(g.fingerprint, dict(g.reasons), dict(g.queues)) for g in found.groups]
    assert shown[0] == (None, {"expired too late": 4}, {"slow": 4})
    assert shown[1] == (ONE, {"max_attempts": 2, "rejected": 1}, {"q": 2, "slow": 1})
    assert shown[2:] == [
        (None, {"rejected": 2}, {"q": 2}),
        (TWO, {"max_attempts": 1}, {"q": 1}),
    ]
    ones = found.groups[1]
    rows = {row["id"]: row for row in await bench.rows(archive=True)}
    assert ones.newest_id == last[0]
    assert ones.error == "ValueError: 2"
    assert ones.first_at == rows[first[0]]["archived_at"]
    assert ones.last_at == rows[last[0]]["archived_at"]
    assert found.groups[3].newest_id == other[0]


async def test_a_group_can_be_listed(bench: Bench) -> None:
    await fail(bench, 3, error="KeyError: 1", fingerprint=TWO)
    ids = await fail(bench, 2, "slow", error="ValueError: 1", fingerprint=ONE)
    [group] = (await groups(bench, fingerprint=ONE)).groups
    assert group.count == 2
    assert (await groups(bench, queue="slow")).groups == (group,)
    assert (await groups(bench, error="ValueError")).groups == (group,)
    assert (await groups(bench, queue="q", fingerprint=ONE)).groups == ()
    found = await page(bench, archived=True, fingerprint=ONE)
    assert [m.id for m in found.messages] == sorted(ids, reverse=True)
    assert {m.error_fingerprint for m in found.messages} == {ONE}
    failed = await page(bench, archived=True, **FAILED)
    assert len(failed.messages) == 5


async def test_the_largest_groups_are_returned(bench: Bench) -> None:
    for count in (1, 3, 2):
        await fail(bench, count, reason=f"reason {count}")
    found = await groups(bench, limit=2)
    assert [g.count for g in found.groups] == [3, 2]


@pytest.mark.parametrize("step", [2, 3, 10])
async def test_no_more_messages_are_looked_at_than_may_be(bench: Bench, step: int) -> None:
    ids = await fail(bench, 7, reason="rejected")
    await archive(bench, 9)
    with (
        patch.object(stored_messages, "MAX_SCANNED", 6),
        patch.object(message_walks, "STEP_SIZE", step),
    ):
        found = await groups(bench)
    rows = {row["id"]: row for row in await bench.rows(archive=True)}
    assert found.count == 6
    assert found.scanned_until == rows[ids[0]]["archived_at"]
    with patch.object(message_walks, "STEP_SIZE", step):
        assert (await groups(bench)).count == 7
