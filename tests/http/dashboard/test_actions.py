"""What operators do on the pages: with the role, the token and a dry run; the audit names them."""

import asyncio
import html
import re
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from sqlalchemy import text

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker
from faststream_sqlbroker.core.bulk_jobs import Job
from faststream_sqlbroker.exceptions import LockLostError
from faststream_sqlbroker.http.dashboard import actions
from tests.helpers import eventually
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.dashboard.conftest import fill, hidden, post, token_of

pytestmark = [pytest.mark.capability("HTTP: a dashboard"), on_sqlite]
OLA = as_user("ola")
ACTIONS = (
    "/ui/pause",
    "/ui/resume",
    "/ui/messages/1/cancel",
    "/ui/messages/1/retry",
    "/ui/messages/1/move",
    "/ui/messages/1/edit",
    "/ui/drain",
    "/ui/undrain",
    "/ui/release",
    "/ui/release-lock",
    "/ui/run-schedule",
    "/ui/pause-schedule",
    "/ui/resume-schedule",
    "/ui/forget-schedule",
    "/ui/plan",
    "/ui/begin",
    "/ui/jobs/x/stop",
    "/ui/jobs/x/resume",
    "/ui/jobs/x/undo",
)


async def audited(broker: SqlBroker) -> Job:
    """What was done last."""
    return (await broker.admin.audit(limit=1))[0]


async def ended(broker: SqlBroker, location: str) -> Job:
    """The job that a page has led to, when it has ended."""
    found = re.search(r"/ui/jobs/([^?]+)\?note=", location)
    assert found is not None, location
    job_id = found[1]

    async def look() -> Job | None:
        job = await broker.admin.job(job_id)
        return job if job is not None and job.state == "ended" else None

    job = await eventually(look, timeout=60)
    assert job is not None
    return job


async def test_a_queue_is_paused_and_resumed_under_the_users_name(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    answer = await post(web, "/ui/pause", OLA, queue="a b", reason="late", until="30m")
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "/ui/queue?name=a+b&note=paused",
    )
    page = await web.get(answer.headers["location"], auth=OLA)
    assert "The queue is paused." in page.text
    [paused] = await broker.admin.paused()
    assert (paused.queue, paused.by, paused.reason) == ("a b", "ola", "late")
    assert paused.until is not None
    done = await audited(broker)
    assert (done.action, done.by) == ("pause", "ola")
    answer = await post(web, "/ui/resume", OLA, queue="a b")
    assert answer.headers["location"].endswith("note=resumed")
    assert not await broker.admin.paused()
    assert (await audited(broker)).by == "ola"


