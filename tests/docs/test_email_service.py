"""The email service of docs/examples: its proof finds every violation, and the whole of it runs."""

import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from docs.examples.emails import proof
from docs.examples.emails.proof import (
    Result,
    Rules,
    all_starts,
    bursts_of,
    most_within,
    untold_starts,
)
from docs.examples.emails.records import Mail, Send, Starts
from docs.examples.emails.service import Plan
from docs.examples.emails.traffic import moments
from tests import forked

SECOND = 1_000_000
PATIENCE = 900
"""Seconds that the example may take: half a minute, unless many others run at the same time."""
RULES = Rules(hour=4 * SECOND, minute=SECOND, undo=SECOND, rate=2)
KILLED = 11
OTHER = 12


def mail(number: int, at: float, user: str = "ada", **more: Any) -> Mail:
    """An e-mail that was created so many seconds after the beginning, and was sent."""
    values: dict[str, Any] = {
        "created_at": round(at * SECOND),
        "moved_at": round((at + 9) * SECOND),
        "queue": "email.send",
        "state": "COMPLETED",
        "reason": None,
        "related_id": None,
        "deliveries": 1,
    }
    return Mail(id=number, user=user, **(values | more))


def gone(number: int, at: float, by: int, user: str = "ada") -> Mail:
    """One that a later one has superseded."""
    ended = {
        "state": "DISCARDED",
        "reason": "superseded",
        "related_id": by,
        "queue": "email",
        "deliveries": 0,
    }
    return mail(number, at, user, **ended)


class History:
    """Two bursts of one user and one of another, as they should be; to be spoilt."""

    def __init__(self) -> None:
        self.mails = {
            m.id: m
            for m in (
                gone(1, 0, 2),
                gone(2, 1, 3),
                mail(3, 4),
                mail(4, 4.5),
                gone(5, 2, 6, "bob"),
                mail(6, 3, "bob"),
            )
        }
        self.published = {1, 2, 3, 4, 5, 6}
        self.sends = [
            Send(3, KILLED, 14 * SECOND),
            Send(6, OTHER, 14 * SECOND),
            Send(4, OTHER, 15 * SECOND),
        ]
        self.grants: list[Starts] = []
        self.grant(11, 11 * SECOND)
        self.grant(12, 11 * SECOND, 12 * SECOND - 9)
        self.grant(13, 12 * SECOND - 9, 13 * SECOND)

    def grant(self, now: int, *starts: int) -> None:
        """What the throttle knows after a claim at a second."""
        self.grants.append(Starts(now * SECOND, [(at, 1) for at in starts]))

    def spoil(self, number: int, **changes: Any) -> None:
        """Change an e-mail."""
        self.mails[number] = replace(self.mails[number], **changes)

    def check(self) -> Result:
        """What the proof says."""
        mails = list(self.mails.values())
        return proof.check(self.published, mails, self.sends, self.grants, KILLED, RULES)


