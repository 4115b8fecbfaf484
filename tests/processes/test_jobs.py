"""Bulk actions whose processes are killed: each message once, and the audit says what was done."""

from collections import Counter
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Job
from faststream_sqlbroker.core.states import MessageState
from tests.contract.conftest import done
from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tests.processes.job_operator import BATCH

pytestmark = pytest.mark.capability("`broker.admin`: bulk actions as jobs, audit, undo")
MESSAGES = 200
KILLS = 4
BEYOND_LIMIT = 20
"""Messages that match a redrive beyond its limit."""


async def begin(admin: Any, action: str) -> Job:
    """Store the job; nothing works on it yet."""
    rest: dict[str, Any] = {"queue": "q", "dry_run": False, "wait": False, "by": "Ann"}
    if action == "redrive":
        rest["limit"] = MESSAGES
    calls: dict[str, Any] = {
        "cancel": admin.bulk_cancel,
        "move": lambda **more: admin.bulk_move("other", **more),
        "redrive": admin.redrive,
        "replay": lambda **more: admin.replay("n", **more),
    }
    job: Job = await calls[action](**rest)
    return job


async def fail_all(fleet: Fleet) -> None:
    """Let every message of the queue end as FAILED."""
    while rows := await fleet.claim(100):
        await fleet.store.settle(
            [done(row, state=MessageState.FAILED, reason="rejected") for row in rows]
        )


async def killed_again_and_again(fleet: Fleet, admin: Any, job_id: str) -> None:
    """Start a process for the job and kill it once it has done something; KILLS times."""
    for _ in range(KILLS):
        before = (await admin.job(job_id)).done
        process = fleet.run("job_operator", job_id)

        async def has_moved(before: int = before) -> bool:
            return bool((await admin.job(job_id)).done > before)

        await eventually(has_moved)
        process.kill()
        process.wait()


@pytest.mark.parametrize("action", ["cancel", "move", "redrive", "replay"])
async def test_a_killed_job_goes_on_and_visits_each_message_once(fleet: Fleet, action: str) -> None:
    await fleet.publish(MESSAGES + (BEYOND_LIMIT if action == "redrive" else 0))
    if action in {"redrive", "replay"}:
        await fail_all(fleet)
    admin = SqlBroker(fleet.store.engine, logger=None).admin
    begun = await begin(admin, action)
    assert begun.expected == MESSAGES
    await killed_again_and_again(fleet, admin, begun.id)

    async def audit_is_true() -> bool:
        """As soon as the server has ended the last killed session."""
        return bool(await changed(fleet, action) == (await admin.job(begun.id)).done)

    await eventually(audit_is_true)
    halfway = await admin.job(begun.id)
    assert halfway.state == "running"
    assert KILLS * BATCH <= halfway.done < MESSAGES
    if action == "redrive":
        # They fail once more while the job runs, and must not come back a second time.
        await fail_all(fleet)
    ended = await admin.wait_for_job(begun.id)
    assert (ended.state, ended.done, ended.skipped) == ("ended", MESSAGES, 0)
    assert await changed(fleet, action) == MESSAGES
    [audited] = await admin.audit()
    assert (audited, audited.by, audited.filters.queue) == (ended, "Ann", "q")


async def changed(fleet: Fleet, action: str) -> int:
    """How many messages the job has changed; each once."""
    live = await fleet.rows()
    ended = await fleet.rows(archive=True)
    if action == "cancel":
        assert len(live) + len(ended) == MESSAGES
        return Counter(row["reason"] for row in ended)["cancelled"]
    if action == "move":
        assert len(live) == MESSAGES
        return Counter(row["queue"] for row in live)["other"]
    if action == "redrive":
        rows = [*live, *ended]
        assert len({row["id"] for row in rows}) == len(rows) == MESSAGES + BEYOND_LIMIT
        assert {row["publish_count"] for row in rows} <= {1, 2}
        return sum(row["publish_count"] == 2 for row in rows)
    assert len(ended) == MESSAGES
    origins = Counter(row["origin_id"] for row in live)
    assert set(origins.values()) <= {1}
    return len(origins)
