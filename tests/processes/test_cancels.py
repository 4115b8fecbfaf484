"""Running messages are cancelled while their processes work, and one of them is killed: each
message ends once, and what was not cancelled is handled."""

import random
from collections import defaultdict
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker
from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tests.processes.worker import gate

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.capability("`broker.admin.cancel` of a running message"),
]
MESSAGES = 120
OPTIONS: dict[str, Any] = {
    "max_workers": 8,
    "release_stuck_timeout": 60.0,
    "release_stuck_interval": 0.3,
    "presence_interval": 0.3,
}


async def test_each_cancelled_message_ends_once(fleet: Fleet) -> None:
    await fleet.publish(MESSAGES)
    victim = fleet.start("gated", **OPTIONS)
    await eventually(lambda: fleet.started().get(victim.pid))
    fleet.start("gated", **OPTIONS)
    admin = SqlBroker(fleet.store.engine, logger=None).admin
    choose = random.Random(7)
    verdicts: dict[int, set[str]] = defaultdict(set)
    """One message may be chosen twice."""

    async def cancel_some(count: int) -> None:
        for _ in range(count):
            live = [row["id"] for row in await fleet.rows()]
            if not live:
                return
            # The first ones run, mostly; the others wait.
            chosen = choose.choice(live[:16] if choose.random() < 0.8 else live)
            verdicts[chosen].add((await admin.cancel(chosen, by="Ann")).verdict)

    await cancel_some(15)
    victim.kill()
    victim.wait()
    gate(fleet.folder).touch()  # now handlers end by themselves, too
    await cancel_some(15)
    await fleet.settled(MESSAGES)
    await fleet.stop()
    rows = {row["id"]: row for row in await fleet.rows(archive=True)}
    assert len(rows) == MESSAGES
    states = {i: row["state"] for i, row in rows.items()}
    assert set(states.values()) == {"COMPLETED", "DISCARDED"}
    assert all(states[i] == "DISCARDED" for i, found in verdicts.items() if "done" in found)
    discarded = {i for i, state in states.items() if state == "DISCARDED"}
    assert discarded <= {i for i, found in verdicts.items() if found & {"done", "requested"}}
    assert {rows[i]["reason"] for i in discarded} == {"cancelled"}
    total = fleet.total()
    for row in rows.values():
        starts = total[int(row["payload"])]
        assert starts <= row["deliveries_count"]
        assert starts or row["state"] == "DISCARDED"


async def test_the_request_outlives_the_process_that_has_the_message(fleet: Fleet) -> None:
    await fleet.publish(1)
    silent = {**OPTIONS, "presence_interval": 3600.0, "searches": False, "wakeup": "poll"}
    holder = fleet.start("hang", **silent)
    await eventually(lambda: fleet.started().get(holder.pid))
    admin = SqlBroker(fleet.store.engine, logger=None).admin
    [row] = await fleet.rows()
    assert (await admin.cancel(row["id"])).is_requested
    holder.kill()
    holder.wait()
    fleet.start("quick", **OPTIONS)  # its lease is ended while this one works
    await fleet.settled(1)
    [ended] = await fleet.rows(archive=True)
    assert (ended["state"], ended["reason"]) == ("DISCARDED", "cancelled")
    assert fleet.total() == {0: 1}
    await fleet.stop()
