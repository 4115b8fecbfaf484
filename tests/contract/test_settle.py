"""Settling: every row of the table of transitions, and the fence in front of each."""

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Defer,
    Discard,
    Nack,
    Outcome,
    Reject,
    Release,
    Relocate,
)
from faststream_sqlbroker.core.reasons import EXPIRED, SUPERSEDED
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.settle import SettleRules, compute_fingerprint, settle
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.policies.rows import PolicyRows
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.contract.conftest import Bench, done

RULES = SettleRules(retry_strategy=ConstantRetryStrategy(delay_seconds=3_000, max_attempts=3))
BAD_TEXT = "NUL \x00 and a lone surrogate \ud800, " + "x" * 20_000
OUTCOMES: dict[str, Outcome | None] = {
    "ack": Ack(),
    "nack": Nack(error=ValueError("no")),
    "nack with delay": Nack(delay=5),
    "reject": Reject("bad", ValueError("no")),
    "no outcome": None,
    "postpone": Defer(30),
    "release": Release(),
    "abandon": Abandon(),
    "move": Relocate("other", b"new"),
    "discard": Discard("expired"),
}


async def test_ack_archives_with_counters_and_times(bench: Bench) -> None:
    """PROCESSING → COMPLETED."""
    await bench.store.insert(
        [_new(headers='{"a": 1}', priority=4, key="k", dedup_id="d", expires_in=600.0)]
    )
    [message] = await bench.claim()
    before = await bench.one()
    result = await bench.store.settle([settle(message, Ack(), RULES, ended_after=1.5)])
    assert (result.settled_ids, result.lost_ids) == ({message.id}, set())
    assert await bench.rows() == []
    row = await bench.one(archive=True)
    assert row["state"] == "COMPLETED"
    assert (row["attempts_count"], row["deliveries_count"], row["reason"]) == (1, 1, None)
    assert (
        row["first_attempt_at"]
        == row["last_attempt_at"]
        == message.acquired_at + timedelta(seconds=1.5)
    )
    assert row["archived_at"] >= message.acquired_at
    for name in (
        "id",
        "queue",
        "priority",
        "key",
        "dedup_id",
        "headers",
        "payload",
        "publish_count",
        "created_at",
        "next_attempt_at",
        "expires_at",
        "acquired_at",
    ):
        assert row[name] == before[name], name


async def test_reasons_are_codes_and_the_related_message_has_a_column(bench: Bench) -> None:
    """So is what a message keeps of its way and of its policies; each end has a statement of its
    own."""
    ids = await bench.put(3)
    await bench.execute("UPDATE message SET hops = 7, policy_key = 'who'")
    rows = {row.id: row for row in await bench.claim()}
    ends: list[Outcome] = [Ack(), Discard(SUPERSEDED, ids[0]), Reject("what the handler says")]
    await bench.store.settle(
        [settle(rows[i], end, RULES, ended_after=0.0) for i, end in zip(ids, ends, strict=True)]
    )
    found = await bench.rows(archive=True)
    assert [(row["state"], row["reason"], row["related_id"]) for row in found] == [
        ("COMPLETED", None, None),
        ("DISCARDED", "superseded", ids[0]),
        ("FAILED", "what the handler says", None),
    ]
    assert {(row["hops"], row["policy_key"]) for row in found} == {(7, "who")}


async def test_an_error_is_stored_with_its_fingerprint(bench: Bench) -> None:
    """One row of the batch has no error, so that each row must get its own."""
    ids = await bench.put(3)
    rows = {row.id: row for row in await bench.claim()}
    ends: list[Outcome] = [Nack(error=ValueError("1")), Reject(), Reject("no", KeyError("2"))]
    settlements = [
        settle(rows[i], end, SettleRules(), ended_after=0.0)
        for i, end in zip(ids, ends, strict=True)
    ]
    await bench.store.settle(settlements)
    found = await bench.rows(archive=True)
    assert [row["error_fingerprint"] for row in found] == [
        compute_fingerprint(ValueError()),
        None,
        compute_fingerprint(KeyError()),
    ]


async def test_messages_discarded_by_policies_keep_their_columns(bench: Bench) -> None:
    first, second = await bench.put(2)
    await bench.execute("UPDATE message SET hops = 7, policy_key = 'who'")
    ends = {first: Discard(SUPERSEDED, second), second: Discard(EXPIRED)}
    async with bench.store.engine.begin() as connection:
        await connection.run_sync(
            lambda c: PolicyRows(bench.store.dialect, c, "q").discard(ends, keep=True)
        )
    found = await bench.rows(archive=True)
    assert [(row["state"], row["reason"], row["related_id"]) for row in found] == [
        ("DISCARDED", "superseded", second),
        ("DISCARDED", "expired", None),
    ]
    assert {(row["hops"], row["policy_key"]) for row in found} == {(7, "who")}


