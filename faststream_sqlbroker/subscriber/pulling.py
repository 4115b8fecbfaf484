"""Single messages for the application: what `get_one` and `async for` of a subscriber give.

One message at a time is leased. The application settles it, which is written at once; until then
its lease is renewed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from faststream.exceptions import SkipMessage
from typing_extensions import override

from faststream_sqlbroker.adapter.messages import ParserComposition, process_msg
from faststream_sqlbroker.core.outcome import Abandon, Nack, Skip
from faststream_sqlbroker.core.rows import ClaimedMessage, Holder
from faststream_sqlbroker.exceptions import (
    LeaseLostError,
    NotSupportedError,
    SetupError,
    StoreError,
    TransientStoreError,
)
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.tasks.direct_claim import (
    DirectClaimer,
    DirectClaimRequest,
    as_claimed,
)
from faststream_sqlbroker.flow.tasks.held import Held, Renewal
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.message import SqlBrokerMessage
from faststream_sqlbroker.parser import SqlBrokerParser

if TYPE_CHECKING:
    from faststream.middlewares import BaseMiddleware

    from faststream_sqlbroker.adapter.values import AsyncCallable, CustomCallable
    from faststream_sqlbroker.subscriber.options import SubscriberSettings

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, None]])

MOST_LEASES = 10
"""For how many leases a message is held that the application does not settle."""
_ADVICE = "release_stuck_timeout is the length of its lease"


class HasHandlerError(SetupError, AssertionError):
    """Single messages were asked for, and the subscriber has a handler.

    It is an AssertionError, too, as with FastStream's other brokers.
    """


def _written(record: M) -> M:
    """`record`, a method that records an outcome, with the write of the outcome after it."""

    @wraps(record)
    async def record_and_write(self: "PulledMessage", *args: Any, **options: Any) -> None:
        try:
            await record(self, *args, **options)
        finally:
            # A nack with an invalid delay is recorded as a plain one before it raises.
            await self.write()

    return cast("M", record_and_write)


class PulledMessage(SqlBrokerMessage):
    """A message that the application settles itself: each method writes the outcome at once.

    Raises (from every method that settles):
        LeaseLostError: the lease is lost; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost twice; the outcome may be written.
        StoreError: nothing was written. Try again.
    """

    _held: Held

    def held_by(self, held: Held) -> None:
        """Write the outcome by `held`."""
        self._held = held

    ack = _written(SqlBrokerMessage.ack)
    nack = _written(SqlBrokerMessage.nack)
    reject = _written(SqlBrokerMessage.reject)
    postpone = _written(SqlBrokerMessage.postpone)
    move_to = _written(SqlBrokerMessage.move_to)
    republish = _written(SqlBrokerMessage.republish)

    async def write(self) -> None:
        """Write the outcome that is recorded, unless one is written."""
        if (outcome := self.raw_message.outcome) is None:
            return
        try:
            if not await self._held.settle(outcome):
                # Another one was written first.
                self.raw_message.settle_anew(self._held.ended)
                self.committed = None
                self.note_outcome()
        except StoreError:
            # Another outcome may be chosen now.
            self.raw_message.settle_anew(None)
            self.committed = None
            raise


class PullingParser(SqlBrokerParser):
    """Makes messages that the application settles itself."""

    @override
    async def parse_message(self, message: ClaimedMessage) -> SqlBrokerMessage:
        return self.parse(message, PulledMessage)


class Pulling:
    """Takes messages of one subscriber one by one; a stop ends it for good."""

    def __init__(
        self,
        claimer: DirectClaimer,
        wakeups: Wakeups,
        settings: "SubscriberSettings",
        log: Log,
        *,
        encode: Any,
        middlewares: "Callable[[ClaimedMessage], list[BaseMiddleware]]",
        parser: "CustomCallable | None",
        decoder: "AsyncCallable",
        paused: bool,
    ) -> None:
        """Nothing is taken yet; `encode` is as of `Holder`, `middlewares` makes those of one
        message, and `parser` is the user's, if there is one.
        """
        self._claimer = claimer
        self._clock = wakeups.clock
        self._outages = wakeups.outages
        self._log = log
        self._lease = settings.release_stuck_timeout
        self._wanted = DirectClaimRequest(
            queues=settings.queues,
            lease=self._lease,
            rules=settings.settle_rules,
            most_deliveries=inf if settings.max_deliveries is None else settings.max_deliveries,
            remove=False,
            listen=settings.wakeup != "poll",
        )
        ids = claimer.correlation_ids
        self._holder = Holder(self._extend, encode, ack_first=False, log=log, correlation_ids=ids)
        own = PullingParser()
        own.log = log
        self._middlewares = middlewares
        self._parser = ParserComposition(parser, own.parse_message)
        self._decoder = decoder
        longest = min(MOST_LEASES * self._lease, settings.max_lease or inf)
        self.renewal = Renewal(claimer, self._outages, log, self._lease, longest)
        self._iterated: WeakSet[Held] = WeakSet()
        """Messages returned by iterations, which a stop releases."""
        self._waits: set[asyncio.Timeout] = set()
        """Timeouts that `pause` and `stop` expire early."""
        self._resumed = asyncio.Event()
        self.pause(paused)
        self._stopped = False

    def pause(self, paused: bool) -> None:
        """Take nothing while `paused`; what is held stays held."""
        if paused:
            self._resumed.clear()
            self._interrupt()
        else:
            self._resumed.set()

    def _interrupt(self) -> None:
        while self._waits:
            self._waits.pop().reschedule(0.0)

    @asynccontextmanager
    async def _interruptible(self) -> AsyncIterator[None]:
        """A block that ends early, without an error, when it is interrupted."""
        # It has no time of its own: `_interrupt` gives it one.
        waiting = asyncio.timeout(None)
        with suppress(TimeoutError):
            async with waiting:
                self._waits.add(waiting)
                try:
                    yield
                finally:
                    self._waits.discard(waiting)

    async def get_one(self, wait: float | None) -> PulledMessage | None:
        """The first due message; None if there was none for `wait` seconds (None: no limit), or if
        the subscriber was stopped.

        Cancelled, it leases nothing.

        Raises:
            StoreError: the database refused or could not be reached.
        """
        held = await self._take(wait)
        return None if held is None else await self._message(held)

    async def messages(self) -> AsyncGenerator[PulledMessage, None]:
        """One message after the other; asking for the next acks the last.

        While the database fails for a passing reason it is asked again, with growing pauses.

        Raises:
            StoreError: the database refused.
        """
        held: Held | None = None
        try:
            while (held := await self._outlast("claim of an iteration", self._take)) is not None:
                self._iterated.add(held)
                message = await self._message(held)
                yield message
                try:
                    if held.open:
                        await self._outlast("ack of an iteration", message.ack)
                except LeaseLostError as error:
                    self._log(logging.WARNING, str(error), message_id=held.row.id)
                # A stop ends the tries to ack it.
                await held.give_back()
        finally:
            # The consumer has gone, or something has failed.
            if held is not None:
                await held.give_back()

    async def _take(self, wait: float | None = None) -> Held | None:
        clock = self._clock.callers
        deadline = None if wait is None else clock.monotonic() + wait
        while not self._stopped:
            async with self._interruptible():
                async with clock.timeout_at(None if self._resumed.is_set() else deadline):
                    await self._resumed.wait()
                left = None if deadline is None else max(0.0, deadline - clock.monotonic())
                row = await self._claimer.take(self._wanted, left, as_claimed)
                return None if row is None else self._hold(row)
            if deadline is not None and clock.monotonic() >= deadline:
                return None
        return None

    def _hold(self, row: ClaimedMessage) -> Held:
        row.holder = self._holder
        return Held(row, self._wanted, self._claimer, _ADVICE)

    async def _extend(self, rows: Sequence[ClaimedMessage], seconds: float) -> bool:
        held = await self._claimer.extend(rows, max(seconds, self._lease))
        return all(row.id in held for row in rows)

    async def _message(self, held: Held) -> PulledMessage:
        try:
            message = await process_msg(
                msg=held.row,
                middlewares=self._middlewares(held.row),
                parser=self._parser,
                decoder=self._decoder,
            )
            pulled = _own(message)
        except BaseException as error:
            with suppress(StoreError, LeaseLostError):
                is_failure = isinstance(error, Exception)
                outcome = Nack(error=error) if is_failure else Abandon()
                await held.settle(Skip() if isinstance(error, SkipMessage) else outcome)
            raise
        pulled.held_by(held)
        if not self._stopped:
            self.renewal.add(held)
        return pulled

    async def _outlast(self, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """What `work` gives, which is repeated while the database fails for a passing reason; None
        if the subscriber was stopped.
        """
        failures = 0
        while not self._stopped:
            try:
                result = await work()
            except TransientStoreError as error:
                failures += 1
                self._outages.failed(self, name, error)
                async with self._interruptible():
                    await self._clock.sleep(backoff(failures, self._clock))
            else:
                if failures:
                    self._outages.worked(self)
                return result
        return None

    async def stop(self) -> None:
        """Take nothing more, give back what iterations hold, and renew no lease any more.

        A message of `get_one` stays leased until its lease ends; the application may still settle
        it.
        """
        self._stopped = True
        self._interrupt()
        await self.renewal.stop()
        for held in list(self._iterated):
            await held.give_back()
        self._outages.left(self)


def _own(message: object) -> PulledMessage:
    if not isinstance(message, PulledMessage):
        raise SetupError(_FOREIGN)
    return message


def refuse_options(settings: "SubscriberSettings", what: str) -> None:
    """Refuse options that single messages cannot keep to.

    Raises:
        NotSupportedError: there is one; the text names it.
    """
    for name in ("policies", "ordered", "batch", "transactional", "task_per_message", "forward_to"):
        if value := getattr(settings, name):
            raise NotSupportedError(
                f"{what} takes single messages, to which {name}={value!r} does not apply: "
                "leave the option out, or give the subscriber a handler"
            )


def refuse_handlers(calls: Any, what: str) -> None:
    """Refuse a subscriber with a handler: its messages are the handler's.

    Raises:
        HasHandlerError: it has one.
    """
    if calls:
        raise HasHandlerError(
            f"{what} takes messages of a subscriber without a handler, and this one has one: use "
            "another broker.subscriber(queue) for single messages"
        )


_FOREIGN = (
    "the parser must return the message that the parser it is given has made, so that the "
    "application can settle it"
)
