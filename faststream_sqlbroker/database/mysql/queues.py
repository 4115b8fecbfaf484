"""Many queues in a few statements, on MySQL and MariaDB.

Neither can use an index for a range whose bound is a column of another row, and only MySQL has
LATERAL. So each lookup is by equality, in the order of the index. ORDER BY names every column of
the index: with fewer, MySQL sorts all rows of a queue to find the first.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.multi_statement import MultiStatementDialect

FEW_PAIRS = 3
"""Up to so many pairs are claimed one by one: a statement for all would cost more."""
FIRST_ROWS = 8
"""With more pairs, one statement looks for so many rows of each; a pair that has as many is claimed
by a statement of its own."""

LockPair = Callable[[ReadyPair, int], Claimed]
"""Locks so many due rows of a pair at most, in their order."""


@dataclass(eq=False)
class PairsClaim:
    """Locks the first due rows of several pairs, in the order of the pairs."""

    dialect: MultiStatementDialect
    limit: int
    token: UUID
    suspicion: Suspicion | None
    """As in `Dialect.claiming`."""
    lock_first: LockPair
    """Locks the rows of a pair alone."""
    _found: Claimed = field(default_factory=Claimed, init=False)

    def run(self, connection: Connection, pairs: Sequence[ReadyPair]) -> Claimed:
        """The rows, by pair, due time, id."""
        # Always the first pair: if it fills the room, the statement for the others is not needed.
        alone = len(pairs) if len(pairs) <= FEW_PAIRS else 1
        for pair in pairs[:alone]:
            self._lock_pair(pair)
        rest = pairs[alone:]
        while rest and (room := self._room) > 0:
            listed = self._first_rows(connection, rest, room)
            self._lock_in_order(connection, rest, listed)
            rest = rest[listed[-1][0] + 1 :] if len(listed) == room else []
        return self._found

    @property
    def _room(self) -> int:
        return self.limit - len(self._found) - len(self._found.suspects)

    def _first_rows(
        self, connection: Connection, pairs: Sequence[ReadyPair], most: int
    ) -> list[tuple[int, list[int]]]:
        """The first `most` pairs that have due rows: each pair's place, and the ids of its first
        rows. Locks nothing.
        """
        binds: dict[str, Any] = {
            "pairs": json.dumps([(pair.queue, pair.priority) for pair in pairs]),
            "most": most,
        }
        name = "first_ids"
        if self.suspicion is not None and not self.suspicion.told:
            name, binds = "first_ids_others", binds | self.suspicion.binds
        rows = connection.execute(self.dialect.sql[name], binds)
        return [(place - 1, [each for each in ids if each is not None]) for place, *ids in rows]

    def _lock_in_order(
        self,
        connection: Connection,
        pairs: Sequence[ReadyPair],
        listed: list[tuple[int, list[int]]],
    ) -> None:
        few: list[int] = []
        queues: dict[str, None] = {}
        for place, ids in listed:
            if len(ids) < FIRST_ROWS:
                few += ids
                queues[pairs[place].queue] = None
                continue
            # This pair may have more rows than were looked for. They come before those of the next
            # pair, so what was found until here is locked first, then this pair by itself.
            self._lock_rows(connection, few, queues)
            self._lock_pair(pairs[place])
            few = []
            queues = {}
        self._lock_rows(connection, few, queues)

    def _lock_pair(self, pair: ReadyPair) -> None:
        if self._room > 0:
            found = self.lock_first(pair, self._room)
            self._add(found, found)

    def _add(self, found: Claimed, in_order: Sequence[ClaimedMessage]) -> None:
        self._found += in_order
        self._found.suspects |= found.suspects

    def _lock_rows(
        self, connection: Connection, ids: Sequence[int], queues: dict[str, None]
    ) -> None:
        """Lock as many of `ids` as there is room for.

        Another session may have locked some since they were found: later ids take their places.
        """
        rank = {each: n for n, each in enumerate(ids)}
        while ids and (room := self._room) > 0:
            part, ids = ids[:room], ids[room:]
            binds = {"ids": sorted(part), "queues": list(queues), "limit": len(part)}
            rows = self.dialect.find(connection, "claim_ids", binds, self.token, self.suspicion)
            self._add(rows, sorted(rows, key=lambda row: rank[row.id]))
