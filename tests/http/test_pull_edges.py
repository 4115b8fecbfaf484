"""Pull consumers: what is rare."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import AsyncMock
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import func, literal_column, select, true, update
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import Debounce, SqlBroker, SqlBrokerResponse
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.parts import channel_rows as channel_rows
from faststream_sqlbroker.database.policies import policy_holds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.fleet import housekeeping
from faststream_sqlbroker.flow.tasks import configured, pull_jobs
from faststream_sqlbroker.flow.tasks.configured import ConfiguredSetup
from faststream_sqlbroker.flow.tasks.pull_jobs import MAX_ROUNDS
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMiddleware
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.conftest import as_user, on_sqlite
from tests.http.pulling import CHANNEL, CONSUMER, JOBS, LEASE, QUEUE, TOKENS, Pulling
from tests.http.test_pull_consumers import over

pytestmark = pytest.mark.capability("HTTP: channels with pull consumers")


async def test_a_job_whose_time_is_over_is_shown_as_queued_or_dead(
    broker: SqlBroker, look: Look
) -> None:
    """W5: at once, not when the application has looked."""
    pulling = Pulling(broker, max_retries=1)
    async with pulling.http:
        await pulling.queued()
        await pulling.app._service.jobs().stop()  # type: ignore[misc]
        await pulling.broadcast()
        [job] = await pulling.queued()
        await pulling.start(job["ID"])
        assert await pulling.state(job["ID"]) == ("INFLIGHT", 0)
        await over(look)
        assert await pulling.state(job["ID"]) == ("QUEUED", 1)
        await pulling.start(job["ID"])
        await over(look)
        assert await pulling.state(job["ID"]) == ("DEAD", 1)


async def test_w4_a_job_that_was_dropped_before_its_first_delivery(
    broker: SqlBroker, look: Look
) -> None:
    """W4: Dead→InFlight is one retry more, whatever it died of."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        await pulling.broadcast()
        [job] = await pulling.queued()
        await broker.admin.cancel(int(job["ID"]), by="ann")
        assert await pulling.state(job["ID"]) == ("DEAD", 0)
        await pulling.start(job["ID"])
        assert await pulling.state(job["ID"]) == ("INFLIGHT", 1)


async def test_jobs_that_have_expired_leave_with_a_page(broker: SqlBroker, look: Look) -> None:
    """As with a claim of a subscriber: nothing else would end them, and pages walk over them."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        for priority in (5, 0, 0):
            await broker.publish("late", QUEUE, priority=priority, lookup="ann", expires_in="1h")
        waits = await broker.publish("later", QUEUE, delay="2h", expires_in="1h")
        await _expire(look, timedelta(minutes=2))
        fresh = await broker.publish("just now", QUEUE, expires_in="1h")
        await _expire(look, timedelta(seconds=1), of=fresh)
        lives = await broker.publish("in time", QUEUE, lookup="ann", expires_in="1h")
        [job] = await pulling.queued("?limit=2")
        assert job["ID"] == str(lives)
        # A client that has listed it a moment ago is told that it has expired.
        assert {row["id"] for row in await look.rows()} == {lives, waits, fresh}
        assert (await pulling.post(str(fresh), "INFLIGHT")).status_code == 400
        ended = await look.rows(archive=True)
        assert [(row["state"], row["reason"]) for row in ended] == [("DISCARDED", "expired")] * 4
        assert await broker.admin.count_mirrored(lookup="ann") == 1


async def test_what_stood_by_for_a_removed_policy_is_found(
    broker: SqlBroker, engine: AsyncEngine, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer had a subscriber, and nothing else but its requests takes from the queue now."""
    monkeypatch.setattr(housekeeping, "REMOVED_START_INTERVAL", 0.1)
    monkeypatch.setattr(pull_jobs, "MAX_PAUSE", 0.1)
    monkeypatch.setattr(policy_holds, "NOTE_VALIDITY", 0)
    before = SqlBroker(engine)

    @before.subscriber(QUEUE, policies=[Debounce("1h")])
    async def handle(body: str) -> None:
        raise AssertionError

    await before.start()
    for _ in range(3):
        await before.publish("x", QUEUE, key="k")

    async def is_put_off() -> bool:
        return all(row["policy_marks"] for row in await look.rows())

    await eventually(is_put_off)
    await before.stop()
    pulling = Pulling(broker)
    async with pulling.http:

        async def is_found() -> bool:
            return len(await pulling.queued()) == 3

        await eventually(is_found)


