"""The second checker: hand-written histories for each rule, a model's histories, and mutations."""

import gzip
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.history import FIRST, LAST
from tests.faults.records import SECOND
from tests.faults.second_checker import ALONE, RULES, check, compare, main
from tests.faults.small_broker import (
    MAX_ATTEMPTS,
    MAX_DELIVERIES,
    OPTIONS,
    PER,
    RATE,
    Lines,
    SmallBroker,
)

ROOT = Path(__file__).parent.parent.parent
History = list[dict[str, Any]]
ONE = 101
OTHER = 102


def broken_rules(history: History) -> set[str]:
    return {broken.rule for broken in check(history)}


class Case(Lines):
    """A history of two processes with all subscribers."""

    def __init__(self) -> None:
        super().__init__()
        for pid in (ONE, OTHER):
            for queue, options in OPTIONS.items():
                self.subscribe(pid, queue, **options)

    def run(
        self, queue: str, number: int, outcome: str = "ack", pid: int = ONE, **fields: Any
    ) -> dict[str, Any]:
        """A start and its end, a while later."""
        start = self.start(queue, number, pid, **fields)
        self.now += 0.2
        self.end(start, outcome)
        return start

    def handled(self, queue: str, number: int, key: str | None = None) -> dict[str, Any]:
        """A message from its publish to its row."""
        self.publish(queue, number, key=key)
        self.run(queue, number)
        return self.row(queue, number, key=key)

    def done(self, **more: Any) -> History:
        return self.finish(ONE, OTHER, **more)


