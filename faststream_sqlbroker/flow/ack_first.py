"""AckPolicy.ACK_FIRST, at most once: a message is removed right before its handler starts."""

import logging
from time import monotonic
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store


async def remove_first(
    store: "Store", inflight: Inflight, rules: SettleRules, log: Log, rows: list[ClaimedMessage]
) -> list[ClaimedMessage]:
    """Commit the removal of `rows`; those that may start.

    What is not known to be committed does not run.
    """
    now = monotonic()
    settlements = [settle(r, Ack(), rules, ended_after=now - r.claimed_monotonic) for r in rows]
    inflight.flushing |= {r.id for r in rows}
    try:
        result = await store.settle(settlements)
    except StoreError as error:
        log(
            logging.ERROR,
            f"ACK_FIRST: the removal of messages {[r.id for r in rows]} is not known to be committed, "
            f"so they do not run ({error})",
        )
        result = None
    finally:
        inflight.flushing -= {r.id for r in rows}
    started = [r for r in rows if result is not None and r.id in result.settled]
    for row in rows:
        row.settle_as(Ack())
        inflight.held.pop(row.id, None)
    if result is not None:
        inflight.settled_count += len(result.settled)
        inflight.lease_lost_count += len(result.lost)
        for message_id in result.lost:
            text = f"lease lost: message {message_id} (phase ack first); it does not run here"
            log(logging.WARNING, text, message_id=message_id)
    return started
