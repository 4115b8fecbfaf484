"""The second checker: python -m tests.faults.second_checker [--rules] HISTORY…

It knows the promises only from docs/explanation/promises.md, the limits of policies from
docs/reference/policies.md, and shares no rule with the first (`checker.py`). Each HISTORY is a file
of JSON lines, perhaps gzipped, or a folder of such files. It prints one line for each broken
promise, and ends with 1 if there is one. `--rules` prints the rules with the sentences that they
check.

The records are those of `records.py`. What a history cannot show:

* 1: whether the broker or the database has lost a row; `finish` has to say what the database is.
* 2: which messages were in one batch; an operator's cancel is recorded for the message only.
* 3: what a stale worker did outside the database.
* 4: whether a message is listed soon enough; the list is read once, after the run.
* 5, 6: statements that the handler sent on another connection, publishes with `with_ack=False`, the
  `PublishError` of a late task, and answers to another broker.
* 7: a lease whose handler never started.
* 9: that the replaced message was archived in the claim's transaction, and what stood by.
* All: a broken promise that the workers' records do not touch, as of queues without records.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from tests.faults.records import ACKED, SECOND, Message, Record, Row, Run, Story, read

RELUCTANT = frozenset({"refused", "tried", "caught"})
"""Ends of handlers whose ack the database may refuse."""
RETRIED = frozenset({"nack", "rolled back"}) | RELUCTANT
"""Ends after which the handler may start again, and that may cost an attempt."""
TOLERANCE = 0.1
"""Seconds that the database's clock and the machine's may differ over a handler's run."""
ROUNDING = 10
"""Microseconds: a process's clock is a float."""
AGREE = "the checkers agree"
"""The rule that `compare` adds to those of the first checker."""
ALONE = frozenset(
    {
        "1 nothing stands still",
        "2 no repeat in vain",
        "3 live holders keep their leases",
    }
)
"""Rules of the first checker that go beyond the promises."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A broken promise."""

    rule: str
    text: str

    def __str__(self) -> str:
        """One plain line."""
        return f"promise {self.rule}: {self.text}"


