"""Schedules of all processes."""

from faststream_sqlbroker.admin.arguments import check_limit, operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.status import Schedule
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError


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
        the next fire time.

        Args:
            name: That of the schedule.
            by: Who does it, as text, for the `audit`; default the host and the process id.

        Returns:
            Whether there was a state.

        Raises:
            SetupError: `name` is not a valid name, or `by` is not text.
        """
        if (problem := name_problem(name)) is not None:
            raise SetupError(f"{short(name)} cannot be the name of a schedule: {problem}")
        return await self._store.schedules.forget(name, operator_name(by))
