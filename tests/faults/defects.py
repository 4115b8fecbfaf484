"""Defects that are planted on purpose: the machine must catch each of them."""

import sys
from collections.abc import Callable
from typing import Any

from sqlalchemy import text

from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimedMessages, ClaimRequest
from faststream_sqlbroker.database.connections import Checkouts, ReadOnlyEvictions
from faststream_sqlbroker.database.multi_statement import MarkedLocks
from faststream_sqlbroker.database.parts.claimed_rows import CLAIMED_COLUMNS
from faststream_sqlbroker.database.parts.handler_locks import HandlerLock
from faststream_sqlbroker.database.policies.slot_use import SlotUse
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.flow.deliver import flush
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.leases import LeaseKeeper
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.fleet.write_path import WritePath


def _settle_by_method(dialect: Any) -> None:
    """Let settles go by the method that a defect has replaced, not by their single statement."""
    dialect.build_settle = lambda *arguments, **options: (
        lambda connection: dialect.settle_and_publish(connection, *arguments, **options)
    )


def no_renewal(_store: Any) -> None:
    """Leases run out while their handlers work."""

    async def tick(_keeper: LeaseKeeper) -> float:
        return 1.0

    LeaseKeeper.tick = tick  # type: ignore[method-assign]


def no_fence(store: Any) -> None:
    """Outcomes are written without a look at the lease, and a worker does not learn that it has
    lost one."""
    dialect = store.dialect
    original = store.dialect.settle

    def settle(connection: Any, settlements: Any) -> Any:
        for s in settlements:
            token = s.lease_token if dialect.name == "postgresql" else s.lease_token.hex
            connection.execute(
                text("UPDATE message SET lease_token = :t WHERE id = :i AND state = 'PROCESSING'"),
                {"t": token, "i": s.id},
            )
        return original(connection, settlements)

    dialect.settle = settle
    _settle_by_method(dialect)
    # Else a worker that wakes up is told of its lost leases first, and the fence is needed in few
    # of its seeds.
    no_renewal(store)


def blind_repeat(store: Any) -> None:
    """After an unanswered commit everything is written once more, whatever was written the first
    time."""
    dialect = store.dialect
    original = store.dialect.settle_and_publish
    settle = store.settle
    blind = False

    def settle_and_publish(connection: Any, settlements: Any, **options: Any) -> Any:
        result = original(connection, settlements, **options)
        lost = {s.unit: None for s in settlements if s.unit is not None and s.id in result.lost_ids}
        messages = [row for unit in lost for row in unit.on_ack]
        if blind and messages:
            dialect.insert(connection, messages)
        return result

    async def noting(settlements: Any, **options: Any) -> Any:
        nonlocal blind
        try:
            result = await settle(settlements, **options)
        except UnknownOutcomeError:
            blind = True
            raise
        blind = False
        return result

    dialect.settle_and_publish = settle_and_publish
    store.settle = noting
    _settle_by_method(dialect)


def forgotten_outcomes(_store: Any) -> None:
    """A failed flush is taken for written: its rows are forgotten, and their leases run out."""
    original = Flusher.flush_batch

    async def flush_one(flusher: Flusher) -> bool:
        inflight: Inflight = flusher._inflight
        try:
            return await original(flusher)
        except Exception:
            for settlement in inflight.queued:
                inflight.held.pop(settlement.id, None)
            inflight.queued.clear()
            raise

    Flusher.flush_batch = flush_one  # type: ignore[method-assign]


def claims_without_locks(store: Any) -> None:
    """Due rows are read first and leased a moment later, even if leased by then (PostgreSQL)."""
    dialect = store.dialect
    columns = ", ".join("headers::text" if c == "headers" else c for c in CLAIMED_COLUMNS)
    look = text(
        f"SELECT {columns}, pg_sleep(0) FROM message WHERE queue = :queue AND priority = :priority "
        "AND state IN ('PENDING', 'RETRYABLE') AND next_attempt_at <= now() "
        "ORDER BY id LIMIT :limit"
    )
    take = text(
        "UPDATE message SET state = 'PROCESSING', acquired_at = now(), lease_token = :token, "
        "lease_expires_at = now() + interval '1 second', deliveries_count = deliveries_count + 1 "
        "WHERE id = ANY(:ids)"
    )

    def claim(connection: Any, request: ClaimRequest) -> Any:
        found = []
        token = request.token
        for pair in request.pairs:
            binds = {"queue": pair.queue, "priority": pair.priority, "limit": request.limit}
            found += [tuple(row)[:-1] for row in connection.execute(look, binds)]
        connection.execute(text("SELECT pg_sleep(0.03)"))
        connection.execute(take, {"token": token, "ids": [row[0] for row in found]})
        now = dialect.now(connection)
        at = CLAIMED_COLUMNS.index("acquired_at")
        claimed = dialect.to_messages([(*row[:at], now, *row[at + 1 :]) for row in found], token)
        for message in claimed:
            message.deliveries_count += 1
        return ClaimedMessages(claimed)

    dialect.claim = claim
    dialect.build_claim = lambda request: lambda connection: claim(connection, request)


def lost_claims(_store: Any) -> None:
    """Some claimed rows are dropped, and still renewed: no worker ever handles them."""
    original = Inflight.add

    def add(inflight: Inflight, rows: Any) -> None:
        rows = list(rows)
        original(inflight, rows)
        if len(rows) > 3:
            for _ in range(1):
                inflight.waiting.get_nowait()

    Inflight.add = add  # type: ignore[method-assign]


