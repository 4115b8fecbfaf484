"""How a history is read after a run: from the events of all processes and from the tables."""

from pathlib import Path
from typing import Any

from sqlalchemy import text

from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.store import Store
from tests.faults.history import AT_MOST_ONCE, Answer, History, Stall, deliveries, read
from tests.helpers import eventually


async def read_all(h: History, folder: Path, store: Store, *, patience: float) -> None:
    """Complete `h`; `patience` in seconds is for the notes of ACK_FIRST to run out."""
    events = read(folder)
    h.deliveries = deliveries(events)
    for d in h.deliveries:
        h.message_ids.setdefault(d.message_id, set()).add(d.number)
    # On SQLite it may have stood still in the middle of a write: then no process can write.
    alone = store.dialect_name != "sqlite"
    h.stalls += [
        Stall(event["since"], event["at"], event["pid"] if alone else None)
        for event in events
        if event["event"] == "stalled"
    ]
    for event in events:
        end = min(h.stopping, h.told_to_end.get(event["pid"], h.stopping))
        if event["event"] == "health" and event["at"] < end:
            h.health.setdefault(event["pid"], []).append((event["at"], event["healthy"]))
    h.live = await _rows(store, "message WHERE queue NOT IN ('out', 'ticks')")
    h.archived = await _rows(
        store, "message_archive WHERE queue <> 'ticks'", ", reason, related_id"
    )
    for table in ("message", "message_archive"):
        h.ticks += await _rows(store, f"{table} WHERE queue = 'ticks'")
    h.answers = await _answers(store)
    h.effects = [tuple(row) for row in await _select(store, "SELECT number, which FROM effects")]
    await _read_unknown(h, store, patience)


async def _select(store: Store, statement: str) -> list[Any]:
    async with store.engine.connect() as connection:
        return list(await connection.execute(text(statement)))


async def _rows(store: Store, table: str, more: str = "") -> list[dict[str, Any]]:
    columns = f"id, queue, state, payload, attempts_count, deliveries_count{more}"
    rows = await _select(store, f"SELECT {columns} FROM {table}")
    return [{**row._mapping, "number": int(bytes(row.payload))} for row in rows]


async def _answers(store: Store) -> list[Answer]:
    rows = await _select(store, "SELECT headers, length(payload) FROM message WHERE queue = 'out'")
    found = [(load_headers(headers), size) for headers, size in rows]
    return [Answer(tuple(h["numbers"]), size, bool(h.get("joint"))) for h, size in found]


async def _read_unknown(h: History, store: Store, patience: float) -> None:
    """What is listed of ACK_FIRST when every note that no worker renews has run out."""
    listed: set[int] = set()

    async def over() -> bool:
        notes = await _select(
            store, "SELECT 1 FROM message_policy_state WHERE scope LIKE 'ack_first:%'"
        )
        listed.clear()
        listed.update(
            unknown.message_id
            for unknown in await store.ack_first_starts.list_unknown(None, 10_000)
            if unknown.queue == AT_MOST_ONCE
        )
        return len(notes) == len(listed)

    await eventually(over, timeout=patience, step=0.1)
    numbers = {row["id"]: row["number"] for row in h.archived}
    h.listed = {numbers.get(message_id, -message_id) for message_id in listed}
