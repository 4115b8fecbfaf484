"""What becomes of messages that a claim under policies has just leased."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.policies import Policy, key_of
from faststream_sqlbroker.core.reasons import NO_KEY, THROTTLED
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.policies.read_time import ReadTime


def refuse(
    rows: Iterable[ClaimedMessage], policies: Sequence[Policy], dead: Collection[int] = ()
) -> None:
    """Record why some of `rows` are claimed only to be made dead letters: those of `dead`, and
    those without a key that `policies` do not deliver.
    """
    keyed = refuses_keyless(policies)
    for row in rows:
        if row.id in dead:
            row.settle_as(Reject(THROTTLED))
        elif keyed and row.policy_key is None:
            row.settle_as(Reject(NO_KEY))


def refuses_keyless(policies: Sequence[Policy]) -> bool:
    """Whether a message without a key is a dead letter."""
    return any(
        getattr(policy, "without_key", "") == "dead_letter" and key_of(policy)
        for policy in policies
    )


def end_at(closes: int, rows: Iterable[ClaimedMessage], read: ReadTime) -> None:
    """None of `rows`, some of which wait for a worker, may start when the window has closed."""
    latest = read.surely_before(closes)
    for row in rows:
        slot = row.slot
        if slot is None:
            row.slot = Slot(0.0, latest)
        elif latest < slot.latest:
            row.slot = replace(slot, latest=latest)


def has_expired(row: ClaimedMessage) -> bool:
    """Whether it had expired when it was leased: it takes no slot."""
    return row.expires_at is not None and row.expires_at <= row.acquired_at


def may_start(row: ClaimedMessage) -> bool:
    """Whether its handler may start: it ends in no other way, and lives to see its slot."""
    if row.outcome is not None or has_expired(row):
        return False
    if row.expires_at is None or row.slot is None or row.slot.at is None:
        return True
    return row.expires_at > from_microseconds(row.slot.at)
