"""Pull consumers over HTTP, row by row of webhook-broker's."""

import asyncio
import base64
from collections.abc import AsyncIterator
from copy import copy
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    SetupError,
    SqlBroker,
    SqlBrokerSchemaConfig,
    TestSqlBroker,
    Throttle,
)
from faststream_sqlbroker.core import channels as channel_rules
from faststream_sqlbroker.core.channels import TRANSITIONS, PullJobState
from faststream_sqlbroker.database import tokens
from faststream_sqlbroker.database.pull import ChangeResult
from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError
from faststream_sqlbroker.http import Channel, Channels, Consumer
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMetrics
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tests.http.conftest import client_of, logins, on_sqlite
from tests.http.pulling import CHANNEL, CONSUMER, JOBS, LEASE, QUEUE, TOKENS, Pulling, channels

pytestmark = pytest.mark.capability("HTTP: channels with pull consumers")


@pytest.fixture
async def pulling(broker: SqlBroker) -> AsyncIterator[Pulling]:
    found = Pulling(broker)
    async with found.http:
        yield found


async def over(look: Look) -> None:
    """The leases of all live jobs run out now; no time has to pass."""
    table = look.tables.message
    async with look.engine.begin() as connection:
        leased = table.c.lease_expires_at.is_not(None)
        past = update(table).where(leased).values(lease_expires_at=table.c.acquired_at)
        await connection.execute(past)


# W1: a consumer is push or pull.


async def test_w1_the_type_of_a_consumer(pulling: Pulling, look: Look) -> None:
    """W1."""
    made = await pulling.put("/channel/news")
    assert made.status_code == 201
    assert made.json().keys() == {"ID", "Token"}
    path = "/channel/news/consumer/mail"
    first = await pulling.put(path)
    assert first.status_code == 201
    token = first.json().pop("Token")
    assert len(token) >= 40
    assert {**first.json(), "Token": ""} == {
        "ID": "mail",
        "Type": "push",
        "Queue": "news/mail",
        "Token": "",
    }
    for form, expected in (
        ({"type": "pull"}, "pull"),
        ({"type": ""}, "push"),
        ({"type": "pull"}, "pull"),
        ({}, "push"),
        ({"type": "push"}, "push"),
    ):
        changed = await pulling.put(path, form)
        assert (changed.status_code, changed.json()) == (
            200,
            {"ID": "mail", "Type": expected, "Queue": "news/mail"},
        )
    for wrong in ("PULL", "queue", " "):
        refused = await pulling.put(path, {"type": wrong})
        assert refused.status_code == 400
        assert "'push', 'pull'" in refused.json()["error"]
    assert (await pulling.put("/channel/none/consumer/mail")).status_code == 404
    for name in ("a b", "-a", "x" * 101, "%2e%2e", "a%00", "\u00e9"):
        assert (await pulling.put(f"/channel/{name}")).status_code in {400, 404}
        assert (await pulling.put(f"/channel/news/consumer/{name}")).status_code in {400, 404}
    unknown = await pulling.put(path, {"callbackUrl": "http://evil.test"})
    assert unknown.status_code == 400
    # Tokens are stored as hashes only, and who made them is in the audit.
    async with look.engine.connect() as connection:
        rows = (await connection.execute(select(look.tables.policy_state))).all()
    assert token not in str(rows)
    assert TOKENS["X-Broker-Channel-Token"] not in str(rows)


async def test_w1_by_configuration(broker: SqlBroker) -> None:
    """W1: missing or empty is push, anything else is refused."""
    for kind in (None, "", "push"):
        consumer = Consumer(type=kind, token="a-token-of-16-chars")
        options = Channels(
            channels={
                CHANNEL: Channel(token=TOKENS["X-Broker-Channel-Token"], consumers={"x": consumer})
            }
        )
        async with client_of(broker.asgi(logins(), channels=options)) as client:
            headers = {**TOKENS, "X-Broker-Consumer-Token": "a-token-of-16-chars"}
            found = await client.get("/channel/orders/consumer/x/queued-jobs", headers=headers)
            assert found.status_code == 400
            assert "'orders/x'" in found.json()["error"]
        await broker.stop()
        await broker.connect()
    with pytest.raises(SetupError, match="type must be one of 'push', 'pull', got 'poll'"):
        Consumer(type="poll")
    with pytest.raises(SetupError, match="16 characters"):
        Consumer(token="short")
    with pytest.raises(SetupError, match="an id must be"):
        Channels(channels={"a/b": Channel()})
    with pytest.raises(SetupError, match="an id must be"):
        Channel(consumers={"": Consumer()})
    assert "a-token" not in repr(Channel(token="a-token-of-16-chars"))