async def test_nack_is_due_again_when_the_strategy_says(bench: Bench) -> None:
    """PROCESSING → RETRYABLE."""
    await bench.put()
    [message] = await bench.claim()
    nack = Nack(error=ValueError("went wrong"))
    await bench.store.settle([settle(message, nack, RULES, ended_after=0.1)])
    row = await bench.one()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("RETRYABLE", 1, 1)
    assert "ValueError: went wrong" in row["last_error"]
    assert (row["acquired_at"], row["lease_token"], row["lease_expires_at"]) == (None, None, None)
    assert row["first_attempt_at"] == row["last_attempt_at"] is not None
    wait = row["next_attempt_at"] - await bench.store.server.read_now()
    assert timedelta(seconds=2_500) < wait <= timedelta(seconds=3_000.1)


async def test_the_last_nack_fails_and_keeps_the_first_attempt(bench: Bench) -> None:
    """PROCESSING → FAILED; promise 8."""
    await bench.put()
    for attempt in range(3):
        await bench.execute(f"UPDATE message SET next_attempt_at = {_past(bench)}")
        [message] = await bench.claim()
        assert message.attempts_count == attempt
        nack = Nack(error=ValueError(f"no {attempt}"))
        await bench.store.settle([settle(message, nack, RULES, ended_after=0.0)])
    row = await bench.one(archive=True)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_attempts", 3)
    assert "no 2" in row["last_error"]
    assert row["first_attempt_at"] <= row["last_attempt_at"]


async def test_reject_fails_with_reason_and_error(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    reject = Reject("bad input", ValueError("no"))
    await bench.store.settle([settle(message, reject, RULES, ended_after=0.0)])
    row = await bench.one(archive=True)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "bad input", 1)
    assert "ValueError: no" in row["last_error"]


async def test_postpone_charges_nothing(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Defer(3_000), RULES, ended_after=0.0)])
    row = await bench.one()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("PENDING", 0, 0)
    assert row["next_attempt_at"] - await bench.store.server.read_now() > timedelta(seconds=2_500)


async def test_release_keeps_the_due_time_and_charges_nothing(bench: Bench) -> None:
    """F10: handed back unstarted."""
    await bench.put()
    before = await bench.one()
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Release(), RULES, ended_after=0.0, attempted=False)])
    assert await bench.one() == before


async def test_release_after_an_attempt_is_retryable(bench: Bench) -> None:
    await bench.put()
    await bench.execute(
        "UPDATE message SET state = 'RETRYABLE', attempts_count = 1, deliveries_count = 1"
    )
    before = await bench.one()
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Release(), RULES, ended_after=0.0, attempted=False)])
    assert await bench.one() == before


async def test_abandon_charges_the_delivery_only(bench: Bench) -> None:
    """graceful_timeout exceeded."""
    await bench.put()
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Abandon(), RULES, ended_after=9.0)])
    row = await bench.one()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("PENDING", 0, 1)
    assert row["first_attempt_at"] is None
    assert [m.deliveries_count for m in await bench.claim()] == [2]


async def test_a_delivery_limit_fails_without_an_attempt(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    await bench.store.settle(
        [settle(message, Reject("max_deliveries"), RULES, ended_after=0.0, attempted=False)]
    )
    row = await bench.one(archive=True)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_deliveries", 0)
    assert (row["first_attempt_at"], row["last_attempt_at"]) == (None, None)


@pytest.mark.parametrize("body", [None, b"new \xff"], ids=["same body", "new body"])
async def test_move_keeps_the_id_and_resets_the_counters(bench: Bench, body: bytes | None) -> None:
    await bench.store.insert([_new(dedup_id="d")])
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Relocate("other", body), RULES, ended_after=0.0)])
    row = await bench.one()
    assert (row["id"], row["queue"], row["state"]) == (message.id, "other", "PENDING")
    assert (row["attempts_count"], row["deliveries_count"], row["dedup_id"]) == (0, 0, None)
    assert (row["first_attempt_at"], row["lease_token"]) == (None, None)
    assert row["payload"] == (message.payload if body is None else body)
    assert len(await bench.claim(1, "other")) == 1


