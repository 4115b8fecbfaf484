"""A batch that did not start as a whole: the handler gets it again in parts."""

from itertools import groupby
from operator import itemgetter

from faststream_sqlbroker.core.outcome import Ack, Again
from faststream_sqlbroker.core.rows import ClaimedMessage, end_publishing
from faststream_sqlbroker.flow.publish_on_ack import ACK_FIRST

Rows = list[ClaimedMessage]


def take_again(rows: Rows, *, ack_first: bool) -> tuple[Rows, list[Rows]]:
    """Those of `rows` that have ended, and the parts in which the handler is to get the others
    again.

    These are as they were before it was called.
    """
    again = [(row.outcome.part, row) for row in rows if isinstance(row.outcome, Again)]
    if not again:
        return rows, []
    ended = [row for row in rows if not isinstance(row.outcome, Again)]
    for _, row in again:
        row.settle_anew(Ack() if ack_first else None)
        row.chained = ()
    end_publishing([row for _, row in again], ACK_FIRST if ack_first else "")
    again.sort(key=itemgetter(0))
    return ended, [[row for _, row in pairs] for _, pairs in groupby(again, key=itemgetter(0))]