async def test_w1_a_push_consumer_is_a_subscriber(broker: SqlBroker, look: Look) -> None:
    """W1, W7: the jobs of a push consumer are handled by FastStream."""
    pulling = Pulling(broker)
    got: list[Any] = []

    @broker.subscriber("orders/mail", **QUICK)
    async def handle(body: dict[str, int]) -> None:
        got.append(body)

    async with pulling.http:
        await pulling.queued()
        assert (await pulling.put("/channel/orders/consumer/mail")).status_code == 201
        refused = await pulling.put("/channel/orders/consumer/mail", {"type": "pull"})
        assert refused.status_code == 400
        assert "subscriber" in refused.json()["error"]
        await broker.start()
        await pulling.broadcast()
        await eventually(lambda: got == [{"id": 1}])
        assert len(await pulling.queued()) == 1


async def test_the_audit_says_who_made_a_consumer(broker: SqlBroker, pulling: Pulling) -> None:
    await pulling.put("/channel/news")
    await pulling.put("/channel/news/consumer/mail", {"type": "pull", "rotate": "true"})
    jobs = await broker.admin.audit()
    of_ann = [(job.action, dict(job.arguments)) for job in jobs if job.by == "ann"]
    assert sorted(of_ann) == [
        ("put_channel", {"channel": "news", "consumer": None, "type": None, "new_token": True}),
        (
            "put_consumer",
            {"channel": "news", "consumer": "mail", "type": "pull", "new_token": True},
        ),
    ]


# W2, W3: queued jobs.


async def test_w2_queued_jobs_by_priority_and_in_pages(pulling: Pulling) -> None:
    """W2."""
    for number, priority in enumerate((0, 5, -3, 5, 0)):
        await pulling.broadcast(str(number).encode(), "text/plain", priority)
    jobs = await pulling.queued()
    assert [job["Message"]["Payload"] for job in jobs] == ["1", "3", "0", "4", "2"]
    assert [job["Priority"] for job in jobs] == [5, 5, 0, 0, -3]
    seen: list[str] = []
    query = "?limit=2"
    pages = 0
    while True:
        page = await pulling.page(query)
        seen += [job["Message"]["Payload"] for job in page.json()["Result"]]
        pages += 1
        if "next" not in page.links:
            break
        path, _, query = page.links["next"]["url"].partition("?")
        assert path == f"{JOBS}/queued-jobs"
        query = f"?{query}"
    assert (seen, pages) == (["1", "3", "0", "4", "2"], 3)


async def test_w2_the_limit_of_a_page(broker: SqlBroker, pulling: Pulling) -> None:
    """W2: 25 unless given, never more than 100."""
    await broker.connect()
    await broker.publish_batch(*(str(n) for n in range(130)), queue=QUEUE)
    for query, count in (("", 25), ("?limit=", 25), ("?limit=1", 1), ("?limit=101", 100)):
        assert len(await pulling.queued(query)) == count
    assert len(await pulling.queued("?limit=999999999")) == 100
    page = await pulling.page("?limit=500")
    assert "limit=100&" in page.links["next"]["url"]
    for wrong in ("?limit=0", "?limit=-1", "?limit=x", "?limit=1.5", "?limit=%C2%B2", "?after=x"):
        assert (await pulling.page(wrong)).status_code == 400
    for cursor in (
        "W10",
        "WzEsMl0",
        "bnVsbA",
        "WzEsMiwiMyJd",
        "!!",
        "WzEsOTk5OTk5OTk5OTk5OTk5OTk5OTksM10",
        "WzAsMSwxMDAwMDAwMDAwMDAwMDAwMDAwMDBd",
        "WzAsMSwtMV0",
    ):
        assert (await pulling.page(f"?after={cursor}")).status_code == 400


async def test_w2_what_is_not_queued_is_not_listed(broker: SqlBroker, pulling: Pulling) -> None:
    """W2: a job that is in flight, ended, not due, expired, or in a paused queue."""
    await broker.connect()
    later = await broker.publish("later", QUEUE, delay=600)
    gone = await broker.publish("gone", QUEUE, expires_in="1ms")
    await broker.publish("here", QUEUE)

    async def only_one() -> bool:
        return [job["Message"]["Payload"] for job in await pulling.queued()] == ["here"]

    await eventually(only_one)
    assert (await pulling.post(str(later), "INFLIGHT")).status_code == 400
    expired = await pulling.post(str(gone), "INFLIGHT")
    text = "the job expired before it was claimed, and is DEAD: claim another"
    assert (expired.status_code, expired.json()) == (400, {"error": text})
    assert (await pulling.state(str(gone)))[0] == "DEAD"
    [job] = await pulling.queued()
    await broker.admin.pause(QUEUE)
    assert await pulling.queued() == []
    assert (await pulling.post(job["ID"], "INFLIGHT")).status_code == 409
    await broker.admin.resume(QUEUE)
    await pulling.start(job["ID"])
    assert await pulling.queued() == []


