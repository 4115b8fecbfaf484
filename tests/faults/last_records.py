"""The last records of a history: how its processes ended, and what the database has after it."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from sqlalchemy import text

from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.store import Store
from tests.faults.history import Recorder

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
COLUMNS = (
    "id, queue, {key}, state, payload, attempts_count, deliveries_count, created_at, acquired_at"
)
NO_HANDLERS = "queue NOT IN ('out', 'ticks')"
"""All but answers, which have no handler, and what a schedule publishes."""


class Ended(Protocol):
    """A process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code."""


def micros(at: Any) -> int | None:
    """A stored time in microseconds of the database's clock."""
    if not isinstance(at, datetime):
        return None if at is None else int(at)
    aware = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    return (aware - EPOCH) // timedelta(microseconds=1)


async def note_last(
    recorder: Recorder,
    store: Store,
    workers: Iterable[Ended],
    listed: Iterable[int],
    **finish: Any,
) -> None:
    """Note the ends of `workers`, all rows, effects and answers, and `listed`, the messages whose
    outcome is listed as unknown; `finish` goes into the last record."""
    for one in workers:
        if (code := one.poll()) is not None:
            recorder.note("exit", worker=one.pid, code=code)
    key = store.engine.dialect.identifier_preparer.quote("key")
    columns = COLUMNS.format(key=key)
    for table, more in (("message", ""), ("message_archive", ", archived_at, reason, related_id")):
        statement = f"SELECT {columns}{more} FROM {table} WHERE {NO_HANDLERS}"
        for row in await _select(store, statement):
            _note_row(recorder, table, row)
    for row in await _select(store, "SELECT number, which FROM effects"):
        recorder.note("effect", **row)
    for row in await _select(
        store, "SELECT headers, length(payload) AS size FROM message WHERE queue = 'out'"
    ):
        headers = load_headers(row["headers"])
        joint = bool(headers.get("joint"))
        recorder.note("answer", numbers=headers["numbers"], size=row["size"], joint=joint)
    for number in listed:
        recorder.note("listed", number=number)
    recorder.note("finish", **finish)


def _note_row(recorder: Recorder, table: str, row: Mapping[str, Any]) -> None:
    recorder.note(
        "row",
        table=table,
        id=row["id"],
        number=int(bytes(row["payload"])),
        queue=row["queue"],
        key=row["key"],
        state=row["state"],
        reason=row.get("reason"),
        attempts=row["attempts_count"],
        deliveries=row["deliveries_count"],
        created=micros(row["created_at"]),
        acquired=micros(row["acquired_at"]),
        archived=micros(row.get("archived_at")),
        related=row.get("related_id"),
    )


async def _select(store: Store, statement: str) -> list[Mapping[str, Any]]:
    async with store.engine.connect() as connection:
        found = await connection.execute(text(statement))
        return [dict(row) for row in found.mappings()]