async def test_discard_is_archived_with_its_reason(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    await bench.store.settle(
        [settle(message, Discard("expired"), RULES, ended_after=0.0, attempted=False)]
    )
    row = await bench.one(archive=True)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("DISCARDED", "expired", 0)


async def test_messages_that_are_not_retained_are_deleted(bench: Bench) -> None:
    rules = replace(RULES, retain_on_ack=False, retain_on_reject=False)
    await bench.put(2)
    first, second = await bench.claim()
    await bench.store.settle(
        [
            settle(first, Ack(), rules, ended_after=0.0),
            settle(second, Reject(), rules, ended_after=0.0),
        ]
    )
    assert await bench.rows() == await bench.rows(archive=True) == []


async def test_without_an_archive_table_everything_finished_is_deleted(engine: AsyncEngine) -> None:
    store = Store(engine, build_tables(SqlBrokerSchemaConfig(message_archive_table_name=None)))
    await store.server.create_tables()
    bench = Bench(store)
    await bench.put()
    [message] = await bench.claim()
    assert (await store.settle([settle(message, Ack(), RULES, ended_after=0.0)])).settled_ids == {
        message.id
    }
    assert await bench.rows() == []


async def test_a_batch_of_all_outcomes_is_settled_at_once(bench: Bench) -> None:
    await bench.put(len(OUTCOMES))
    messages = await bench.claim(len(OUTCOMES))
    settlements = [
        settle(m, o, RULES, ended_after=0.0)
        for m, o in zip(messages, OUTCOMES.values(), strict=True)
    ]
    result = await bench.store.settle(settlements)
    assert result.settled_ids == {m.id for m in messages}
    archived = {r["id"]: r["state"] for r in await bench.rows(archive=True)}
    live = {r["id"]: r["state"] for r in await bench.rows()}
    assert [{**archived, **live}[m.id] for m in messages] == [
        "COMPLETED",
        "RETRYABLE",
        "RETRYABLE",
        "FAILED",
        "FAILED",
        "PENDING",
        "PENDING",
        "PENDING",
        "PENDING",
        "DISCARDED",
    ]


@pytest.mark.parametrize(
    "outcome", [Nack(error=ValueError(BAD_TEXT)), Reject(BAD_TEXT, ValueError(BAD_TEXT))]
)
async def test_any_error_text_can_be_stored(bench: Bench, outcome: Outcome) -> None:
    await bench.put()
    [message] = await bench.claim()
    result = await bench.store.settle([settle(message, outcome, RULES, ended_after=0.0)])
    assert result.settled_ids == {message.id}
    row = (await bench.rows() + await bench.rows(archive=True))[0]
    assert "NUL" in row["last_error"]


# -- the fence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
async def test_a_late_settle_after_a_lost_lease_changes_nothing(
    bench: Bench, outcome: Outcome | None
) -> None:
    """Promise 3: the lease was released, or another worker holds it now."""
    await bench.put(2)
    stale = await bench.claim()
    await bench.expire()
    await bench.store.release_stuck(["q"], 10)
    settlements = [settle(m, outcome, RULES, ended_after=0.0) for m in stale]
    before = await bench.rows()
    assert (await bench.store.settle(settlements)).lost_ids == {m.id for m in stale}
    assert await bench.rows() == before
    fresh = await bench.claim()
    before = await bench.rows()
    assert (await bench.store.settle(settlements)).lost_ids == {m.id for m in stale}
    assert await bench.rows() == before
    assert await bench.rows(archive=True) == []
    # The new holder's own outcome still counts.
    assert (
        len(
            (
                await bench.store.settle([settle(m, Ack(), RULES, ended_after=0.0) for m in fresh])
            ).settled_ids
        )
        == 2
    )


async def test_a_stale_token_is_not_lent_validity_by_another_rows_token(bench: Bench) -> None:
    """The fence compares pairs: (id of one, token of another) must not match."""
    await bench.put(2)
    [first] = await bench.claim(1)
    [second] = await bench.claim(1)
    crossed = [
        replace(settle(first, Ack(), RULES, ended_after=0.0), lease_token=second.lease_token),
        replace(settle(second, Ack(), RULES, ended_after=0.0), lease_token=first.lease_token),
    ]
    assert (await bench.store.settle(crossed)).lost_ids == {first.id, second.id}
    leases = [(first.id, second.lease_token), (second.id, first.lease_token)]
    assert await bench.store.renew(leases, 60) == set()
    assert [r["state"] for r in await bench.rows()] == ["PROCESSING"] * 2


async def test_a_settle_twice_counts_once(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    settlement = settle(message, Ack(), RULES, ended_after=0.0)
    assert (await bench.store.settle([settlement])).settled_ids == {message.id}
    assert (await bench.store.settle([settlement])).lost_ids == {message.id}
    assert len(await bench.rows(archive=True)) == 1


async def test_an_unleased_row_matches_no_token(bench: Bench) -> None:
    [message_id] = await bench.put()
    from faststream_sqlbroker.core.rows import Settlement

    settlement = Settlement(message_id, uuid4(), MessageState.COMPLETED)
    assert (await bench.store.settle([settlement])).lost_ids == {message_id}
    assert (await bench.one())["state"] == "PENDING"


@pytest.mark.parametrize("outcome", [Ack(), Nack(), Release()], ids=["archive", "retry", "release"])
@pytest.mark.parametrize("step", range(1, 5))
async def test_a_release_between_two_statements_of_a_settle(
    bench: Bench, outcome: Outcome, step: int
) -> None:
    """Before each statement of the settle another session tries to release the row and claim it
    anew.

    Whatever wins, the message ends in one place, settled by exactly one of the two.
    """
    await bench.put()
    [message] = await bench.claim()
    await bench.expire()
    intruder = _Intruder(bench, step)
    intruder.listen()
    result = await bench.store.settle([settle(message, outcome, RULES, ended_after=0.0)])
    intruder.remove()
    assert intruder.statements > 0
    live = await bench.rows()
    archived = await bench.rows(archive=True)
    assert len(live) + len(archived) == 1
    if result.settled_ids:
        expected = {"Ack": "COMPLETED", "Nack": "RETRYABLE", "Release": "PENDING"}
        assert (live + archived)[0]["state"] == expected[type(outcome).__name__]
    else:
        assert live[0]["state"] == "PENDING"


class _Intruder:
    """A synchronous connection releases every lease just before the settle's n-th statement."""

    def __init__(self, bench: Bench, step: int) -> None:
        from sqlalchemy import create_engine

        self.bench = bench
        self.step = step
        self.statements = 0
        url = bench.store.engine.url
        drivers = {
            "postgresql": "psycopg",
            "mariadb": "pymysql",
            "mysql": "pymysql",
            "sqlite": "pysqlite",
        }
        name = f"{url.get_backend_name()}+{drivers[bench.store.dialect_name]}"
        timeout: dict[str, Any] = {"timeout": 0.05} if "sqlite" in name else {}
        self.engine = create_engine(url.set(drivername=name), connect_args=timeout)

    def listen(self) -> None:
        event.listen(self.bench.store.engine.sync_engine, "before_cursor_execute", self._before)

    def remove(self) -> None:
        event.remove(self.bench.store.engine.sync_engine, "before_cursor_execute", self._before)
        self.engine.dispose()

    def _before(self, _c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "message" not in statement:
            return
        self.statements += 1
        if self.statements == self.step:
            self._release()

    def _release(self) -> None:
        from sqlalchemy.exc import DBAPIError

        try:
            with self.engine.begin() as connection:
                if self.bench.store.dialect_name != "sqlite":
                    locked = "SELECT id FROM message WHERE state = 'PROCESSING' FOR UPDATE NOWAIT"
                    connection.execute(text(locked)).all()
                connection.execute(
                    text(
                        "UPDATE message SET state = 'PENDING', lease_token = NULL, "
                        "lease_expires_at = NULL, acquired_at = NULL WHERE state = 'PROCESSING'"
                    )
                )
        except DBAPIError:
            pass  # the settle holds the row already: the intruder is the late one


def _new(**fields: Any) -> Any:
    from faststream_sqlbroker.core.rows import NewMessage

    return NewMessage("q", b"body", **fields)


def _past(bench: Bench) -> str:
    return {"postgresql": "statement_timestamp()", "sqlite": "1"}.get(
        bench.store.dialect_name, "UTC_TIMESTAMP(6)"
    )


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_everything_works_on_an_engine_that_begins_immediately(engine: AsyncEngine) -> None:
    """The recipe of docs/howto/outbox.md: the application's listeners begin every transaction."""

    @event.listens_for(engine.sync_engine, "connect")
    def no_implicit_begin(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begin_immediate(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    store = Store(engine, build_tables(SqlBrokerSchemaConfig()))
    await store.server.create_tables()
    await store.server.setup()
    bench = Bench(store)
    await bench.put(3)
    async with engine.begin() as connection:
        await connection.execute(text("SELECT count(*) FROM message"))
        await store.insert_in(connection, [_new()])
    messages = await bench.claim(4)
    assert len(messages) == 4
    result = await store.settle([settle(m, Ack(), RULES, ended_after=0.0) for m in messages])
    assert len(result.settled_ids) == 4
    assert await store.find_ready_pairs(["q"]) == []
    assert len(await bench.rows(archive=True)) == 4


async def test_columns_of_the_users_may_have_any_name(bench: Bench) -> None:
    """Also those that a statement gives to what it works out."""
    for name in ("ended_at", "ended", "token", "ord", "c", "state_before"):
        await bench.execute(f"ALTER TABLE message ADD COLUMN {name} INTEGER")
    await bench.put(3)
    rows = await bench.claim(3)
    result = await bench.store.settle(
        [done(rows[0]), done(rows[1], state=MessageState.RETRYABLE, delay=0.0)]
    )
    assert len(result.settled_ids) == 2
    assert [row["id"] for row in await bench.rows(archive=True)] == [rows[0].id]
