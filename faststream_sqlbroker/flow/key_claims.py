"""Claims of the keys of `Once`: messages that start together share one transaction."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.policies import Once, Policy
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.once import Verdict
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

Verdicts = dict[int, tuple[Verdict, int | None]]
"""By message, with the one that has its key."""


@dataclass(slots=True, eq=False)
class _Asked:
    rows: Sequence[ClaimedMessage]
    answer: "asyncio.Future[Verdicts | StoreError | None]"
    """None: this one sends what is asked next."""


class KeyClaims:
    """What the workers of one subscriber ask at the same time is asked at once.

    One transaction runs at a time. Workers that ask while it runs share the next one, which the
    first of them sends. So there is no task of its own.
    """

    def __init__(self, store: "Store", ttl: float) -> None:
        """`ttl`: seconds for which a key stays claimed."""
        self._store = store
        self._ttl = ttl
        self._waiting: list[_Asked] = []
        self._sending = False

    async def claim(self, rows: Sequence[ClaimedMessage]) -> Verdicts | StoreError:
        """Claim the keys of `rows`; the verdicts, or why there are none.

        Do not cancel it: others wait for what it sends.
        """
        asked = _Asked(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._sending and (answer := await asked.answer) is not None:
            return answer
        self._sending = True
        # The other workers that have become free with this one ask in the same turn of the loop.
        await asyncio.sleep(0)
        together = self._waiting
        self._waiting = []
        try:
            answers = await self._send(together)
        except BaseException as error:
            for each in together:
                if each is not asked and not each.answer.done():
                    each.answer.set_exception(error)
            raise
        finally:
            self._sending = bool(self._waiting)
            if self._waiting:
                self._waiting[0].answer.set_result(None)
        for each, answer in zip(together, answers, strict=True):
            if each is not asked:
                each.answer.set_result(answer)
        return answers[together.index(asked)]

    async def _send(self, together: Sequence[_Asked]) -> list[Verdicts | StoreError]:
        started = await self._claimed_free(together)
        if isinstance(started, StoreError):
            return [started] * len(together)
        rest = [each for each in together if each.rows[0].id not in started]
        answers = dict(zip(map(id, rest), await self._send_rest(rest), strict=True))
        return [
            answers.get(id(each)) or {row.id: (Verdict.START, row.id) for row in each.rows}
            for each in together
        ]

    async def _claimed_free(self, together: Sequence[_Asked]) -> set[int] | StoreError:
        """The messages whose keys were free, which is usual; an error if that is not known."""
        # Not of batches: if the rest of one cannot be asked for, it does not start, and no key of
        # it may stay claimed.
        single = [each.rows[0] for each in together if len(each.rows) == 1]
        if not single:
            return set()
        try:
            return await self._store.policies.claim_free_keys(single, self._ttl)
        except (TransientStoreError, UnknownOutcomeError) as error:
            return error
        except StoreError:
            return set()  # refused: it is found out of which

    async def _send_rest(self, together: Sequence[_Asked]) -> list[Verdicts | StoreError]:
        if not together:
            return []
        answer = await self._claimed([row for each in together for row in each.rows])
        if not isinstance(answer, StoreError):
            return [{row.id: answer[row.id] for row in each.rows} for each in together]
        passing = isinstance(answer, TransientStoreError | UnknownOutcomeError)
        if passing or len(together) == 1:
            return [answer] * len(together)
        # What the database refuses of one must not keep the others.
        return [await self._claimed(each.rows) for each in together]

    async def _claimed(self, rows: Sequence[ClaimedMessage]) -> Verdicts | StoreError:
        try:
            return await self._store.policies.claim_keys(rows, self._ttl)
        except StoreError as error:
            return error


def key_claims_of(store: "Store", policies: Sequence[Policy]) -> KeyClaims | None:
    """Those of one subscriber, which all its workers share; None without `Once`."""
    once = next((policy for policy in policies if isinstance(policy, Once)), None)
    return None if once is None else KeyClaims(store, once.ttl / MICROSECONDS)
