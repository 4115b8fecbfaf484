"""Shares of queues with weights: which queue the next claim begins with.

Each message that is claimed from a queue costs it 1 / weight. The queue that has paid least comes first in the next
claim, the others take what room it leaves. So while several queues have messages, what is claimed follows the
weights, to within one claim of each; a queue whose turn it is and that has nothing costs no claim. Turns are not saved
up: a queue that comes back begins where the others are.
"""

from collections.abc import Sequence

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair


class Shares:
    """What the queues of one subscriber have paid."""

    def __init__(self, queues: Sequence[str], weights: Sequence[int]) -> None:
        """All begin alike; `weights` are 1 or more, in the order of `queues`."""
        self._weights = dict(zip(queues, weights, strict=True))
        self._paid = dict.fromkeys(queues, 0.0)

    def order(self, pairs: Sequence[ReadyPair]) -> list[ReadyPair]:
        """`pairs` for the next claim; those of one queue stay as they are."""
        asked = {pair.queue for pair in pairs}
        if asked:
            self._catch_up([queue for queue in self._paid if queue not in asked], asked)
        return sorted(pairs, key=lambda pair: (self._paid[pair.queue], -self._weights[pair.queue]))

    def claimed(self, pairs: Sequence[ReadyPair], rows: Sequence[ClaimedMessage], limit: int) -> None:
        """`rows` were claimed, at most `limit`, from `pairs`, in their order."""
        queues = list(dict.fromkeys(pair.queue for pair in pairs))
        if len(rows) < limit:
            # Every queue was asked and has nothing more: whoever is first next time, nobody waits for it.
            self._paid = dict.fromkeys(self._paid, 0.0)
            return
        last = 0
        for row in rows:
            self._paid[row.queue] += 1 / self._weights[row.queue]
            last = max(last, queues.index(row.queue))
        self._catch_up(queues[:last], queues[last:])

    def _catch_up(self, empty: Sequence[str], others: "Sequence[str] | set[str]") -> None:
        """Let the `empty` queues have no turns left that the `others` do not have; keep numbers small."""
        least = min(self._paid[queue] for queue in others)
        for queue in empty:
            self._paid[queue] = max(self._paid[queue], least)
        least = min(self._paid.values())
        for queue in self._paid:
            self._paid[queue] -= least
