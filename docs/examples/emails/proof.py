"""What the Email service promises, checked against what the database and the senders have written
down.

The definitions are written out once more here, from the documentation and not from the broker's
code. Times are whole microseconds of the database's clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from docs.examples.emails.records import Mail, Send, Starts

MOST_TWICE = 78
"""E-mails that one killed process can have sent without the database knowing.

While a write takes long, a sender claims until 40 outcomes (two flushes of 20) are unwritten. Then
it still sends what it holds: 30 that wait (1.5 batches of 20) and the 8 of its workers.
"""
_SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Rules:
    """What is promised."""

    hour: int
    minute: int
    undo: int
    rate: int
    queue: str = "email.send"


@dataclass
class Result:
    """The counts, and a sentence for each violation."""

    published: int = 0
    sent: int = 0
    superseded: int = 0
    sent_twice: int = 0
    lost: int = 0
    not_last: int = 0
    over_rate: int = 0
    violations: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The counts as text."""
        counts = {name: value for name, value in vars(self).items() if name != "violations"}
        return "email: " + " ".join(f"{name}={value}" for name, value in counts.items())


@dataclass(frozen=True)
class Burst:
    """E-mails of one user that count as one."""

    start: int
    end: int
    mails: tuple[Mail, ...]

    @property
    def newest(self) -> Mail:
        """The one to send."""
        return max(self.mails, key=lambda mail: mail.id)


def bursts_of(mails: Iterable[Mail], rules: Rules) -> list[Burst]:
    """Partition the e-mails of one user.

    An e-mail arrives when it was created, or when it is due if that is later: here after the time
    to take it back. A burst starts with an arrival, and ends when nothing has arrived for an hour,
    or an hour after its start.
    """
    found: list[Burst] = []
    arrivals = sorted((mail.created_at + rules.undo, mail.id, mail) for mail in mails)
    while arrivals:
        start = last = arrivals[0][0]
        inside = []
        while arrivals and arrivals[0][0] <= min(last + rules.hour, start + rules.hour):
            last, _, mail = arrivals.pop(0)
            inside.append(mail)
        found.append(Burst(start, min(last + rules.hour, start + rules.hour), tuple(inside)))
    return found


def check(
    published: set[int],
    mails: Sequence[Mail],
    sends: Sequence[Send],
    grants: Sequence[Starts],
    killed: int | None,
    rules: Rules,
) -> Result:
    """Compare; a result without violations is the proof.

    Args:
        published: Ids that the writers were given.
        mails: The archive.
        sends: The senders' notes.
        grants: What the throttle knew after each claim.
        killed: The process that was killed.
        rules: What was promised.
    """
    result = Result(published=len(published))
    _check_ends(result, published, mails, sends)
    _check_twice(result, mails, sends, killed)
    _check_bursts(result, mails, sends, rules)
    _check_rate(result, mails, grants, rules)
    return result


def _check_ends(
    result: Result, published: set[int], mails: Sequence[Mail], sends: Sequence[Send]
) -> None:
    """Each e-mail that was published was sent, or is superseded; there are no others."""
    sent = {send.message_id for send in sends}
    ended: set[int] = set()
    for mail in mails:
        if mail.id not in published:
            result.violations.append(f"e-mail {mail.id} is in the archive, but was not published")
        elif mail.state == "COMPLETED" and mail.id in sent:
            result.sent += 1
            ended.add(mail.id)
        elif mail.state == "DISCARDED" and mail.reason == _SUPERSEDED:
            result.superseded += 1
            ended.add(mail.id)
        else:
            result.violations.append(
                f"e-mail {mail.id} ended as {mail.state} ({mail.reason}), and was not sent"
            )
    result.lost = len(published - ended)
    result.violations += [f"e-mail {i} is lost" for i in sorted(published - ended)]
    if len(mails) > len({mail.id for mail in mails}):
        result.violations.append("an e-mail is in the archive twice")


def _check_twice(
    result: Result, mails: Sequence[Mail], sends: Sequence[Send], killed: int | None
) -> None:
    """Only what the killed process had sent, and could not say any more, is sent again."""
    processes: dict[int, list[int]] = defaultdict(list)
    for send in sends:
        processes[send.message_id].append(send.process)
    deliveries = {mail.id: mail.deliveries for mail in mails}
    twice = {mail: by for mail, by in processes.items() if len(by) > 1}
    result.sent_twice = len(twice)
    for mail, by in twice.items():
        if by[0] != killed or len(by) > 2 or deliveries.get(mail, 0) < 2:
            result.violations.append(f"e-mail {mail} was sent by {by}, and {killed} was killed")
    if len(twice) > MOST_TWICE:
        result.violations.append(
            f"{len(twice)} e-mails were sent twice: more than one process can hold"
        )