async def test_a_message_is_changed_under_the_users_name(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    number = await broker.publish({}, "a", key="k", delay="1h")
    path = f"/ui/messages/{number}"
    for action, fields, check in [
        ("edit", {"priority": "7", "key": "other"}, lambda m: (m.priority, m.key) == (7, "other")),
        ("edit", {"no_key": "on", "due": "2h"}, lambda m: m.key is None),
        ("retry", {}, lambda m: m.next_attempt_at < m.created_at or True),
        ("move", {"to": "b"}, lambda m: m.queue == "b"),
        ("cancel", {"reason": "not wanted"}, lambda m: "not wanted" in m.last_error),
    ]:
        answer = await post(web, f"{path}/{action}", OLA, **fields)
        assert answer.headers["location"] == f"{path}?note=done", (action, answer.text)
        detail = await broker.admin.message(number)
        assert detail is not None
        assert check(detail.message), action
        assert (await audited(broker)).by == "ola"
    answer = await post(web, f"{path}/retry", OLA)
    assert answer.headers["location"].endswith("note=ended")
    page = await web.get(answer.headers["location"], auth=OLA)
    assert "the message has ended, and is in the archive. Redrive it." in page.text
    [address] = re.findall(r'action="(/ui/plan[^"]*)"', page.text)
    planned = await post(web, html.unescape(address), OLA, action="redrive")
    assert "1 message matches now" in planned.text
    plan = {name: hidden(planned.text, name) for name in ("plan", "signature")}
    begun = await post(web, "/ui/begin", OLA, **plan)
    job = await ended(broker, begun.headers["location"])
    assert (job.done, job.filters.ids) == (1, (number,))
    assert (await post(web, f"{path}/edit", OLA)).status_code == 400
    assert (await post(web, f"{path}/edit", OLA, priority="high")).status_code == 400
    assert (await post(web, f"{path}/move", OLA)).status_code == 400


async def test_dead_letters_are_redriven_after_a_dry_run_and_it_is_undone(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    ids = await fill(broker, "orders")
    await broker.stop()
    await broker.connect()
    page = (await web.get("/ui/dead-letters", auth=OLA)).text
    [address] = set(re.findall(r'action="(/ui/plan[^"]*fingerprint=[^"]*)"', page))
    search = {"action": "redrive", "to": "later"}
    answer = await post(web, html.unescape(address), OLA, **search)
    assert "1 message matches now. No message has been changed yet." in answer.text
    assert not await broker.admin.audit(bulk=True)
    plan = {name: hidden(answer.text, name) for name in ("plan", "signature")}
    forged = {**plan, "plan": plan["plan"].replace("later", "other")}
    assert (await post(web, "/ui/begin", OLA, **forged)).status_code == 400
    assert (await post(web, "/ui/begin", as_user("ann"), **plan)).status_code == 400
    assert not await broker.admin.audit(bulk=True)
    begun = await post(web, "/ui/begin", OLA, **plan)
    job = await ended(broker, begun.headers["location"])
    assert (job.action, job.by, job.done) == ("redrive", "ola", 1)
    detail = await broker.admin.message(ids["failed"])
    assert detail is not None
    assert (detail.message.queue, detail.message.state.name) == ("later", "PENDING")
    shown = await web.get(f"/ui/jobs/{job.id}", auth=OLA)
    assert "1 of 1 done, 0 skipped" in shown.text
    undone = await post(web, f"/ui/jobs/{job.id}/undo", OLA)
    assert (await ended(broker, undone.headers["location"])).by == "ola"
    detail = await broker.admin.message(ids["failed"])
    assert detail is not None
    assert detail.message.state.name == "FAILED"


@pytest.mark.parametrize(
    ("action", "fields"), [("cancel", {"why": "old"}), ("retry", {}), ("move", {"to": "b"})]
)
async def test_all_that_wait_and_match_are_changed_after_a_dry_run(
    broker: SqlBroker, web: httpx.AsyncClient, action: str, fields: dict[str, Any]
) -> None:
    numbers = [await broker.publish({}, queue, delay="1h") for queue in ("a", "a", "other")]
    answer = await post(web, "/ui/plan", OLA, action=action, queue="a", rate="1000", **fields)
    assert "2 messages match now" in answer.text, answer.text
    plan = {name: hidden(answer.text, name) for name in ("plan", "signature")}
    begun = await post(web, "/ui/begin", OLA, **plan)
    assert (await ended(broker, begun.headers["location"])).done == 2
    assert len(numbers) == 3


async def test_a_dry_run_is_confirmed_once(broker: SqlBroker, web: httpx.AsyncClient) -> None:
    await broker.publish({}, "a", delay="1h")
    answer = await post(web, "/ui/plan", OLA, action="retry", queue="a")
    plan = {name: hidden(answer.text, name) for name in ("plan", "signature")}
    both = await asyncio.gather(*(post(web, "/ui/begin", OLA, **plan) for _ in range(2)))
    assert sorted(each.status_code for each in both) == [303, 409]
    again = await post(web, "/ui/begin", OLA, **plan)
    assert again.status_code == 409
    assert "was already confirmed" in again.text
    assert len(await broker.admin.audit(bulk=True)) == 1


async def test_a_dry_run_that_was_left_open_cannot_be_confirmed(
    broker: SqlBroker, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.publish({}, "a", delay="1h")
    answer = await post(web, "/ui/plan", OLA, action="retry", queue="a")
    plan = {name: hidden(answer.text, name) for name in ("plan", "signature")}
    monkeypatch.setattr(actions, "PLAN_LIFETIME", -60.0)
    late = await post(web, "/ui/begin", OLA, **plan)
    assert late.status_code == 409
    assert "older than 15 minutes" in late.text
    assert not await broker.admin.audit(bulk=True)


async def test_only_what_has_the_searched_state_is_changed(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    await broker.publish({}, "a", delay="1h")

    @broker.subscriber(
        "b", retry_strategy=ConstantRetryStrategy(delay_seconds=3600, max_attempts=2)
    )
    async def fail(_body: dict) -> None:
        raise ValueError

    await broker.publish({}, "b")
    await broker.start()

    async def retried() -> bool:
        return bool((await broker.admin.messages(state="RETRYABLE")).messages)

    await eventually(retried)
    await broker.stop()
    await broker.connect()
    for state, said in [
        ("RETRYABLE", "1 message matches now"),
        ("PENDING", "1 message matches now"),
        ("PROCESSING", "0 messages match now"),
    ]:
        answer = await post(web, "/ui/plan", OLA, action="cancel", state=state)
        assert said in answer.text, answer.text
        assert f", {state}" in answer.text
    answer = await post(web, "/ui/plan", OLA, action="cancel", state="RETRYABLE")
    plan = {name: hidden(answer.text, name) for name in ("plan", "signature")}
    begun = await post(web, "/ui/begin", OLA, **plan)
    assert (await ended(broker, begun.headers["location"])).done == 1
    [left] = (await broker.admin.messages()).messages
    assert left.queue == "a"


async def test_a_job_is_stopped_and_goes_on(broker: SqlBroker, web: httpx.AsyncClient) -> None:
    for _ in range(3):
        await broker.publish({}, "a", delay="1h")
    planned = await broker.admin.bulk_cancel(queue="a", rate=0.001)
    job = await broker.admin.run_job(planned, wait=False)
    stopped = await post(web, f"/ui/jobs/{job.id}/stop", OLA)
    assert stopped.headers["location"].endswith("note=stopped")
    found = await broker.admin.job(job.id)
    assert found is not None
    assert found.state == "stopped"
    page = await web.get(f"/ui/jobs/{job.id}", auth=OLA)
    assert f"/ui/jobs/{job.id}/resume" in page.text
    goes = await post(web, f"/ui/jobs/{job.id}/resume", OLA)
    assert goes.headers["location"].endswith("note=goes_on")
    found = await broker.admin.job(job.id)
    assert found is not None
    assert found.state == "running"
    await post(web, f"/ui/jobs/{job.id}/stop", OLA)
    # The work of this process ends by itself then.
    await eventually(
        lambda: (
            not any("BulkJobs._run_work" in repr(task.get_coro()) for task in asyncio.all_tasks())
        ),
        timeout=60,
    )


async def test_names_with_direction_marks_are_shown_escaped(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    """They would reorder what stands around them; links and forms lead to the very name."""
    name = "a\u202eb\u2066/c"
    number = await broker.publish({"x": name}, name, key=name, delay="1h")
    assert number is not None
    await broker.admin.pause("other", reason=name)
    query = urlencode({"name": name})
    for path in (f"/ui/queue?{query}", "/ui/queues", "/ui/messages", f"/ui/messages/{number}", "/"):
        page = html.unescape((await web.get(path, auth=OLA)).text)
        assert "\u202e" not in page
        assert "a\\u202eb\\u2066/c" in page
    for path in (f"/ui/queue?{query}", "/ui/queues"):
        for action, is_paused in (("pause", True), ("resume", False)):
            page = (await web.get(path, auth=OLA)).text
            [address] = re.findall(rf'action="(/ui/{action}\?queue=a[^"]*)"', page)
            assert (await post(web, html.unescape(address), OLA)).status_code == 303
            [queue] = await broker.admin.queues(name)
            assert (queue.paused is not None) is is_paused
    searched = f"/ui/messages?{urlencode({'queue': name})}"
    page = (await web.get(searched, auth=OLA)).text
    [plan] = re.findall(r'action="(/ui/plan[^"]*)"', page)[:1]
    planned = await post(web, html.unescape(plan), OLA, action="retry")
    assert "1 message matches now" in planned.text
    begun = {each: hidden(planned.text, each) for each in ("plan", "signature")}
    assert (await post(web, "/ui/begin", OLA, **begun)).status_code == 303


async def test_a_job_tells_what_the_database_refused(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    numbers = [await broker.publish({}, "a", delay="1h") for _ in range(3)]
    async with broker.engine.begin() as connection:
        await connection.execute(
            text(
                "CREATE TRIGGER refused BEFORE UPDATE ON message "
                f"WHEN NEW.id = {numbers[1]} BEGIN SELECT RAISE(ABORT, 'not here'); END"
            )
        )
    job = await broker.admin.bulk_move("b", queue="a", dry_run=False)
    page = (await web.get(f"/ui/jobs/{job.id}", auth=OLA)).text
    assert "2 of 3 done, 0 skipped, 1 failed" in page
    assert f'href="/ui/messages/{numbers[1]}"' in page
    assert "2 of 3 done, 0 skipped, 1 failed" in (await web.get("/ui/jobs", auth=OLA)).text


async def test_the_error_of_a_job_is_hidden_with_bodies(broker: SqlBroker) -> None:
    """PostgreSQL quotes the row that a constraint refuses, with its body."""
    await broker.publish_batch(*range(20), queue="a", delay="1h")
    async with broker.engine.begin() as connection:
        refused = "CREATE TRIGGER refused BEFORE UPDATE ON message "
        await connection.execute(text(refused + "BEGIN SELECT RAISE(ABORT, 'quoted body'); END"))
    job = await broker.admin.bulk_move("b", queue="a", dry_run=False)
    assert job.state == "failed"
    for options, is_shown in (
        ({}, True),
        ({"show_bodies": False}, False),
        ({"redact": lambda m: m}, False),
    ):
        async with client_of(broker.asgi(logins(), **options)) as client:
            page = (await client.get(f"/ui/jobs/{job.id}", auth=OLA)).text
        assert ("quoted body" in page) is is_shown
        assert ("<dd>hidden</dd>" in page) is not is_shown


async def test_unknown_actions_jobs_and_workers_are_refused(web: httpx.AsyncClient) -> None:
    for path, fields in [
        ("/ui/plan", {"action": "delete"}),
        ("/ui/plan", {"action": "move"}),
        ("/ui/plan", {"action": "retry", "rate": "fast"}),
        ("/ui/plan", {"action": "retry", "rate": "nan"}),
        ("/ui/plan", {}),
        ("/ui/plan", {"action": "retry", "archived": "on"}),
        ("/ui/plan", {"action": "cancel", "reason": "cancelled"}),
        ("/ui/plan", {"action": "move", "to": "b", "state": "FAILED"}),
        ("/ui/begin", {"plan": "{}", "signature": "x"}),
        ("/ui/jobs/none/stop", {}),
        ("/ui/jobs/none/resume", {}),
        ("/ui/jobs/none/undo", {}),
        ("/ui/release", {"worker": "one-that-is-gone"}),
        ("/ui/drain", {"worker": "one-that-is-gone"}),
        ("/ui/undrain", {}),
        ("/ui/release-lock", {}),
        ("/ui/release-lock", {"key": "x" * 256}),
        ("/ui/forget-schedule", {}),
        ("/ui/forget-schedule", {"name": "x" * 256}),
        ("/ui/run-schedule", {}),
        ("/ui/run-schedule", {"name": "x" * 256}),
        ("/ui/pause-schedule", {}),
        ("/ui/resume-schedule", {}),
        ("/ui/pause", {"queue": "a", "until": "soon"}),
        ("/ui/pause", {}),
    ]:
        answer = await post(web, path, OLA, **fields)
        assert answer.status_code == 400, (path, answer.text)
        assert "text/html" in answer.headers["content-type"]


async def test_a_worker_is_drained_and_released(broker: SqlBroker, web: httpx.AsyncClient) -> None:
    started = asyncio.Event()

    @broker.subscriber("slow")
    async def handle(_body: dict) -> None:
        started.set()
        await asyncio.Event().wait()

    await broker.publish({}, "slow")
    await broker.start()
    await asyncio.wait_for(started.wait(), 60)
    [worker] = await broker.admin.subscribers()
    for action, note, button in (
        ("drain", "drained", "Undrain"),
        ("drain", "drain_unchanged", "Undrain"),
        ("undrain", "undrained", "Drain"),
    ):
        done = await post(web, f"/ui/{action}", OLA, worker=worker.worker)
        assert done.headers["location"] == f"/ui/workers?note={note}"
        page = await web.get(done.headers["location"], auth=OLA)
        assert f'aria-label="{button}: {worker.worker}"' in page.text
    assert ((await audited(broker)).action, (await audited(broker)).by) == ("undrain", "ola")
    refused = await post(web, "/ui/release", OLA, worker=worker.worker)
    assert refused.status_code == 400
    assert "is alive until at least" in refused.text
    done = await post(web, "/ui/release", OLA, worker=worker.worker, force="on")
    assert done.headers["location"] == "/ui/workers?note=released"
    assert (await audited(broker)).by == "ola"


async def test_a_lock_is_released_and_a_schedule_forgotten(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    with pytest.raises(LockLostError):
        async with broker.lock("report", lease="10m"):
            done = await post(web, "/ui/release-lock", OLA, key="report")
            assert done.headers["location"] == "/ui/locks?note=lock_released"
    action = await audited(broker)
    assert (action.action, action.by, action.arguments["key"]) == ("release_lock", "ola", "report")
    done = await post(web, "/ui/release-lock", OLA, key="report")
    assert done.headers["location"] == "/ui/locks?note=lock_free"
    broker.publish_on_schedule("nightly", "0 3 * * *", "a", {})
    await broker.start()
    await eventually(broker.admin.schedules)
    await broker.stop()
    await broker.connect()
    done = await post(web, "/ui/forget-schedule", OLA, name="nightly")
    assert done.headers["location"] == "/ui/schedules?note=schedule_forgotten"
    action = await audited(broker)
    assert (action.action, action.by, action.arguments) == (
        "forget_schedule",
        "ola",
        {"name": "nightly"},
    )
    done = await post(web, "/ui/forget-schedule", OLA, name="nightly")
    assert done.headers["location"] == "/ui/schedules?note=no_schedule"
    assert (
        "The schedule does not exist." in (await web.get(done.headers["location"], auth=OLA)).text
    )


async def test_a_schedule_is_run_paused_and_resumed_under_the_users_name(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    broker.publish_on_schedule("nightly", "0 3 * * *", "a", {})
    await broker.start()
    await eventually(broker.admin.schedules)
    await broker.stop()
    await broker.connect()
    assert "/ui/resume-schedule" not in (await web.get("/ui/schedules", auth=OLA)).text
    for action, note, shown in [
        ("run", "schedule_asked", "run requested at"),
        ("pause", "schedule_paused", "paused</span> since"),
        ("pause", "schedule_unchanged", "/ui/resume-schedule"),
        ("resume", "schedule_resumed", "/ui/pause-schedule"),
        ("resume", "schedule_unchanged", "/ui/run-schedule"),
    ]:
        done = await post(web, f"/ui/{action}-schedule", OLA, name="nightly")
        assert done.headers["location"] == f"/ui/schedules?note={note}"
        page = (await web.get(done.headers["location"], auth=OLA)).text
        assert shown in page, page
        assert "run requested" not in page or action == "run"
    did = [(each.action, each.by) for each in await broker.admin.audit()]
    assert did == [("resume_schedule", "ola"), ("pause_schedule", "ola"), ("run_schedule", "ola")]
    await post(web, "/ui/pause-schedule", OLA, name="nightly")
    refused = await post(web, "/ui/run-schedule", OLA, name="nightly")
    assert refused.status_code == 400
    assert "is paused by ola: resume it first" in refused.text
    viewer = (await web.get("/ui/schedules", auth=as_user("vic"))).text
    assert "paused</span>" in viewer
    assert 'method="post"' not in viewer


async def test_only_operators_act_and_only_with_the_token(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    await broker.publish({}, "a")
    token = await token_of(web, OLA)
    others = await token_of(web, as_user("ann"))
    for path in ACTIONS:
        answer = await post(web, path, as_user("vic"), queue="a")
        assert answer.status_code == 403, path
        for data in ({}, {"csrf": "x"}, {"csrf": others}):
            answer = await web.post(path, auth=OLA, data={"queue": "a", **data})
            assert answer.status_code == 403, path
        assert "reload the page" in answer.text
        for headers in ({"Origin": "http://evil.test"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await web.post(path, auth=OLA, data={"csrf": token}, headers=headers)
            assert answer.status_code == 403, path
        assert (await web.post(path, data={"csrf": token})).status_code == 401
        assert (await web.get(path, auth=OLA)).status_code in {404, 405}
    assert not await broker.admin.audit()


async def test_viewers_and_the_read_only_mode_have_no_actions(broker: SqlBroker) -> None:
    number = await broker.publish({}, "a")
    paths = ("/ui/queues", "/ui/queue?name=a", "/ui/messages", f"/ui/messages/{number}")
    async with client_of(broker.asgi(logins())) as client:
        for path in paths:
            assert 'method="post"' in (await client.get(path, auth=OLA)).text, path
            assert 'method="post"' not in (await client.get(path, auth=as_user("vic"))).text
    async with client_of(broker.asgi(logins(), dashboard="read_only")) as client:
        for path in paths:
            assert 'method="post"' not in (await client.get(path, auth=as_user("ann"))).text
        for path in ACTIONS:
            answer = await post(client, path, as_user("ann"), queue="a")
            assert answer.status_code in {404, 405}, path


async def test_large_and_odd_forms_are_refused(web: httpx.AsyncClient) -> None:
    answer = await post(web, "/ui/pause", OLA, queue="a", reason="x" * 2_000_000)
    assert answer.status_code == 413
    token = await token_of(web, OLA)
    odd = await web.post(
        "/ui/pause", auth=OLA, content=f"csrf={token}&queue=a&queue=b", headers=_FORM
    )
    assert odd.status_code == 400
    plain = await web.post("/ui/pause", auth=OLA, content="queue=a")
    assert plain.status_code == 415


_FORM = {"Content-Type": "application/x-www-form-urlencoded"}
