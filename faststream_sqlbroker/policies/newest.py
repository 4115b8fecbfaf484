"""KeepLast at a claim: of each key the newest message, when its window is over and none runs."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import KeepLast
from faststream_sqlbroker.core.policies.flags import HELD_BURST, KEPT
from faststream_sqlbroker.core.policies.keep_last import Latest, Turn, next_turn
from faststream_sqlbroker.core.reasons import SUPERSEDED
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.policies.bursts import SHORTEST_BURST_RECHECK, pause_behind
from faststream_sqlbroker.policies.intake import FORGET_BURSTS, burst_scope, burst_states
from faststream_sqlbroker.policies.rows import Live, PolicyRows


class NewestHeads:
    """The choice of one claim of one queue. Times are microseconds since 1970."""

    def __init__(
        self,
        policy: KeepLast,
        rows: PolicyRows,
        connection: Connection,
        queue: str,
        now: int,
        *,
        keep: bool,
    ) -> None:
        """Under the queue's lock, after all that is due has taken part; `keep`: what is superseded
        is archived.
        """
        self._policy = policy
        self._rows = rows
        self._connection = connection
        self._queue = queue
        self._now = now
        self._keep = keep
        self._known: dict[str, Latest] = {}
        self._live: dict[int, Live] = {}
        self.later: list[int] = []
        """When messages that wait are looked at again."""

    def choose(self, due: Sequence[tuple[int, str | None, int]], limit: int) -> list[int]:
        """Up to `limit` of the messages (id, key, due time) to deliver now. Of the others, some are
        superseded, the rest gets a later due time.
        """
        turns = self._turns({key for _, key, _ in due if key is not None})
        gone = {
            message: Discard(SUPERSEDED, by)
            for turn in turns.values()
            for message, by in turn.superseded.items()
        }
        chosen: list[int] = []
        waiting: dict[int, int | None] = {}
        for message, key, _ in due:
            turn = turns.get(key, Turn(message))
            if message in gone:
                continue
            if (at := self._waits_until(turn, message)) is not None:
                waiting[message] = at
            elif turn.goes not in {None, message}:
                # It is not known here: another policy, or an operator, has left it.
                gone[message] = Discard(SUPERSEDED, turn.goes)
            elif len(chosen) < limit:
                chosen.append(message)
        self._rows.discard(self._connection, self._queue, gone, keep=self._keep)
        self._rows.shift(self._connection, self._queue, waiting, HELD_BURST, KEPT | HELD_BURST)
        self.later = [at for at in waiting.values() if at is not None]
        return chosen

    def delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """`rows` have been leased: their windows begin."""
        states: dict[str, tuple[Any, int]] = {}
        for row in rows:
            key = row.policy_key
            if key is not None and key in self._known:
                latest = self._known[key]
                latest.delivered(row.id, self._now)
                until = self._now + self._policy.window + FORGET_BURSTS
                states[key] = self._policy.dump(latest), until
        self._rows.keep(self._connection, burst_scope(self._queue), states)

    def _turns(self, keys: set[str]) -> dict[str | None, Turn]:
        stored = burst_states(
            self._rows, self._connection, self._queue, self._policy, keys, self._now
        )
        self._known = {key: self._policy.load(stored.get(key)) for key in keys}
        ids = {message for latest in self._known.values() for message in latest.known()}
        self._live = self._rows.live(self._connection, self._queue, ids)
        states = {message: live.state for message, live in self._live.items()}
        return {
            key: next_turn(self._policy, latest, states, self._now)
            for key, latest in self._known.items()
        }

    def _waits_until(self, turn: Turn, message: int) -> int | None:
        """When to look at `message` again, which is due; None: it need not wait."""
        if turn.waits_for is not None:
            return self._now + pause_behind(self._live.get(turn.waits_for), self._now)
        if turn.goes == message:
            return turn.not_before if turn.not_before > self._now else None
        if turn.goes is not None and message > turn.goes:
            return self._now + max(SHORTEST_BURST_RECHECK, self._policy.window)
        return None
