"""The live subscribers, and what a dead one has leased."""

from faststream_sqlbroker.admin.arguments import operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.overview import nearest_name
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.text import short, storable
from faststream_sqlbroker.exceptions import SetupError

RELEASED_AT_ONCE = 1_000
"""Messages released in one transaction, so that it stays short."""


class Workers(Operations):
    """Subscribers of all processes."""

    async def subscribers(self, queue: str | None = None) -> list[LiveSubscriber]:
        """The live subscribers of all processes, the latest heartbeat first.

        A subscriber that ended without `stop` (SIGKILL, a lost machine) is listed for up to four
        `presence_interval`s more. At most 10 000 are read, the first by name.

        Args:
            queue: List only subscribers of this queue.
        """
        found = await self._store.live_subscribers.subscribers()
        return [s for s in found if queue is None or queue in s.queues]

    async def drain(self, worker: str, *, by: str | None = None) -> list[str]:
        """Let a worker claim nothing more; others take its queues, and its process lives on.

        What it runs goes on, and the outcomes are written. Messages that it has claimed and not
        started are given back; no delivery is counted. Its signs of life go on. It sees the drain
        with the next of them: within its `presence_interval` (5 seconds by default), on PostgreSQL
        mostly at once. It stays drained until `undrain`, or until it stops: a worker that starts
        again has another name, and claims. `subscribers` shows which are drained.

        Args:
            worker: The name of one subscriber, as listed by `subscribers`, or its beginning, the
                host and the process id: then all live subscribers of that process.
            by: Who drains, as text, for the `audit`; default user and host.

        Returns:
            The names of the subscribers that are drained now and were not, sorted.

        Raises:
            SetupError: no live subscriber or process has this name, or `by` is no text.
        """
        return await self._drain(worker, by, drained=True)

    async def undrain(self, worker: str, *, by: str | None = None) -> list[str]:
        """End the drain of a worker; it sees that as soon as it would see a drain.

        Args:
            worker: As of `drain`.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            The names of the subscribers that were drained and are no longer, sorted.

        Raises:
            SetupError: As `drain`.
        """
        return await self._drain(worker, by, drained=False)

    async def _drain(self, worker: str, by: str | None, *, drained: bool) -> list[str]:
        who = operator_name(by)
        names = await self._living(worker)
        async with self._turn:
            changed, paused = await self._changing.live_subscribers.drain(
                names, worker, self._channel, who, drained=drained
            )
            self._heard(paused)
        return sorted(changed)

    async def _living(self, worker: str) -> list[str]:
        """The live subscribers that `worker` names: one, or those of a process."""
        _check_name(worker)
        known = await self._store.live_subscribers.subscriber(worker)
        if known is not None and known[1]:
            return [worker]
        living = await self._store.live_subscribers.subscribers()
        if found := [each.worker for each in living if each.process == worker]:
            return found
        names = sorted({name for each in living for name in (each.worker, each.process)})
        near = nearest_name(worker, names)
        meant = "" if near is None else f", is {near!r} meant?"
        msg = (
            f"no live subscriber or process is named {short(worker)}{meant}: "
            "broker.admin.subscribers() lists the live ones with their names"
        )
        raise SetupError(msg)

    async def release(self, worker: str, *, force: bool = False, by: str | None = None) -> int:
        """Release the messages that a worker has leased now, instead of when its leases run out.

        Use it for a worker that ended without `stop`; it is known for an hour after that. Its
        messages are due again, and the delivery counts, as after a lease that ran out. Rows locked
        by a handler's transaction (`transactional=True`) stay locked until that transaction ends.

        Args:
            worker: The name of one subscriber of one process, as listed by `subscribers`.
            force: Release also if the worker is alive. Its handlers continue, so their effects
                outside of this database may happen twice. The outcomes that it writes for these
                messages are ignored.
            by: Who releases, as text, for the `audit`; default user and host.

        Returns:
            How many messages were released, or discarded as an operator had asked to cancel them.

        Raises:
            SetupError: `worker` is not known, or it is alive and `force` is not set, or `by` is no
                text.
        """
        _check_name(worker)
        known = await self._store.live_subscribers.subscriber(worker)
        if known is None:
            msg = (
                f"no subscriber is known as {short(worker)}: broker.admin.subscribers() lists the "
                "live ones with their names; one that ended without stop() is known for an hour"
            )
            raise SetupError(msg)
        subscriber, alive = known
        if alive and not force:
            msg = (
                f"{worker} is alive until {subscriber.lease_expires_at} at least: wait, or stop "
                "its process, or give force=True; with it others handle the messages while "
                "handlers of this worker may still run"
            )
            raise SetupError(msg)
        total = 0
        who = operator_name(by)
        release = self._changing.live_subscribers.release
        while count := await release(subscriber, RELEASED_AT_ONCE, who):
            total += count
        return total


def _check_name(worker: str) -> None:
    if not isinstance(worker, str) or not storable(worker):
        raise SetupError(f"worker must be the name of a subscriber, got {short(worker)}")