def lost(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    case.publish("plain", 2, outcome="unknown")
    if not broken:
        case.row("plain", 1, deliveries=0, state="DISCARDED")
    return case.done()


def waiting(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    case.now += 20.0
    case.row("plain", 1, table="message", state="PENDING", deliveries=0, archived=None)
    return case.done(patience=10.0 if broken else 30.0)


def uncommitted(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1, outcome="rolled back")
    case.publish("plain", 2, 3, outcome="unknown")
    case.run("plain", 2)
    case.row("plain", 2)
    case.run("plain", 3)
    case.row("plain", 3)
    if broken:
        case.run("plain", 1)
    return case.done()


def repeated(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    case.run("plain", 1, "ack" if broken else "nack")
    case.run("plain", 1, pid=OTHER, deliveries=2, attempts=0 if broken else 1)
    case.row("plain", 1, deliveries=2)
    return case.done()


def ids(*, broken: bool) -> History:
    case = Case()
    case.handled("plain", 1)
    case.publish("plain", 2)
    case.run("plain", 2, id=1 if broken else 2)
    case.row("plain", 2)
    return case.done()


def unhandled(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    if broken:
        case.start("plain", 1, ONE)
    else:
        case.run("plain", 1)
    case.row("plain", 1)
    return case.done()


def stale(*, broken: bool) -> History:
    """The lease of ONE ran out in its handler, and OTHER has handled the message; or not yet, when
    ONE's ack is written."""
    case = Case()
    case.publish("plain", 1)
    first = case.start("plain", 1, ONE)
    case.note("report", ONE, id=1, deliveries=1, lost=True)
    second = case.start("plain", 1, OTHER, deliveries=2)
    case.end(first, "ack")
    early = case.stored()
    case.now += 0.5
    case.end(second, "ack")
    case.row("plain", 1, deliveries=2, **({"archived": early} if broken else {}))
    return case.done()


def started_again(*, broken: bool) -> History:
    case = Case()
    case.publish("first", 1)
    case.run("first", 1)
    if broken:
        case.run("first", 1, deliveries=2)
    case.row("first", 1)
    return case.done()


def unlisted(*, broken: bool) -> History:
    case = Case()
    case.publish("first", 1)
    case.start("first", 1, ONE)
    case.row("first", 1)
    if not broken:
        case.note("listed", number=1)
    case.note("exit", worker=ONE, code=-9)
    return case.finish(OTHER)


def doubled(*, broken: bool) -> History:
    case = Case()
    case.handled("tx", 1)
    for which in (FIRST, LAST, *([LAST] if broken else [])):
        case.note("effect", number=1, which=which)
    return case.done()


def own_commit(*, broken: bool) -> History:
    case = Case()
    case.publish("tx", 1)
    case.run("tx", 1, "nack" if broken else "committed")
    case.row("tx", 1, state="FAILED", reason="transaction_ended")
    if not broken:
        case.note("effect", number=1, which=FIRST)
    return case.done()


def answered(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    case.end(case.start("plain", 1, ONE), "ack", 60)
    case.row("plain", 1)
    for _ in range(1 + broken):
        case.note("answer", numbers=[1], size=60, joint=False)
    return case.done()


def two_of_a_key(*, broken: bool) -> History:
    return _two_at_once("ordered", broken=broken)


def two_under_one(*, broken: bool) -> History:
    return _two_at_once("alone", broken=broken)


def _two_at_once(queue: str, *, broken: bool) -> History:
    case = Case()
    case.publish(queue, 1, 2, key="a")
    first = case.start(queue, 1, ONE)
    if not broken:
        case.end(first, "ack")
    second = case.start(queue, 2, OTHER)
    if broken:
        case.end(first, "ack")
    case.end(second, "ack")
    case.row(queue, 1, key="a")
    case.row(queue, 2, key="a")
    return case.done()


def out_of_order(*, broken: bool) -> History:
    """Message 1 was committed late, after message 2 was claimed; or not."""
    case = Case()
    if broken:
        case.publish("ordered", 1, key="a")
    case.now += 1.0
    case.publish("ordered", 2, key="a")
    case.run("ordered", 2)
    if not broken:
        case.publish("ordered", 1, key="a")
    case.run("ordered", 1)
    case.row("ordered", 1, key="a")
    case.row("ordered", 2, key="a")
    return case.done()


def too_many_attempts(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    attempts = MAX_ATTEMPTS - 1 + broken
    case.run("plain", 1, deliveries=attempts + 1, attempts=attempts)
    case.row("plain", 1, deliveries=attempts + 1, attempts=attempts + 1)
    return case.done()


def too_many_deliveries(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    case.run("plain", 1, deliveries=MAX_DELIVERIES + broken)
    case.row("plain", 1, deliveries=MAX_DELIVERIES + broken)
    return case.done()


def charged(*, broken: bool) -> History:
    """A crash of ONE costs no attempt."""
    case = Case()
    case.publish("plain", 1)
    case.start("plain", 1, ONE)
    case.run("plain", 1, pid=OTHER, deliveries=2, attempts=int(broken))
    case.row("plain", 1, deliveries=2)
    case.note("exit", worker=ONE, code=-9)
    return case.finish(OTHER)


def failed(*, broken: bool) -> History:
    case = Case()
    case.publish("plain", 1)
    case.run("plain", 1, "ack" if broken else "nack")
    case.row("plain", 1, state="FAILED", reason="not_retried")
    return case.done()


def superseded(*, broken: bool) -> History:
    case = Case()
    case.publish("debounced", 1, key="a")
    if broken:
        case.row("debounced", 2, key="a", state="DISCARDED", reason="cancelled")
        case.publish("debounced", 2, key="b")
    else:
        case.handled("debounced", 2, key="a")
    gone = {"state": "DISCARDED", "reason": "superseded", "deliveries": 0, "attempts": 0}
    case.row("debounced", 1, key="a", related=3 if broken else 2, **gone)
    return case.done()


def throttled(*, broken: bool) -> History:
    case = Case()
    numbers = range(1, RATE + 2)
    case.publish("throttled", *numbers)
    per = PER * SECOND / RATE
    for n in numbers:
        looked = round(n * per) if not broken else n
        case.run("throttled", n, looked=looked)
        case.row("throttled", n)
    return case.done()


def ran_twice(*, broken: bool) -> History:
    case = Case()
    case.handled("single", 1, key="a")
    case.handled("single", 2, key="a" if broken else "b")
    return case.done()


CASES: dict[str, Callable[..., History]] = {
    "1 nothing lost": lost,
    "1 one recorded outcome": waiting,
    "1 nothing uncommitted is seen": uncommitted,
    "2 no repeat without a reason": repeated,
    "2 one id for each message": ids,
    "2 at least once": unhandled,
    "3 a stale worker changes nothing": stale,
    "4 at most once": started_again,
    "4 unknown starts are listed": unlisted,
    "5 effects exactly once": doubled,
    "5 own commits fail at once": own_commit,
    "6 answers belong to the ack": answered,
    "7 one at a time": two_of_a_key,
    "7 order": out_of_order,
    "8 limits": too_many_attempts,
    "8 limit of deliveries": too_many_deliveries,
    "8 charges": charged,
    "8 failures have a cause": failed,
    "9 the last of a burst": superseded,
    "policies Concurrency": two_under_one,
    "policies Throttle": throttled,
    "policies Once": ran_twice,
}


def test_every_rule_has_its_histories() -> None:
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_kept_promise_is_no_finding(name: str) -> None:
    assert check(CASES[name](broken=False)) == []


@pytest.mark.parametrize("name", CASES)
def test_a_broken_promise_is_found_with_its_message_records_and_times(name: str) -> None:
    [found, *_] = [one for one in check(CASES[name](broken=True)) if one.rule == name]
    assert re.search(r"(message|messages|handlers|key|at most) ", found.text)
    assert str(found).count("\n") == 0
    assert re.search(r"\d+\.\d{3}", found.text)


def test_each_rule_quotes_the_page() -> None:
    pages = ("docs/explanation/promises.md", "docs/reference/policies.md")
    text = " ".join(" ".join((ROOT / page).read_text().split()) for page in pages)
    text = text.replace("**", "")
    assert [rule.name for rule in RULES if rule.promise not in text] == []


def test_what_a_database_without_durable_commits_may_lose_is_no_finding() -> None:
    history = lost(broken=True)
    history[-1]["durable"] = False
    assert check(history) == []
    history = too_many_attempts(broken=True)
    history[-1]["durable"] = False
    assert broken_rules(history) == {"8 limits"}


def test_a_lease_tells_apart_the_deliveries_of_an_id_that_was_given_again() -> None:
    case = Case()
    case.publish("plain", 1)
    case.publish("plain", 2)
    first = case.start("plain", 1, ONE, id=1, message_id="1-1", lease="a")
    second = case.start("plain", 2, ONE, id=1, message_id="1-2", lease="b")
    for start, lease in ((second, "b"), (first, "a")):
        mark = {"id": 1, "deliveries": 1, "lease": lease, "outcome": "ack"}
        case.note("end", start["pid"], **mark, answer=None)
    case.row("plain", 1)
    case.row("plain", 2)
    assert check(case.done()) == []
    second["message_id"] = "1-1"
    assert broken_rules(case.records) == {"2 one id for each message"}


# --- a model of the broker, and mutations of its histories ---


def model_history(seed: int, steps: int = 300) -> History:
    return SmallBroker(random.Random(seed)).run(steps)


@given(st.integers(0, 2**32), st.integers(1, 400))
def test_a_correct_broker_breaks_no_promise(seed: int, steps: int) -> None:
    assert check(model_history(seed, steps)) == []


Change = Callable[[History], bool]


def one(history: History, event: str, **wanted: Any) -> dict[str, Any] | None:
    """The first record of that kind; a wanted value may be a set of values."""
    for record in history:
        if record["event"] == event and all(
            record.get(k) in v if isinstance(v, frozenset) else record.get(k) == v
            for k, v in wanted.items()
        ):
            return record
    return None


def runs_of(history: History, number: int) -> History:
    return [r for r in history if r["event"] == "start" and r["number"] == number]


def plain_ack(history: History, queue: str = "plain") -> tuple[dict[str, Any], ...]:
    """Row, start and end of a message that was handled once, by a process that never crashed, and
    that no report is about."""
    well = {r["worker"] for r in history if r["event"] == "exit" and r["code"] == 0}
    reported = {r["id"] for r in history if r["event"] == "report"}
    for row in history:
        if row["event"] != "row" or row["queue"] != queue or row["state"] != "COMPLETED":
            continue
        runs = runs_of(history, row["number"])
        if len(runs) == 1 and runs[0]["pid"] in well and row["id"] not in reported:
            end = one(history, "end", id=row["id"], deliveries=runs[0]["deliveries"])
            if end is not None:
                return row, runs[0], end
    return ()


def lose_a_message(history: History) -> bool:
    publish = one(history, "publish", outcome="committed")
    if publish is None:
        return False
    number = publish["numbers"][0]
    history[:] = [r for r in history if (r["event"], r.get("number")) != ("row", number)]
    return True


def keep_two_rows(history: History) -> bool:
    row = one(history, "row")
    if row is not None:
        history.append({**row, "table": "message"})
    return row is not None


def leave_it_waiting(history: History) -> bool:
    row = one(history, "row", state="COMPLETED")
    if row is not None:
        row.update(table="message", state="PENDING", archived=None)
        history[-1]["patience"] = 0.0
    return row is not None


def show_a_rollback(history: History) -> bool:
    publish = one(history, "publish", outcome="committed")
    if publish is not None:
        publish["outcome"] = "rolled back"
    return publish is not None


def commit_in_part(history: History) -> bool:
    for publish in history:
        if publish["event"] == "publish" and len(publish["numbers"]) > 1:
            rows = {r["number"] for r in history if r["event"] == "row"}
            if rows.issuperset(publish["numbers"]):
                publish["outcome"] = "unknown"
                gone = publish["numbers"][0]
                history[:] = [r for r in history if (r["event"], r.get("number")) != ("row", gone)]
                return True
    return False


def start_again(history: History) -> bool:
    if found := plain_ack(history):
        _, start, end = found
        again = {**start, "at": end["at"] + 0.5, "deliveries": start["deliveries"] + 1}
        history.append(again)
    return bool(found)


def start_twice_under_one_claim(history: History) -> bool:
    if found := plain_ack(history):
        history.append({**found[1], "at": found[1]["at"] + 0.01, "pid": 999})
    return bool(found)


def give_an_id_twice(history: History) -> bool:
    starts = [r for r in history if r["event"] == "start"]
    other = next((r for r in starts if r["number"] != starts[0]["number"]), None)
    if other is not None:
        other["id"] = starts[0]["id"]
    return other is not None


def complete_without_a_handler(history: History) -> bool:
    if found := plain_ack(history):
        history.remove(found[1])
        history.remove(found[2])
    return bool(found)


def ack_by_a_stale_worker(history: History) -> bool:
    if found := plain_ack(history):
        found[0]["deliveries"] += 1
    return bool(found)


def settle_too_early(history: History) -> bool:
    if found := plain_ack(history):
        found[2]["at"] += 100.0
    return bool(found)


def ack_without_a_lease(history: History) -> bool:
    if found := plain_ack(history):
        _, start, end = found
        mark = {"id": start["id"], "deliveries": start["deliveries"], "lost": True}
        history.append({"event": "report", "at": end["at"], "pid": start["pid"], **mark})
    return bool(found)


def start_after_ack_first(history: History) -> bool:
    start = one(history, "start", queue="first")
    if start is not None:
        history.append({**start, "at": start["at"] + 5.0, "deliveries": start["deliveries"] + 1})
    return start is not None


def list_nothing(history: History) -> bool:
    listed = one(history, "listed")
    if listed is not None:
        history.remove(listed)
    return listed is not None


def double_an_effect(history: History) -> bool:
    found = plain_ack(history, "tx")
    if found:
        history.append({**found[0], "event": "effect", "which": LAST})
    return bool(found)


def leave_an_effect(history: History) -> bool:
    committed = {r["id"] for r in history if r["event"] == "end" and r["outcome"] == "committed"}
    for row in history:
        clean = row.get("id") not in committed and row.get("state") == "FAILED"
        if row["event"] == "row" and row["queue"] == "tx" and clean:
            history.append({**row, "event": "effect", "which": FIRST})
            return True
    return False


def fail_as_after_a_failover(history: History) -> bool:
    if found := plain_ack(history, "tx"):
        found[0].update(state="FAILED", reason="transaction_ended")
    return bool(found)


def answer_twice(history: History) -> bool:
    answer = one(history, "answer")
    if answer is not None:
        history.append(dict(answer))
    return answer is not None


def lose_an_answer(history: History) -> bool:
    answer = one(history, "answer")
    if answer is not None:
        history.remove(answer)
    return answer is not None


def answer_a_failure(history: History) -> bool:
    row = one(history, "row", queue="plain", state="FAILED")
    if row is not None:
        history.append({**row, "event": "answer", "numbers": [row["number"]], "size": 1})
    return row is not None


def _neighbours(history: History, queue: str) -> tuple[tuple[dict[str, Any], ...], ...]:
    """Two messages of a key that were acked at once, one after the other, the second one committed
    before the first started."""
    keys: dict[int, Any] = {}
    committed: dict[int, float] = {}
    for r in history:
        if r["event"] == "publish" and r["outcome"] == "committed":
            keys.update(zip(r["numbers"], r["keys"], strict=True))
            committed.update(dict.fromkeys(r["numbers"], r["at"]))
    acked = [
        (row, *rest)
        for row in history
        if row["event"] == "row" and keys.get(row["number"]) is not None
        for rest in [plain_ack([row, *(r for r in history if r["event"] != "row")], queue)[1:]]
        if rest
    ]
    for first in acked:
        for second in acked:
            same = keys[first[0]["number"]] == keys[second[0]["number"]]
            follows = first[2]["at"] < second[1]["at"]
            if same and follows and committed[second[0]["number"]] < first[1]["asked"]:
                return first, second
    return ()


def swap_order(history: History) -> bool:
    if found := _neighbours(history, "ordered"):
        first, second = found
        first[0]["id"], second[0]["id"] = second[0]["id"], first[0]["id"]
    return bool(found)


def run_two_of_a_key(history: History) -> bool:
    if found := _neighbours(history, "ordered"):
        found[0][2]["at"] = found[1][1]["at"] + 0.0005
    return bool(found)


def run_two_under_one(history: History) -> bool:
    if found := _neighbours(history, "alone"):
        found[0][2]["at"] = found[1][1]["at"] + 0.0005
    return bool(found)


def run_two_of_a_key_under_one(history: History) -> bool:
    if found := _neighbours(history, "keyed"):
        found[0][2]["at"] = found[1][1]["at"] + 0.0005
    return bool(found)


def start_after_the_limit(history: History) -> bool:
    start = one(history, "start", queue="plain")
    if start is not None:
        start["attempts"] = MAX_ATTEMPTS
    return start is not None


def start_after_all_deliveries(history: History) -> bool:
    start = one(history, "start", queue="plain")
    if start is not None:
        start["deliveries"] = start["attempts"] + MAX_DELIVERIES + 1
    return start is not None


def charge_nothing_for_a_nack(history: History) -> bool:
    well = {r["worker"] for r in history if r["event"] == "exit" and r["code"] == 0}
    reported = {r["id"] for r in history if r["event"] == "report"}
    for end in history:
        if end["event"] == "end" and end["outcome"] == "nack" and end["id"] not in reported:
            later = [
                r
                for r in history
                if r["event"] == "start"
                and (r["id"], r["deliveries"]) == (end["id"], end["deliveries"] + 1)
            ]
            if end["pid"] in well and later and later[0]["queue"] != "batch":
                later[0]["attempts"] -= 1
                return True
    return False


def fail_without_a_cause(history: History) -> bool:
    if found := plain_ack(history):
        found[0].update(state="FAILED", reason="settle_error")
    return bool(found)


def fail_before_the_limit(history: History) -> bool:
    row = one(history, "row", state="FAILED", reason="max_attempts")
    if row is not None:
        row["attempts"] = MAX_ATTEMPTS - 1
    return row is not None


def supersede_by_nothing(history: History) -> bool:
    row = one(history, "row", reason="superseded")
    if row is not None:
        row["related"] = None
    return row is not None


def supersede_by_an_older_one(history: History) -> bool:
    row = one(history, "row", reason="superseded")
    if row is not None:
        row["related"] = row["id"]
    return row is not None


def break_the_rate(history: History) -> bool:
    starts = [r for r in history if r["event"] == "start" and r["queue"] == "throttled"]
    for start in starts:
        start["looked"] = starts[0]["looked"]
    return len(starts) > RATE


def run_a_key_twice(history: History) -> bool:
    numbers = {r["number"] for r in history if r["event"] == "start" and r["queue"] == "single"}
    for publish in history:
        if publish["event"] == "publish" and publish["queue"] == "single":
            publish["keys"] = ["same"] * len(publish["numbers"])
    return len(numbers) > 1


MUTATIONS: dict[Change, str] = {
    lose_a_message: "1 nothing lost",
    keep_two_rows: "1 one recorded outcome",
    leave_it_waiting: "1 one recorded outcome",
    show_a_rollback: "1 nothing uncommitted is seen",
    commit_in_part: "1 nothing uncommitted is seen",
    start_again: "2 no repeat without a reason",
    start_twice_under_one_claim: "2 no repeat without a reason",
    give_an_id_twice: "2 one id for each message",
    complete_without_a_handler: "2 at least once",
    ack_by_a_stale_worker: "3 a stale worker changes nothing",
    settle_too_early: "3 a stale worker changes nothing",
    ack_without_a_lease: "3 a stale worker changes nothing",
    start_after_ack_first: "4 at most once",
    list_nothing: "4 unknown starts are listed",
    double_an_effect: "5 effects exactly once",
    leave_an_effect: "5 effects exactly once",
    fail_as_after_a_failover: "5 own commits fail at once",
    answer_twice: "6 answers belong to the ack",
    lose_an_answer: "6 answers belong to the ack",
    answer_a_failure: "6 answers belong to the ack",
    run_two_of_a_key: "7 one at a time",
    swap_order: "7 order",
    start_after_the_limit: "8 limits",
    start_after_all_deliveries: "8 limit of deliveries",
    charge_nothing_for_a_nack: "8 charges",
    fail_without_a_cause: "8 failures have a cause",
    fail_before_the_limit: "8 failures have a cause",
    supersede_by_nothing: "9 the last of a burst",
    supersede_by_an_older_one: "9 the last of a burst",
    run_two_under_one: "policies Concurrency",
    run_two_of_a_key_under_one: "policies Concurrency",
    break_the_rate: "policies Throttle",
    run_a_key_twice: "policies Once",
}
"""Changes of a good history, and the rule that must find each."""


def test_every_rule_has_a_mutation() -> None:
    assert set(MUTATIONS.values()) == {rule.name for rule in RULES}


@pytest.mark.parametrize("change", MUTATIONS, ids=lambda change: change.__name__)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_a_mutation_is_found(change: Change, seed: int) -> None:
    # Some histories have no place for it: those that follow do.
    for n in range(seed, seed + 50):
        history = model_history(n)
        if change(history):
            assert MUTATIONS[change] in broken_rules(history)
            return
    pytest.fail("no history has a place for it")


# --- both checkers ---


def test_checkers_that_agree() -> None:
    found = check(lost(broken=True))
    assert compare({"1 nothing lost": []}, []) == []
    assert compare({"1 nothing lost": ["message 1 is gone"]}, found) == []
    assert compare({"policies": ["a text that names no message"]}, found) == []
    assert compare({rule: ["it goes beyond the promises"] for rule in ALONE}, []) == []
    assert compare({"schedules": ["a tick is missing"]}, []) == []
    assert compare({"1 nothing lost": ["message 1 is gone"]}, [], durable=False) == []


def test_a_disagreement_is_a_finding() -> None:
    found = check(lost(broken=True))
    [only_first] = compare({"1 nothing lost": ["message 1 is gone"], "7 order": []}, [])
    assert only_first.startswith("only the first checker found: 1 nothing lost: ")
    [only_second] = compare({"1 nothing lost": []}, found)
    assert only_second.startswith("only the second checker found: promise 1 nothing lost: message")
    [hidden] = compare({"health told": ["7 is still not healthy"]}, found)
    assert hidden == only_second
    [apart] = compare({"1 nothing lost": ["messages [5, 6] are gone"]}, found)
    assert apart == "the first checker found [5, 6], the second one [1]"


# --- the command ---


def write(path: Path, history: History) -> str:
    lines = "".join(json.dumps(record) + "\n" for record in history)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return str(path)


def test_the_command_over_files_and_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.jsonl.gz", model_history(1))
    (tmp_path / "folder").mkdir()
    history = model_history(2)
    write(tmp_path / "folder" / "1", history[::2])
    write(tmp_path / "folder" / "2", history[1::2])
    assert main([good, str(tmp_path / "folder")]) == 0
    assert "2 histories, 0 broken promises" in capsys.readouterr().out
    bad = write(tmp_path / "bad.jsonl", lost(broken=True))
    assert main([good, bad]) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"{bad}: promise 1 nothing lost: message 1 of 'plain', committed between"
    )
    assert last == "2 histories, 1 broken promises"


def test_the_command_is_a_module_and_prints_its_rules() -> None:
    command = [sys.executable, "-m", "tests.faults.second_checker"]
    done = subprocess.run(
        [*command, "--rules"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(RULES)
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 2