async def test_many_that_have_expired_hide_no_job(broker: SqlBroker, look: Look) -> None:
    """One request ends a bounded number of them, and the page has the others' jobs all the same."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        rows = [SqlBrokerResponse(b"late", expires_in="1h")] * (2 * MAX_ROUNDS + 4)
        await broker.publish_batch(*rows, queue=QUEUE)
        await _expire(look, timedelta(minutes=2))
        await broker.publish("in time", QUEUE)
        for left in (4, 0):
            assert [job["Message"]["Payload"] for job in await pulling.queued("?limit=1")] == [
                "in time"
            ]
            assert len(await look.rows()) == left + 1


async def _expire(look: Look, ago: timedelta, of: int | None = None) -> None:
    """Let all messages, or one, have expired some time ago."""
    table = look.tables.message
    where = true() if of is None else table.c.id == of
    async with look.engine.begin() as connection:
        over = datetime.now(timezone.utc) - ago
        await connection.execute(update(table).where(where).values(expires_at=over))


async def test_an_expired_job_that_another_client_takes_stays_taken(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """It is dead by another client's request, and the next one takes it again and lets it live."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        late = str(await broker.publish("late", QUEUE, expires_in="1h"))
        await _expire(look, timedelta(minutes=2))
        store = broker._store.pull
        end_expired = store.end_expired

        async def taken_before(queue: str, ids: Sequence[int]) -> None:
            assert (await pulling.post(late, "INFLIGHT")).status_code == 400
            await pulling.start(late)
            await end_expired(queue, ids)

        monkeypatch.setattr(store, "end_expired", taken_before)
        assert await pulling.queued() == []
        [row] = await look.rows()
        assert row["state"] == "PROCESSING"


