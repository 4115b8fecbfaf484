"""KeepLast at a claim: of each key the newest message, when its window is over and none runs."""

from collections.abc import Mapping, Sequence

from faststream_sqlbroker.core.policies import KeepLast
from faststream_sqlbroker.core.policies.flags import HELD_BURST, KEPT
from faststream_sqlbroker.core.policies.keep_last import Turn, next_turn
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.bursts import SHORTEST_BURST_RECHECK, pause_behind
from faststream_sqlbroker.database.policies.standby import KeyHeads


class NewestHeads(KeyHeads):
    """The choice of one claim of one queue. Times are microseconds since 1970."""

    def choose(self, due: Sequence[tuple[int, str | None, int]], limit: int) -> list[int]:
        """Up to `limit` of the messages (id, key, due time) to deliver now; the others stand by, or
        get a later due time.
        """
        due = self._read_due(due)
        turns = self._turns()
        chosen: list[int] = []
        waiting: dict[int, int | None] = {}
        older = _superseded(turns)
        for message, key, _ in due:
            turn = turns.get(key or "", Turn(message))
            if (at := self._waits_until(turn, key, message)) is not None:
                waiting[message] = at
            elif key is not None and turn.goes is not None and turn.goes != message:
                # Perhaps it is not known here: another policy, or an operator, has left it.
                older[message] = key, turn.goes
            elif len(chosen) < limit:
                chosen.append(message)
        self._wait_for_others(older)
        keys = {message: key for message, key, _ in due}
        marks = HELD_BURST, KEPT | HELD_BURST
        self._rows.shift(self._connection, self._queue, waiting, *marks, keys=keys)
        self.later += [at for at in waiting.values() if at is not None]
        return chosen

    def _wait_for_others(self, older: Mapping[int, tuple[str, int]]) -> None:
        """Let those stand by in whose place another one is delivered."""
        for message, (key, _) in older.items():
            latest = self._known[key]
            if latest.first == message:
                latest.first = None
        self._stand_by(older)

    def delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """`rows` have been leased: their windows begin, and what they replace goes."""
        started = {
            row.policy_key: row.id
            for row in rows
            if row.policy_key is not None and row.policy_key in self._known
        }
        self._supersede(started)
        for key, message in started.items():
            self._known[key].delivered(message, self._now)
        self._save(started)

    def _turns(self) -> dict[str, Turn]:
        assert isinstance(self._policy, KeepLast)  # noqa: S101 - only its heads are these
        turns: dict[str, Turn] = {}
        for key, latest in self._known.items():
            states = {message: live.state for message, live in self._live[key].items()}
            turns[key] = next_turn(self._policy, latest, states, self._now)
        return turns

    def _waits_until(self, turn: Turn, key: str | None, message: int) -> int | None:
        """When to look at `message` again, which is due; None: it need not wait."""
        if turn.waits_for is not None and key is not None:
            return self._now + pause_behind(self._live[key].get(turn.waits_for), self._now)
        if turn.goes == message:
            return turn.not_before if turn.not_before > self._now else None
        if turn.goes is not None and message > turn.goes:
            return self._now + max(SHORTEST_BURST_RECHECK, self._policy.window)
        return None


def _superseded(turns: Mapping[str, Turn]) -> dict[int, tuple[str, int]]:
    """Of messages in whose place another one is delivered, their keys and that one."""
    return {
        message: (key, by) for key, turn in turns.items() for message, by in turn.superseded.items()
    }