Check = Callable[[Story], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    name: str
    promise: str
    """The sentence that it checks."""
    check: Check
    durable: bool
    """Whether it holds only while the database keeps its commits."""


RULES: list[Rule] = []


def rule(name: str, promise: str, *, durable: bool = True) -> Callable[[Check], Check]:
    """Enter a rule that checks the sentence `promise`."""

    def enter(check: Check) -> Check:
        RULES.append(Rule(name, promise, check, durable))
        return check

    return enter


@rule(
    "1 nothing lost",
    "If the transaction of your publish committed, the message is never lost, as long as the "
    "database keeps its commits.",
)
def nothing_lost(story: Story) -> Iterator[str]:
    """What was committed, or has started, has a row."""
    for m in story.messages.values():
        if m.rows or m.publish is None or m.publish.outcome == "rolled back":
            continue
        if m.publish.outcome == "committed":
            when = f"between {m.publish.began:.3f} and {m.publish.at:.3f}"
            yield f"message {m.number} of {m.publish.queue!r}, committed {when}, has no row"
        elif m.runs:
            yield f"message {m.number} has no row, but started: {m.runs[0]}"


@rule(
    "1 one recorded outcome",
    "The message waits, is being handled, or is settled with a recorded outcome.",
)
def one_outcome(story: Story) -> Iterator[str]:
    """A message has one row, and none waits at the end for which there was time."""
    patience = story.finish.get("patience", inf)
    for m in story.messages.values():
        if len(m.rows) > 1:
            yield f"message {m.number} has {len(m.rows)} rows: {m.rows[0]}; {m.rows[1]}"
        if m.publish is None or m.row is None or m.row.table != "message":
            continue
        if (waits := story.finished_at - m.publish.at) >= patience:
            began = f"published at {m.publish.at:.3f}"
            yield f"message {m.number}, {began}, still waits after {waits:.0f} s: {m.row}"


@rule(
    "1 nothing uncommitted is seen",
    "If the transaction was not committed, no handler ever sees the message.",
    durable=False,
)
def nothing_uncommitted(story: Story) -> Iterator[str]:
    """What was rolled back has no start and no row; a transaction is visible as a whole."""
    for m in story.messages.values():
        seen = f"started: {m.runs[0]}" if m.runs else f"has a row: {m.row}"
        if not m.runs and m.row is None:
            continue
        if m.publish is None:
            yield f"message {m.number} was never published, but {seen}"
        elif m.publish.outcome == "rolled back":
            yield f"message {m.number}, rolled back at {m.publish.at:.3f}, {seen}"
        elif m.runs and m.runs[0].at < m.publish.began:
            yield f"message {m.number}, published from {m.publish.began:.3f} on, {seen}"
    for publish in story.publishes:
        kept = [n for n in publish.numbers if story.messages[n].rows]
        if publish.outcome == "unknown" and kept and len(kept) < len(publish.numbers):
            sent = f"sent in one transaction at {publish.began:.3f}"
            yield f"messages {list(publish.numbers)}, {sent}, were committed in part: {kept}"


@rule("2 no repeat without a reason", "Your handler starts again only after one of these:")
def no_repeat(story: Story) -> Iterator[str]:
    """Each start but the first has one of the reasons."""
    for m in story.messages.values():
        if len(m.runs) < 2:
            continue
        for first, then in pairwise(sorted(m.runs, key=lambda r: (r.queue, r.delivery, r.at))):
            if first.queue != then.queue or story.has(first.queue, "ack_first"):
                continue
            if first.delivery == then.delivery:
                yield f"message {m.number} started twice under one claim: {first}; {then}"
            elif not _may_repeat(story, first, then.at):
                yield f"message {m.number} started again without a reason: {first}; {then}"


def _may_repeat(story: Story, run: Run, before: float = inf) -> bool:
    """Whether the message of `run` may start again, with a reason from `before`."""
    if run.lost or run.unknown or story.crashed(run.pid, before):
        return True
    if run.ended is None:
        # It raised, or was cut off: what its process does afterwards says nothing.
        return True
    return run.end in RETRIED and run.ended <= before


@rule(
    "2 one id for each message",
    "It is the same at every delivery, after a move, a redrive, and in the archive, and no other "
    "message of the database ever has it.",
    durable=False,
)
def one_id(story: Story) -> Iterator[str]:
    """A message has one id, and no other has the same."""
    owners: dict[Any, Run] = {}
    for m in story.messages.values():
        for run in m.runs:
            if run.message_id != m.runs[0].message_id:
                ids = f"{m.runs[0].message_id} and {run.message_id}"
                yield f"message {m.number} had the ids {ids}: {m.runs[0]}; {run}"
            owner = owners.setdefault(run.message_id, run)
            if owner.number != run.number:
                both = f"messages {owner.number} and {run.number}"
                yield f"{both} had the id {run.message_id}: {owner}; {run}"
                break


@rule("2 at least once", "Delivery is at least once")
def at_least_once(story: Story) -> Iterator[str]:
    """What is COMPLETED was handled to a good end."""
    for m in story.messages.values():
        row = m.row
        if row is None or not m.completed or not story.has(row.queue, "noted"):
            continue
        if not story.has(row.queue, "ack_first") and not any(r.end in ACKED for r in m.runs):
            runs = "; ".join(map(str, m.runs)) or "it never started"
            yield f"message {m.number} is COMPLETED, but no handler acked it: {runs}. {row}"


@rule(
    "3 a stale worker changes nothing",
    "A worker that lost its lease can never finish, retry, move or dead-letter the message.",
)
def no_stale_write(story: Story) -> Iterator[str]:
    """The outcome is that of the last delivery, and comes after its handler's end."""
    for m in story.messages.values():
        row = m.row
        if row is None or not m.runs or not story.has(row.queue, "noted"):
            continue
        for run in m.runs if row.archived is not None else ():
            if run.queue == row.queue and run.delivery > row.deliveries:
                yield f"message {m.number} was settled before its {run}: {row}"
        if m.completed and not story.has(row.queue, "ack_first"):
            yield from _stale_ack(story, m, row)
        yield from _stale_retry(m)


def _stale_ack(story: Story, m: Message, row: Row) -> Iterator[str]:
    run = m.deciding()
    if run is None or run.end not in ACKED:
        acked = next((r for r in m.runs if r.end in ACKED), None)
        if acked is not None:
            holder = "a delivery that never started" if run is None else run
            yield f"message {m.number} was held by {holder}, and acked by {acked}: {row}"
        return
    if run.lost and not run.unknown:
        yield f"message {m.number} was acked without its lease, by {run}: {row}"
    if run.claimed is None or run.stored is None or run.ended is None or row.archived is None:
        return
    # A transaction's time may be that of its begin, before the handler.
    held = (row.archived - run.stored) / SECOND
    early = 0 <= held < run.ended - run.claimed - TOLERANCE
    if early and not story.has(row.queue, "transactional"):
        when = f"{held:.3f} s after its claim, before its handler's end"
        yield f"message {m.number} was settled {when}: {run}. {row}"


def _stale_retry(m: Message) -> Iterator[str]:
    for first, then in pairwise(sorted(m.runs, key=lambda r: r.delivery)):
        fenced = first.lost and not first.unknown
        if first.queue == then.queue and fenced and then.attempts > first.attempts:
            yield f"message {m.number} was charged an attempt without a lease: {first}; {then}"


@rule("4 at most once", "the broker never runs it again")
def at_most_once(story: Story) -> Iterator[str]:
    """A message of ACK_FIRST starts once."""
    for m in story.messages.values():
        runs = [r for r in m.runs if story.has(r.queue, "ack_first")]
        if len(runs) > 1:
            yield f"message {m.number} of ACK_FIRST started again: {'; '.join(map(str, runs))}"


@rule("4 unknown starts are listed", "`broker.admin.unknown()` lists such messages")
def unknown_is_listed(story: Story) -> Iterator[str]:
    """What a crash cut off, or kept from starting, is listed."""
    for m in story.messages.values():
        row = m.row
        if row is None or not m.completed or m.listed or not story.has(row.queue, "ack_first"):
            continue
        if not m.runs:
            yield f"message {m.number} was removed, never started, and is not listed: {row}"
        for run in m.runs[:1]:
            if run.end is None and story.codes.get(run.pid, 0) != 0:
                yield f"message {m.number} was cut off by a crash, and is not listed: {run}"


@rule("5 effects exactly once", "So effects in that database are committed exactly once.")
def effects_once(story: Story) -> Iterator[str]:
    """A COMPLETED message has each effect once, another has none."""
    for m in story.messages.values():
        queue = m.row.queue if m.row else m.publish.queue if m.publish else ""
        if not story.has(queue, "transactional") or any(r.end == "committed" for r in m.runs):
            continue
        for which in story.has(queue, "effects") or sorted(m.effects):
            if (count := m.effects[which]) != m.completed:
                runs = "; ".join(map(str, m.runs))
                yield f"message {m.number} has {which!r} {count} times: {m.row}. {runs}"


@rule(
    "5 own commits fail at once",
    "Its earlier changes stay, and the message is FAILED at once with reason `transaction_ended`.",
)
def own_commits(story: Story) -> Iterator[str]:
    """What commits by itself fails with that reason, and nothing else does."""
    for m in story.messages.values():
        row = m.row
        if row is None or not story.has(row.queue, "noted"):
            continue
        done = [r for r in m.runs if r.end == "committed" and not r.lost and not r.unknown]
        named = row.state == "FAILED" and row.reason == "transaction_ended"
        if named and not any(r.end == "committed" for r in m.runs):
            runs = "; ".join(map(str, m.runs)) or "it never started"
            yield f"message {m.number} did not commit by itself: {row}. {runs}"
        if done and not named and not story.crashed(done[-1].pid, inf):
            yield f"message {m.number} committed by itself: {done[-1]}. {row}"
        if done and story.has(row.queue, "effects") and not m.effects:
            yield f"message {m.number} committed by itself, and its changes are gone: {done[-1]}"


@rule(
    "6 answers belong to the ack",
    "the answer is written in the transaction that settles its input, only if the outcome is ack "
    "or move.",
)
def answers(story: Story) -> Iterator[str]:
    """The acked delivery's answer is there once, and no other."""
    for m in story.messages.values():
        row = m.row
        queue = row.queue if row else m.publish.queue if m.publish else ""
        if not story.has(queue, "noted"):
            continue
        run = m.deciding() if m.completed else None
        if m.completed and (run is None or run.end not in ACKED):
            continue  # rules 2 and 3 are about it
        wanted = [] if run is None or run.answer is None else [run.answer]
        if m.answers != wanted:
            detail = f"has answers of {m.answers} bytes instead of {wanted}"
            yield f"message {m.number} {detail}: {run or 'no ack'}. {row}"
        joint = int(bool(wanted) and bool(story.has(queue, "batch")))
        if m.joint != joint:
            detail = f"is in {m.joint} answers of batches instead of {joint}"
            yield f"message {m.number} {detail}: {run or 'no ack'}. {row}"


def _key(story: Story, run: Run) -> str | None:
    m = story.messages[run.number]
    if m.publish is not None:
        return m.publish.key.get(m.number)
    return None if m.row is None else m.row.key


def _by_key(story: Story, option: str) -> Iterator[tuple[str, str, list[Run]]]:
    """The runs of each key of the queues with `option`, in the order of their starts."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for m in story.messages.values():
        for run in m.runs:
            if story.has(run.queue, option) and (key := _key(story, run)) is not None:
                found[run.queue, key].append(run)
    for (queue, key), runs in found.items():
        yield queue, key, sorted(runs, key=lambda r: r.at)


def _live(story: Story, run: Run) -> bool:
    """Whether `run` is of the message's newest delivery, and never lost its lease."""
    return not run.lost and run.delivery == story.newest[run.number, run.queue]


@rule("7 one at a time", "The broker gives one lease at a time per key,")
def one_at_a_time(story: Story) -> Iterator[str]:
    """No handler of a key starts while another runs that has its lease."""
    for queue, key, runs in _by_key(story, "ordered"):
        latest: Run | None = None
        ended = -inf
        for run in runs:
            if run.ended is None or not _live(story, run):
                continue
            if latest is not None and run.at < ended and run.number != latest.number:
                both = f"message {latest.number}, {latest}; message {run.number}, {run}"
                yield f"key {key!r} of {queue!r} had two handlers at once: {both}"
            if run.ended > ended:
                latest, ended = run, run.ended


@rule("7 order", "in id order among committed messages, across retries and processes.")
def order(story: Story) -> Iterator[str]:
    """No message of a key starts after one with a greater id that was claimed later than it was
    committed."""
    for queue, key, runs in _by_key(story, "ordered"):
        known = [(row.id, run) for run in runs if (row := story.messages[run.number].row)]
        greatest = -1
        for n, (number, run) in enumerate(known):
            if number < greatest and _live(story, run):
                later = next(r for i, r in _back(known, n) if i > number)
                publish = story.messages[run.number].publish
                seen = publish is not None and publish.outcome == "committed"
                if publish and seen and later.asked is not None and publish.at < later.asked:
                    both = f"message {later.number}, {later}; message {run.number}, {run}"
                    when = f"committed at {publish.at:.3f}"
                    yield f"key {key!r} of {queue!r} is out of order ({when}): {both}"
            greatest = max(greatest, number)


def _back(known: Sequence[tuple[int, Run]], n: int) -> Iterator[tuple[int, Run]]:
    """Those before the `n`-th, from the latest on."""
    return (known[i] for i in range(n - 1, -1, -1))


@rule(
    "8 limits",
    "Your handler does not start with `attempts_count ≥ max_attempts`.",
    durable=False,
)
def limits(story: Story) -> Iterator[str]:
    """No start beyond a limit."""
    for run, most in _limited(story, "max_attempts"):
        if run.attempts >= most:
            detail = f"{run.attempts} attempts of at most {most}"
            yield f"message {run.number} started after {detail}: {run}"


def _limited(story: Story, option: str) -> Iterator[tuple[Run, int]]:
    """The runs of the queues with `option`, and what it is."""
    for m in story.messages.values():
        for run in m.runs:
            if (most := story.has(run.queue, option)) is not None:
                yield run, most


@rule(
    "8 limit of deliveries",
    "`deliveries_count − attempts_count`, the new delivery included, is at most `max_deliveries`.",
    durable=False,
)
def delivery_limits(story: Story) -> Iterator[str]:
    """No start beyond the limit."""
    for run, most in _limited(story, "max_deliveries"):
        if run.delivery - run.attempts > most:
            detail = f"{run.delivery} deliveries and {run.attempts} attempts, of at most {most}"
            yield f"message {run.number} started with {detail}: {run}"


@rule("8 charges", "A crash costs a delivery, not an attempt. A nack costs both,")
def charges(story: Story) -> Iterator[str]:
    """Attempts and deliveries rise as the ends of the handlers tell."""
    for m in story.messages.values():
        if len(m.runs) < 2:
            continue
        for first, then in pairwise(sorted(m.runs, key=lambda r: (r.queue, r.delivery))):
            if first.queue != then.queue or first.lost or first.unknown:
                continue
            charged = then.attempts - first.attempts
            least, most = _charge(story, first)
            if not least <= charged <= most:
                detail = (
                    f"{charged} attempts instead of {least if least == most else (least, most)}"
                )
                yield f"message {m.number} was charged {detail}: {first}; {then}"


def _charge(story: Story, run: Run) -> tuple[int, int]:
    """The least and the most attempts that `run` costs."""
    crashed = story.codes.get(run.pid, 1) != 0
    if run.end is None:
        # In a transaction, a statement may have failed.
        raised = bool(story.has(run.queue, "transactional")) or not crashed
        return 0, int(raised)
    if run.end == "nack" and not crashed and not story.has(run.queue, "batch"):
        return 1, 1
    return 0, 1


@rule(
    "8 failures have a cause",
    "So without `max_attempts` a failing message is retried for ever, but a message that kills its "
    "process still ends.",
)
def causes(story: Story) -> Iterator[str]:
    """What is FAILED had a handler that failed, or used up a limit."""
    for m in story.messages.values():
        row = m.row
        if row is None or row.state != "FAILED" or not story.has(row.queue, "noted"):
            continue
        most = story.has(row.queue, "max_attempts")
        deliveries = story.has(row.queue, "max_deliveries")
        if row.reason == "max_attempts" and most is not None and row.attempts < most:
            yield f"message {m.number} had {row.attempts} attempts of {most}: {row}"
        elif row.reason == "max_deliveries":
            if deliveries is not None and row.deliveries - row.attempts < deliveries:
                yield f"message {m.number} had not used up {deliveries} deliveries: {row}"
        elif m.runs and all(r.end == "ack" and not _may_repeat(story, r) for r in m.runs):
            yield f"message {m.number} failed, and no handler did: {row}. {m.runs[-1]}"


@rule(
    "9 the last of a burst",
    "`Debounce` and `KeepLast` archive a message as `superseded` in the transaction that claims "
    "the newer message for a worker, not before.",
)
def last_of_burst(story: Story) -> Iterator[str]:
    """A superseded message has a newer one of its key, which was claimed."""
    for m in story.messages.values():
        row = m.row
        if row is None or row.reason != "superseded" or not story.has(row.queue, "debounce"):
            continue
        newer = story.by_row.get(-1 if row.related is None else row.related)
        other = None if newer is None else newer.row
        if newer is None or other is None:
            yield f"message {m.number} was superseded by no message: {row}"
        elif row.related is not None and row.related <= row.id:
            yield f"message {m.number} was superseded by an older one: {row}; {other}"
        elif (other.queue, other.key) != (row.queue, row.key):
            yield f"message {m.number} was superseded by one of another key: {row}; {other}"
        elif not newer.runs and (other.reason == "superseded" or other.state == "COMPLETED"):
            yield f"message {m.number} was superseded by one that never started: {row}; {other}"


@rule("policies Concurrency", "At most `limit` leases at a time, of the queue or of each key.")
def concurrency(story: Story) -> Iterator[str]:
    """No more handlers run at once than there may be leases."""
    scopes: dict[tuple[str, str | None], list[Run]] = defaultdict(list)
    for m in story.messages.values():
        for run in m.runs:
            limit = story.has(run.queue, "concurrency")
            if limit is None or not _live(story, run):
                continue
            if run.ended is None or run.ended <= run.at:
                continue
            key = _key(story, run) if story.has(run.queue, "per_key") else None
            scopes[story.has(run.queue, "scope") or run.queue, key].append(run)
    for (scope, key), runs in scopes.items():
        most = max(story.has(r.queue, "concurrency") for r in runs)
        # An end at the moment of a start comes first.
        moments = [(r.ended or 0.0, -1, r) for r in runs] + [(r.at, 1, r) for r in runs]
        running: dict[int, Run] = {}
        for at, step, run in sorted(moments, key=lambda moment: moment[:2]):
            if step < 0:
                running.pop(id(run), None)
                continue
            running[id(run)] = run
            if len(running) > most:
                those = "; ".join(f"message {r.number}, {r}" for r in running.values())
                where = scope if key is None else f"{scope}, key {key}"
                yield f"{len(running)} of at most {most} of {where!r} ran at {at:.3f}: {those}"


@rule("policies Throttle", "At most `rate` starts in any period `per`,")
def throttle(story: Story) -> Iterator[str]:
    """No period has more starts than the rate; `looked` says when the broker let each start."""
    looks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for m in story.messages.values():
        for run in m.runs:
            if run.looked is not None and story.has(run.queue, "throttle"):
                looks[run.queue].append((run.looked, run.number))
    for queue, starts in looks.items():
        rate, per = story.has(queue, "throttle")
        starts.sort()
        for early, late in zip(starts, starts[rate:], strict=False):
            if (took := late[0] - early[0]) < per * SECOND - ROUNDING:
                detail = f"{rate + 1} handlers of {queue!r} started in {took / SECOND:.6f} s"
                yield f"{detail}, from message {early[1]} at {early[0]} to message {late[1]}"


@rule("policies Once", "Runs one message of each key, at most once")
def once(story: Story) -> Iterator[str]:
    """No two messages of a key run."""
    for queue, key, runs in _by_key(story, "once"):
        for run in runs[1:]:
            if run.number != runs[0].number:
                both = f"message {runs[0].number}, {runs[0]}; message {run.number}, {run}"
                yield f"key {key!r} of {queue!r} ran twice: {both}"


def check(records: Iterable[Record]) -> list[Broken]:
    """Apply all rules to the records of one history."""
    story = Story(records)
    durable = story.finish.get("durable", True)
    used = [r for r in RULES if durable or not r.durable]
    return [Broken(r.name, text) for r in used for text in r.check(story)]


def compare(
    first: Mapping[str, Collection[str]], second: Sequence[Broken], *, durable: bool = True
) -> list[str]:
    """How the verdict of the first checker, by rule, differs from that of the second, which has
    few rules where the database is not `durable`.

    They may count one fault to different promises, and see different parts of it. So a difference
    is that only one has findings, or that none of their findings are about the same message.
    """
    promises = {
        name: texts
        for name, texts in first.items()
        if texts and (name[0].isdigit() or name == "policies")
    }
    shared = {name: texts for name, texts in promises.items() if name not in ALONE}
    if durable and shared and not second:
        return [f"only the first checker found: {name}: {texts}" for name, texts in shared.items()]
    if second and not promises:
        return [f"only the second checker found: {broken}" for broken in second]
    firsts = numbers(text for texts in shared.values() for text in texts)
    seconds = numbers(broken.text for broken in second)
    if firsts and seconds and firsts.isdisjoint(seconds):
        return [f"the first checker found {sorted(firsts)}, the second one {sorted(seconds)}"]
    return []


def numbers(texts: Iterable[str]) -> set[int]:
    """The messages that `texts` of either checker name."""
    lists = (match for text in texts for match in re.findall(r"messages? ([\[\]\d, and]+)", text))
    return {int(number) for each in lists for number in re.findall(r"\d+", each)}


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def main(arguments: Sequence[str]) -> int:
    """Check each history; return the exit code."""
    if list(arguments) == ["--rules"]:
        for each in RULES:
            _say(f"{each.name}: {each.promise}")
        return 0
    if not arguments:
        _say(__doc__)
        return 2
    wrong = 0
    for name in arguments:
        records = [*read(Path(name))]
        found = check(records)
        if not any(record["event"] == "finish" for record in records):
            found.append(Broken("whole", "it has no record of its end, so it shows little"))
        wrong += len(found)
        for broken in found:
            _say(f"{name}: {broken}")
    _say(f"{len(arguments)} histories, {wrong} broken promises")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
