"""Acks, together with the messages that are published with them, in one statement.

It commits by itself, so acks that publish take one round trip, as acks alone do. A message is
inserted if and only if the same statement has removed the row that it belongs to.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from faststream_sqlbroker.core.rows import NewMessage, Settlement, SettleResult
from faststream_sqlbroker.database.parts.sizes import BYTES_TOGETHER, bytes_of
from faststream_sqlbroker.database.postgresql.answers import settled_of
from faststream_sqlbroker.database.postgresql.binds import insert_binds, removing_query
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.database.statements import Statements
from faststream_sqlbroker.exceptions import StoreError


def settling_on_ack(
    sql: Statements, settlements: Sequence[Settlement], *, archive: bool
) -> Query[SettleResult] | None:
    """The one statement that settles and publishes; None: it takes several.

    One is enough if no unit has several rows, all rows are acked, or all are removed without a
    trace, and what is published is not large, waits for no other transaction's `dedup_id` and has
    no lookup value.
    """
    published = [
        (s.id, message) for s in settlements if s.unit is not None for message in s.unit.on_ack
    ]
    messages = [message for _, message in published]
    query = removing_query(sql, settlements, archive=archive, end="_on_ack")
    if query is None or not _are_simple(settlements, messages):
        return None
    owners = [owner for owner, _ in published]

    def read(rows: Iterable[Sequence[Any]]) -> SettleResult:
        counts = dict(tuple(row) for row in rows)
        expected = sum(owner in counts for owner in owners)
        if any(count != expected for count in counts.values()):
            msg = (
                f"{expected} messages were published with their acks, but {max(counts.values())} "
                "were inserted: is there a trigger on the table?"
            )
            raise StoreError(msg)
        return settled_of(settlements, set(counts))

    binds = insert_binds(messages)
    del binds["dedup_ids"]
    return Query(query.clause, {**query.binds, "owners": owners, **binds}, read)


def _are_simple(settlements: Sequence[Settlement], messages: Sequence[NewMessage]) -> bool:
    units = [s.unit for s in settlements if s.unit is not None]
    alone = len(set(units)) == len(units) and len({s.id for s in settlements}) == len(settlements)
    more = any(m.dedup_id is not None or m.lookup is not None for m in messages)
    return alone and not more and bytes_of(messages) <= BYTES_TOGETHER
