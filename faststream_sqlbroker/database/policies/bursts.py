"""Debounce at a claim: deliver one message of each key at a time, in the order of its bursts."""

from collections.abc import Sequence

from faststream_sqlbroker.core.policies.flags import HELD_BURST, KEPT
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.rows import Live
from faststream_sqlbroker.database.policies.standby import KeyHeads

SHORTEST_BURST_RECHECK = MICROSECONDS // 20
"""Least time until a waiting message is checked again (microseconds)."""
LONGEST_BURST_RECHECK = 2 * MICROSECONDS
"""A message that waits for the one before it is checked again after as long as that one has been
running, at most after this. So it waits at most twice as long as it must, and many waiting messages
do not fill every claim."""
BURST_WAIT_LIMIT = 60 * MICROSECONDS
"""The same limit if the message before waits itself, for example for a retry: an operator may
cancel it."""


class BurstHeads(KeyHeads):
    """The choice of one claim of one queue. Times are microseconds since 1970."""

    def choose(self, due: Sequence[tuple[int, str | None, int]], limit: int) -> list[int]:
        """Up to `limit` of the messages (id, key, due time) to deliver now; the others get a later
        due time.
        """
        due = self._read_due(due)
        chosen: list[int] = []
        taken: set[str] = set()
        waiting: dict[int, int | None] = {}
        for message, key, _ in due:
            live = {} if key is None else self._live[key]
            turn = None if key is None else self._known[key].next(set(live))
            if key in taken or (turn is not None and turn != message):
                waiting[message] = self._now + pause_behind(live.get(turn or 0), self._now)
            elif len(chosen) < limit:
                chosen.append(message)
                if key is not None:
                    taken.add(key)
        # A message that is put off gives up its slot, which would be for another time.
        keys = {message: key for message, key, _ in due}
        marks = HELD_BURST, KEPT | HELD_BURST
        self._rows.shift(self._connection, self._queue, waiting, *marks, keys=keys)
        self.later += [at for at in waiting.values() if at is not None]
        return chosen

    def delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """`rows` have been leased: they have left their bursts."""
        started: dict[str, int] = {}
        keys: set[str] = set()
        for row in rows:
            key = row.policy_key
            if key is not None and key in self._known:
                keys.add(key)
                if row.id != self._known[key].current:
                    started[key] = row.id
        self._supersede(started)
        for row in rows:
            if row.policy_key in keys:
                self._known[row.policy_key].delivered(row.id)
        self._save(keys)


def pause_behind(before: Live | None, now: int) -> int:
    """How long to put off what waits for the message `before`."""
    if before is None:
        return SHORTEST_BURST_RECHECK
    pause = before.due - now if before.acquired is None else now - before.acquired
    if before.state != "PROCESSING":
        # It cannot settle before it has been claimed.
        return min(max(SHORTEST_BURST_RECHECK, pause), BURST_WAIT_LIMIT)
    return min(max(SHORTEST_BURST_RECHECK, pause), LONGEST_BURST_RECHECK)
