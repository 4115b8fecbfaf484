"""The statements that policies cost: none without policies, few for bursts of any size."""

import logging
import os
from collections import Counter
from math import ceil
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.core.policies import Debounce
from faststream_sqlbroker.core.rows import Prefetch
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.rows import SCAN_SIZE
from faststream_sqlbroker.database.store import Store
from tests.contract.conftest import done
from tests.flow.conftest import Rig, count_as_quick
from tests.helpers import MYSQL, eventually, mysql_numbers

EACH = 25
"""Statements of one claim at most, whatever it finds."""
LIMIT = 1000
STEP = 500
"""Messages that one statement looks at here, in place of `SCAN`."""
SIZES = {"sqlite": 5_000, "postgresql": 5_000, "mariadb": 3_000, "mysql": 3_000}
MANY = int(os.environ.get("SQLBROKER_TEST_BURST", "0"))
"""Messages in place of those, looked at as users' are."""


@pytest.fixture
def scan(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many messages one statement looks at."""
    if MANY:
        return SCAN_SIZE
    for module in ("rows", "intake"):
        monkeypatch.setattr(f"faststream_sqlbroker.database.policies.{module}.SCAN_SIZE", STEP)
    return STEP


def counted(engine: AsyncEngine) -> Counter[str]:
    """How often each statement is sent to `engine` from now on."""
    seen = Counter[str]()

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen[statement] += 1

    return seen


@pytest.mark.parametrize("database", ["mariadb", "mysql", "sqlite"], indirect=True)
async def test_a_subscriber_without_policies_sends_no_statement_more(rig: Rig) -> None:
    """A look, a claim and a write; PostgreSQL's go on the driver's own connection
    (tests/contract/test_cost.py)."""
    await rig.put(100)
    known = counted(rig.store.engine)
    pairs = await rig.store.find_ready_pairs(["q"])
    suspicion = SuspectRule.from_max_deliveries(13)
    prefetch = Prefetch(1, 20.0)
    rows = await rig.store.claim(
        pairs, 100, 60.0, uuid4(), suspect_rule=suspicion, prefetch=prefetch
    )
    for renew in (rig.store.renew_free, rig.store.renew):  # a process that stands still renews
        await renew([(r.id, r.lease_token) for r in rows], 60.0)
    await rig.store.settle([done(row) for row in rows])
    await rig.store.get_seconds_to_lease_end(["q"])
    await rig.store.poll_all(["q"], ["q"])
    expected = dict(known)
    known.clear()
    await rig.put(100)
    inserts = dict(known)
    known.clear()
    consumer = rig.consumer(wakeup="poll", policies=[])
    await consumer.start()
    count_as_quick(consumer)
    await eventually(lambda: consumer.inflight.settled_count == 100)
    upkeep = {s for s in known if "message_policy_state.expires_at" in s}
    assert sum(known[s] for s in upkeep) <= 1, "once in a long while, for all of a broker"
    asked = {s for s in known if "max_allowed_packet" in s}  # of each connection, once
    assert (
        sum(known[s] for s in asked)
        <= rig.store.engine.pool.checkedin() + rig.store.engine.pool.checkedout()
    )
    others = set(known) - set(expected) - set(inserts) - upkeep - asked
    assert not others
    claims = [s for s in expected if "lease_token" in s and "deliveries_count + 1" in s]
    assert claims
    assert all(known[claim] <= 2 for claim in claims), "a full claim is followed by another"


def one_key(kind: str, count: int, each: str) -> str:
    """INSERT of messages that came an hour ago; their keys are `each` of n."""
    past, key = {
        "sqlite": ("CAST(strftime('%s', 'now') - 3600 AS INTEGER) * 1000000", "key"),
        "postgresql": ("statement_timestamp() - interval '1 hour'", "key"),
    }.get(kind, ("UTC_TIMESTAMP(6) - INTERVAL 1 HOUR", "`key`"))
    numbers = {
        "sqlite": (
            "(WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s "
            f"WHERE n < {count - 1}) SELECT n FROM s)"
        ),
        "postgresql": f"(SELECT n FROM generate_series(0, {count - 1}) AS x(n))",
    }.get(kind, mysql_numbers(count))
    columns = f"queue, payload, {key}, created_at, next_attempt_at"
    return (
        f"INSERT INTO message ({columns}) SELECT 'q', 'x', {each}, {past}, {past} FROM {numbers} s"
    )


async def claimed(store: Store, most: int) -> tuple[list[tuple[str | None, int]], int]:
    """Claim, and settle, until there is nothing due: key and id of what was delivered, and the
    number of claims."""
    memory = ScanPosition()
    found = list[tuple[str | None, int]]()
    claims = 0
    dry = 0
    policies = [Debounce("1s")]
    while dry < 2:
        wanted = PolicyClaimRequest(["q"], LIMIT, 60.0, uuid4(), policies)
        claim, memory = await store.policies.claim(wanted, memory)
        claims += 1
        assert claims <= most
        dry = 0 if claim.rows or claim.has_more else dry + 1
        found += [(row.key, row.id) for row in claim.rows]
        if claim.rows:
            await store.settle([done(row) for row in claim.rows])
    return found, claims


@pytest.mark.timeout(1200)
async def test_a_burst_of_one_key_settles_in_sets(rig: Rig, database: str, scan: int) -> None:
    """Z7: a statement for thousands of messages, not one for each."""
    count = MANY or SIZES[database]
    await rig.execute(one_key(database, count, "'a'"))
    last = await _value(rig.store.engine, "SELECT max(id) FROM message")
    seen = counted(rig.store.engine)
    began = monotonic()
    scans = 2 * ceil(count / scan)  # to take all in, and to end what has stood by
    found, claims = await claimed(rig.store, scans + 5)
    told = (
        f"{count} messages of a key: {sum(seen.values())} statements, {claims} claims, "
        f"{monotonic() - began:.1f} s"
    )
    logging.getLogger(__name__).info(told)
    assert found == [("a", last)]
    assert sum(seen.values()) <= EACH * (scans + 5), told
    assert await _value(rig.store.engine, "SELECT count(*) FROM message_archive") == count
    superseded = (
        f"state = 'DISCARDED' AND reason = 'superseded' AND related_id > id AND id < {last}"
    )
    assert (
        await _value(rig.store.engine, f"SELECT count(*) FROM message_archive WHERE {superseded}")
        == count - 1
    )


@pytest.mark.timeout(1200)
async def test_bursts_of_many_keys_take_no_statement_for_each(
    rig: Rig, database: str, scan: int
) -> None:
    """Z7: ten messages of each key."""
    count = MANY or SIZES[database]
    keys = count // 10
    each = "CONCAT('k', MOD(n, {}))" if database in MYSQL else "'k' || (n % {})"
    await rig.execute(one_key(database, count, each.format(keys)))
    seen = counted(rig.store.engine)
    began = monotonic()
    most = ceil(count / scan) + ceil(keys / LIMIT) + 5
    found, claims = await claimed(rig.store, most)
    told = (
        f"{keys} keys of 10: {sum(seen.values())} statements, {claims} claims, "
        f"{monotonic() - began:.1f} s"
    )
    logging.getLogger(__name__).info(told)
    assert len(found) == len({key for key, _ in found}) == keys
    assert sum(seen.values()) <= EACH * most, told
    delivered = "SELECT count(*) FROM message_archive WHERE state = 'COMPLETED'"
    newest = f"{delivered} AND id > (SELECT max(id) FROM message_archive) - {keys}"
    assert await _value(rig.store.engine, newest) == keys


async def _value(engine: AsyncEngine, sql: str) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(text(sql))).scalar_one())
