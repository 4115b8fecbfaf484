"""Single messages for the application: `get_one` and `async for` of a subscriber.

One message at a time is leased. The application settles it, and the outcome is written immediately;
until then the lease is renewed.
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
from faststream_sqlbroker.core.rows import ClaimedMessage, HandlerServices
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
    return_claimed,
)
from faststream_sqlbroker.flow.tasks.held import HeldMessage, LeaseRenewal
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.message import SqlBrokerMessage
from faststream_sqlbroker.parser import SqlBrokerParser

if TYPE_CHECKING:
    from faststream.middlewares import BaseMiddleware

    from faststream_sqlbroker.adapter.values import AsyncCallable, CustomCallable
    from faststream_sqlbroker.subscriber.options import SubscriberSettings

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, None]])

MAX_LEASES = 10
"""Maximum number of leases for which an unsettled message is held."""
_LEASE_HINT = "raise release_stuck_timeout, the length of its lease, or call extend_lease() in time"


class HasHandlerError(SetupError, AssertionError):
    """A request for single messages from a subscriber that has a handler.

    Also an AssertionError, as in FastStream's other brokers.
    """


def _wrap_with_write(record: M) -> M:
    """Wrap `record`, a method that records an outcome, to write the outcome afterwards.

    A method such as `ack` only notes the outcome on the row. In a handler the worker then writes
    it; a pulled message, which `get_one` or `async for` returned, has no worker.
    """

    @wraps(record)
    async def record_and_write(self: "PulledMessage", *args: Any, **options: Any) -> None:
        try:
            await record(self, *args, **options)
        finally:
            # A nack with an invalid delay is recorded as a plain nack before it raises.
            await self.write_outcome()

    return cast("M", record_and_write)


class PulledMessage(SqlBrokerMessage):
    """A message that the application settles: each method writes the outcome immediately.

    Raises (from every method that settles):
        LeaseLostError: the lease is lost; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost twice; the outcome may be written.
        StoreError: nothing was written. Try again.
    """

    _held: HeldMessage

    def set_held(self, held: HeldMessage) -> None:
        """Set the lease that the outcome is written through."""
        self._held = held

    ack = _wrap_with_write(SqlBrokerMessage.ack)
    nack = _wrap_with_write(SqlBrokerMessage.nack)
    reject = _wrap_with_write(SqlBrokerMessage.reject)
    postpone = _wrap_with_write(SqlBrokerMessage.postpone)
    move_to = _wrap_with_write(SqlBrokerMessage.move_to)
    republish = _wrap_with_write(SqlBrokerMessage.republish)

    async def write_outcome(self) -> None:
        """Write the recorded outcome, unless an outcome is already written.

        Another task, or a stop that released the message, may have written another outcome first;
        that one then replaces the recorded one. After a failed write the outcome is cleared, so the
        application may settle again.
        """
        if (outcome := self.raw_message.outcome) is None:
            return
        try:
            if not await self._held.settle(outcome):
                # Another outcome was written first.
                self.raw_message.replace_outcome(self._held.outcome)
                self.committed = None
                self.note_outcome()
        except StoreError:
            # Another outcome may be chosen now.
            self.raw_message.replace_outcome(None)
            self.committed = None
            raise


class PullingParser(SqlBrokerParser):
    """Creates messages that the application settles."""

    @override
    async def parse_message(self, message: ClaimedMessage) -> SqlBrokerMessage:
        return self.parse(message, PulledMessage)


class Pulling:
    """Claims single messages of a subscriber, until the final stop."""

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
        """Create the object without claiming a message.

        `encode` is the same as for `HandlerServices`, `middlewares` returns the middlewares of a
        message, and `parser` is the user's parser, if any.
        """
        self._claimer = claimer
        self._clock = wakeups.clock
        self._outages = wakeups.outages
        self._log = log
        self._lease = settings.release_stuck_timeout
        self._request = DirectClaimRequest(
            queues=settings.queues,
            lease=self._lease,
            rules=settings.settle_rules,
            max_deliveries=inf if settings.max_deliveries is None else settings.max_deliveries,
            remove=False,
            listen=settings.wakeup != "poll",
        )
        ids = claimer.correlation_ids
        self._holder = HandlerServices(
            self._extend, encode, ack_first=False, log=log, correlation_ids=ids
        )
        default_parser = PullingParser()
        default_parser.log = log
        self._middlewares = middlewares
        self._parser = ParserComposition(parser, default_parser.parse_message)
        self._decoder = decoder
        max_duration = min(MAX_LEASES * self._lease, settings.max_lease or inf)
        self.renewal = LeaseRenewal(claimer, self._outages, log, self._lease, max_duration)
        self._iterated: WeakSet[HeldMessage] = WeakSet()
        """Messages returned by iterations, which a stop releases."""
        self._timeouts: set[asyncio.Timeout] = set()
        """Timeouts that `pause` and `stop` expire early."""
        self._resumed = asyncio.Event()
        self.pause(paused)
        self._stopped = False

    def pause(self, paused: bool) -> None:
        """Claim no messages while `paused`; leases that the application holds stay."""
        if paused:
            self._resumed.clear()
            self._interrupt()
        else:
            self._resumed.set()

    def _interrupt(self) -> None:
        """End the current waits early, so that they notice a pause or a stop.

        Each wait is a block of `_allow_interrupt`.
        """
        while self._timeouts:
            # A deadline in the past expires the timeout.
            self._timeouts.pop().reschedule(0.0)

    @asynccontextmanager
    async def _allow_interrupt(self) -> AsyncIterator[None]:
        """Run a block that `_interrupt` ends early, without an error.

        Cancelling the caller's task instead would also end the application's code. The caller then
        checks for a pause or a stop.
        """
        # The timeout has no deadline until `_interrupt` sets one.
        waiting = asyncio.timeout(None)
        with suppress(TimeoutError):
            async with waiting:
                self._timeouts.add(waiting)
                try:
                    yield
                finally:
                    self._timeouts.discard(waiting)

    async def get_one(self, wait: float | None) -> PulledMessage | None:
        """Return the first due message, or None after `wait` seconds or a stop.

        None waits without limit. A cancelled call leases nothing.

        Raises:
            StoreError: the database refused the statement or could not be reached.
        """
        leased_message = await self._claim(wait)
        return None if leased_message is None else await self._make_message(leased_message)

    async def iter_messages(self) -> AsyncGenerator[PulledMessage, None]:
        """Yield due messages; requesting the next message acks the last.

        During a transient failure of the database, retry with growing delays.

        Raises:
            StoreError: the database refused a statement.
        """
        leased_message: HeldMessage | None = None
        try:
            while (
                leased_message := await self._retry_outages(
                    "claim of a pulled message", self._claim
                )
            ) is not None:
                self._iterated.add(leased_message)
                message = await self._make_message(leased_message)
                yield message
                try:
                    if leased_message.is_open:
                        await self._retry_outages("ack of a pulled message", message.ack)
                except LeaseLostError as error:
                    self._log(logging.WARNING, str(error), message_id=leased_message.row.id)
                # A stop ends the retries of the ack, so the message may still be leased.
                await leased_message.release()
        finally:
            # The iterator was closed, or something failed.
            if leased_message is not None:
                await leased_message.release()

    async def _claim(self, wait: float | None = None) -> HeldMessage | None:
        """Claim the first due message; return None after `wait` seconds or a stop.

        A pause interrupts a waiting claim, which then waits for `resume` before it claims again.
        """
        # The clock for waits of the application: it runs even in a test that stops time.
        clock = self._clock.callers
        deadline = None if wait is None else clock.monotonic() + wait
        while not self._stopped:
            async with self._allow_interrupt():
                # While paused, the wait for `resume` also counts against the deadline.
                async with clock.timeout_at(None if self._resumed.is_set() else deadline):
                    await self._resumed.wait()
                remaining = None if deadline is None else max(0.0, deadline - clock.monotonic())
                row = await self._claimer.claim(self._request, remaining, return_claimed)
                return None if row is None else self._make_held(row)
            if deadline is not None and clock.monotonic() >= deadline:
                return None
        return None

    def _make_held(self, row: ClaimedMessage) -> HeldMessage:
        """Return the object that holds the lease of `row` and writes its outcome.

        The row also gets the services for `extend_lease` and for new bodies, which in a handler
        come from the loops of its subscriber.
        """
        row.services = self._holder
        return HeldMessage(row, self._request, self._claimer, _LEASE_HINT)

    async def _extend(self, rows: Sequence[ClaimedMessage], seconds: float) -> bool:
        """Extend the leases of `rows`; return True if all are still held. For `extend_lease`."""
        extended = await self._claimer.extend(rows, max(seconds, self._lease))
        return all(row.id in extended for row in rows)

    async def _make_message(self, leased_message: HeldMessage) -> PulledMessage:
        """Create the message of a leased row by middlewares, parser and decoder.

        Called right after the claim. If this fails, the message is nacked; a cancellation counts no
        attempt. Otherwise the lease is renewed from now on.
        """
        try:
            message = await process_msg(
                msg=leased_message.row,
                middlewares=self._middlewares(leased_message.row),
                parser=self._parser,
                decoder=self._decoder,
            )
            pulled = _check_pulled(message)
        except BaseException as error:
            # The caller gets this error. If the outcome cannot be written, the lease expires.
            with suppress(StoreError, LeaseLostError):
                is_failure = isinstance(error, Exception)
                outcome = Nack(error=error) if is_failure else Abandon()
                await leased_message.settle(Skip() if isinstance(error, SkipMessage) else outcome)
            raise
        pulled.set_held(leased_message)
        # After a stop no lease is renewed; the application may still settle the message in time.
        if not self._stopped:
            self.renewal.add(leased_message)
        return pulled

    async def _retry_outages(self, name: str, function: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `function`, retried during transient failures of the database.

        Only iterations retry; `get_one` raises such an error. Return None if the subscriber was
        stopped. `name` describes the call in the log of the outage.
        """
        failures = 0
        while not self._stopped:
            try:
                result = await function()
            except TransientStoreError as error:
                failures += 1
                self._outages.record_failure(self, name, error)
                async with self._allow_interrupt():
                    await self._outages.pause(backoff(failures, self._clock))
            else:
                if failures:
                    self._outages.record_success(self)
                return result
        return None

    async def stop(self) -> None:
        """Stop claiming, release messages of iterations, and stop renewing leases.

        A message of `get_one` stays leased until its lease ends; the application may still settle
        it.
        """
        self._stopped = True
        self._interrupt()
        await self.renewal.stop()
        for leased_message in list(self._iterated):
            await leased_message.release()
        self._outages.remove_part(self)


def _check_pulled(message: object) -> PulledMessage:
    """Refuse a message that a custom parser replaced, which the application could not settle."""
    if not isinstance(message, PulledMessage):
        raise SetupError(_FOREIGN_MESSAGE)
    return message


def check_options(settings: "SubscriberSettings", usage: str) -> None:
    """Refuse options that do not apply to single messages.

    Raises:
        NotSupportedError: there is such an option; the text names it.
    """
    for name in ("policies", "ordered", "batch", "transactional", "task_per_message", "forward_to"):
        if value := getattr(settings, name):
            raise NotSupportedError(
                f"{usage} takes single messages, to which {name}={value!r} does not apply: omit "
                "the option, or give the subscriber a handler"
            )


def check_no_handlers(calls: Any, usage: str) -> None:
    """Refuse a subscriber whose messages go to a handler.

    Raises:
        HasHandlerError: the subscriber has a handler.
    """
    if calls:
        raise HasHandlerError(
            f"{usage} needs a subscriber without a handler, but this subscriber has one: use "
            "another broker.subscriber(queue) for single messages"
        )


_FOREIGN_MESSAGE = (
    "a custom parser must return the message of the original parser; otherwise the application "
    "could not settle it"
)