def unnoted_starts(store: Any) -> None:
    """ACK_FIRST removes messages and leaves no note of it."""

    async def remove_first(settlements: Any, *_: Any) -> Any:
        return await store.settle(settlements)

    store.ack_first_starts.remove_first = remove_first


def claims_without_order(store: Any) -> None:
    """Due messages are claimed without regard to earlier ones of their key."""

    async def claim_ordered(
        pairs: Any, limit: int, lease: float, token: Any, cursors: Any, **options: Any
    ) -> Any:
        return await store.claim(pairs, limit, lease, token, **options), None, cursors

    store.claim_ordered = claim_ordered


def commit_before_effects(store: Any) -> None:
    """A transactional handler's ack is written on a connection of its own."""
    from faststream_sqlbroker.database.messages.handler import HandlerTransaction

    async def commit(transaction: HandlerTransaction, settlements: Any) -> Any:
        await transaction.connection.rollback()
        return await store.settle(settlements)

    HandlerTransaction.commit = commit  # type: ignore[method-assign]


def answers_on_one_row(_store: Any) -> None:
    """Answers of a batch go with its first message only; the others are settled by themselves."""
    original = Settlements.__call__

    def call(settlements: Settlements, rows: Any) -> Any:
        made = original(settlements, rows)
        known = set()
        for settlement in made:
            if settlement.unit in known:
                settlement.unit = None
            known.add(settlement.unit)
        return made

    Settlements.__call__ = call  # type: ignore[method-assign]


def unproven_transactions(_store: Any) -> None:
    """It is not checked that a handler's transaction is still the one it was given (MySQL and
    MariaDB)."""
    MarkedLocks.prove = lambda _locks, _connection, _lock: None  # type: ignore[method-assign]


def nothing_is_set_apart(_store: Any) -> None:
    """A transient failure is repeated as it is, before everything else."""
    flush.QUARANTINE_AFTER = sys.maxsize


def read_only_sessions_stay(_store: Any) -> None:
    """Connections to a server that has said that it is read-only stay in the pool."""
    Checkouts.evict_if_spoiled = lambda _checkouts, _error: None  # type: ignore[method-assign]
    ReadOnlyEvictions.evict_if_read_only = lambda _evictions, _error: None  # type: ignore[method-assign]


def no_idle_limit(store: Any) -> None:
    """The server keeps a transaction of the broker's own for as long as its client's socket is
    open."""
    begin = store.dialect.begin
    store.dialect.begin = lambda connection, _limit=None: begin(connection)


def no_slot_is_met(_store: Any) -> None:
    """Messages of a Throttle are put off, again and again."""

    def start(_use: SlotUse, _row: Any, *, must: bool = False) -> bool:
        return must

    SlotUse.start = start  # type: ignore[method-assign]


def forgotten_slots(_store: Any) -> None:
    """Slots of a Throttle are not written into its log."""

    def add(_log: SlotLog, _slot: int, _deadline: int, _count: int = 1) -> None:
        """Nothing."""

    SlotLog.add = add  # type: ignore[method-assign]


def numbers_of_any_server(store: Any) -> None:
    """The number of a handler's transaction is believed at any server (PostgreSQL)."""
    status = text(
        "SELECT CASE WHEN CAST(:number AS text)::xid8 < pg_snapshot_xmax(pg_current_snapshot()) "
        "THEN pg_xact_status(CAST(:number AS text)::xid8) = 'committed' ELSE false END"
    )

    def was_committed(connection: Any, lock: HandlerLock) -> bool:
        return bool(connection.execute(status, {"number": lock.number}).scalar_one())

    store.dialect.handler_locks.was_committed = was_committed


def ids_alone(_store: Any) -> None:
    """The `message_id` of a message is the number of its row, which a failover may give again."""
    ids = property(lambda row: str(row.id))
    ClaimedMessage.message_id = ids  # type: ignore[attr-defined,assignment,method-assign,unused-ignore]


def ready_without_writes(_store: Any) -> None:
    """A process is ready where nothing can be written."""

    async def check_within(_path: WritePath, _timeout: float | None) -> None:
        return None

    WritePath.check_within = check_within  # type: ignore[method-assign]


def locks_of_one_server(store: Any) -> None:
    """Claims under policies and in order lock rows, and do not write them: other servers of a
    cluster see no lock (MySQL and MariaDB)."""
    store.dialect._write_locked = lambda _connection, _scope, locked: locked


DEFECTS: dict[str, Callable[[Any], None]] = {
    "no fence": no_fence,
    "no renewal": no_renewal,
    "blind repeat": blind_repeat,
    "forgotten outcomes": forgotten_outcomes,
    "claims without locks": claims_without_locks,
    "lost claims": lost_claims,
    "unnoted starts": unnoted_starts,
    "claims without order": claims_without_order,
    "commit before effects": commit_before_effects,
    "answers on one row": answers_on_one_row,
    "unproven transactions": unproven_transactions,
    "nothing is set apart": nothing_is_set_apart,
    "read-only sessions stay": read_only_sessions_stay,
    "no idle limit": no_idle_limit,
    "no slot is met": no_slot_is_met,
    "forgotten slots": forgotten_slots,
    "numbers of any server": numbers_of_any_server,
    "ids alone": ids_alone,
    "ready without writes": ready_without_writes,
    "locks of one server": locks_of_one_server,
}


def plant(name: str, store: Any) -> None:
    """Plant the defect `name` in this process."""
    DEFECTS[name](store)
