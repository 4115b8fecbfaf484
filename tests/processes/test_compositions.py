"""Fleets with random compositions of policies, of which processes are killed again and again.

The suite tries the same ones each time. `SQLBROKER_COMPOSITION=SEED` tries another,
`SQLBROKER_COMPOSITIONS=10` that many from there on; the message of a failure has the seed.
"""

import asyncio
import os
import random
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.rows import NewMessage
from tests.processes.compositions import KEYS, Composition, seed_of, wrongs
from tests.processes.conftest import Fleet
from tests.processes.policy_fleet import PolicyFleet

pytestmark = pytest.mark.timeout(400)

RUNS = int(os.environ.get("SQLBROKER_COMPOSITIONS", "1"))
PROCESSES = 3
KILLS = 3
TICKS = 40
STEP = 0.1


@pytest.mark.parametrize("number", range(RUNS))
async def test_a_random_composition_keeps_what_it_promises(fleet: Fleet, number: int) -> None:
    """Nothing lost, no rate or limit exceeded, order and Once kept, whichever process is killed."""
    composition = Composition.drawn(seed_of(number))
    chance = random.Random(composition.seed + 1)
    policies = PolicyFleet(fleet)
    workers = [policies.start(composition.given()) for _ in range(PROCESSES)]
    await fleet.live(PROCESSES)
    kills = sorted(chance.sample(range(5, TICKS), KILLS))
    killed = []
    scoped = tuple(
        queue
        for queue, each in composition.subscribers.items()
        if any(options.get("scope") for _, options in each.of("Concurrency"))
    )
    async with policies.watched(scoped) as seen:
        for tick in range(TICKS):
            await fleet.bury()
            await put(policies, chance, list(composition.subscribers))
            if tick in kills:
                victim = workers.pop(chance.randrange(len(workers)))
                policies.kill(victim)
                killed.append(victim.pid)
                workers.append(policies.start(composition.given()))
            await asyncio.sleep(STEP)
        await ended(fleet, policies, str(composition))
    await fleet.stop()
    found = wrongs(composition, await policies.left(), policies.published, seen, killed)
    assert found == [], f"{composition}\n" + "\n".join(found)


async def put(policies: PolicyFleet, chance: random.Random, queues: list[str]) -> None:
    """Some messages with keys, without, and of several priorities."""
    messages = [
        NewMessage(
            queue,
            b"1",
            key=chance.choice([*KEYS, None]),
            priority=chance.choice([0, 0, 1, 5]),
        )
        for queue in queues
        for _ in range(chance.choice([0, 0, 1, 1, 2, 6]))
    ]
    if not messages:
        return
    ids: list[Any] = list(await policies.store.insert(messages))
    for message, message_id in zip(messages, ids, strict=True):
        policies.published[message.queue].append(message_id)


async def ended(fleet: Fleet, policies: PolicyFleet, text: str) -> None:
    """Wait until nothing is left; else say what is, and why."""
    count = sum(map(len, policies.published.values()))
    try:
        await fleet.settled(count)
    except AssertionError:
        operator = SqlBroker(fleet.store.engine, logger=None).admin
        rows = await fleet.rows()
        whys = [str(await operator.explain(row["id"])) for row in rows[:5]]
        left = f"{len(rows)} are left of {count}"
        pytest.fail("\n".join([text, left, *whys, str(rows[:2])]))
