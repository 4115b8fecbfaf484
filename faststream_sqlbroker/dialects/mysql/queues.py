"""Many queues in a few statements, on MySQL and MariaDB.

Neither searches a range whose bound is a column of another row, and LATERAL is MySQL's alone. So
what is asked for each queue is found by equality and by the order of the index, which ORDER BY
names column by column: MySQL would sort all rows of a queue for the first of them.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.mysql.dialect import MysqlDialect

FEW_PAIRS = 3
"""So many pairs are claimed one by one."""
FIRST_ROWS = 8
"""Rows of each of more pairs that are looked for together; a pair that has as many is claimed by
itself."""

_NAME = "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_UP = "ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1"
_DOWN = (
    "ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC, m.next_attempt_at DESC, "
    "m.id DESC LIMIT 1"
)
_DUE = "IF(m.next_attempt_at < '1000-01-01', '1000-01-01', m.next_attempt_at)"
"""A zero date, which comes first, is none; one that is due must not hide the others of its pair."""


def _first(column: str, where: str, order: str) -> str:
    return (
        f"(SELECT {column} FROM {{message}} m FORCE INDEX ({{ready_index}})\n"
        f"    WHERE m.claimable = 1 AND {where} {order})"
    )


READY_PAIRS = f"""
WITH RECURSIVE q AS (
  SELECT q.place, q.queue, {_first("m.priority", "m.queue = q.queue", _DOWN)} AS top
  FROM JSON_TABLE(:queues, '$[*]' COLUMNS (place FOR ORDINALITY, queue {
    _NAME
} PATH '$')) q{{which_queues}}
), p AS (
  SELECT q.place, q.queue, q.top AS priority, {
    _first("m.priority", "m.queue = q.queue", _UP)
} AS bottom
  FROM q WHERE q.top IS NOT NULL
  UNION ALL
  SELECT p.place, p.queue, p.priority - 1, p.bottom FROM p WHERE p.priority > p.bottom
)
SELECT p.queue, p.priority, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {
    _first(_DUE, "m.queue = p.queue AND m.priority = p.priority", _UP)
}) / 1000000
FROM p ORDER BY p.place, p.priority DESC
"""
"""Each priority between a queue's highest and its lowest is tried: at most 201 (the table's CHECK),
mostly one."""

_IDS = ",\n  ".join(
    _first(
        "IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL)",
        "m.queue = p.queue AND m.priority = p.priority{which}",
        f"{_UP} OFFSET {n}",
    )
    + f" AS id_{n}"
    for n in range(FIRST_ROWS)
)
FIRST_IDS = f"""
SELECT p.place,
  {_IDS}
FROM JSON_TABLE(:pairs, '$[*]' COLUMNS (
    place FOR ORDINALITY, queue {_NAME} PATH '$[0]', priority INT PATH '$[1]')) p
HAVING id_0 IS NOT NULL LIMIT :most
"""
"""Whether a row is due is asked of the row found: a search for due ones would read all that are
not."""


class PairsClaim:
    """Locks the first due rows of several pairs, in the order of the pairs."""

    def __init__(
        self,
        dialect: "MysqlDialect",
        connection: Connection,
        limit: int,
        token: UUID,
        suspicion: Suspicion | None,
    ) -> None:
        """Lock up to `limit`; `suspicion` as in `Dialect.claim`."""
        self._dialect = dialect
        self._connection = connection
        self._limit = limit
        self._token = token
        self._suspicion = suspicion
        self._found = Claimed()

    def run(self, pairs: Sequence[ReadyPair]) -> Claimed:
        """The rows, by pair, due time, id."""
        # The first one always: where it has rows for all the room, there is nothing to look for.
        alone = len(pairs) if len(pairs) <= FEW_PAIRS else 1
        for pair in pairs[:alone]:
            self._lock_pair(pair)
        rest = pairs[alone:]
        while rest and (room := self._room) > 0:
            listed = self._first_rows(rest, room)
            self._lock_in_order(rest, listed)
            rest = rest[listed[-1][0] + 1 :] if len(listed) == room else []
        return self._found

    @property
    def _room(self) -> int:
        return self._limit - len(self._found) - len(self._found.suspects)

    def _first_rows(self, pairs: Sequence[ReadyPair], most: int) -> list[tuple[int, list[int]]]:
        """The places of the first `most` pairs that have due rows, each with the ids of its first
        ones; locks nothing.
        """
        binds: dict[str, Any] = {
            "pairs": json.dumps([(pair.queue, pair.priority) for pair in pairs]),
            "most": most,
        }
        name = "first_ids"
        if self._suspicion is not None and not self._suspicion.told:
            name, binds = "first_ids_others", binds | self._suspicion.binds
        rows = self._connection.execute(self._dialect.sql[name], binds)
        return [(place - 1, [each for each in ids if each is not None]) for place, *ids in rows]

    def _lock_in_order(
        self, pairs: Sequence[ReadyPair], listed: list[tuple[int, list[int]]]
    ) -> None:
        few: list[int] = []
        queues: dict[str, None] = {}
        for place, ids in listed:
            if len(ids) < FIRST_ROWS:
                few += ids
                queues[pairs[place].queue] = None
                continue
            # Which of its rows come before the next pair's is known only when it has been claimed.
            self._lock_rows(few, queues)
            self._lock_pair(pairs[place])
            few = []
            queues = {}
        self._lock_rows(few, queues)

    def _lock_pair(self, pair: ReadyPair) -> None:
        if self._room > 0:
            found = self._dialect.lock_pair(
                self._connection, pair, self._room, self._token, self._suspicion
            )
            self._add(found, found)

    def _add(self, found: Claimed, in_order: Sequence[ClaimedMessage]) -> None:
        self._found += in_order
        self._found.suspects |= found.suspects

    def _lock_rows(self, ids: Sequence[int], queues: dict[str, None]) -> None:
        """Lock so many of `ids` as there is room for; what is locked elsewhere by now leaves its
        place to the next.
        """
        rank = {each: n for n, each in enumerate(ids)}
        while ids and (room := self._room) > 0:
            part, ids = ids[:room], ids[room:]
            binds = {"ids": sorted(part), "queues": list(queues), "limit": len(part)}
            rows = self._dialect.find(
                self._connection, "claim_ids", binds, self._token, self._suspicion
            )
            self._add(rows, sorted(rows, key=lambda row: rank[row.id]))
