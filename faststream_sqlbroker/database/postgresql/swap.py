"""Claims under policies in two statements, each of which commits by itself.

The first reads messages, leases, states and the queue's version from one snapshot. The second
raises the version and leases, but only if the version is still the same. So a claim that has
decided by what is no longer true writes nothing.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from faststream_sqlbroker.core.policies.seen import Candidate, Seen, SeenQueue, Swap
from faststream_sqlbroker.core.rows import Claimed
from faststream_sqlbroker.database.postgresql.answers import read_claimed


def read_seen(rows: Iterable[Sequence[Any]]) -> Seen:
    """The answer to `look`."""
    seen = Seen(0)
    known: dict[str, SeenQueue] = {}
    for now, queue, due_in, version, running, states, *columns in rows:
        seen.now = now
        if queue is None:
            continue
        if queue not in known:
            infos = {} if states is None else json.loads(states)
            known[queue] = SeenQueue(queue, version, running, infos)
        if due_in > 0:
            seen.waits.append(due_in)
        elif columns[0] is not None:
            seen.queues[queue] = known[queue]
            known[queue].candidates += map(Candidate._make, zip(*columns, strict=True))
    return seen


def swap_binds(swap: Swap) -> dict[str, Any]:
    """The binds of `swap`."""
    return {
        "queue": swap.queue,
        "version": swap.version,
        "ids": list(swap.ids),
        "lease": swap.lease,
        "token": swap.token,
        "scopes": list(swap.kept),
        "infos": [json.dumps(info) for info, _ in swap.kept.values()],
        "expiries": [expires for _, expires in swap.kept.values()],
    }


def read_swapped(rows: Iterable[Sequence[Any]], swap: Swap) -> Claimed | None:
    """The leased messages, in the order of `swap`; None: the version was another."""
    found = list(rows)
    if not found:
        return None
    rank = {message: n for n, message in enumerate(swap.ids)}
    leased = read_claimed((row for row in found if row[0] is not None), swap.token)
    return Claimed(sorted(leased, key=lambda message: rank[message.id]))
