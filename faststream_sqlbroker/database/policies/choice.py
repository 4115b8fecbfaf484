"""Select the due messages of a queue that a claim under its lock leases, and their order.

Times are microseconds since 1970.
"""

from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies import Debounce, KeepLast
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.parts.ordered import UNLIMITED, Cursors, HeadSearch
from faststream_sqlbroker.database.policies.intake import Due, Intake
from faststream_sqlbroker.database.policies.key_heads import BurstHeads, LatestHeads
from faststream_sqlbroker.database.policies.key_slots import KeySlots
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest
from faststream_sqlbroker.database.policies.slots import Slots

MAX_DEFERRAL = 5 * MICROSECONDS
"""A message that waits for a slot of its key behind a burst is checked again after this, if many
do (microseconds).
"""


@dataclass
class NextScan:
    """The time of the next scan of a queue."""

    now: int
    delays: list[float] = field(default_factory=list)
    """Seconds until each requested scan."""
    has_more: bool = False
    """True if more remains to be scanned immediately."""

    def get_delay(self, at: int) -> float:
        """Return the seconds from now to `at`, at least a millisecond."""
        return max(0.001, (at - self.now) / MICROSECONDS)


@dataclass(eq=False)
class MessageSelection:
    """Selects the messages to lease. Its attributes hold the results of the policies so far."""

    intake: Intake
    slots: Slots
    request: PolicyClaimRequest
    suspect_rule: SuspectRule | None
    cursors: Cursors
    """Moved by a selection that goes from key to key."""
    next_scan: NextScan
    """Receives the times of the next scans."""
    immediate_starts: int = 0
    """Number of messages that find a free worker."""
    bursts: BurstHeads | LatestHeads | None = None
    incomplete_policy: Debounce | KeepLast | None = None
    """The policy that has not seen all messages yet."""
    max_per_key: int | None = None
    """Maximum leases of a key."""

    def select(self, limit: int, *, skip_suspects: bool = False) -> list[int]:
        """Return up to `limit` messages to lease, in the order of their starts.

        A claim calls this after all policies have seen the due messages. With `skip_suspects`,
        without suspects: messages that may have killed their process. Otherwise suspects are
        returned only if the rule wants them reported to the caller, which then claims them alone.
        """
        if limit < 1:
            return []
        suspect_rule = self.suspect_rule
        may_return_suspects = suspect_rule is not None and suspect_rule.report and not skip_suspects
        excluded = None if may_return_suspects else suspect_rule
        if self._is_by_key:
            return self._select_by_key(limit, excluded)
        if self.bursts is None:
            return [message for message, _, _ in self._list_due(limit, excluded)]
        return self._select_from_bursts(self.bursts, limit, excluded)

    @property
    def _is_by_key(self) -> bool:
        """True if a claim goes from key to key."""
        limited = self.max_per_key is not None or self.slots.keys is not None
        return self.request.ordered or (limited and self.bursts is None)

    def _list_due(self, size: int, excluded: SuspectRule | None) -> list[Due]:
        """Return up to `size` due messages that all policies have passed so far.

        Each policy flags the messages that it has seen; a message without the flags waits for the
        next claim. `excluded` are suspects, which may have killed their process and run alone.
        """
        intake = self.intake
        due: list[Due] = []
        for pair in intake.pairs:
            if len(due) < size:
                due += intake.rows.list_due(
                    pair.priority,
                    required_flags=intake.passed_flags,
                    now=intake.now,
                    size=size - len(due),
                    excluded=excluded,
                    only=self.request.only,
                )
        return due

    def _select_from_bursts(
        self, bursts: BurstHeads | LatestHeads, limit: int, excluded: SuspectRule | None
    ) -> list[int]:
        """Select the messages that Debounce or KeepLast delivers now, a message of each key.

        Reads more than `limit` due messages, as several may have one key. While a policy is
        incomplete, it has not seen all arrivals: those of the keys read here join their bursts
        first, as a newer message may be among them. If the page was full but gave too few messages,
        the claim is repeated soon.
        """
        size = max(100, 2 * limit)
        due = self._list_due(size, excluded)
        has_more_due = len(due) == size
        if self.incomplete_policy is not None:
            due = self.intake.catch_up(self.incomplete_policy, due)
        if self.slots.keys is not None:
            due = self._filter_by_slot(self.slots.keys, due, has_more_due=has_more_due)
        selected = bursts.select(due, limit)
        self.next_scan.delays += [self.next_scan.get_delay(at) for at in bursts.next_checks]
        self.next_scan.has_more |= has_more_due and len(selected) < limit
        return selected

    def _filter_by_slot(self, keys: KeySlots, due: list[Due], *, has_more_due: bool) -> list[Due]:
        """Return the messages of `due` whose key has a free slot of the Throttle now.

        A slot is a time at which the Throttle lets one message start. If more messages are due than
        were read (`has_more_due`), the messages without a slot get a later due time. Otherwise they
        would fill the next page too, and hide messages of other keys.
        """
        keys.load_keys(key for _, key, _ in due if key is not None)
        open_messages = [message for message in due if keys.is_open(message[1])]
        if has_more_due:
            # Not until their slots: after a change of the rate, messages must not stay deferred for
            # long.
            blocked = {
                message: min(keys.get_next_slot(key), self.intake.now + MAX_DEFERRAL)
                for message, key, _ in due
                if key is not None and not keys.is_open(key)
            }
            self.intake.rows.shift(blocked, 0)
        return open_messages

    def _select_by_key(self, limit: int, excluded: SuspectRule | None) -> list[int]:
        """Select messages key by key, for ordered=True or limits of each key.

        The head of a key is its first message, the only one that may start next. Schedules the next
        scan for when another head is due. With `request.only`, checks that message alone.
        """
        heads = HeadSearch(
            self.intake.rows.connection,
            self.intake.rows.dialect.sql,
            limit,
            excluded=excluded,
            mask=self.intake.passed_flags,
            per_key=None if self.request.ordered else self.max_per_key or UNLIMITED,
            starting=self.immediate_starts,
            gate=self.slots.keys,
            by_header=self.intake.rows.by_header,
        )
        if self.request.only is not None:
            return [
                i for i, _, _ in self._list_due(1, None) if heads.may_start(self.intake.queue, i)
            ]
        if heads.scan(self.intake.pairs, self.cursors):
            # With a pause: all keys may be busy, and there may be many.
            self.next_scan.delays.append(0.0)
        elif not heads.is_full and (next_wait := heads.get_next_due_in()) is not None:
            self.next_scan.delays.append(next_wait)
        return heads.ids[:limit]