def _check_bursts(
    result: Result, mails: Sequence[Mail], sends: Sequence[Send], rules: Rules
) -> None:
    """Of each burst the newest e-mail was sent, after the burst's end, and the others were not."""
    first_sent: dict[int, int] = {}
    for send in sends:
        first_sent[send.message_id] = min(
            first_sent.get(send.message_id, send.sent_at), send.sent_at
        )
    by_user: dict[str, list[Mail]] = defaultdict(list)
    for mail in mails:
        by_user[mail.user].append(mail)
    problems = [
        problem
        for of_user in by_user.values()
        for burst in bursts_of(of_user, rules)
        for problem in _burst_problems(burst, first_sent)
    ]
    strangers = set(first_sent) - {mail.id for mail in mails}
    problems += [f"e-mail {i} was sent, and is not in the archive" for i in sorted(strangers)]
    result.not_last = len(problems)
    result.violations += problems


def _burst_problems(burst: Burst, first_sent: dict[int, int]) -> Iterable[str]:
    newest, ids = burst.newest, {mail.id for mail in burst.mails}
    for mail in burst.mails:
        sent_at = first_sent.get(mail.id)
        if mail is not newest and sent_at is not None:
            yield (
                f"e-mail {mail.id} of {mail.user} was sent, but the last of its burst is "
                f"{newest.id}"
            )
        if mail is newest and sent_at is None:
            yield f"e-mail {mail.id} of {mail.user}, the last of its burst, was not sent"
        if mail is newest and sent_at is not None and sent_at < burst.end:
            early = burst.end - sent_at
            yield f"e-mail {mail.id} of {mail.user} was sent {early} us before its burst ended"
        if mail.reason == _SUPERSEDED:
            by = mail.related_id
            if by is None or by <= mail.id or by not in ids:
                yield (
                    f"e-mail {mail.id} of {mail.user} was superseded by {by}, which is no later "
                    f"one of its burst"
                )


def _check_rate(
    result: Result, mails: Sequence[Mail], grants: Sequence[Starts], rules: Rules
) -> None:
    """In no minute, wherever it begins, more e-mails were let through than the rate, as the
    throttle has noted; and it has noted each of them.
    """
    starts = all_starts(grants, rules.minute)
    over = [
        f"{rules.rate + 1} starts within {late - early} us"
        for early, late in zip(starts, starts[rules.rate :], strict=False)
        if late - early <= rules.minute
    ]
    # Of a killed process the latest moments stay: e-mails may have started long before.
    count = len(starts) + untold_starts(grants, rules.minute)
    if len(moved := moves(mails, rules)) > count:
        over.append(f"{len(moved)} e-mails were let through, with {count} starts")
    result.over_rate = len(over)
    result.violations += over


def all_starts(grants: Sequence[Starts], minute: int) -> list[int]:
    """When e-mails were let through at the latest, in order.

    A claim notes for each e-mail the latest moment at which it starts. The next claim of the same
    process notes when that was, or nothing if it did not start. What is not noted any more, though
    less than a minute is over, was replaced so.
    """
    starts: list[int] = []
    before: Counter[int] = Counter()
    for grant in grants:
        now = Counter(dict(grant.slots))
        starts += [at for at in (before - now).elements() if at < grant.now - minute]
        before = now
    return sorted([*starts, *before.elements()])


def untold_starts(grants: Sequence[Starts], minute: int) -> int:
    """How many e-mails may have been let through at a moment that no claim has noted.

    A claim that comes more than a minute after a start takes the latest moment out of the log and
    notes no other, as the start keeps no e-mail waiting any more. What did not start looks alike.
    """
    untold = 0
    before: Counter[int] = Counter()
    for grant in grants:
        now = Counter(dict(grant.slots))
        replaced = [at for at in (before - now).elements() if at >= grant.now - minute]
        moments = [at for at in (now - before).elements() if at <= grant.now]
        untold += max(0, len(replaced) - len(moments))
        before = now
    return untold


def moves(mails: Sequence[Mail], rules: Rules) -> list[int]:
    """When e-mails came into the sending queue, in order."""
    return sorted(mail.moved_at for mail in mails if mail.queue == rules.queue)


def most_within(times: Sequence[int], length: int) -> int:
    """The most of `times`, which are in order, in any period of `length`."""
    most = first = 0
    for n, at in enumerate(times):
        while times[first] <= at - length:
            first += 1
        most = max(most, n - first + 1)
    return most
