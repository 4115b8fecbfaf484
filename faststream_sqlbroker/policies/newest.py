"""KeepLast at a claim: of each key the newest message, when its window is over and none runs."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from faststream_sqlbroker.core.policies import KeepLast
from faststream_sqlbroker.core.policies.flags import HELD_BURST, KEPT
from faststream_sqlbroker.core.policies.keep_last import Turn, next_turn
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.policies.bursts import SHORTEST_BURST_RECHECK, pause_behind
from faststream_sqlbroker.policies.standby import KeyHeads


class NewestHeads(KeyHeads):
    """The choice of one claim of one queue. Times are microseconds since 1970."""

    _replaced: Mapping[int, int] = MappingProxyType({})
    """Older messages of keys, and those that are delivered in their place, if they start now."""

    def choose(self, due: Sequence[tuple[int, str | None, int]], limit: int) -> list[int]:
        """Up to `limit` of the messages (id, key, due time) to deliver now; the others stand by, or
        get a later due time.
        """
        ended = self._read(key for _, key, _ in due if key is not None)
        turns = self._turns()
        replaced = _replaced(turns.values())
        chosen: list[int] = []
        waiting: dict[int, int | None] = {}
        older: dict[int, tuple[str, int]] = {}
        for message, key, _ in due:
            turn = turns.get(key, Turn(message))
            if message in ended:
                continue
            if (at := self._waits_until(turn, key, message)) is not None:
                waiting[message] = at
            elif key is not None and turn.goes is not None and turn.goes != message:
                # Perhaps it is not known here: another policy, or an operator, has left it.
                older[message] = key, turn.goes
                replaced[message] = turn.goes
                self._key_of[message] = key
            elif len(chosen) < limit:
                chosen.append(message)
        self._replaced = _starting(replaced, set(chosen))
        self._wait_for_others(older, set(chosen))
        self._rows.shift(self._connection, self._queue, waiting, HELD_BURST, KEPT | HELD_BURST)
        self.later += [at for at in waiting.values() if at is not None]
        return chosen

    def _wait_for_others(self, older: Mapping[int, tuple[str, int]], chosen: set[int]) -> None:
        """Let those stand by for which another one is delivered, but does not start now."""
        older = {message: of for message, of in older.items() if of[1] not in chosen}
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
        going = set(started.values())
        self._supersede(started, {m: by for m, by in self._replaced.items() if by in going})
        for key, message in started.items():
            self._known[key].delivered(message, self._now)
        self._save(started)

    def _turns(self) -> dict[str | None, Turn]:
        assert isinstance(self._policy, KeepLast)  # noqa: S101 - only its heads are these
        turns: dict[str | None, Turn] = {}
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


def _replaced(turns: Iterable[Turn]) -> dict[int, int]:
    return {message: by for turn in turns for message, by in turn.superseded.items()}


def _starting(replaced: Mapping[int, int], chosen: set[int]) -> dict[int, int]:
    return {message: by for message, by in replaced.items() if by in chosen}
