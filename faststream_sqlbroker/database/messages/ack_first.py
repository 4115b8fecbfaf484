"""Messages of `AckPolicy.ACK_FIRST`: removed before their handlers start."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    or_,
    select,
    update,
)

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult, UnknownOutcome
from faststream_sqlbroker.database.engine import Database, StoreSubject
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.policy_state import (
    ACK_FIRST,
    ONCE,
    get_process_name,
    match_key,
)
from faststream_sqlbroker.schema.types import clock, later

MAX_AUDIT_IDS = 100
"""Maximum ids in one entry of the audit; all are counted."""

Started = tuple[str, int]
"""Queue and id of a message whose handler has been started."""


class AckFirstStarts(StoreSubject):
    """Records in the database the handlers that have started and not yet ended.

    Each start belongs to a holder, the subscriber of one process, which renews it while the handler
    runs. A start that its holder stops renewing has an unknown outcome.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._worker = get_process_name()

    async def remove_first(
        self,
        settlements: Sequence[Settlement],
        rows: Sequence[ClaimedMessage],
        holder: UUID,
        lease: float,
    ) -> SettleResult:
        """Write `settlements` of `rows`, and record the start of each removed row.

        Both are one transaction, so no removed message is without a record. If `holder` neither
        ends nor renews a start for `lease` seconds, its process may have died before or after the
        handler ran, and `list_unknown` returns the message.
        """
        remove = self._dialect.settle_ack_first
        worker = self._worker
        return await self._database.run(
            lambda c: remove(c, settlements, rows, holder, lease, worker),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def renew(self, started: Sequence[Started], holder: UUID, lease: float) -> None:
        """Extend starts of `holder`, whose handlers still run, to `lease` seconds from now.

        A start is the record of a message that was removed before its handler ran. Without a
        renewal it becomes an unknown outcome.
        """
        statement = (
            update(self._table)
            .where(match_key(self._table), self._table.c.lease_token == holder)
            .values(lease_expires_at=later(bindparam("until")))
        )
        until = round(lease * 1_000_000)
        binds = [{**keys, "until": until} for keys in _build_keys(started)]

        def renew(connection: Connection) -> None:
            connection.execute(statement, binds)

        await self._database.run(renew, Activity.CONSUME, Activity.STATE)

    async def end(self, started: Sequence[Started], holder: UUID) -> None:
        """Remove starts of `holder`, whose handlers have ended.

        A start is the record of a message that was removed before its handler ran.
        """

        def remove(connection: Connection) -> None:
            conditions = match_key(self._table), self._table.c.lease_token == holder
            connection.execute(delete(self._table).where(*conditions), _build_keys(started))

        await self._database.run(remove, Activity.CONSUME, Activity.STATE)

    async def list_unknown(self, queue: str | None, limit: int) -> list[UnknownOutcome]:
        """Return up to `limit` messages whose handler may or may not have run, oldest first.

        Their starts have an expired lease: the holder has stopped renewing them. Without `queue`,
        starts of all queues.
        """
        c = self._table.c
        statement = self._select_overdue(queue).order_by(c.created_at, c.key).limit(limit)
        rows = await self._database.run(
            lambda connection: connection.execute(statement).all(), Activity.OPERATE, write=False
        )
        outcomes = [_to_outcome(*row) for row in rows]
        return sorted(outcomes, key=lambda outcome: (outcome.started_at, outcome.message_id))

    async def forget(self, ids: Sequence[int], by: str = "") -> int:
        """Remove messages from the unknown outcomes, and record the operator; return the count.

        Called when an operator has checked the messages. A key of the policy `Once` stays claimed:
        only the lease of its record is removed, so that no message of the key runs again.
        """
        forgotten = set(ids)

        def forget(connection: Connection) -> int:
            overdue = connection.execute(self._select_overdue(None)).all()
            rows = [row for row in overdue if _to_outcome(*row).message_id in forgotten]
            condition = and_(match_key(self._table), self._table.c.lease_expires_at <= clock())
            if binds := _filter_keys(rows, ACK_FIRST):
                connection.execute(delete(self._table).where(condition), binds)
            if binds := _filter_keys(rows, ONCE):
                statement = update(self._table).where(condition).values(lease_expires_at=None)
                connection.execute(statement, binds)
            count = len(rows)
            if count:
                options = {"message_ids": list(ids[:MAX_AUDIT_IDS])}
                record_action(connection, self._dialect, "forget_unknown", by, options, done=count)
            return count

        return await self._database.run(forget, Activity.OPERATE)

    def _select_overdue(self, queue: str | None) -> Select[Any]:
        """Select the starts that are no longer renewed; without `queue`, of all queues.

        A start is the record of a message removed before its handler ran. It is a row of its own,
        or part of the row of a key that is handled once (policy `Once`).
        """
        c = self._table.c
        scopes = [
            c.scope.startswith(prefix, autoescape=True)
            if queue is None
            else c.scope == prefix + queue
            for prefix in (ACK_FIRST, ONCE)
        ]
        columns = c.scope, c.key, c.info, c.created_at
        return select(*columns).where(and_(or_(*scopes), c.lease_expires_at <= clock()))


def _to_outcome(scope: str, key: str, info: Any, started_at: datetime) -> UnknownOutcome:
    """Convert the row of a start, a message that was removed before its handler ran.

    The key of the row is the message's id. The row of a `Once` key has the id in `info`.
    """
    if scope.startswith(ONCE):
        return UnknownOutcome(
            info["message"], scope.removeprefix(ONCE), key, started_at, info["worker"]
        )
    return UnknownOutcome(
        int(key), scope.removeprefix(ACK_FIRST), info["key"], started_at, info["worker"]
    )


def _build_keys(started: Sequence[Started]) -> list[dict[str, Any]]:
    """Build the binds that `match_key` expects for the rows of starts."""
    return [
        {"of_scope": ACK_FIRST + queue, "of_key": str(message_id)} for queue, message_id in started
    ]


def _filter_keys(rows: Sequence[Row[Any]], prefix: str) -> list[dict[str, Any]]:
    """Build the binds of the `rows` whose scope begins with `prefix`."""
    return [
        {"of_scope": row.scope, "of_key": row.key} for row in rows if row.scope.startswith(prefix)
    ]