def counts(result: Result) -> dict[str, int]:
    """The numbers of the last line."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", result.line())}


def test_a_right_history_has_no_violation() -> None:
    result = History().check()
    assert result.violations == []
    line = "email: published=6 sent=3 superseded=3 sent_twice=0 lost=0 not_last=0 over_rate=0"
    assert result.line() == line


def test_an_email_of_a_killed_process_may_be_sent_again_and_is_counted() -> None:
    history = History()
    history.sends.append(Send(3, OTHER, 18 * SECOND))
    history.spoil(3, deliveries=2)
    result = history.check()
    assert (result.violations, result.sent_twice, result.sent) == ([], 1, 3)


def lose_one_that_is_superseded(h: History) -> None:
    del h.mails[1]


def lose_one_that_should_be_sent(h: History) -> None:
    del h.mails[6]
    h.sends = [send for send in h.sends if send.message_id != 6]


def complete_without_sending(h: History) -> None:
    h.sends = [send for send in h.sends if send.message_id != 6]


def fail_one(h: History) -> None:
    h.spoil(4, state="FAILED", reason="max_attempts")


def send_another_than_the_last(h: History) -> None:
    h.mails |= {5: mail(5, 2, "bob"), 6: gone(6, 3, 5, "bob")}
    h.sends[1] = Send(5, OTHER, 14 * SECOND)


def send_an_older_one_too(h: History) -> None:
    h.mails[5] = mail(5, 2, "bob")
    h.sends.append(Send(5, OTHER, 14 * SECOND))
    h.grant(14, 14 * SECOND - 5)


def send_one_for_two_bursts(h: History) -> None:
    h.mails[3] = gone(3, 4, 4)
    del h.sends[0]


def send_before_the_burst_ends(h: History) -> None:
    h.sends[1] = Send(6, OTHER, 7 * SECOND - 1)


def supersede_by_another_user(h: History) -> None:
    h.spoil(5, related_id=4)


def supersede_by_an_older_one(h: History) -> None:
    h.spoil(2, related_id=1)


def send_twice_without_a_kill(h: History) -> None:
    h.sends.append(Send(6, OTHER, 18 * SECOND))
    h.spoil(6, deliveries=2)


def send_twice_in_one_delivery(h: History) -> None:
    h.sends.append(Send(3, OTHER, 18 * SECOND))


def send_what_was_not_written(h: History) -> None:
    h.sends.append(Send(99, OTHER, 18 * SECOND))


def archive_what_was_not_published(h: History) -> None:
    h.published.remove(4)


def grant_too_many_at_once(h: History) -> None:
    h.grants.append(Starts(13 * SECOND, [(13 * SECOND, 3)]))


def grant_a_slot_of_the_next_minute_too_early(h: History) -> None:
    del h.grants[2]
    h.grant(12, 11 * SECOND, 12 * SECOND - 9, 12 * SECOND)


def let_one_through_without_a_start(h: History) -> None:
    del h.grants[2]


def take_a_start_back(h: History) -> None:
    h.grant(13, 12 * SECOND)


def test_a_claim_may_come_too_late_to_note_when_an_email_started() -> None:
    """It started at 11.5 of a slot that reached to 13, and the next claim came at 12.6."""
    history = History()
    del history.grants[1:]
    history.grant(11, 11 * SECOND, 13 * SECOND)
    history.grants.append(Starts(12 * SECOND + 600_000, [(12 * SECOND + 700_000, 1)]))
    assert len(all_starts(history.grants, RULES.minute)) == 2
    assert history.check().violations == []
    # Once no claim can have come too late, each start is noted.
    del history.grants[1]
    assert "let through" in str(history.check().violations)


@pytest.mark.parametrize(
    ("spoil", "counted"),
    [
        (lose_one_that_is_superseded, "lost"),
        (lose_one_that_should_be_sent, "lost"),
        (complete_without_sending, "lost"),
        (fail_one, "lost"),
        (send_another_than_the_last, "not_last"),
        (send_an_older_one_too, "not_last"),
        (send_one_for_two_bursts, "not_last"),
        (send_before_the_burst_ends, "not_last"),
        (supersede_by_another_user, "not_last"),
        (supersede_by_an_older_one, "not_last"),
        (send_what_was_not_written, "not_last"),
        (send_twice_without_a_kill, "sent_twice"),
        (send_twice_in_one_delivery, "sent_twice"),
        (archive_what_was_not_published, None),
        (grant_too_many_at_once, "over_rate"),
        (grant_a_slot_of_the_next_minute_too_early, "over_rate"),
        (let_one_through_without_a_start, "over_rate"),
        (take_a_start_back, "over_rate"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_violation_is_found(spoil: Any, counted: str | None) -> None:
    """Z1: a proof that cannot fail proves nothing."""
    history = History()
    spoil(history)
    result = history.check()
    assert result.violations
    if counted is not None:
        assert counts(result)[counted] > 0


@pytest.mark.parametrize(
    ("created", "bursts"),
    [
        ([0], [[0]]),
        ([0, 4], [[0, 1]]),  # at the end still belongs to it
        ([0, 4.000001], [[0], [1]]),
        ([0, 3, 4.5, 8.6], [[0, 1], [2], [3]]),  # from a burst's start, not from its last
        ([0, 1, 2, 3, 4, 5, 6], [[0, 1, 2, 3, 4], [5, 6]]),
    ],
)
def test_bursts_are_as_defined(created: list[float], bursts: list[list[int]]) -> None:
    mails = [mail(n, at) for n, at in enumerate(created)]
    found = bursts_of(reversed(mails), RULES)
    assert [[m.id for m in burst.mails] for burst in found] == bursts
    assert found[0].start == SECOND
    assert found[0].end == 5 * SECOND


def test_the_newest_is_the_one_with_the_greatest_id() -> None:
    """Not the one that was created last: the order of ids is the order of publishing."""
    [burst] = bursts_of([mail(7, 1), mail(8, 0.5)], RULES)
    assert burst.newest.id == 8


def test_starts_are_what_was_noted_last() -> None:
    grants = [
        Starts(1, [(1, 2)]),
        Starts(5, [(1, 2), (8, 1), (9, 1)]),
        Starts(7, [(6, 1)]),
        Starts(12, [(12, 2)]),
    ]
    assert all_starts(grants, 5) == [1, 1, 6, 12, 12]
    assert untold_starts(grants, 5) == 1  # one of the two at 8 and 9
    assert most_within([1, 1, 5, 5, 9], 5) == 4
    assert most_within([], 5) == 0


def test_the_writers_are_as_unruly_as_the_example_needs() -> None:
    """The full size has bursts that overlap, bursts longer than an hour, and users with several."""
    plan = Plan()
    written = moments(plan)
    mails = [mail(n, at, user) for n, (at, user) in enumerate(written)]
    rules = Rules(*(round(s * SECOND) for s in (plan.hour, plan.minute, plan.undo)), plan.rate)
    users = {user for _, user in written}
    bursts = [len(bursts_of([m for m in mails if m.user == user], rules)) for user in users]
    assert len(users) == 1_000
    assert max(bursts) >= 4
    # So that the throttle has something to hold back.
    assert sum(bursts) > plan.rate / plan.minute * plan.publishing
    assert plan.rate % plan.together  # else the database would forget slots before they are read


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The example as a command."""
    return forked.finished("-m", "docs.examples.email_service", *arguments, timeout=PATIENCE)


