"""The last message of a burst that can be delivered is delivered, whatever becomes of newer ones
(Z7)."""

from collections import Counter, defaultdict
from datetime import datetime, timezone
from itertools import product
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from sqlalchemy import delete, event, select, text, update
from sqlalchemy.util import await_only

from faststream_sqlbroker.core.bulk_jobs import Job
from faststream_sqlbroker.core.policies import Debounce, Header, KeepLast, Policy, Throttle
from faststream_sqlbroker.core.policies.flags import BURST
from faststream_sqlbroker.core.policies.header import Key
from faststream_sqlbroker.core.policies.standby import (
    MAX_STANDBY_CHECK_DELAY,
    MAX_STANDBY_RECHECK,
    has_standby_flags,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.bulk.store import JobStore
from faststream_sqlbroker.database.overviews import count_messages
from faststream_sqlbroker.database.parts.live_queues import count_due
from faststream_sqlbroker.database.policies.intake import get_burst_scope
from faststream_sqlbroker.database.policies.policy_holds import STEP_SIZE
from faststream_sqlbroker.database.policies.request import PolicyClaim
from faststream_sqlbroker.database.queue_states import read_states
from tests.policies.machine import UNIT, Machine, Message, check_model
from tests.policies.world import QUEUE, World, microseconds, outcome

SECOND = 1_000_000
EXAMPLES = {"sqlite": 30, "postgresql": 12, "mariadb": 12, "mysql": 12}
ALL_OF_FILTERS = ("cancel all", "move all")
WAYS = ("cancel", "move", "key", "expire")

lengths = st.integers(1, 4).map(lambda n: n * UNIT / 1e6)
debounce = st.builds(
    lambda window, more: Debounce(window, max_wait=None if more is None else window + more),
    lengths,
    st.sampled_from([None, 1.0]),
)
leading = lengths.map(lambda window: Debounce(window, edge="leading"))


async def change(world: World, message: int, how: str) -> None:
    """What another program does, or time."""
    table = world.store.tables.message
    statement: Any = update(table).where(table.c.id == message)
    if how == "cancel":
        statement = delete(table).where(table.c.id == message)
    elif how == "move":
        statement = statement.values(queue="elsewhere", policy_marks=0)
    elif how == "key":
        statement = statement.values(key="another", policy_marks=0)
    else:
        statement = statement.values(expires_at=table.c.created_at)
    async with world.clock.engine.begin() as connection:
        await connection.execute(statement)


async def operate(world: World, message: int, how: str) -> None:
    """The same by the broker's operations."""
    repairs = world.store.repairs
    if how == "cancel":
        found = await repairs.cancel(message, "")
    elif how == "move":
        found = await repairs.move(message, "elsewhere")
    else:
        found = await repairs.edit(message, {"key": "another"}, None)
    assert found.done


class LastMachine(Machine):
    """Nothing is superseded but by what has started; and in the end all that could be delivered
    has started, or something has in its place."""

    kinds: ClassVar = (*Machine.kinds, "change", "publish")
    policies: ClassVar = st.one_of(
        st.tuples(debounce), st.tuples(leading), st.tuples(lengths.map(KeepLast))
    )
    late: ClassVar = st.sampled_from([0, 0, 0, UNIT])
    expires: ClassVar = st.sampled_from([None, None, None, UNIT, 5 * UNIT])

    def start(self) -> None:
        self.started: dict[str, set[int]] = defaultdict(set)
        self.policy: Policy = self.given[0]
        self.leading = isinstance(self.policy, Debounce) and self.policy.edge == "leading"

    def change(self, data: st.DataObject) -> None:
        """An operator, or another program, takes a message away that waits."""
        waiting = [m for m in self.live.values() if m.lease is None and m.key is not None]
        if not waiting:
            return
        # The newest mostly: that is what others stand by for.
        message = data.draw(st.sampled_from([waiting[-1], *waiting]), "message")
        how = data.draw(st.sampled_from([*WAYS[:3], "due"]), "how")
        if how == "due":
            assert self.world.run(self.world.store.repairs.set_due(message.id, 0.0)).done
            message.due = min(message.due, self.now)
            return
        by = data.draw(st.sampled_from([operate, change]), "by")
        self.world.run(by(self.world, message.id, how))
        del self.live[message.id]

    def check(self, claim: PolicyClaim, limit: int) -> None:
        now = {row.id for row in claim.rows if row.id in self.live}
        assert not any(
            self.live[i].key is not None
            and not self.live[i].delivered
            and self.live[i].expired(self.now)
            for i in now
        ), "what cannot be delivered has started"
        for message in now:
            self.started[str(self.live[message].key)].add(message)
        for message_id, row in self.archived().items():
            if message_id not in self.live:
                continue  # it has got another key
            message = self.live.pop(message_id)
            if row["reason"] == "expired":
                assert message.expired(self.now)
                continue
            assert row["reason"] == "superseded"
            self.is_replaced(message, row["related_id"])

    def is_replaced(self, message: Message, by: int) -> None:
        assert by in self.started[str(message.key)], "nothing has started in its place"
        assert self.leading or by > message.id
        assert not message.delivered or isinstance(self.policy, KeepLast)

    def ended(self, message: Message, how: str) -> None:
        if how in {"ack", "reject", "expired"}:
            self.seen.add(message.id)

    def teardown(self) -> None:
        if self.checking or not hasattr(self, "policy"):
            return
        for _ in range(60):
            # A suspect runs alone, which these claims do not let it; others of its key wait for it.
            held = {m.key for m in self.live.values() if m.suspect and m.key is not None}
            if all(message.suspect or message.key in held for message in self.live.values()):
                return
            for message in self.leased:
                self.end(message, "expired" if message.expired(message.acquired) else "ack")
            self.world.advance(MAX_STANDBY_RECHECK)
            self.claim_by(0, 20)
        pytest.fail(f"these are left: {self.live}")


class LastWorld(World):
    """What an operator has taken away is not told of."""

    def claim(self, process: int, limit: int, starting: int | None = None) -> PolicyClaim:
        found = super().claim(process, limit, starting)
        rows: list[ClaimedMessage] = []
        for row in found.rows:
            if row.key == "another":
                self.settle(row, outcome("ack", 0))
                self.run(self._forget(row.id))
            else:
                rows.append(row)
        found.rows = rows
        return found

    async def _forget(self, message: int) -> None:
        table = self.store.tables.archive
        assert table is not None
        async with self.clock.engine.begin() as connection:
            await connection.execute(delete(table).where(table.c.id == message))


def test_nothing_is_superseded_but_by_what_starts(database: str, database_url: str) -> None:
    """While newer messages expire, are cancelled, are moved and get other keys."""
    check_model(LastMachine, database_url, examples=EXAMPLES[database], world=LastWorld)


def ids(claim: PolicyClaim) -> list[int]:
    return [row.id for row in claim.rows]


def superseded(world: World) -> dict[int, int]:
    archived = world.archived()
    return {i: r["related_id"] for i, r in archived.items() if r["reason"] == "superseded"}


@pytest.mark.parametrize("how", WAYS)
def test_the_one_before_goes_when_the_newest_would_have_gone(world: World, how: str) -> None:
    """Also the one before that, and at the end of the burst."""
    for lost in (1, 2):
        world.begin([Debounce("3s")])
        messages = []
        for _ in range(4):
            messages.append(world.put("k"))
            assert ids(world.claim(0, 20)) == []
            world.advance(SECOND)
        for message in messages[4 - lost :]:
            world.run(change(world, message, how))
        world.advance(2 * SECOND - 1_000)
        assert not set(ids(world.claim(1, 20))) & set(messages)
        assert not superseded(world)
        world.advance(2_000)
        found = ids(world.claim(1, 20)) or ids(world.claim(2, 20))
        expected = messages[3 - lost]
        assert [message for message in found if message in messages[: 4 - lost]] == [expected]
        assert superseded(world) == dict.fromkeys(messages[: 3 - lost], expected)


@pytest.mark.parametrize("how", WAYS)
def test_what_keep_last_has_replaced_goes_in_its_window(world: World, how: str) -> None:
    world.begin([KeepLast("4s")])
    first = world.put("k")
    [row] = world.claim(0, 20).rows
    assert row.id == first
    world.settle(row, outcome("ack", 0))
    world.advance(SECOND)
    kept, lost = world.put("k"), world.put("k")
    assert ids(world.claim(0, 20)) == []
    world.run(change(world, lost, how))
    world.advance(3 * SECOND + 1_000)
    found = [*ids(world.claim(1, 20)), *ids(world.claim(1, 20))]
    assert kept in found
    assert not superseded(world)


@pytest.mark.parametrize("how", WAYS)
def test_the_second_of_a_burst_goes_if_the_first_cannot(world: World, how: str) -> None:
    """With edge="leading", while no worker was free."""
    world.begin([Debounce("3s", edge="leading")])
    other, first, second = world.put("other"), world.put("k"), world.put("k")
    assert ids(world.claim(0, 1)) == [other]
    world.run(change(world, first, how))
    world.advance(SECOND)
    third = world.put("k")
    found = [i for _ in range(20) for i in self_claim(world)]
    assert second in found
    assert superseded(world) == {third: second}


def test_what_expires_before_its_slot_replaces_nothing(world: World) -> None:
    """It was claimed ahead of its slot, which it does not live to see."""
    world.begin([Debounce("100ms"), Throttle(1, "10s", burst=1)])
    other = world.put("other")
    world.advance(SECOND)
    assert ids(world.claim(0, 20)) == [other]
    kept, lost = world.put("k"), world.put("k", expires_in=9.95)
    world.advance(9_900_000)
    [row] = world.claim(0, 20).rows
    assert row.id == lost
    assert not superseded(world)
    world.advance(100_000)
    world.settle(row, outcome("expired", 0))
    found = [i for _ in range(40) for i in self_claim(world)]
    assert found == [kept]


def test_all_that_stood_by_is_freed_with_its_policy(world: World) -> None:
    """Though more is looked at again at one time than one step looks at."""
    world.begin([Debounce("3s")])
    count = 2 * STEP_SIZE + 100
    rows = [NewMessage(QUEUE, b"1", key="k") for _ in range(count)]
    world.run(world.store.insert(rows))
    for _ in range(3):
        assert ids(world.claim(0, 20)) == []
    policy_holds = world.store.policy_holds
    [hold] = world.run(policy_holds.load_holds([QUEUE]))
    assert world.run(policy_holds.free_removed(hold)) == count
    live = world.live()
    assert len(live) == count
    assert max(microseconds(row["next_attempt_at"]) for row in live.values()) <= world.now


def test_the_newest_is_known_as_long_as_it_waits(world: World) -> None:
    """A queue may be closed, paused or behind for longer than keys are remembered."""
    world.begin([Debounce("3s")])
    old, new = world.put("k"), world.put("k")
    assert ids(world.claim(0, 20)) == []
    for _ in range(3):
        world.advance(2 * 86_400 * SECOND)
        world.run(world.store.remove_expired_states(1_000))
    assert ids(world.claim(0, 20)) == [new]
    assert superseded(world) == {old: new}


def test_another_key_makes_it_another_keys_message(world: World) -> None:
    """A newer message of that key that was delivered before does not count."""
    world.begin([KeepLast("4s")])
    first = world.put("k")
    [row] = world.claim(0, 20).rows
    assert row.id == first
    world.settle(row, outcome("ack", 0))
    kept, new = world.put("k"), world.put("k")
    assert ids(world.claim(0, 20)) == []
    other = world.put("other")
    [row] = world.claim(0, 20).rows
    assert row.id == other
    world.settle(row, outcome("ack", 0))
    world.advance(SECOND)
    assert world.run(world.store.repairs.edit(kept, {"key": "other"}, None)).done
    assert sorted(delivered(world, 8)) == [kept, new]
    assert not superseded(world)


@pytest.mark.parametrize("kind", [Debounce, KeepLast])
def test_keys_may_be_of_headers_from_now_on(world: World, kind: Any) -> None:
    """What stands by is found by no key then, and is not left behind."""
    tenant = {"headers": '{"tenant": "t"}'}
    world.begin([kind("3s")])
    first = world.put("k", **tenant)
    found = delivered(world, 1)
    messages = [first, *(world.put("k", **tenant) for _ in range(3))]
    found += delivered(world, 1)
    world.policies = [kind("3s", key=Header("tenant"))]
    found += delivered(world, 30)
    assert {*found, *superseded(world)} == set(messages)
    assert not world.live()


def test_a_message_that_comes_back_takes_part_anew(world: World) -> None:
    for policy in (Debounce("3s"), Debounce("3s", edge="leading"), KeepLast("3s")):
        world.begin([policy])
        world.put(None)
        messages = [world.put("k"), world.put("k")]
        assert len(ids(world.claim(0, 1))) == 1
        for message in messages:
            for key in ("other", "k"):
                assert world.run(world.store.repairs.edit(message, {"key": key}, None)).done
        found = delivered(world, 8)
        assert messages[0 if policy.leading else 1] in found
        assert {*found, *superseded(world)} == set(messages)


def test_a_key_with_one_more_space_at_its_end_is_another_key(world: World) -> None:
    """MySQL takes them for equal; policies do not."""
    world.begin([Debounce("3s")])
    message = world.put("k")
    for key, stays in (("k", True), ("k ", False), ("k ", True), ("k", False)):
        world.claim(0, 20)
        assert world.live()[message]["policy_marks"] & BURST
        assert world.run(world.store.repairs.edit(message, {"key": key}, None)).done
        assert bool(world.live()[message]["policy_marks"] & BURST) == stays


def test_the_newest_may_be_put_off_for_long(world: World) -> None:
    """What stands by for it is looked at each hour."""
    world.begin([Debounce("3s")])
    old, new = world.put("k"), world.put("k")
    assert ids(world.claim(0, 20)) == []
    late = datetime(9998, 1, 1, tzinfo=timezone.utc)
    assert world.run(world.store.repairs.set_due(new, late)).done
    for _ in range(3):
        world.advance(MAX_STANDBY_CHECK_DELAY + SECOND)
        assert ids(world.claim(0, 20)) == []
    world.run(change(world, new, "cancel"))
    world.advance(MAX_STANDBY_CHECK_DELAY + SECOND)
    assert [*ids(world.claim(0, 20)), *ids(world.claim(0, 20))] == [old]


def test_a_retry_of_another_key_does_not_stand_by(world: World) -> None:
    """It has left its burst, and is not superseded in another."""
    world.begin([Debounce("3s")])
    retried = world.put("other")
    world.claim(0, 20)
    world.advance(3 * SECOND + 1_000)
    [row] = world.claim(0, 20).rows
    assert row.id == retried
    world.settle(row, outcome("nack", 3600 * SECOND))
    old, new = world.put("k"), world.put("k")
    assert ids(world.claim(0, 20)) == []
    assert world.run(world.store.repairs.edit(retried, {"key": "k"}, 0.0)).done
    found = delivered(world, 12)
    assert sorted(found) == [retried, new]
    assert superseded(world) == {old: new}


def test_keys_that_differ_in_spaces_are_looked_at(world: World) -> None:
    """To MySQL they are equal."""
    world.begin([Debounce("3s")])
    keys = ("k", "k ", "k  ")
    newest = {key: [world.put(key) for _ in range(3)][-1] for key in keys}
    assert {*delivered(world, 12)} >= {*newest.values()}
    assert not world.live()


@pytest.mark.parametrize("how", ["drop", "dead_letter"])
def test_what_a_throttle_refuses_has_replaced_the_others(world: World, how: Any) -> None:
    """Else each message of the burst would be refused, one by one."""
    world.begin([Debounce("1s"), Throttle(1, "1h", burst=1, when_exceeded=how)])
    other = world.put("other")
    world.claim(0, 20)
    world.advance(SECOND + 1_000)
    [row] = world.claim(0, 20).rows
    assert row.id == other
    world.settle(row, outcome("ack", 0))
    *older, newest = [world.put("k") for _ in range(4)]
    refused = delivered(world, 8)
    assert refused == ([newest] if how == "dead_letter" else [])
    assert not world.live()
    assert superseded(world) == dict.fromkeys(older, newest)


def test_it_is_looked_at_less_often_the_longer_it_stands(world: World) -> None:
    """A large backlog costs little, and nothing waits longer than it has for its newest."""
    world.begin([Debounce("3s")])
    old, _ = world.put("k"), world.put("k")
    assert ids(world.claim(0, 20)) == []
    looks = set[Any]()
    for _ in range(30):
        world.advance(60 * SECOND)
        first = world.put(None, priority=1)
        assert ids(world.claim(0, 1)) == [first]
        looks.add(world.live()[old]["next_attempt_at"])
    assert 4 < len(looks) < 15


def test_it_is_looked_at_seldom_behind_a_message_that_runs_for_long(world: World) -> None:
    """Though its newest is put off every two seconds."""
    world.begin([Debounce("3s")])
    world.put("k")
    world.claim(0, 20)
    world.advance(4 * SECOND)
    [running] = world.claim(0, 20).rows
    old, new = world.put("k"), world.put("k")
    looks = set[Any]()
    for _ in range(60):
        assert ids(world.claim(0, 20)) == []
        looks.add(world.live()[old]["next_attempt_at"])
        world.advance(20 * SECOND)
    assert 5 < len(looks) < 20, "of 60"
    world.settle(running, outcome("ack", 0))
    assert delivered(world, 5) == [new]
    assert superseded(world) == {old: new}


@pytest.mark.parametrize(
    ("key", "how"),
    [(True, "key"), *product([True, Header("tenant")], ["cancel", "move", *ALL_OF_FILTERS])],
)
def test_what_an_operator_takes_away_gives_its_place_soon(world: World, key: Key, how: str) -> None:
    """However long the other one has stood by: from `MAX_STANDBY_RECHECK` on that changes
    nothing."""
    world.begin([Debounce("3s", key=key)])
    old = world.put("k", headers='{"tenant": "k"}')
    new = world.put("k", headers='{"tenant": "k", "which": "new"}')
    assert ids(world.claim(0, 20)) == []
    for _ in range(2):
        world.advance(3600 * SECOND)
        first = world.put(None, priority=1)
        assert ids(world.claim(0, 1)) == [first]
    if how in WAYS:
        world.run(operate(world, new, how))
    else:
        arguments = {"text": ""} if how == "cancel all" else {"to": "elsewhere"}
        filters = Filters(headers={"which": "new"})
        job = Job(action=how.split()[0], by="", filters=filters, arguments=arguments)
        world.run(run_job(world.store.jobs, job))
    world.advance(MAX_STANDBY_RECHECK)
    found = [*ids(world.claim(0, 20)), *ids(world.claim(0, 20))]
    assert old in found
    assert not superseded(world)


async def run_job(jobs: JobStore, job: Job, done: int = 1) -> Job:
    begun = await jobs.start(await jobs.plan(job), "jobs")
    step = await jobs.run_step(begun.id)
    assert step.job is not None
    assert step.job.done == done
    return begun


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_text_in_created_at_stops_nothing(world: World) -> None:
    """Another program has written it."""
    world.begin([Debounce("3s")])
    old, new = world.put("k"), world.put("k")
    world.run(execute(world, f"UPDATE message SET created_at = '2026-01-01' WHERE id = {old}"))
    assert delivered(world, 8) == [new]
    assert not world.live()


async def execute(world: World, statement: str) -> None:
    async with world.clock.engine.begin() as connection:
        await connection.execute(text(statement))


@pytest.mark.parametrize("how", ["retry", "postpone", "edit", "until", "retry all"])
@pytest.mark.parametrize("kind", [Debounce, KeepLast])
def test_what_stands_by_keeps_its_place_when_it_is_made_due(
    world: World, kind: Any, how: str
) -> None:
    """It does not come after the newer one, and it goes if that one cannot."""
    for lost in (False, True):
        world.begin([kind("3s")])
        first = world.put("k")
        assert delivered(world, 5) == [first]
        if kind is KeepLast:
            # Its window is open again.
            first = world.put("k")
            assert delivered(world, 1) == [first]
        old, new = world.put("k", headers='{"which": "old"}'), world.put("k")
        assert ids(world.claim(0, 20)) == []
        world.run(make_due(world, old, how))
        assert stands(world, old)
        if lost:
            world.run(change(world, new, "cancel"))
        assert delivered(world, 20) == [old if lost else new]
        assert superseded(world) == ({} if lost else {old: new})


async def make_due(world: World, message: int, how: str) -> None:
    repairs = world.store.repairs
    if how == "retry all":
        filters = Filters(headers={"which": "old"})
        await run_job(world.store.jobs, Job(action="retry_now", by="", filters=filters), done=0)
    elif how == "edit":
        assert (await repairs.edit(message, {"priority": 1}, 5.0)).done
        assert (await repairs.edit(message, {}, 5.0)).done
    else:
        ways = {"retry": 0.0, "postpone": 10.0, "until": await world.store.server.read_now()}
        assert (await repairs.set_due(message, ways[how])).done


def stands(world: World, message: int) -> bool:
    row = world.live()[message]
    return has_standby_flags(microseconds(row["next_attempt_at"]), row["policy_marks"])


@pytest.mark.parametrize("kind", [Debounce, KeepLast])
def test_many_that_are_made_due_go_with_the_newest(world: World, kind: Any) -> None:
    """Also if it was due before."""
    world.begin([kind("3s")])
    if kind is KeepLast:
        first = world.put("k")
        assert delivered(world, 1) == [first]
    *older, newest = world.put_many(120, "k")
    assert ids(world.claim(0, 20)) == []
    world.advance(3_500_000)
    for message in older:
        # The ids of what is noted in the audit go by the time.
        world.advance(1_000)
        assert world.run(world.store.repairs.set_due(message, 0.0)).done
    assert delivered(world, 8) == [newest]
    assert superseded(world) == dict.fromkeys(older, newest)


@pytest.mark.parametrize("database", ["postgresql", "mysql", "mariadb"], indirect=True)
@pytest.mark.parametrize("case", ["debounce", "keep last", "retry"])
def test_a_message_of_another_key_by_now_is_not_superseded(world: World, case: str) -> None:
    """The race: the edit commits between the claim's read and its discard. (On SQLite it waits for
    the claim.)"""
    world.begin([Debounce("3s") if case == "debounce" else KeepLast("3s")])
    if case != "debounce":
        first = world.put("k")
        [row] = world.claim(0, 20).rows
        assert row.id == first
        world.settle(row, outcome("nack", 3600 * SECOND) if case == "retry" else outcome("ack", 0))
    old = first if case == "retry" else world.put("k")
    new = world.put("k")
    assert ids(world.claim(0, 20)) == []
    world.advance(3 * SECOND + 1_000)
    # A claim that looks at what stands by keeps it locked.
    other = world.put(None, priority=1)
    assert ids(world.claim(0, 1)) == [other]
    edited: list[int] = []

    def edit(*given: Any) -> None:
        if "u.k IS NULL" in given[2] and not edited:
            edited.append(old)
            await_only(operate(world, old, "key"))

    engine = world.clock.engine.sync_engine
    event.listen(engine, "before_cursor_execute", edit)
    found = ids(world.claim(0, 20))
    event.remove(engine, "before_cursor_execute", edit)
    assert edited
    assert found == [new]
    assert not superseded(world)
    assert world.live()[old]["key"] == "another"
    if case != "retry":
        assert old in delivered(world, 8)


@pytest.mark.parametrize("case", ["keep last", "cancelled"])
def test_a_key_for_which_nothing_stands_by_is_forgotten_after_a_day(
    world: World, case: str
) -> None:
    world.begin([KeepLast("2s") if case == "keep last" else Debounce("2s")])
    if case == "keep last":
        # No worker was free for its whole window.
        world.put("other")
        assert len([world.put("k") for _ in range(4)]) == 4
        assert len(ids(world.claim(0, 1))) == 1
        world.advance(5 * SECOND)
    else:
        world.put("k")
        world.claim(0, 20)
        world.advance(3 * SECOND)
        [running] = world.claim(0, 20).rows
        lost = world.put("k")
        world.claim(0, 20)
        world.advance(3 * SECOND)
        world.claim(0, 20)
        assert len([world.put("k") for _ in range(2)]) == 2
        world.claim(0, 20)
        world.run(change(world, lost, "cancel"))
        world.advance(3 * SECOND)
        world.settle(running, outcome("ack", 0))
    assert delivered(world, 8)
    assert superseded(world)
    world.advance(3 * 86_400 * SECOND)
    world.run(world.store.remove_expired_states(1_000))
    assert world.run(known_keys(world)) == []


async def known_keys(world: World) -> list[str]:
    c = world.store.tables.policy_state.c
    async with world.clock.engine.connect() as connection:
        found = await connection.execute(select(c.key).where(c.scope == get_burst_scope(QUEUE)))
        return list(found.scalars())


@pytest.mark.parametrize("kind", [Debounce, KeepLast])
@pytest.mark.parametrize("action", ["cancel", "move", "retry_now"])
def test_an_undo_brings_no_older_one_after_the_newest(world: World, kind: Any, action: str) -> None:
    """What comes back takes part in the bursts of its key anew."""
    for later in (0, 4 * SECOND):
        world.begin([kind("3s")])
        first = world.put("k")
        assert first in delivered(world, 4)
        if kind is KeepLast:
            first = world.put("k")
            assert delivered(world, 1) == [first]
        messages = [world.put("k") for _ in range(5)]
        assert ids(world.claim(0, 20)) == []
        given = {"cancel": {"text": ""}, "move": {"to": "elsewhere"}, "retry_now": {}}[action]
        job = Job(action=action, by="", queues=(QUEUE,), filters=Filters(), arguments=given)
        jobs = world.store.jobs
        # What stands by keeps its place.
        done = 1 if action == "retry_now" else 5
        begun = world.run(run_job(jobs, job, done))
        world.advance(later)
        undo = world.run(jobs.start_undo(begun.id, "", "jobs"))
        assert undo is not None
        step = world.run(jobs.run_step(undo.id))
        assert step.job is not None
        assert step.job.done == done
        found = delivered(world, 20)
        assert found[-1] == messages[-1]
        # KeepLast: the first that comes back to an idle key goes at once.
        assert len(found) <= (2 if kind is KeepLast else 1)
        assert {*found, *superseded(world)} >= set(messages)
        assert not world.live()


def test_an_old_key_does_not_hold_back_a_message_of_another(world: World) -> None:
    """The open burst of the key that it had knows it still."""
    world.begin([Debounce("3s")])
    edited = world.put("old")
    assert ids(world.claim(0, 20)) == []
    assert world.run(world.store.repairs.edit(edited, {"key": "k"}, None)).done
    world.claim(0, 20)
    newer = world.put("old")
    assert ids(world.claim(0, 20)) == []
    assert not stands(world, edited)
    world.advance(3 * SECOND + 1_000)
    later = world.put("k")
    assert delivered(world, 8) == [edited, newer, later]
    assert not superseded(world)


def test_an_old_key_gives_no_due_time_to_a_message_of_another(world: World) -> None:
    """An older message of the key that it had is due later, and joins the burst that knows it."""
    world.begin([Debounce("3s")])
    world.put("old", delay=SECOND)
    edited = world.put("old")
    assert ids(world.claim(0, 20)) == []
    world.advance(SECOND)
    assert world.run(world.store.repairs.edit(edited, {"key": "k"}, 60.0)).done
    assert edited not in delivered(world, 60)
    assert edited in delivered(world, 5)


def test_its_own_key_again_changes_nothing(world: World) -> None:
    """Two bursts wait, each for its first message."""
    world.begin([Debounce("3s", edge="leading")])
    first = world.put("k")
    [running] = world.claim(0, 20).rows
    assert running.id == first
    bursts = []
    for _ in range(2):
        world.advance(4 * SECOND)
        bursts.append([world.put("k"), world.put("k")])
        assert ids(world.claim(0, 20)) == []
    assert world.run(world.store.repairs.edit(bursts[0][0], {"key": "k"}, None)).done
    world.advance(SECOND)
    assert ids(world.claim(0, 20)) == []
    world.settle(running, outcome("ack", 0))
    assert delivered(world, 20) == [burst[0] for burst in bursts]


@pytest.mark.parametrize("first", ["old", "k"])
def test_of_two_keys_that_know_a_message_its_own_counts(world: World, first: str) -> None:
    """A message of each comes in the same claim, in either order."""
    world.begin([Debounce("3s")])
    edited = world.put("old")
    world.claim(0, 20)
    world.advance(SECOND)
    assert world.run(world.store.repairs.edit(edited, {"key": "k"}, None)).done
    world.claim(0, 20)
    world.advance(SECOND)
    newer = {key: world.put(key) for key in (first, {"old": "k", "k": "old"}[first])}
    assert ids(world.claim(0, 20)) == []
    assert sorted(delivered(world, 8)) == sorted(newer.values())
    assert superseded(world) == {edited: newer["k"]}


@pytest.mark.parametrize("how", ["edit", "undo"])
def test_what_comes_back_while_it_was_delivered_last_leaves_the_others(
    world: World, how: str
) -> None:
    """It was postponed, so it counts as not delivered; a newer burst waits behind it."""
    world.begin([Debounce("2s")])
    back = world.put("k")
    world.claim(0, 20)
    world.advance(2 * SECOND + 1_000)
    [row] = world.claim(0, 20).rows
    assert row.id == back
    world.settle(row, outcome("postpone", 30 * SECOND))
    if how == "edit":
        for key in ("other", "k"):
            assert world.run(world.store.repairs.edit(back, {"key": key}, None)).done
    else:
        jobs = world.store.jobs
        job = Job(action="cancel", by="", filters=Filters(), arguments={"text": ""})
        undo = world.run(jobs.start_undo(world.run(run_job(jobs, job)).id, "", "jobs"))
        assert undo is not None
        world.run(jobs.run_step(undo.id))
    world.advance(SECOND)
    one = world.put("k")
    world.claim(0, 20)
    world.advance(3 * SECOND)
    *older, newest = [world.put("k") for _ in range(3)]
    found = delivered(world, 60)
    assert found[-1] == newest
    assert not {*older} & {*found}
    assert {back, one, *older, newest} == {*found, *superseded(world)}


def test_another_key_of_the_publish_is_nothing_to_a_header(world: World) -> None:
    """Two bursts wait, each for its first message."""
    world.begin([Debounce("3s", edge="leading", key=Header("tenant"))])
    tenant = {"headers": '{"tenant": "t"}'}
    first = world.put("k", **tenant)
    [running] = world.claim(0, 20).rows
    assert running.id == first
    bursts = []
    for _ in range(2):
        world.advance(4 * SECOND)
        bursts.append([world.put("k", **tenant), world.put("k", **tenant)])
        assert ids(world.claim(0, 20)) == []
    assert world.run(world.store.repairs.edit(bursts[0][0], {"key": "other"}, None)).done
    assert ids(world.claim(0, 20)) == []
    world.settle(running, outcome("ack", 0))
    assert delivered(world, 20) == [burst[0] for burst in bursts]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("key", ["'k' || char(0) || 'x'", "CAST(x'ff' AS TEXT)"])
def test_keys_that_no_broker_has_written_stop_nothing(world: World, key: str) -> None:
    """Another program has."""
    for policy in (Debounce("3s"), KeepLast("3s")):
        world.begin([policy])
        messages = [world.put("k") for _ in range(3)]
        world.run(execute(world, f"UPDATE message SET key = {key}"))
        assert world.run(world.store.repairs.edit(messages[0], {"priority": 1}, None)).done
        assert world.run(world.store.repairs.cancel(messages[1], "")).done
        assert sorted(delivered(world, 8)) == [messages[0], messages[2]]


def test_a_message_that_two_keys_know_holds_back_its_own(world: World) -> None:
    """It got another key, and is handled under that one."""
    world.begin([Debounce("3s")])
    edited = world.put("old")
    world.claim(0, 20)
    assert world.run(world.store.repairs.edit(edited, {"key": "k"}, None)).done
    world.claim(0, 20)
    world.advance(3 * SECOND + 1_000)
    other = world.put("old")
    [running] = world.claim(0, 20).rows
    assert running.id == edited
    waits = world.put("k")
    assert delivered(world, 8) == [other]
    world.settle(running, outcome("ack", 0))
    assert delivered(world, 8) == [waits]


@pytest.mark.parametrize("kind", [Debounce, KeepLast])
def test_a_policy_that_comes_back_takes_all_in_anew(world: World, kind: Any) -> None:
    """What had stood by is one burst more, in place of messages that go one by one."""
    world.begin([kind("3s")])
    first = world.put("k")
    assert delivered(world, 5) == [first]
    if kind is KeepLast:
        first = world.put("k")
        assert delivered(world, 1) == [first]
    messages = [world.put("k") for _ in range(5)]
    assert ids(world.claim(0, 20)) == []
    world.advance(70 * SECOND)
    policy_holds = world.store.policy_holds
    [hold] = world.run(policy_holds.load_holds([QUEUE]))
    world.run(policy_holds.free_removed(hold))
    found = delivered(world, 10)
    assert found[0] == messages[-1]
    assert len(found) <= 2
    assert {*found, *superseded(world)} == set(messages)


def delivered(world: World, seconds: int) -> list[int]:
    """What ends in so many seconds after a delivery; without claims once nothing is live."""
    found: list[int] = []
    for second in range(seconds):
        rows = world.claim(0, 20).rows
        for row in rows:
            found.append(row.id)
            world.settle(row, row.outcome or outcome("ack", 0))
        if rows and not world.live():
            world.advance((seconds - second) * SECOND)
            break
        world.advance(SECOND)
    return found


def self_claim(world: World) -> list[int]:
    found = ids(world.claim(0, 20))
    world.advance(SECOND)
    return found


def test_what_stands_by_counts_nowhere(world: World) -> None:
    """Neither before its burst has ended nor after, while no worker is free."""
    world.begin([Debounce("3s")])
    for _ in range(2):
        for key in ("a", "b", "c"):
            world.put(key)
        assert ids(world.claim(0, 20)) == []
        world.advance(SECOND)
    assert counted(world) == (0, 3, 3, 0, 3, 0)
    world.advance(10 * SECOND)
    assert counted(world) == (3, 0, 3, 8, 3, 8)
    world.claim(0, 1)
    assert counted(world)[:3] == (2, 0, 2)
    assert counted(world)[5] == 0, "the claim has looked"
    world.advance(3600 * SECOND)
    assert counted(world)[:3] == (2, 0, 2)
    assert counted(world)[5] > 3000


def test_what_is_due_in_8970_stands_by_only_with_its_mark(world: World) -> None:
    """A due time may be a sentinel for "never", and text in SQLite."""
    world.begin([Debounce("3s")])
    never, foreign = world.put(None), world.put(None)
    message = world.store.tables.message

    async def edit() -> None:
        async with world.clock.engine.begin() as connection:
            far = datetime(9000, 1, 1, tzinfo=timezone.utc)
            for each in (never, foreign):
                await connection.execute(
                    update(message).where(message.c.id == each).values(next_attempt_at=far)
                )
            if world.store.dialect_name == "sqlite":
                later = f"UPDATE message SET next_attempt_at = '2026-01-01' WHERE id = {foreign}"
                await connection.exec_driver_sql(later)

    world.run(edit())
    assert counted(world)[4:] == (0, 0)


def counted(world: World) -> tuple[int, ...]:
    """Messages that are due and that are due later, both as operators see them, the seconds since
    the first was due, what stands by, and the seconds since a claim should have looked at that, as
    metrics tell it."""
    dialect = world.store.dialect

    async def read() -> tuple[int, ...]:
        async with world.clock.engine.connect() as connection:

            def look(sync: Any) -> tuple[int, ...]:
                [state] = read_states(sync, dialect, [QUEUE], Counter())
                counts = count_messages(sync, dialect, [QUEUE])[QUEUE]
                assert counts.ready.value == state.ready
                assert counts.delayed.value == state.delayed
                assert counts.standing.value == state.standing
                assert abs(counts.standing_overdue - state.standing_overdue) < 60.0
                assert count_due(sync, dialect, QUEUE, 100) == state.ready
                both = state.ready + state.delayed
                return (
                    state.ready,
                    state.delayed,
                    both,
                    round(state.oldest_due_age),
                    state.standing,
                    round(state.standing_overdue),
                )

            return await connection.run_sync(look)

    return world.run(read())
