"""Schedules of all processes."""

from faststream_sqlbroker.admin.arguments import check_limit, operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import checked_name
from faststream_sqlbroker.core.status import Schedule
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

WHAT = "the name of a schedule"


class Schedules(Operations):
    """States of schedules."""

    async def schedules(self, *, limit: int = 1_000) -> list[Schedule]:
        """The schedules of all processes, sorted by name, with their last and next fire times.

        A schedule that no process declares any more stays listed, with a next fire time in the
        past, until `forget_schedule`.

        Args:
            limit: Most schedules to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.schedules.listed(limit)

    async def forget_schedule(self, name: str, *, by: str | None = None) -> bool:
        """Remove the state of a schedule, including fire times that are due.

        A process that still declares it makes a new state within half a minute, which starts with
        the next fire time, and is not paused.

        Args:
            name: That of the schedule.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            Whether there was a state.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        return await self._changing.schedules.forget(checked_name(name, WHAT), operator_name(by))

    async def run_schedule(self, name: str, *, by: str | None = None) -> bool:
        """Publish the message of a schedule once more, now; the next fire time stays.

        A process that runs and declares the schedule makes the message and publishes it once: on
        PostgreSQL mostly at once, elsewhere within half a minute. Its header `fire-time` has the
        time of this call. If no process declares the schedule, the request waits for one. A
        request that waits already stays one. If the schedule's function runs just now, it is
        called again. What the function raises is handled as for a fire time.

        Args:
            name: That of the schedule.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            Whether there is such a schedule.

        Raises:
            SetupError: the schedule is paused, `name` is not a valid name, or `by` is not text.
        """
        was = await self._changing.schedules.run(checked_name(name, WHAT), operator_name(by))
        if was is not None and was.paused_at is not None:
            raise SetupError(
                f"the schedule {short(name)} is paused by {was.paused_by}: resume it first"
            )
        self._rescheduled()
        return was is not None

    async def pause_schedule(self, name: str, *, by: str | None = None) -> bool:
        """Publish nothing of a schedule until `resume_schedule`, in all processes and restarts.

        When this returns, no message of it is written any more: one that its function makes just
        now is not published, and a request of `run_schedule` that waits is withdrawn. Messages
        that were published before stay.

        Args:
            name: That of the schedule.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            Whether this call paused it: False if there is no such schedule, or it was paused.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        was = await self._changing.schedules.pause(checked_name(name, WHAT), operator_name(by))
        return was is not None and was.paused_at is None

    async def resume_schedule(self, name: str, *, by: str | None = None) -> bool:
        """End the pause of a schedule, which goes on with the first fire time after this call.

        Fire times during the pause are left out, whatever `missed` says.

        Args:
            name: That of the schedule.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            Whether it was paused.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        was = await self._changing.schedules.resume(checked_name(name, WHAT), operator_name(by))
        self._rescheduled()
        return was is not None and was.paused_at is not None