async def test_an_expired_job_that_lives_again_is_as_before(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """Another client has taken the dead job, and its time is over: it waits on."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        late = str(await broker.publish("late", QUEUE, expires_in="1h"))
        await _expire(look, timedelta(minutes=2))
        store = broker._store.pull
        end_expired = store.end_expired

        async def queued_again(queue: str, ids: Sequence[int]) -> None:
            assert (await pulling.post(late, "INFLIGHT")).status_code == 400
            await pulling.start(late)
            await over(look)
            assert (await pulling.state(late))[0] == "QUEUED"
            before = await look.rows()
            await end_expired(queue, ids)
            assert await look.rows() == before

        monkeypatch.setattr(store, "end_expired", queued_again)
        [job] = await pulling.queued()
        assert job["ID"] == late


async def test_an_old_lease_changes_nothing_of_a_job_that_is_taken_at_that_moment(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """Promise 3: the request finds that its time is over; then another client is faster."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        jobs = pulling.app._service.jobs()  # type: ignore[misc]
        await jobs.stop()
        # Only requests look for what is over.
        monkeypatch.setattr(jobs, "_has_poll_loop", False)
        store = broker._store.pull
        end_leases = store.end_leases
        leases = [await pulling.start(job["ID"])]

        async def taken_at_once(*arguments: Any) -> Any:
            found = await end_leases(*arguments)
            monkeypatch.setattr(store, "end_leases", end_leases)
            leases.append(await pulling.start(job["ID"]))
            return found

        for how in ("DELIVERED", "DEAD", "heartbeat"):
            await over(look)
            monkeypatch.setattr(store, "end_leases", taken_at_once)
            if how == "heartbeat":
                old = {**TOKENS, LEASE: leases[-1]}
                path = f"{JOBS}/job/{job['ID']}/heartbeat"
                answer = await pulling.http.post(path, json={}, headers=old)
            else:
                answer = await pulling.post(job["ID"], how, lease=leases[-1])
            assert answer.status_code == 409
            assert await pulling.state(job["ID"]) == ("INFLIGHT", len(leases) - 1)
        assert len(set(leases)) == 4
        done = await pulling.post(job["ID"], "DELIVERED", lease=leases[-1])
        assert done.status_code == 202


async def test_a_consumer_that_becomes_a_push_one_gives_its_jobs_up(
    broker: SqlBroker, look: Look
) -> None:
    """No client can end them any more, and the subscriber must not wait for their timeouts."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        await pulling.broadcast()
        [job] = await pulling.queued()
        lease = await pulling.start(job["ID"], IncrementalTimeout=100_000)
        assert (await pulling.put(JOBS, {"type": "push"})).status_code == 200
        [row] = await look.rows()
        assert (row["state"], row["lease_token"], row["deliveries_count"]) == ("PENDING", None, 1)
        assert (await pulling.put(JOBS, {"type": "pull"})).status_code == 200
        assert (await pulling.post(job["ID"], "DELIVERED", lease=lease)).status_code == 409
        # A new token of a push consumer takes no subscriber's leases.
        await pulling.start(job["ID"])
        await pulling.put(JOBS, {"type": "pull", "rotate": "true"})
        [row] = await look.rows()
        assert row["state"] == "PROCESSING"


async def test_a_request_that_was_let_in_before_takes_no_job_of_a_push_consumer(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """Its body came late, or other clients kept it waiting: no client could end that job."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        await pulling.post(job["ID"], "DEAD", lease=await pulling.start(job["ID"]))
        await pulling.broadcast()
        [waiting] = await pulling.queued()
        jobs = pulling.app._service.jobs()  # type: ignore[misc]
        before = await jobs.find_channel(CHANNEL, CONSUMER)
        await pulling.put(JOBS, {"type": "push"})

        async def find(channel: str, consumer: str) -> Any:
            return before

        monkeypatch.setattr(jobs, "find_channel", find)
        for each in (waiting, job):
            refused = await pulling.post(each["ID"], "INFLIGHT", IncrementalTimeout=100_000)
            assert refused.status_code == 400
            assert "this is a push consumer" in refused.json()["error"]
        assert [row["state"] for row in await look.rows()] == ["PENDING"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_job_that_is_taken_during_a_change_to_push_is_queued_again(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """By a statement that has begun before the change was committed, and ends after it; on MariaDB
    and MySQL by another server of a cluster."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        store = broker._store.tokens
        put = store.set_channel

        async def taken_at_last(*arguments: Any, **options: Any) -> Any:
            found = await put(*arguments, **options)
            table = look.tables.message
            leased = {"state": "PROCESSING", "lease_token": uuid4(), "acquired_at": clock()}
            async with look.engine.begin() as connection:
                values = update(table).values(**leased, lease_expires_at=clock())
                await connection.execute(values)
            return found

        monkeypatch.setattr(store, "set_channel", taken_at_last)
        assert (await pulling.put(JOBS, {"type": "push"})).status_code == 200
        [row] = await look.rows()
        assert (str(row["id"]), row["state"], row["lease_token"]) == (job["ID"], "PENDING", None)


async def test_a_job_in_flight_that_is_cancelled_is_dead_when_its_time_is_over(
    broker: SqlBroker, look: Look
) -> None:
    """By whatever queues it again: a look at it, the loop, and a change to push."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        jobs = pulling.app._service.jobs()  # type: ignore[misc]
        await jobs.stop()
        for by in ("look", "sweep", "push"):
            await pulling.broadcast()
            [job] = await pulling.queued()
            await pulling.start(job["ID"])
            await broker.admin.cancel(int(job["ID"]), by="ann", reason=by)
            assert await pulling.state(job["ID"]) == ("INFLIGHT", 0)
            if by == "push":
                await pulling.put(JOBS, {"type": "push"})
            else:
                await over(look)
            if by == "sweep":
                await jobs._end_leases(QUEUE)
            if by == "look":
                assert await pulling.state(job["ID"]) == ("DEAD", 0)
            assert await look.rows() == []
            row = (await look.rows(archive=True))[-1]
            assert (row["state"], row["reason"]) == ("DISCARDED", "cancelled")
            assert row["last_error"] == f"cancelled by ann: {by}"


@on_sqlite
async def test_a_job_that_json_cannot_tell_hides_no_other(broker: SqlBroker, look: Look) -> None:
    """Another program may have stored half of a surrogate pair, and NaN."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.queued()
        for _ in range(2):
            await broker.publish("x", QUEUE, lookup="ann")
        headers = """'{"content-type": "\\ud800", "channel-message-id": "\\ud800", "a": NaN}'"""
        table = look.tables.message
        first = select(func.min(table.c.id)).scalar_subquery()
        async with look.engine.begin() as connection:
            odd = update(table).where(table.c.id == first).values(headers=literal_column(headers))
            await connection.execute(odd)
        one, two = await pulling.queued()
        assert (one["Message"]["ContentType"], one["Message"]["MessageID"]) == ("?", "?")
        assert two["Message"]["ContentType"] == "text/plain"
        assert await pulling.state(one["ID"]) == ("QUEUED", 0)
        records = await pulling.http.get("/v1/mirror?Lookup=ann", auth=as_user("ola"))
        assert [each["Properties"].get("a") for each in records.json()["Result"]] == ["NaN", None]


async def test_a_broadcast_is_sent_once_for_a_dedup_id(broker: SqlBroker, look: Look) -> None:
    pulling = Pulling(broker, "other")
    async with pulling.http:
        await pulling.queued()

        async def send(dedup_id: str) -> Any:
            headers = {**TOKENS, "X-Broker-Dedup-Id": dedup_id}
            return await pulling.http.post(
                f"/channel/{CHANNEL}/broadcast", content=b"1", headers=headers
            )

        first = await send("order-1")
        assert (first.status_code, first.json()["Jobs"]) == (201, 2)
        again = await send("order-1")
        assert (again.status_code, again.json()) == (200, {"MessageID": None, "Jobs": 0})
        [job] = await pulling.queued()
        await pulling.post(job["ID"], "INFLIGHT")
        await pulling.post(job["ID"], "DELIVERED")
        third = await send("order-1")
        assert (third.status_code, third.json()["Jobs"]) == (201, 1)
        assert (await send("x" * 256)).status_code == 400


async def test_middlewares_see_a_broadcast_as_one_batch(broker: SqlBroker) -> None:
    registry = CollectorRegistry()
    pulling = Pulling(broker, "other")
    broker.add_middleware(SqlBrokerPrometheusMiddleware(registry=registry))
    async with pulling.http:
        message = await pulling.broadcast(b"\xff", "image/png")
        for each in (pulling, pulling.of("other")):
            [job] = await each.queued()
            assert job["Message"]["MessageID"] == message
            assert job["Message"]["ContentType"] == "image/png;base64"
    labels = {"app_name": "faststream", "broker": "sqlbroker", "destination": CHANNEL}
    found = registry.get_sample_value(
        "faststream_published_messages_total", {**labels, "status": "success"}
    )
    assert found == 2


async def test_what_has_expired_is_forgotten_without_any_subscriber(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """Rows of lookup values whose messages have left; nothing else may be there to remove them."""
    pulling = Pulling(broker)
    table = look.tables.policy_state

    async def mirrored() -> int:
        counted = select(func.count()).where(table.c.scope == "mirror:ann")
        async with look.engine.connect() as connection:
            return int((await connection.execute(counted)).scalar_one())

    async with pulling.http:
        await pulling.queued()
        jobs = pulling.app._service.jobs()  # type: ignore[misc]
        await jobs.stop()
        job = str(await broker.publish("x", QUEUE, lookup="ann"))
        await broker.publish("y", QUEUE, lookup="ann")
        await pulling.post(job, "DELIVERED", lease=await pulling.start(job))
        async with look.engine.begin() as connection:
            over = update(table).where(table.c.scope == "mirror:ann").values(expires_at=clock())
            await connection.execute(over)

        async def one_is_left() -> bool:
            # A look leaves out rows that another transaction has locked.
            monkeypatch.setattr(jobs._housekeeping, "_cleaned_at", float("-inf"))
            await jobs._tick()
            return await mirrored() == 1

        await eventually(one_is_left)
        forgotten = AsyncMock()
        monkeypatch.setattr(jobs.store, "remove_expired_states", forgotten)
        await jobs._tick()
        assert not forgotten.called, "it comes once a minute"


@on_sqlite
async def test_all_pull_consumers_are_watched(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many consumers of any type there are."""
    monkeypatch.setattr(channel_rows, "CONSUMER_PAGE", 2)
    pulling = Pulling(broker, "c", "e")
    async with pulling.http:
        await pulling.queued()
        for name in ("a", "b", "d", "f"):
            assert (await pulling.put(f"/channel/{CHANNEL}/consumer/{name}")).status_code == 201
        await pulling.put("/channel/last")
        await pulling.put("/channel/last/consumer/x", {"type": "pull"})
        found = await pulling.app._service.jobs().store.tokens.list_pulled_queues()  # type: ignore[misc]
    assert found == ["last/x", QUEUE, f"{CHANNEL}/c", f"{CHANNEL}/e"]


@on_sqlite
async def test_a_limit_of_many_digits(broker: SqlBroker) -> None:
    pulling = Pulling(broker)
    async with pulling.http:
        for digits in (20, 5_000):
            page = await pulling.page(f"?limit={'9' * digits}")
            assert page.status_code == 400
            text = "limit must be a whole number of up to 19 digits, got '99"
            assert page.json()["error"].startswith(text)
        assert (await pulling.page(f"?limit={'9' * 19}")).status_code == 200


@on_sqlite
async def test_errors_say_what_was_given_and_what_is_allowed(broker: SqlBroker) -> None:
    pulling = Pulling(broker)
    states = "NextState must be 'INFLIGHT', 'DELIVERED' or 'DEAD', got "
    seconds = "IncrementalTimeout must be greater than or equal to 0, got -1"
    async with pulling.http:
        for answer, text in [
            (await pulling.page("?limit=0"), "limit must be greater than or equal to 1, got 0"),
            (await pulling.page("?limit=few"), "limit must be a whole number, got 'few'"),
            (await pulling.post("1", "DONE"), f"{states}'DONE'"),
            (
                await pulling.http.post(f"{pulling.jobs}/job/1", json={}, headers=TOKENS),
                "NextState is missing: ",
            ),
            (await pulling.post("1", "INFLIGHT", IncrementalTimeout=-1), seconds),
        ]:
            assert answer.status_code == 400
            assert answer.json()["error"].startswith(text)


TIMEOUT = "IncrementalTimeout is only allowed for QUEUED or DEAD to INFLIGHT"
LOST = "the lease is lost, another consumer may have the job: abandon it and claim another"


@pytest.mark.parametrize(
    ("ways", "wanted", "fields", "text"),
    [
        ([], "DELIVERED", {}, "a job that is QUEUED can only become INFLIGHT, got NextState "),
        (["INFLIGHT", "DELIVERED"], "INFLIGHT", {}, "a job that is DELIVERED cannot change, got"),
        (["INFLIGHT", "DEAD"], "DELIVERED", {}, "a job that is DEAD can only become INFLIGHT, "),
        (["INFLIGHT"], "DELIVERED", {"IncrementalTimeout": 0}, f"{TIMEOUT}, got INFLIGHT "),
        ([], "DEAD", {"IncrementalTimeout": 5}, f"{TIMEOUT}, got QUEUED to DEAD: omit it"),
    ],
)
@on_sqlite
async def test_w4_a_change_that_is_refused_says_what_is_allowed(
    broker: SqlBroker, ways: list[str], wanted: str, fields: dict[str, int], text: str
) -> None:
    """W4."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        for state in ways:
            assert (await pulling.post(job["ID"], state)).status_code == 202
        found = await pulling.post(job["ID"], wanted, **fields)
        assert found.status_code == 400
        assert found.json()["error"].startswith(text)


@on_sqlite
async def test_errors_about_jobs_say_what_to_do(broker: SqlBroker) -> None:
    pulling = Pulling(broker)
    async with pulling.http:
        later = await broker.publish("later", QUEUE, delay=600)
        path = f"{JOBS}/job/{later}"

        async def told(answer: Any) -> str:
            text: str = (await answer).json()["error"]
            return text

        async def send(path: str, body: bytes, **headers: str) -> str:
            return await told(pulling.http.post(path, content=body, headers={**TOKENS, **headers}))

        assert await told(pulling.post(str(later), "INFLIGHT")) == (
            "the job is not due yet: queued-jobs lists the jobs that you may claim"
        )
        assert await told(pulling.post("999", "INFLIGHT")) == (
            "this consumer has no job '999': retention may have removed it; queued-jobs lists "
            "the jobs that you may claim"
        )
        assert await told(pulling.post("x", "DEAD")) == (
            "job 'x' does not exist: use the number that the server returned"
        )
        lease = str(uuid4())
        await broker.publish("now", QUEUE)
        [job] = await pulling.queued()
        await pulling.start(job["ID"])
        assert await told(pulling.post(job["ID"], "DELIVERED", lease=lease)) == LOST
        beat = f"{JOBS}/job/{job['ID']}/heartbeat"
        assert await send(beat, b"{}", **{LEASE: lease}) == LOST
        assert await send(beat, b"{}") == (
            "X-Broker-Lease is missing: it must be the UUID that the claim returned"
        )
        secret = "not-a-uuid"
        assert await send(beat, b"{}", **{LEASE: secret}) == (
            "X-Broker-Lease must be the UUID that the claim returned, got another text"
        )
        assert await send(path, b"") == "NextState is missing: add it"
        wanted = "the body must be a JSON object"
        assert await send(path, b'["x"]') == f"{wanted}, got a JSON array"
        assert await send(path, b'{"NextState":') == (
            f"{wanted}, but is not valid JSON: EOF while parsing a value at line 1 column 13"
        )
        assert await told(pulling.page("?after=x")) == (
            "after must be the cursor of a Link header, got 'x': omit it for the first page"
        )
        assert await send(f"/channel/{CHANNEL}/broadcast", b"1", **{"Content-Type": "x" * 201}) == (
            f"Content-Type must be up to 200 printable ASCII characters, got '{'x' * 76}..."
        )


@on_sqlite
async def test_the_loop_starts_with_the_broker_and_the_application(
    broker: SqlBroker, look: Look
) -> None:
    """Jobs out of time are queued again also if no client asks."""
    pulling = Pulling(broker)
    jobs = pulling.app._service.jobs()  # type: ignore[misc]
    async with pulling.http:
        await pulling.queued()
        await pulling.broadcast()
        [job] = await pulling.queued()
        await pulling.start(job["ID"])
        await broker.stop()
        assert not jobs._loop.is_running
        await over(look)
        await broker.start()
        row = await look.in_state("PENDING")
        assert row["deliveries_count"] == 1
        await broker.stop()
        assert not jobs._loop.is_running
        # A request does not start again what was stopped.
        await pulling.http.get("/health/live")
        assert not jobs._loop.is_running
        await broker.connect()
        # Any request will do, also a probe; a mounted application is not told of the server.
        await pulling.http.get("/health/live")
        assert jobs._loop.is_running
        await jobs.stop()
        # An application that runs alone is told.
        async with pulling.app._lifespan(None):  # type: ignore[arg-type]
            assert jobs._loop.is_running
        assert not jobs._loop.is_running


async def test_a_configuration_that_fails_is_not_made_by_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    now = 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    made = 0

    async def make() -> None:
        nonlocal made
        made += 1
        if made < 3:
            raise SetupError(f"number {made}")

    found = ConfiguredSetup(make, clock)
    monkeypatch.setattr(configured, "backoff", lambda failures, _clock: 10.0 * failures)
    for _ in range(5):
        with pytest.raises(SetupError, match="number 1"):
            await found.run_once()
    assert made == 1
    now = 10.0
    for _ in range(5):
        with pytest.raises(SetupError, match="number 2"):
            await found.run_once()
    assert made == 2
    now = 29.0
    with pytest.raises(SetupError, match="number 2"):
        await found.run_once()
    now = 30.0
    await asyncio.gather(*(found.run_once() for _ in range(5)))
    assert made == 3
