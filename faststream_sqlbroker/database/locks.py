"""Locks by key, each operation one transaction.

Locks are rows of the policy state. They are never removed, because their counter is the fence,
which must not start again.

The statements are the same on every database. A lock is free if it has no token, or if its lease
has run out by the database's clock. An acquire writes a new token and raises the counter. Every
later write names the token.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Update, and_, case, or_, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.status import HeldLock
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.policy_state import (
    create_insert,
    get_future_time,
    get_process_name,
)
from faststream_sqlbroker.schema.types import MYSQL, clock

LOCK = "lock"
"""The scope of all locks."""


class LockStore(StoreSubject):
    """Locks by key; a holder is identified by a token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def acquire(
        self, key: str, token: UUID, lease: float, info: Mapping[str, Any] | None = None
    ) -> int | None:
        """Acquire `key` for `lease` seconds and store `info`; return the fence, None if locked.

        The fence is a counter that each new holder raises: a protected resource can refuse writes
        with an older fence. With the holder's token this extends the lease and returns the same
        fence. So after an unknown outcome, repeat the call with the same token.
        """
        c = self._table.c
        values = {
            "lease_token": token,
            "lease_expires_at": get_future_time(lease),
            "created_at": clock(),
            "info": {**(info or {}), "worker": get_process_name()},
        }
        free = or_(c.lease_token.is_(None), c.lease_expires_at <= clock(), c.lease_token == token)
        # The order matters: MySQL assigns from left to right and reads new values, so the counter
        # must be set before lease_token changes.
        fence = case((c.lease_token == token, c.counter), else_=c.counter + 1)
        new_values = {"counter": fence, **values}
        new_row = {"scope": LOCK, "key": key, "counter": 1, **values}
        insert = create_insert(self._table, self._dialect.name)

        def acquire(connection: Connection) -> int | None:
            if connection.dialect.name in MYSQL:
                return self._acquire_in_steps(connection, insert, new_row, new_values, free)
            statement = insert.values(new_row).on_conflict_do_update(
                index_elements=["scope", "key"], set_=new_values, where=free
            )
            rows = connection.execute(statement.returning(c.counter))
            fence: int | None = rows.scalar_one_or_none()
            return fence

        return await self._database.run(acquire, Activity.LOCK)

    def _acquire_in_steps(
        self,
        connection: Connection,
        insert: Any,
        new_row: Mapping[str, Any],
        new_values: Mapping[str, Any],
        free: ColumnElement[bool],
    ) -> int | None:
        """Acquire a lock on MySQL and MariaDB; return the fence, None if locked.

        Their upsert takes no condition. So update the row if it is free, and read the counter back
        by this call's token. Insert the row if there is none yet.
        """
        c = self._table.c
        condition = self._match_key(new_row["key"])
        held_counter = select(c.counter).where(condition, c.lease_token == new_row["lease_token"])
        statement = update(self._table).where(condition, free)
        connection.execute(
            statement.ordered_values(*((c[name], value) for name, value in new_values.items()))
        )
        fence: int | None = connection.execute(held_counter).scalar_one_or_none()
        if fence is None and connection.execute(select(c.key).where(condition)).first() is None:
            # Race: another process may insert the row first. Then this statement changes nothing,
            # and the token read below is that of the other process.
            new_insert = insert.values(new_row)
            connection.execute(new_insert.on_duplicate_key_update(scope=c.scope))
            fence = connection.execute(held_counter).scalar_one_or_none()
        return fence

    async def extend(self, key: str, token: UUID, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; return False if another token holds `key`.

        An expired lease is extended, too, if the lock was not acquired since: nothing happened
        under the lock that its holder could miss.
        """
        return await self._write_lock(
            self._update_held(key, token).values(lease_expires_at=get_future_time(lease))
        )

    async def release(self, key: str, token: UUID) -> bool:
        """Release `key`; return False, without a change, if `token` no longer holds the lock."""
        held_lock = self._update_held(key, token)
        return await self._write_lock(held_lock.values(lease_token=None, lease_expires_at=None))

    async def _write_lock(self, statement: Update) -> bool:
        """Run `statement`; return True if a row was written."""

        def write(connection: Connection) -> bool:
            return bool(connection.execute(statement).rowcount)

        return await self._database.run(write, Activity.LOCK)

    async def force_release(self, key: str, by: str) -> bool:
        """Release `key` from any holder, and record the operator; return True if `key` was held.

        The counter is raised, so that the holder's fence is no longer the latest.
        """
        c = self._table.c
        held_lock = update(self._table).where(self._match_key(key), c.lease_token.is_not(None))
        statement = held_lock.values(lease_token=None, lease_expires_at=None, counter=c.counter + 1)

        def force(connection: Connection) -> bool:
            was_held = bool(connection.execute(statement).rowcount)
            if was_held:
                record_action(connection, self._dialect, "release_lock", by, {"key": key})
            return was_held

        return await self._database.run(force, Activity.OPERATE)

    async def list_held(self, limit: int) -> Sequence[HeldLock]:
        """List up to `limit` locks that have a holder now, sorted by key."""
        c = self._table.c
        is_held = (c.scope == LOCK, c.lease_token.is_not(None), c.lease_expires_at > clock())
        statement = select(c.key, c.counter, c.created_at, c.lease_expires_at, c.info).where(
            *is_held
        )

        def read_rows(connection: Connection) -> list[HeldLock]:
            return [
                HeldLock(r.key, r.counter, r.created_at, r.lease_expires_at, r.info["worker"])
                for r in connection.execute(statement.order_by(c.key).limit(limit))
            ]

        return await self._database.run(read_rows, Activity.OPERATE, write=False)

    def _match_key(self, key: str) -> ColumnElement[bool]:
        """Return the condition of the row of the lock `key`."""
        return and_(self._table.c.scope == LOCK, self._table.c.key == key)

    def _update_held(self, key: str, token: UUID) -> Update:
        """Start an UPDATE that changes the lock only while `token` is the holder's."""
        return update(self._table).where(self._match_key(key), self._table.c.lease_token == token)