async def test_w3_the_form_of_a_job(broker: SqlBroker, pulling: Pulling) -> None:
    """W3."""
    message = await pulling.broadcast(b'{"a": "\xc3\xa9"}', "application/json")
    [job] = await pulling.queued()
    assert job.keys() == {"ID", "Priority", "Message"}
    assert isinstance(job["ID"], str)
    assert job["Message"] == {
        "MessageID": message,
        "Payload": '{"a": "\u00e9"}',
        "ContentType": "application/json",
    }
    await pulling.post(job["ID"], "INFLIGHT")
    # The type is as it was sent: curl -d sends this one unless it is told another.
    form = "application/x-www-form-urlencoded"
    await pulling.broadcast(b'{"id": 1}', form)
    [job] = await pulling.queued()
    assert job["Message"]["ContentType"] == form
    await pulling.post(job["ID"], "INFLIGHT")
    # Bytes that are no text are base64, and marked.
    await pulling.broadcast(b"\xff\x00\x01", "image/png")
    [job] = await pulling.queued()
    assert job["Message"]["ContentType"] == "image/png;base64"
    assert base64.b64decode(job["Message"]["Payload"]) == b"\xff\x00\x01"
    await pulling.post(job["ID"], "INFLIGHT")
    await pulling.broadcast(b"", None)
    # A producer that knows nothing of channels.
    await broker.connect()
    plain = await broker.publish(b"raw", QUEUE)
    jobs = await pulling.queued()
    assert [job["Message"]["ContentType"] for job in jobs] == ["application/octet-stream"] * 2
    assert jobs[0]["Message"]["Payload"] == ""
    assert jobs[1]["Message"]["MessageID"] == str(plain)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_w3_a_page_of_large_jobs_is_shorter(
    pulling: Pulling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W3: never empty, and the link leads on."""
    monkeypatch.setattr(channel_rules, "PAGE_BYTES", 250)
    for size in (100, 100, 100, 400, 10):
        await pulling.broadcast(b"x" * size)
    sizes = []
    query = ""
    while True:
        page = await pulling.page(query)
        sizes.append([len(job["Message"]["Payload"]) for job in page.json()["Result"]])
        if "next" not in page.links:
            break
        query = "?" + page.links["next"]["url"].partition("?")[2]
    assert sizes == [[100, 100], [100], [400], [10]]


# W4: changes of a job.

GOLDEN = {
    # state: (request, code, code with IncrementalTimeout, state and retries afterwards)
    "QUEUED": [
        ("INFLIGHT", 202, 202, ("INFLIGHT", 0)),
        ("DELIVERED", 400, 400, ("QUEUED", 0)),
        ("DEAD", 400, 400, ("QUEUED", 0)),
    ],
    "INFLIGHT": [
        ("INFLIGHT", 202, 400, ("INFLIGHT", 0)),
        ("DELIVERED", 202, 400, ("DELIVERED", 0)),
        ("DEAD", 202, 400, ("DEAD", 0)),
    ],
    "DELIVERED": [
        ("INFLIGHT", 400, 400, ("DELIVERED", 0)),
        ("DELIVERED", 202, 400, ("DELIVERED", 0)),
        ("DEAD", 400, 400, ("DELIVERED", 0)),
    ],
    "DEAD": [
        ("INFLIGHT", 202, 202, ("INFLIGHT", 1)),
        ("DELIVERED", 400, 400, ("DEAD", 0)),
        ("DEAD", 202, 400, ("DEAD", 0)),
    ],
}
WAYS = {
    "QUEUED": [],
    "INFLIGHT": ["INFLIGHT"],
    "DELIVERED": ["INFLIGHT", "DELIVERED"],
    "DEAD": ["INFLIGHT", "DEAD"],
}
CASES = [
    (state, *case, timeout)
    for state, cases in GOLDEN.items()
    for case in cases
    for timeout in (None, 0, 600)
]


async def all_rows(look: Look) -> list[Any]:
    """What the database has, in all tables."""
    found: list[Any] = [await look.rows(), await look.rows(archive=True)]
    table = look.tables.policy_state
    async with look.engine.connect() as connection:
        rows = await connection.execute(select(table).order_by(table.c.scope, table.c.key))
        return [*found, [dict(row._mapping) for row in rows]]


@pytest.mark.parametrize(("before", "wanted", "code", "code_with", "after", "timeout"), CASES)
async def test_w4_four_states_three_requests(
    pulling: Pulling,
    look: Look,
    before: str,
    wanted: str,
    code: int,
    code_with: int,
    after: tuple[str, int],
    timeout: int | None,
) -> None:
    """W4: with an IncrementalTimeout, also one of 0, and without."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    for state in WAYS[before]:
        assert (await pulling.post(job["ID"], state)).status_code == 202
    rows = await all_rows(look)
    fields = {} if timeout is None else {"IncrementalTimeout": timeout}
    found = await pulling.post(job["ID"], wanted, **fields)
    expected = code if timeout is None else code_with
    assert found.status_code == expected, found.text
    refused = expected == 400
    assert await pulling.state(job["ID"]) == ((before, 0) if refused else after)
    assert (await all_rows(look) == rows) is (refused or before == wanted)
    claimed = wanted == "INFLIGHT" and expected == 202 and before != wanted
    assert (LEASE in found.headers) is claimed
    if expected == 202:
        assert found.json() == {"Taken": claimed}


@on_sqlite
async def test_w4_what_is_no_request(pulling: Pulling) -> None:
    """W4: QUEUED cannot be asked for, whatever the job's state is."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    for wrong in ("QUEUED", "inflight", "", None, 5, ["INFLIGHT"], {"a": 1}):
        assert (await pulling.post(job["ID"], wrong)).status_code == 400
    for timeout in ("10", 1.5, -1, True, None, 10**12, [1]):
        found = await pulling.post(job["ID"], "INFLIGHT", IncrementalTimeout=timeout)
        assert found.status_code == 400
    assert await pulling.state(job["ID"]) == ("QUEUED", 0)
    for unknown in ("0", "999", "x", f"0{job['ID']}", "-1", "9" * 19, "9" * 30, "%00"):
        assert (await pulling.post(unknown, "INFLIGHT")).status_code == 404


def test_w4_the_table_is_the_missions() -> None:
    """W4."""
    allowed = {(a.value, b.value) for a, b in TRANSITIONS}
    assert allowed == {
        ("QUEUED", "INFLIGHT"),
        ("INFLIGHT", "DELIVERED"),
        ("INFLIGHT", "DEAD"),
        ("DEAD", "INFLIGHT"),
    }
    assert {state.value for state in PullJobState} == GOLDEN.keys()


async def test_w4_a_job_that_was_pruned_is_not_found(pulling: Pulling, look: Look) -> None:
    """W4."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    await pulling.start(job["ID"])
    await pulling.post(job["ID"], "DELIVERED")
    async with look.engine.begin() as connection:
        await connection.execute(look.tables.archive.delete())
    for state in ("INFLIGHT", "DELIVERED", "DEAD"):
        assert (await pulling.post(job["ID"], state)).status_code == 404


async def test_w4_the_retries_survive_a_death(pulling: Pulling) -> None:
    """W4: each start of a dead job is one more retry."""
    await pulling.broadcast(b"again")
    [job] = await pulling.queued()
    for retries in range(4):
        await pulling.start(job["ID"])
        assert await pulling.state(job["ID"]) == ("INFLIGHT", retries)
        assert (await pulling.post(job["ID"], "DEAD")).status_code == 202
        assert await pulling.state(job["ID"]) == ("DEAD", retries)
    assert (await pulling.show(job["ID"]))["Message"]["Payload"] == "again"


async def test_w4_a_client_that_sends_its_lease_is_checked(pulling: Pulling, look: Look) -> None:
    """W4, promise 3: a stale client that names its lease changes nothing."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    first = await pulling.start(job["ID"])
    await over(look)
    # Its time is over: the job is queued, and the old lease is good for nothing.
    for state in ("DELIVERED", "DEAD"):
        assert (await pulling.post(job["ID"], state, lease=first)).status_code == 409
    assert await pulling.state(job["ID"]) == ("QUEUED", 1)
    second = await pulling.start(job["ID"])
    assert second != first
    for state in ("DELIVERED", "DEAD", "INFLIGHT"):
        assert (await pulling.post(job["ID"], state, lease=first)).status_code == 409
    assert await pulling.state(job["ID"]) == ("INFLIGHT", 1)
    assert (await pulling.post(job["ID"], "INFLIGHT", lease=second)).status_code == 202
    assert (await pulling.post(job["ID"], "DELIVERED", lease=second)).status_code == 202
    # Repeated, as after a lost answer.
    assert (await pulling.post(job["ID"], "DELIVERED", lease=second)).status_code == 202
    assert (await pulling.post(job["ID"], "DELIVERED", lease="x")).status_code == 400
    assert await pulling.state(job["ID"]) == ("DELIVERED", 1)


async def test_w4_two_clients_at_one_job(pulling: Pulling) -> None:
    """W4: one of them gets the lease."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    found = await asyncio.gather(*(pulling.post(job["ID"], "INFLIGHT") for _ in range(6)))
    assert {each.status_code for each in found} == {202}
    assert len([each for each in found if LEASE in each.headers]) == 1
    assert all(each.json() == {"Taken": LEASE in each.headers} for each in found)
    assert await pulling.state(job["ID"]) == ("INFLIGHT", 0)
    ended = await asyncio.gather(*(pulling.post(job["ID"], s) for s in ("DELIVERED", "DEAD")))
    assert sorted(each.status_code for each in ended) == [202, 400]


# W5: timeouts.


async def test_w5_a_job_out_of_time_is_queued_again_and_dead_at_last(
    broker: SqlBroker, look: Look
) -> None:
    """W5: by the database's clock."""
    pulling = Pulling(broker, max_retries=2)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        for retries in (0, 1, 2):
            lease = await pulling.start(job["ID"])
            assert await pulling.state(job["ID"]) == ("INFLIGHT", retries)
            await over(look)
            if retries < 2:
                [again] = await pulling.queued()
                assert again["ID"] == job["ID"]
                assert await pulling.state(job["ID"]) == ("QUEUED", retries + 1)
        assert await pulling.queued() == []
        assert await pulling.state(job["ID"]) == ("DEAD", 2)
        [row] = await look.rows(archive=True)
        assert (row["state"], row["reason"]) == ("FAILED", "max_deliveries")
        assert (await pulling.post(job["ID"], "DELIVERED", lease=lease)).status_code == 409
        # It can be started again nevertheless; out of time, it is dead at once.
        await pulling.start(job["ID"])
        await over(look)
        assert (await pulling.post(job["ID"], "DELIVERED")).status_code == 400
        assert await pulling.state(job["ID"]) == ("DEAD", 3)


@pytest.mark.parametrize("dead", [False, True])
async def test_w5_the_length_of_the_timeout(broker: SqlBroker, look: Look, dead: bool) -> None:
    """W5: stopTimeout + rationalDelay (+ IncrementalTimeout), for both kinds of starts."""
    pulling = Pulling(broker, stop_timeout="20m", rational_delay=3)
    async with pulling.http:
        await pulling.broadcast()
        await pulling.broadcast()
        plain, longer = await pulling.queued()
        more = {"IncrementalTimeout": 100}
        for job, fields, seconds in ((plain, {}, 1_203), (longer, more, 1_303)):
            if dead:
                await pulling.start(job["ID"])
                await pulling.post(job["ID"], "DEAD")
            await pulling.start(job["ID"], **fields)
            [row] = [row for row in await look.rows() if str(row["id"]) == job["ID"]]
            length = (row["lease_expires_at"] - row["acquired_at"]).total_seconds()
            # Two statements on MySQL and MariaDB, and the machine may be busy between them.
            assert seconds <= length + 0.001 < seconds + 60


def test_w5_the_timeout_unless_it_is_configured() -> None:
    """W5: 30 s + 2 s, and five retries."""
    plain = Channels()
    assert (plain.stop_timeout, plain.rational_delay, plain.timeout) == (30.0, 2.0, 32.0)
    assert plain.max_retries == 5
    longer = Channels(stop_timeout="10m", rational_delay="1s")
    assert longer.timeout == 601.0


async def test_w5_the_application_releases_without_a_request(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W5: the loop of the application queues it again; nothing asks for it."""
    monkeypatch.setattr("faststream_sqlbroker.flow.tasks.pull_jobs.MAX_PAUSE", 0.2)
    pulling = Pulling(broker, stop_timeout=0.05, rational_delay=0)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        await pulling.start(job["ID"])

        async def released() -> bool:
            [row] = await look.rows()
            return row["state"] == "PENDING" and row["deliveries_count"] == 1

        await eventually(released)


# W6: tokens.


async def test_w6_both_tokens_are_verified(pulling: Pulling) -> None:
    """W6: the answer does not tell what is wrong, nor what exists."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    good = dict(TOKENS)
    names = list(good)
    wrong: list[dict[str, str]] = [
        {},
        {names[0]: good[names[0]]},
        {names[1]: good[names[1]]},
        {names[0]: good[names[1]], names[1]: good[names[0]]},
        {**good, names[0]: ""},
        {**good, names[1]: good[names[1]] + "x"},
    ]
    answers = set()
    paths = [
        ("GET", f"{JOBS}/queued-jobs"),
        ("GET", f"{JOBS}/job/{job['ID']}"),
        ("POST", f"{JOBS}/job/{job['ID']}"),
        ("POST", f"{JOBS}/job/{job['ID']}/heartbeat"),
    ]
    app = pulling.app
    for number, headers in enumerate(wrong):
        async with client_of(app, client=(f"192.0.2.{number}", 1)) as client:
            for method, path in paths:
                found = await client.request(
                    method, path, headers=headers, json={} if method == "POST" else None
                )
                answers.add((found.status_code, found.text))
    async with client_of(app, client=("192.0.2.77", 1)) as client:
        for path in (
            "/channel/none/consumer/x/queued-jobs",
            "/channel/orders/consumer/x/queued-jobs",
            # PostgreSQL refuses to look up a NUL character.
            "/channel/a%00/consumer/x/queued-jobs",
            "/channel/orders/consumer/x%00/queued-jobs",
        ):
            found = await client.get(path, headers=good)
            answers.add((found.status_code, found.text))
    assert len(answers) == 1
    assert answers.pop()[0] == 403
    assert await pulling.state(job["ID"]) == ("QUEUED", 0)
    no_channel = await pulling.http.post("/channel/orders/broadcast", content=b"x")
    assert no_channel.status_code == 403


@on_sqlite
async def test_w6_tokens_cannot_be_guessed(pulling: Pulling) -> None:
    """W6: failures are limited, also for what does not exist."""
    headers = {**TOKENS, "X-Broker-Consumer-Token": "guess"}
    codes = [
        (await pulling.http.get(f"{JOBS}/queued-jobs", headers=headers)).status_code
        for _ in range(12)
    ]
    assert codes == [403] * 10 + [429] * 2
    assert (await pulling.page()).status_code == 429


async def test_w6_a_new_token_replaces_the_old_one(pulling: Pulling) -> None:
    """W6."""
    await pulling.queued()
    changed = await pulling.put(JOBS, {"type": "pull", "rotate": "true"})
    assert changed.status_code == 200
    assert (await pulling.page()).status_code == 403
    headers = {**TOKENS, "X-Broker-Consumer-Token": changed.json()["Token"]}
    assert (await pulling.http.get(f"{JOBS}/queued-jobs", headers=headers)).status_code == 200


@on_sqlite
async def test_w6_only_administrators_make_channels(pulling: Pulling) -> None:
    """W6: a wrong role, and a page of another site."""
    assert (await pulling.http.put("/channel/news")).status_code == 401
    for user in ("vic", "ola"):
        assert (await pulling.put("/channel/news", user=user)).status_code == 403
        assert (await pulling.put(JOBS, user=user)).status_code == 403
    forged = await pulling.http.put(
        "/channel/news", auth=("ann", "ann-password"), headers={"Origin": "http://evil.test"}
    )
    assert forged.status_code == 403


# W7: fan-out.


async def test_w7_each_consumer_has_its_own_jobs(broker: SqlBroker, look: Look) -> None:
    """W7: with one MessageID, and in one transaction."""
    pulling = Pulling(broker, "mail", "report")
    async with pulling.http:
        message = await pulling.broadcast()
        others = [pulling, pulling.of("mail"), pulling.of("report")]
        jobs = [(await each.queued())[0] for each in others]
        assert {job["Message"]["MessageID"] for job in jobs} == {message}
        assert len({job["ID"] for job in jobs}) == 3
        assert {row["queue"] for row in await look.rows()} == {
            "orders/billing",
            "orders/mail",
            "orders/report",
        }
        await others[0].start(jobs[0]["ID"])
        await others[0].post(jobs[0]["ID"], "DEAD")
        assert await others[1].state(jobs[1]["ID"]) == ("QUEUED", 0)
        # A job is its consumer's alone.
        assert (await others[1].post(jobs[2]["ID"], "INFLIGHT")).status_code == 404
        assert (await others[1].post(jobs[0]["ID"], "INFLIGHT")).status_code == 404


@on_sqlite
async def test_w7_a_consumer_that_no_message_would_reach_is_refused(
    pulling: Pulling, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pulling.queued()
    monkeypatch.setattr(tokens, "MAX_CONSUMERS", 2)
    assert (await pulling.put("/channel/orders/consumer/second")).status_code == 201
    refused = await pulling.put("/channel/orders/consumer/third")
    assert refused.status_code == 400
    assert "at most 2 consumers" in refused.json()["error"]
    # Those that are there can be changed.
    assert (await pulling.put("/channel/orders/consumer/second")).status_code == 200


@on_sqlite
async def test_w7_a_channel_without_consumers_loses_nothing(broker: SqlBroker) -> None:
    """W7."""
    token = TOKENS["X-Broker-Channel-Token"]
    options = Channels(channels={CHANNEL: Channel(token=token)})
    async with client_of(broker.asgi(logins(), channels=options)) as client:
        found = await client.post("/channel/orders/broadcast", content=b"x", headers=TOKENS)
        assert found.status_code == 409
        for priority in ("101", "-101", "x", "1.0", ""):
            headers = {**TOKENS, "X-Broker-Message-Priority": priority}
            refused = await client.post("/channel/orders/broadcast", headers=headers)
            assert refused.status_code == 400
        large = await client.post(
            "/channel/orders/broadcast", content=b"x" * (1024 * 1024 + 1), headers=TOKENS
        )
        assert large.status_code == 413


# W8: long jobs.


async def test_w8_a_long_job_extends_its_lease(broker: SqlBroker, look: Look) -> None:
    """W8: by heartbeats, with the lease of its claim."""
    pulling = Pulling(broker)
    async with pulling.http:
        await pulling.broadcast()
        [job] = await pulling.queued()
        lease = await pulling.start(job["ID"])
        path = f"{JOBS}/job/{job['ID']}/heartbeat"

        async def beat(lease: str | None, **fields: Any) -> int:
            headers = TOKENS if lease is None else {**TOKENS, LEASE: lease}
            return (await pulling.http.post(path, json=fields, headers=headers)).status_code

        async def ends_at() -> Any:
            return (await look.rows())[0]["lease_expires_at"]

        before = await ends_at()
        assert await beat(lease, IncrementalTimeout=600) == 202
        longer = await ends_at()
        assert (longer - before).total_seconds() > 500
        # Never shortened.
        assert await beat(lease) == 202
        assert await ends_at() == longer
        assert await beat(None) == 400
        assert await beat("x") == 400
        assert await beat(lease, IncrementalTimeout="1") == 400
        assert await beat(str(uuid4())) == 409
        await over(look)
        assert await beat(lease) == 409
        assert await pulling.state(job["ID"]) == ("QUEUED", 1)


async def test_w8_jobs_wait_until_their_consumer_wants_them(broker: SqlBroker, look: Look) -> None:
    """W8: it throttles itself; what it does not take waits for a year, and costs no retry."""
    pulling = Pulling(broker)
    async with pulling.http:
        for _ in range(3):
            await pulling.broadcast()
        table = look.tables.message
        async with look.engine.begin() as connection:
            row = (await connection.execute(select(table).limit(1))).one()
            long_ago = row.created_at - timedelta(days=365)
            old = {"created_at": long_ago, "next_attempt_at": long_ago}
            await connection.execute(update(table).values(old))
        [first] = await pulling.queued("?limit=1")
        lease = await pulling.start(first["ID"])
        await pulling.app._service.jobs()._tick()  # type: ignore[misc]
        others = await pulling.queued()
        assert len(others) == 2
        assert first["ID"] not in {each["ID"] for each in others}
        for each in others:
            assert await pulling.state(each["ID"]) == ("QUEUED", 0)
        assert (await pulling.post(first["ID"], "DELIVERED", lease=lease)).status_code == 202
        assert len(await pulling.queued()) == 2


# What a pull consumer cannot be.


async def test_a_queue_that_is_pulled_gets_no_subscriber(
    broker: SqlBroker, pulling: Pulling, engine: AsyncEngine
) -> None:
    """The consumer was made first, by this process or another one."""
    await pulling.broadcast()
    other = SqlBroker(engine, logger=None)

    @other.subscriber(QUEUE, "plain", "a/b/c", **QUICK)
    async def handle() -> None:
        pass

    with pytest.raises(SetupError, match=f"{QUEUE!r} has the subscriber"):
        await other.start()
    await other.stop()
    assert len(await pulling.queued()) == 1
    assert (await pulling.put(JOBS, {"type": "push"})).status_code == 200
    await other.start()
    await other.stop()


async def test_a_configuration_makes_a_push_consumer_of_a_pull_one(
    pulling: Pulling, engine: AsyncEngine
) -> None:
    """A new version has a subscriber in place of the clients: it starts, and gets their jobs."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    await pulling.start(job["ID"], IncrementalTimeout=100_000)
    other = SqlBroker(engine, logger=None)
    got: list[Any] = []

    @other.subscriber(QUEUE, **QUICK)
    async def handle(body: dict[str, int]) -> None:
        got.append(body)

    # Without a request, which alone would make what the configuration names.
    other.asgi(
        logins(), channels=Channels(channels={CHANNEL: Channel(consumers={"x": Consumer()})})
    )
    with pytest.raises(SetupError, match="has the subscriber Handle, but jobs of a pull"):
        await other.start()
    consumers = {CONSUMER: Consumer(type="push")}
    other.asgi(logins(), channels=Channels(channels={CHANNEL: Channel(consumers=consumers)}))
    await other.start()
    await eventually(lambda: got == [{"id": 1}])
    await other.stop()
    assert (await pulling.page()).status_code == 400


async def test_a_queue_with_a_subscriber_cannot_be_pulled(
    engine: AsyncEngine, broker: SqlBroker
) -> None:
    """With its policies and its dead_letter_queue; here, and in other processes."""

    @broker.subscriber(QUEUE, policies=[Throttle(1, per="1s")], dead_letter_queue="dead", **QUICK)
    async def handle(body: str) -> None:
        pass

    with pytest.raises(SetupError, match="without policies and dead_letter_queue"):
        broker.asgi(logins(), channels=channels())
    await broker.start()
    await eventually(broker.admin.subscribers)  # its first sign of life, written in the background
    elsewhere = Pulling(SqlBroker(engine, logger=None))
    async with elsewhere.http:
        refused = await elsewhere.page()
        assert refused.status_code == 503
        assert QUEUE not in refused.text


@pytest.mark.parametrize("fields", [{}, {"IncrementalTimeout": 600}], ids=["", "longer"])
async def test_an_answer_to_a_commit_that_was_lost(
    broker: SqlBroker, pulling: Pulling, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int]
) -> None:
    """The consumer gets its lease nevertheless, and its end is written once."""
    await pulling.broadcast()
    [job] = await pulling.queued()
    channels = broker._store.pull
    database = copy(channels._database)
    real = database.run
    lost = 0

    async def run(work: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal lost
        found = await real(work, *arguments, **options)
        if isinstance(found, ChangeResult) and (found.started or found.ended):
            lost += 1
            raise UnknownOutcomeError("the answer was lost")
        return found

    monkeypatch.setattr(database, "run", run)
    monkeypatch.setattr(channels, "_database", database)
    lease = await pulling.start(job["ID"], **fields)
    assert (await pulling.post(job["ID"], "DELIVERED", lease=lease)).status_code == 202
    assert lost == 2
    assert await pulling.state(job["ID"]) == ("DELIVERED", 0)


async def test_the_configuration_is_in_the_audit_once(
    engine: AsyncEngine, broker: SqlBroker
) -> None:
    for _ in range(2):
        pulling = Pulling(SqlBroker(engine, logger=None))
        async with pulling.http:
            await asyncio.gather(*(pulling.queued() for _ in range(3)))
    jobs = await broker.admin.audit()
    assert sorted(job.action for job in jobs) == ["put_channel", "put_consumer"]
    assert {job.by for job in jobs} == {"configuration"}


@on_sqlite
async def test_a_content_type_that_cannot_be_stored(pulling: Pulling) -> None:
    await pulling.queued()
    for wrong in ("x" * 201, "text/plain; charset=\u00e9"):
        headers = {**TOKENS, "Content-Type": wrong.encode("latin-1")}
        found = await pulling.http.post("/channel/orders/broadcast", headers=headers)
        assert found.status_code == 400


@on_sqlite
async def test_under_a_test_broker_nothing_reaches_the_database(
    broker: SqlBroker, look: Look
) -> None:
    """The application may be made before the test begins, as where a module mounts it."""

    @broker.subscriber("orders/mail", **QUICK)
    async def handle(body: dict[str, int]) -> None:
        pass

    pulling = Pulling(broker)
    async with pulling.http:
        async with TestSqlBroker(broker):
            await pulling.queued()
            await pulling.put("/channel/orders/consumer/mail")
            await pulling.broadcast()
            await broker.drain()
            handle.mock.assert_called_once_with({"id": 1})
            [job] = await pulling.queued()
            await pulling.start(job["ID"])
            assert await pulling.state(job["ID"]) == ("INFLIGHT", 0)
        assert await look.rows() == []
        assert await pulling.queued() == []


@on_sqlite
async def test_channels_need_an_archive(engine: AsyncEngine) -> None:
    schema = SqlBrokerSchemaConfig(message_archive_table_name=None)
    broker = SqlBroker(engine, schema=schema, logger=None)
    with pytest.raises(SetupError, match="channels need the archive"):
        broker.asgi(logins(), channels=Channels())
    # Without channels there are no such paths.
    async with client_of(broker.asgi(logins())) as client:
        assert (await client.get(f"{JOBS}/queued-jobs", headers=TOKENS)).status_code == 404


@on_sqlite
async def test_jobs_are_counted(engine: AsyncEngine, look: Look) -> None:
    registry = CollectorRegistry()
    broker = SqlBroker(engine, metrics=SqlBrokerPrometheusMetrics(registry), logger=None)
    await broker.create_tables()
    pulling = Pulling(broker, max_retries=1)
    async with pulling.http:
        for state in ("DELIVERED", "DEAD"):
            await pulling.broadcast()
            [job] = await pulling.queued()
            lease = await pulling.start(job["ID"])
            assert (await pulling.post(job["ID"], state, lease=lease)).status_code == 202
        await pulling.broadcast()
        for _ in range(2):
            [job] = await pulling.queued()
            lease = await pulling.start(job["ID"])
            await over(look)
        # The request finds that its time is over; or the loop has found it just before.
        assert (await pulling.post(job["ID"], "DELIVERED", lease=lease)).status_code == 409
        assert await pulling.queued() == []
        # So does a heartbeat.
        await pulling.broadcast()
        for _ in range(2):
            [job] = await pulling.queued()
            lease = await pulling.start(job["ID"])
            await over(look)
        late = await pulling.http.post(
            f"{JOBS}/job/{job['ID']}/heartbeat", json={}, headers={**TOKENS, LEASE: lease}
        )
        assert late.status_code == 409
        assert await pulling.state(job["ID"]) == ("DEAD", 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sqlbroker_{name}_total", {"queue": QUEUE, **labels})

    assert value("http_published_messages") == 4
    assert value("claimed_messages") == 6
    assert value("settled_messages", outcome="acked", reason="") == 1
    assert value("settled_messages", outcome="failed", reason="rejected") == 1
    assert value("settled_messages", outcome="failed", reason="max_deliveries") == 2
    assert value("lost_messages", outcome="lost") == 1
    await broker.stop()


@on_sqlite
async def test_what_a_caller_is_not_told_is_in_the_log(
    broker: SqlBroker, pulling: Pulling, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise StoreError("no right on the table message")

    monkeypatch.setattr(broker._store.tokens, "find", refuse)
    refused = await pulling.page()
    assert refused.status_code == 500
    assert "table" not in refused.text
    [told] = heard.texts("no right on the table message")
    assert f"GET {JOBS}/queued-jobs" in told


@on_sqlite
async def test_names_and_bodies_are_json_and_no_script(pulling: Pulling) -> None:
    """XSS by bodies and errors: no answer is HTML."""
    script = "<script>alert(1)</script>"
    await pulling.broadcast(script.encode(), "text/html")
    page = await pulling.page()
    assert page.headers["content-type"] == "application/json"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.json()["Result"][0]["Message"]["Payload"] == script
    for path in (f"/channel/{script}", f"/channel/orders/consumer/{script}"):
        found = await pulling.put(path)
        assert found.status_code in {400, 404}
        assert found.headers["content-type"] == "application/json"
