"""Messages that were published with a lookup value."""

from faststream_sqlbroker.admin.arguments import check_limit, text_or_none
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.mirror import MirroredMessage, checked_info
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import PublishError


class Mirror(Operations):
    """They can be found from their publish until they leave the message table."""

    async def count_mirrored(self, *, lookup: str | None = None, info: str | None = None) -> int:
        """How many live messages were published with this lookup value and have this info.

        Without `lookup` the records of all lookup values are read.

        Args:
            lookup: The lookup value; None: any.
            info: The whole info text; None: any.

        Raises:
            ValueError: `lookup` is no lookup value, or `info` no info text.
        """
        return await self._store.mirror.count(_lookup(lookup), _info(info))

    async def mirrored(
        self, *, lookup: str | None = None, info: str | None = None, limit: int = 100
    ) -> list[MirroredMessage]:
        """These messages, by id, with their headers and bodies.

        Args:
            lookup: As of `count_mirrored`.
            info: As of `count_mirrored`.
            limit: Most messages to return; 1 or more.

        Raises:
            ValueError: an argument is not valid.
        """
        check_limit(limit)
        return await self._store.mirror.find(_lookup(lookup), _info(info), limit)

    async def set_info(
        self,
        lookup: str,
        info: str | None,
        *,
        id: int | None = None,  # noqa: A002
        by: str | None = None,
    ) -> int:
        """Replace the info of the live messages with this lookup value, also while they run.

        Args:
            lookup: The lookup value.
            info: The new text, at most 1,000 characters; None: none.
            id: Only of the message with this id.
            by: Who does it, as text, for the `audit`. Without it the audit has no entry: handlers
                may set the info of each message.

        Returns:
            Of how many messages.

        Raises:
            ValueError: an argument is not valid.
            SetupError: `by` is not text.
        """
        found = _lookup(lookup)
        if found is None:
            raise ValueError("set_info needs a lookup value, got None")
        text = _info(info)
        return await self._changing.mirror.set_info(found, id, text, text_or_none("by", by))


def _lookup(value: str | None) -> str | None:
    if value is not None and (problem := name_problem(value)) is not None:
        msg = f"{short(value)} cannot be a lookup value: {problem}"
        raise ValueError(msg)
    return value


def _info(value: str | None) -> str | None:
    try:
        return checked_info(value)
    except PublishError as error:
        raise ValueError(str(error)) from None
