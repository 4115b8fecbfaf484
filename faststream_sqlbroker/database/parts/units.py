"""Settle unit by unit: all rows of a unit and the messages published with it, or nothing."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import NewMessage, Settlement, SettleResult, Unit
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.mirror_rows import insert_mirrored, remove_records
from faststream_sqlbroker.exceptions import StoreError

Units = dict[Unit, list[Settlement]]
Settle = Callable[[Connection, Sequence[Settlement]], SettleResult]
LOCK_WAIT = 1.0
"""Seconds to wait for a lock. A row that is locked for longer must not delay the other outcomes of
a flush.
"""


def settle_units(
    dialect: DialectOperations,
    connection: Connection,
    settlements: Sequence[Settlement],
    *,
    skip_locked: bool = False,
    settle: Settle | None = None,
) -> SettleResult:
    """Settle complete units, and insert the messages published with each.

    A unit is a group of outcomes, with the messages to publish on ack, that is written as a whole
    or not at all. If a lease of a unit is lost, its rows that are still held are in neither set of
    the result. With `skip_locked`, the same holds for rows that another transaction has locked and
    for all rows of their units, and no lock is waited for longer than `LOCK_WAIT` seconds. `settle`
    replaces the dialect's own method.

    Raises:
        StoreError: a unit was written in part, because a trigger has kept a row, or a message is
            in `settlements` twice. The caller must roll back.
    """
    if len({settlement.id for settlement in settlements}) < len(settlements):
        # The result has ids of messages: of two deliveries of one message, the older one would
        # count as written, too.
        msg = "a flush has two outcomes of the same message"
        raise StoreError(msg)
    units: Units = {}
    for settlement in settlements:
        if settlement.unit is not None:
            units.setdefault(settlement.unit, []).append(settlement)
    with _limit_lock_wait(dialect, connection, units, skip_locked=skip_locked):
        lost_ids: set[int] = set()
        if skip_locked or any(len(parts) > 1 for parts in units.values()):
            settlements, lost_ids = _lock_rows(
                dialect, connection, settlements, units, skip_locked=skip_locked
            )
        result = (settle or dialect.settle)(connection, settlements)
        result.lost_ids |= lost_ids
        remove_records(dialect, connection, settlements, result.settled_ids)
        if messages := _list_on_ack(units, result.settled_ids):
            dialect.wait_for_dedup_ids(connection, messages)
            insert_mirrored(dialect, connection, messages)
    return result


def _limit_lock_wait(
    dialect: DialectOperations, connection: Connection, units: Units, *, skip_locked: bool
) -> AbstractContextManager[None]:
    """Limit the wait for locks during a settle.

    Another transaction may hold a row or a `dedup_id` without end. With `skip_locked`, the other
    outcomes must not wait long. And some servers wait on after this client has given up, which
    would block other transactions: there the wait ends before the client's time limit.
    """
    if skip_locked:
        return dialect.limit_lock_wait(connection, LOCK_WAIT)
    if dialect.outwaits_clients and any(
        row.dedup_id is not None for unit in units for row in unit.on_ack
    ):
        return dialect.limit_lock_wait(connection, dialect.time_limit - LOCK_WAIT)
    return nullcontext()


def _lock_rows(
    dialect: DialectOperations,
    connection: Connection,
    settlements: Sequence[Settlement],
    units: Units,
    *,
    skip_locked: bool,
) -> tuple[list[Settlement], set[int]]:
    """Lock all rows in the order of their ids, so that two settles cannot deadlock.

    A unit, whose rows are written together or not at all, is writable only if all of them are
    locked here. With `skip_locked`, a row locked elsewhere is not lost: its lease may still be
    held.

    Returns:
        The settlements that can be written, and the ids whose leases are lost.
    """
    leases = [(settlement.id, settlement.lease_token) for settlement in settlements]
    locked_here = dialect.lock(connection, leases, skip_locked=skip_locked)
    held_ids = locked_here | dialect.find_held(connection, leases) if skip_locked else locked_here
    complete_units = {
        unit for unit, parts in units.items() if all(part.id in locked_here for part in parts)
    }
    writable = [
        settlement
        for settlement in settlements
        if settlement.id in locked_here
        and (settlement.unit is None or settlement.unit in complete_units)
    ]
    return writable, {settlement.id for settlement in settlements} - held_ids


def _list_on_ack(units: Units, settled: set[int]) -> list[NewMessage]:
    """Return the messages to publish with the units that are `settled`.

    Raises:
        StoreError: a unit was written in part; the caller must roll back.
    """
    messages: list[NewMessage] = []
    for unit, parts in units.items():
        written = sum(part.id in settled for part in parts)
        if written == len(parts):
            messages += unit.on_ack
        elif written:
            msg = (
                f"messages {[part.id for part in parts]} must be settled together, but only "
                f"{written} were written; check the table for triggers that skip rows"
            )
            raise StoreError(msg)
    return messages