@pytest.mark.timeout(PATIENCE + 60)
async def test_the_example_proves_itself(database_url: str) -> None:
    """Z1, Z11, Z12. A publish or a process may take ten seconds before anything is broken."""
    size = "--users 40 --times 2 --publishing 6 --hour 2 --minute 1 --rate 10"
    patience = "--undo 11 --lease 16"
    done = run("--url", database_url, *size.split(), *patience.split())
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    last = done.stdout.rstrip().splitlines()[-1]
    numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", last)}
    assert last == "email: " + " ".join(f"{name}={value}" for name, value in numbers.items())
    expected = ["published", "sent", "superseded", "sent_twice", "lost", "not_last", "over_rate"]
    assert list(numbers) == expected
    assert numbers["published"] == numbers["sent"] + numbers["superseded"] > 250
    assert numbers["lost"] == numbers["not_last"] == numbers["over_rate"] == 0
    assert "minute   1 " in said
    assert "killed (SIGKILL)" in said


def test_a_violation_is_printed_and_sets_the_exit_code() -> None:
    """No e-mail can be published within a microsecond, so that nothing would be proved."""
    size = "--users 2 --publishing 0.1 --hour 0.5 --undo 0.000001"
    done = run("sqlite", *size.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken promise: nothing is proved: a publish took " in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("email: published=")
