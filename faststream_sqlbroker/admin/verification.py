"""Whether the tables hold what they must."""

from faststream_sqlbroker.admin.arguments import LONGEST_AGE, check_limit
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.core.verification import Verification
from faststream_sqlbroker.exceptions import SetupError

MOST_DAMAGES = 10_000
"""Damages that one call lists; what is beyond is counted."""


class Verifying(Operations):
    """`verify`."""

    async def verify(
        self,
        *,
        after: str | None = None,
        rows: int = 1_000_000,
        time_limit: Duration = "10m",
        lease_over: Duration = "10m",
        limit: int = 100,
    ) -> Verification:
        """Look through the tables for rows that contradict each other or cannot be.

        Looked at are live messages, the archive, jobs of operators, and what exports to a lake have
        recorded (`record_as`) against the rows of the archive. Nothing is written. A transaction
        reads 2 000 rows at most, so the broker can run. `health` compares the tables' definitions.

        Args:
            after: `after` of the call before, to go on where it ended.
            rows: It ends after so many rows, and then has `after`; 1 or more.
            time_limit: It ends after this time as well.
            lease_over: A lease that ended so long ago has no owner, as any live subscriber of its
                queue gives such messages back within seconds. A message whose holder lives has one:
                the transaction of a handler may last longer than its lease.
            limit: Damages to list; 1 to 10 000. All of them are counted.

        Raises:
            ValueError: `rows` is less than 1.
            SetupError: an argument is not valid.
        """
        check_limit(rows)
        if not 1 <= limit <= MOST_DAMAGES:
            raise SetupError(f"limit must be 1 to {MOST_DAMAGES}, got {limit!r}")
        over = positive_seconds("lease_over", lease_over)
        if over > LONGEST_AGE:
            raise SetupError(f"lease_over must be at most 100 years, got {short(lease_over)}")
        try:
            return await self._store.verifier.verify(
                after,
                rows=rows,
                seconds=positive_seconds("time_limit", time_limit),
                lease_over=over,
                limit=limit,
            )
        except NotACursorError:
            raise SetupError(
                f"after must be what the call before returned as after, got {short(after)}"
            ) from None
