"""Claim from many queues in a few statements, on MySQL and MariaDB.

Neither can use an index for a range whose bound is a column of another row, and only MySQL has
LATERAL. So each lookup is by equality, in the order of the index. ORDER BY names every column of
the index: with fewer, MySQL sorts all rows of a queue to find the first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    ClaimRequest,
    ReadyPair,
)
from faststream_sqlbroker.database.multi_statement import MultiStatementDialect

MAX_SINGLE_PAIRS = 3
"""Maximum number of pairs that are claimed individually: a statement for all would cost more."""
FIRST_ROWS = 8
"""With more pairs, one statement searches this many rows of each; a pair that has as many is
claimed by a statement of its own.
"""


@dataclass(eq=False)
class PairsClaim:
    """A claim of the first due rows of several pairs, in the order of the pairs."""

    dialect: MultiStatementDialect
    connection: Connection
    request: ClaimRequest
    _messages: ClaimedMessages = field(default_factory=ClaimedMessages, init=False)

    def run(self) -> ClaimedMessages:
        """Lock the rows, and return the locked rows by pair, due time and id.

        A pair is a queue and a priority with due rows. At most `limit` rows are locked, including
        suspects, which are not leased.
        """
        pairs = self.request.pairs
        # Always claim the first pair singly: if it reaches the limit, the statement for the others
        # is not needed.
        single_count = len(pairs) if len(pairs) <= MAX_SINGLE_PAIRS else 1
        for pair in pairs[:single_count]:
            self._lock_pair(pair)
        remaining = pairs[single_count:]
        while remaining and (capacity := self._capacity) > 0:
            first_rows = self._find_first_rows(remaining, capacity)
            self._lock_in_order(remaining, first_rows)
            # Each pair found has at least one row. If fewer pairs were found than rows are wanted,
            # the remaining pairs have none.
            remaining = remaining[first_rows[-1][0] + 1 :] if len(first_rows) == capacity else []
        return self._messages

    @property
    def _capacity(self) -> int:
        return self.request.limit - len(self._messages) - len(self._messages.suspects)

    def _find_first_rows(
        self, pairs: Sequence[ReadyPair], limit: int
    ) -> list[tuple[int, list[int]]]:
        """Find the first `limit` pairs (queue and priority) that have due rows; locks nothing.

        Returns:
            Each pair's position in `pairs`, and the ids of up to `FIRST_ROWS` of its rows.
        """
        binds: dict[str, Any] = {
            "pairs": json.dumps([(pair.queue, pair.priority) for pair in pairs]),
            "most": limit,
        }
        name, binds = self._skip_suspects("first_ids", binds)
        rows = self.connection.execute(self.dialect.sql[name], binds)
        return [
            (position - 1, [message_id for message_id in ids if message_id is not None])
            for position, *ids in rows
        ]

    def _skip_suspects(self, name: str, binds: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the statement that skips suspects if required, and its binds.

        A suspect may have killed its process, and must run alone. A rule with `report` lets the
        statement return suspects, so that the claim can report them.
        """
        rule = self.request.suspect_rule
        if rule is None or rule.report:
            return name, binds
        return f"{name}_others", binds | rule.binds

    def _lock_in_order(
        self, pairs: Sequence[ReadyPair], first_rows: list[tuple[int, list[int]]]
    ) -> None:
        """Lock the `first_rows` of `pairs`, in the order of the pairs.

        `first_rows` are positions in `pairs` and the ids found there. Rows of several pairs are
        locked by one statement, as long as no pair has more rows than were found.
        """
        pending_ids: list[int] = []
        queues: dict[str, None] = {}
        for position, ids in first_rows:
            if len(ids) < FIRST_ROWS:
                pending_ids += ids
                queues[pairs[position].queue] = None
                continue
            # This pair may have more rows than were read, and they come before the rows of the next
            # pair. So lock the rows found so far first, then this pair by a statement of its own.
            self._lock_rows(pending_ids, queues)
            self._lock_pair(pairs[position])
            pending_ids = []
            queues = {}
        self._lock_rows(pending_ids, queues)

    def _lock_pair(self, pair: ReadyPair) -> None:
        """Lock the first due rows of a pair, up to the remaining capacity, in their order.

        Rows locked elsewhere are skipped.
        """
        if (limit := self._capacity) > 0:
            binds = {"queue": pair.queue, "priority": pair.priority, "limit": limit}
            messages = self._lock(*self._skip_suspects("claim", binds))
            self._add(messages, messages)

    def _lock(self, name: str, binds: dict[str, Any]) -> ClaimedMessages:
        request = self.request
        return self.dialect.lock_claimable(
            self.connection, name, binds, request.token, request.suspect_rule
        )

    def _add(self, messages: ClaimedMessages, in_order: Sequence[ClaimedMessage]) -> None:
        self._messages += in_order
        self._messages.suspects |= messages.suspects

    def _lock_rows(self, ids: Sequence[int], queues: dict[str, None]) -> None:
        """Lock as many of `ids`, in the order of the claim, as the remaining limit allows.

        Another session may have locked some since they were found: later ids replace them.
        """
        rank = {message_id: n for n, message_id in enumerate(ids)}
        while ids and (capacity := self._capacity) > 0:
            part, ids = ids[:capacity], ids[capacity:]
            binds = {"ids": sorted(part), "queues": list(queues), "limit": len(part)}
            rows = self._lock("claim_ids", binds)
            self._add(rows, sorted(rows, key=lambda row: rank[row.id]))
