"""Operations on live subscribers, and on the leases of dead ones."""

from faststream_sqlbroker.admin.filters import get_operator_name
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.overview import find_similar_name
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.text import format_value, is_storable
from faststream_sqlbroker.exceptions import SetupError

RELEASE_BATCH = 1_000
"""Number of messages released in one transaction, so that it stays short."""


class WorkerOperations(AdminOperations):
    """Operations on subscribers of all processes."""

    async def subscribers(self, queue: str | None = None) -> list[LiveSubscriber]:
        """List the live subscribers of all processes, the latest heartbeat first.

        A subscriber that ended without `stop` (SIGKILL, a lost machine) is listed for up to four
        more `presence_interval`s. At most 10 000 are read, the first by name.

        Args:
            queue: List only subscribers of this queue.
        """
        subscribers = await self._store.live_subscribers.list_subscribers()
        return [
            subscriber for subscriber in subscribers if queue is None or queue in subscriber.queues
        ]

    async def drain(self, worker: str, *, by: str | None = None) -> list[str]:
        """Stop all claims of a worker; other workers take over the queues, and the process stays
        alive.

        Running handlers continue, and the outcomes are written. Claimed messages that have not
        started are released; no delivery is counted. Heartbeats continue, and the worker learns of
        the drain with the next one: within its `presence_interval` (5 seconds by default), on
        PostgreSQL mostly at once. It stays drained until `undrain`, or until it stops: a restarted
        worker has another name, and claims. `subscribers` shows which workers are drained.

        Args:
            worker: The name of one subscriber, as listed by `subscribers`; or the first part of the
                name, host and process id, for all live subscribers of that process.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            The names of the newly drained subscribers, sorted.

        Raises:
            SetupError: no live subscriber or process has this name, or `by` is not text.
        """
        return await self._set_drained(worker, by, drained=True)

    async def undrain(self, worker: str, *, by: str | None = None) -> list[str]:
        """End the drain of a worker, which notices this as soon as a drain.

        Args:
            worker: As of `drain`.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            The names of the subscribers that are no longer drained, sorted.

        Raises:
            SetupError: As `drain`.
        """
        return await self._set_drained(worker, by, drained=False)

    async def _set_drained(self, worker: str, by: str | None, *, drained: bool) -> list[str]:
        """Drain or undrain the subscribers that `worker` names; return the changed names, sorted.

        A drained subscriber claims no more messages, but finishes those that are running. The
        semaphore keeps concurrent changes in order for this process: `on_paused` must get the
        latest state last.
        """
        operator = get_operator_name(by)
        names = await self._require_live(worker)
        async with self._hooks.pause_semaphore:
            changed, paused = await self._writable_store.live_subscribers.drain(
                names, worker, self._hooks.channel, operator, drained=drained
            )
            self._hooks.on_paused(paused)
        return sorted(changed)

    async def _require_live(self, worker: str) -> list[str]:
        """Return the names of the live subscribers that `worker` selects.

        A subscriber's name selects that subscriber; "host:pid" selects all of a process.

        Raises:
            SetupError: no live subscriber or process has this name.
        """
        _validate_name(worker)
        registration = await self._store.live_subscribers.find_subscriber(worker)
        # The second value of a registration is True while the subscriber is alive.
        if registration is not None and registration[1]:
            return [worker]
        subscribers = await self._store.live_subscribers.list_subscribers()
        if workers := [
            subscriber.worker for subscriber in subscribers if subscriber.process == worker
        ]:
            return workers
        names = sorted(
            {name for subscriber in subscribers for name in (subscriber.worker, subscriber.process)}
        )
        similar = find_similar_name(worker, names)
        suggestion = "" if similar is None else f"; did you mean {similar!r}?"
        msg = (
            f"no live subscriber or process is named {format_value(worker)}: "
            f"broker.admin.subscribers() lists the names{suggestion}"
        )
        raise SetupError(msg)

    async def release(self, worker: str, *, force: bool = False, by: str | None = None) -> int:
        """Release the messages that a worker has leased now, before the leases expire.

        Use this for a worker that ended without `stop`, which stays known for an hour after that.
        Its messages are due again, and the delivery counts, as after an expired lease. Rows locked
        by a handler's transaction (`transactional=True`) stay locked until that transaction ends.

        Args:
            worker: The name of one subscriber of one process, as listed by `subscribers`.
            force: Release even if the worker is alive. Its handlers continue, so their effects
                outside of this database may happen twice. The outcomes that it writes for these
                messages are ignored.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            How many messages were released, or discarded because an operator had requested to
            cancel them.

        Raises:
            SetupError: `worker` is unknown, or it is alive and `force` is not set, or `by` is not
                text.
        """
        _validate_name(worker)
        registration = await self._store.live_subscribers.find_subscriber(worker)
        if registration is None:
            msg = (
                f"no subscriber is named {format_value(worker)}: broker.admin.subscribers() lists "
                "the names; a subscriber that ended without stop() stays known for an hour"
            )
            raise SetupError(msg)
        subscriber, is_alive = registration
        if is_alive and not force:
            msg = (
                f"{worker} is alive until at least {subscriber.lease_expires_at}: wait, stop its "
                "process, or give force=True, which lets other workers handle the messages while "
                "handlers of this worker may still run"
            )
            raise SetupError(msg)
        total = 0
        operator = get_operator_name(by)
        release = self._writable_store.live_subscribers.release
        while count := await release(subscriber, RELEASE_BATCH, operator):
            total += count
        return total


def _validate_name(worker: str) -> None:
    """Refuse values that cannot be the name of a subscriber, before the database is queried."""
    if not isinstance(worker, str) or not is_storable(worker):
        raise SetupError(f"worker must be the name of a subscriber, got {format_value(worker)}")
