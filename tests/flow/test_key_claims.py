"""Claims of keys that workers ask for at the same time share a transaction (Z4)."""

import asyncio
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.database.parts.once import OnceStatus
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.policy_starts import KeyClaimer
from tests.flow.conftest import Rig
from tests.helpers import eventually

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Policies:
    """A store that answers when told to."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.go = asyncio.Event()
        self.refused: dict[int, StoreError] = {}
        self.free: set[int] = set()
        self.uncertain: StoreError | None = None

    async def claim_free_keys(self, rows: list[ClaimedMessage], _ttl: float) -> set[int]:
        if self.uncertain is not None:
            raise self.uncertain
        return {row.id for row in rows} & self.free

    async def claim_keys(self, rows: list[ClaimedMessage], _ttl: float) -> Any:
        self.asked.append([row.id for row in rows])
        await self.go.wait()
        for row in rows:
            if row.id in self.refused:
                raise self.refused[row.id]
        return {row.id: (OnceStatus.START, row.id) for row in rows}


@pytest.fixture
def policies() -> Policies:
    return Policies()


def row(number: int) -> ClaimedMessage:
    return ClaimedMessage(
        number, "q", b"", {}, 0, f"k{number}", 0, 1, 1, NOW, NOW, None, None, None, NOW, uuid4()
    )


def ask(policies: Policies, *ids: int) -> "list[asyncio.Task[Any]]":
    """One worker for each of `ids`."""
    store: Any = SimpleNamespace(policies=policies)
    claims = getattr(policies, "claims", None) or KeyClaimer(store, 60.0)
    policies.claims = claims  # type: ignore[attr-defined]
    return [asyncio.create_task(claims.claim([row(i)])) for i in ids]


async def test_workers_that_ask_together_share_a_transaction(policies: Policies) -> None:
    first = ask(policies, 1, 2, 3)
    await eventually(lambda: policies.asked == [[1, 2, 3]])
    second = ask(policies, 4, 5)
    await asyncio.sleep(0)
    policies.go.set()
    answers = await asyncio.gather(*first, *second)
    assert policies.asked == [[1, 2, 3], [4, 5]]
    assert answers == [{i: (OnceStatus.START, i)} for i in (1, 2, 3, 4, 5)]


async def test_what_the_database_refuses_keeps_no_other(policies: Policies) -> None:
    policies.go.set()
    policies.refused[2] = StoreError("no such key")
    one, two, three = await asyncio.gather(*ask(policies, 1, 2, 3))
    assert (one, three) == ({1: (OnceStatus.START, 1)}, {3: (OnceStatus.START, 3)})
    assert two is policies.refused[2]
    assert policies.asked == [[1, 2, 3], [1], [2], [3]]


async def test_a_passing_failure_is_everyones(policies: Policies) -> None:
    policies.go.set()
    policies.refused[2] = TransientStoreError("the database is busy")
    assert await asyncio.gather(*ask(policies, 1, 2)) == [policies.refused[2]] * 2
    assert policies.asked == [[1, 2]]


async def test_an_unexpected_error_reaches_all_and_the_next_go_on(policies: Policies) -> None:
    policies.refused[1] = RuntimeError("a bug")  # type: ignore[assignment]
    first = ask(policies, 1, 2)
    await eventually(lambda: policies.asked == [[1, 2]])
    second = ask(policies, 3)
    await asyncio.sleep(0)
    policies.go.set()
    errors = await asyncio.gather(*first, return_exceptions=True)
    assert errors == [policies.refused[1]] * 2
    assert await asyncio.gather(*second) == [{3: (OnceStatus.START, 3)}]


async def test_free_keys_are_not_asked_for_again(policies: Policies) -> None:
    policies.go.set()
    policies.free = {1, 3}
    answers = await asyncio.gather(*ask(policies, 1, 2, 3))
    assert answers == [{i: (OnceStatus.START, i)} for i in (1, 2, 3)]
    assert policies.asked == [[2]]


@pytest.mark.parametrize("error", [TransientStoreError("busy"), UnknownOutcomeError("cut off")])
async def test_nothing_more_is_asked_while_it_is_not_known_which_were_free(
    policies: Policies, error: StoreError
) -> None:
    policies.go.set()
    policies.uncertain = error
    assert await asyncio.gather(*ask(policies, 1, 2)) == [error] * 2
    assert policies.asked == []


async def test_a_refusal_of_free_keys_asks_for_all(policies: Policies) -> None:
    policies.go.set()
    policies.uncertain = StoreError("no such key")
    policies.refused[2] = StoreError("no such key")
    one, two = await asyncio.gather(*ask(policies, 1, 2))
    assert one == {1: (OnceStatus.START, 1)}
    assert two is policies.refused[2]


async def test_a_batch_asks_for_all_its_keys_at_once(policies: Policies) -> None:
    """If it cannot start, none of its keys may stay claimed."""
    policies.go.set()
    policies.free = {1, 2}
    store: Any = SimpleNamespace(policies=policies)
    both = await KeyClaimer(store, 60.0).claim([row(1), row(2)])
    assert both == {1: (OnceStatus.START, 1), 2: (OnceStatus.START, 2)}
    assert policies.asked == [[1, 2]]


async def test_only_free_keys_are_claimed_without_a_verdict(rig: Rig, database: str) -> None:
    """Taken keys, lost leases and the second message of a key are left to the verdicts."""
    taken, *ids = await rig.store.insert(
        [NewMessage("q", b"1", key=key) for key in ("a", "a", "b", "b", "c", "d")]
    )
    rows = {message.id: message for message in await rig.claim(10)}
    await rig.store.policies.claim_keys([rows[taken or 0]], 60.0)
    lost = rows[ids[3] or 0]
    lost.lease_token = uuid4()
    asked = [rows[i or 0] for i in ids]
    free = await rig.store.policies.claim_free_keys(asked, 60.0)
    assert free == ({ids[1], ids[4]} if database == "postgresql" else set())
    verdicts = await rig.store.policies.claim_keys(asked, 60.0)
    assert verdicts == {
        ids[0]: (OnceStatus.DUPLICATE, taken),
        ids[1]: (OnceStatus.START, ids[1]),
        ids[2]: (OnceStatus.DUPLICATE, ids[1]),
        ids[3]: (OnceStatus.LOST, None),
        ids[4]: (OnceStatus.START, ids[4]),
    }
    assert await rig.store.policies.claim_free_keys(asked, 60.0) == set(), "claimed by now"


async def test_workers_of_a_subscriber_ask_together(rig: Rig) -> None:
    """Each with keys of its own they would send a transaction a message."""
    sizes = list[int]()
    policies: Any = rig.store.policies
    claim = policies.claim_free_keys

    async def note(rows: list[ClaimedMessage], ttl: float) -> Any:
        sizes.append(len(rows))
        return await claim(rows, ttl)

    policies.claim_free_keys = note
    await rig.store.insert([NewMessage("q", b"1", key=f"k{n}") for n in range(20)])
    await rig.consumer(policies=[Once("1h")], max_workers=20, max_fetch_interval=0.1).start()
    await eventually(lambda: len(rig.handled) == 20)
    assert sum(sizes) == 20
    assert max(sizes) > 1


async def test_messages_of_one_key_that_start_together_run_once(rig: Rig) -> None:
    """Also in one statement: the first of them has the key."""
    ids = await rig.put(5, key="a")
    rows = await rig.claim(10)
    verdicts = await rig.store.policies.claim_keys(rows, 60.0)
    assert verdicts == {
        ids[0]: (OnceStatus.START, ids[0]),
        **dict.fromkeys(ids[1:], (OnceStatus.DUPLICATE, ids[0])),
    }
    assert await rig.store.policies.claim_keys(rows, 60.0) == verdicts, "a repeat changes nothing"


async def test_twenty_workers_handle_each_key_once(rig: Rig) -> None:
    await rig.store.insert([NewMessage("q", b"1", key=f"k{n % 30}") for n in range(90)])
    await rig.consumer(policies=[Once("1h")], max_workers=20, max_fetch_interval=0.1).start()

    async def all_gone() -> bool:
        return not await rig.count()

    await eventually(all_gone)
    assert sorted(str(row.key) for row in rig.handled) == sorted(f"k{n}" for n in range(30))
