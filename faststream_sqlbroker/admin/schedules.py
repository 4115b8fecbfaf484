"""Operations on the schedules of all processes."""

from faststream_sqlbroker.admin.filters import check_limit, get_operator_name
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.checks import validate_name
from faststream_sqlbroker.core.status import Schedule
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

NAME_LABEL = "the name of a schedule"


class ScheduleOperations(AdminOperations):
    """Operations on schedules and their states."""

    async def schedules(self, *, limit: int = 1_000) -> list[Schedule]:
        """List the schedules of all processes, sorted by name, with their last and next fire times.

        A schedule that no process declares any more stays listed, with a next fire time in the
        past, until `forget_schedule`.

        Args:
            limit: Maximum number of schedules; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.schedules.list_schedules(limit)

    async def forget_schedule(self, name: str, *, by: str | None = None) -> bool:
        """Remove the state of a schedule, including fire times that are due.

        A process that still declares the schedule creates a new state within half a minute, which
        starts with the next fire time, and is not paused.

        Args:
            name: Name of the schedule.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            True if there was a state.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        return await self._writable_store.schedules.remove(
            validate_name(name, NAME_LABEL), get_operator_name(by)
        )

    async def run_schedule(self, name: str, *, by: str | None = None) -> bool:
        """Publish the message of a schedule once more, now; the next fire time stays.

        A running process that declares the schedule creates the message and publishes it once: on
        PostgreSQL mostly at once, elsewhere within half a minute. Its header `fire-time` has the
        time of this call. If no process declares the schedule, the request waits for one. Several
        waiting requests count as one. If the schedule's function is running, it is called again.
        Errors of the function are handled as for a fire time.

        Args:
            name: Name of the schedule.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            True if there is such a schedule.

        Raises:
            SetupError: the schedule is paused, `name` is not a valid name, or `by` is not text.
        """
        schedule = await self._writable_store.schedules.request_run(
            validate_name(name, NAME_LABEL), get_operator_name(by)
        )
        if schedule is not None and schedule.paused_at is not None:
            raise SetupError(
                f"schedule {format_value(name)} is paused by {schedule.paused_by}: resume it first"
            )
        self._hooks.on_rescheduled()
        return schedule is not None

    async def pause_schedule(self, name: str, *, by: str | None = None) -> bool:
        """Stop publishing a schedule's messages until `resume_schedule`, in all processes and
        restarts.

        When this returns, no message of the schedule is written any more: a message that its
        function is creating is not published, and a waiting request of `run_schedule` is withdrawn.
        Messages that were published before stay.

        Args:
            name: Name of the schedule.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            True if this call paused the schedule; False if there is none, or it was paused already.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        previous = await self._writable_store.schedules.pause(
            validate_name(name, NAME_LABEL), get_operator_name(by)
        )
        return previous is not None and previous.paused_at is None

    async def resume_schedule(self, name: str, *, by: str | None = None) -> bool:
        """End the pause of a schedule, which continues with the first fire time after this call.

        Fire times during the pause are skipped, whatever `missed` says.

        Args:
            name: Name of the schedule.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            True if the schedule was paused.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        previous = await self._writable_store.schedules.resume(
            validate_name(name, NAME_LABEL), get_operator_name(by)
        )
        self._hooks.on_rescheduled()
        return previous is not None and previous.paused_at is not None
