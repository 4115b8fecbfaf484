"""Stride scheduling of queues with weights: which queue the next claim begins with.

Each message that is claimed from a queue costs it 1 / weight. The queue that has paid least comes
first in the next claim, the others take what room it leaves. So while several queues have messages,
what is claimed follows the weights, to within one claim of each; a queue whose turn it is and that
has nothing costs no claim. Turns are not saved up: a queue that comes back begins where the others
are.
"""

from collections.abc import Iterable, Mapping, Sequence

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair


class StrideScheduler:
    """What the queues of one subscriber have paid."""

    def __init__(self, queues: Sequence[str], weights: Sequence[int]) -> None:
        """All begin alike; `weights` are 1 or more, in the order of `queues`."""
        self._weights = dict(zip(queues, weights, strict=True))
        self._paid = dict.fromkeys(queues, 0.0)

    def order(self, asked: Iterable[str]) -> list[str]:
        """The queues `asked` from next, in their order."""
        queues = dict.fromkeys(asked)
        if queues:
            self._catch_up([queue for queue in self._paid if queue not in queues], queues)
        return sorted(queues, key=lambda queue: (self._paid[queue], -self._weights[queue]))

    def order_pairs(self, pairs: Sequence[ReadyPair]) -> list[ReadyPair]:
        """`pairs` for the next claim; those of one queue stay as they are."""
        rank = {queue: n for n, queue in enumerate(self.order(pair.queue for pair in pairs))}
        return sorted(pairs, key=lambda pair: rank[pair.queue])

    def claimed(self, asked: Iterable[str], rows: Sequence[ClaimedMessage], *, more: bool) -> None:
        """`rows` were claimed from the queues `asked`, in their order; `more` says that there may
        be others left.
        """
        queues = list(dict.fromkeys(asked))
        if not queues:
            return
        if not more:
            # Every queue was asked and has nothing else: all begin anew, as none has to wait.
            self._paid = dict.fromkeys(self._paid, 0.0)
            return
        last = 0
        place = {queue: n for n, queue in enumerate(queues)}
        for row in rows:
            self._paid[row.queue] += 1 / self._weights[row.queue]
            last = max(last, place[row.queue])
        self._catch_up(queues[:last], queues[last:])

    def gave_back(self, counts: Mapping[str, int]) -> None:
        """So many messages of each queue were claimed and went back: their turns are not used."""
        for queue, count in counts.items():
            self._paid[queue] -= count / self._weights[queue]
        self._begin_at_zero()

    def _catch_up(self, empty: Iterable[str], others: Iterable[str]) -> None:
        """Let the `empty` queues have no turns left that the `others` do not have; keep numbers
        small.
        """
        least = min(self._paid[queue] for queue in others)
        for queue in empty:
            self._paid[queue] = max(self._paid[queue], least)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        least = min(self._paid.values())
        for queue in self._paid:
            self._paid[queue] -= least
