"""Which messages there are: pages, single ones and why they wait, dead letters, those whose outcome
is not known, and those with a lookup value.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from faststream_sqlbroker.admin.arguments import (
    check_limit,
    filters_of,
    message_number,
    operator_name,
    text_or_none,
)
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.mirror import MirroredMessage, checked_info
from faststream_sqlbroker.core.overview import DeadLetters
from faststream_sqlbroker.core.rows import UnknownOutcome
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import Explanation
from faststream_sqlbroker.core.stored import (
    MessageDetail,
    MessagePage,
    NotACursorError,
    Redact,
    came_from,
    history,
)
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError

MOST_GROUPS = 1_000
"""Groups of one answer."""
MOST_LISTED = 1_000
"""Messages of one page."""


class Messages(Operations):
    """Lists of messages, and single ones.

    Those with a lookup value can be found from their publish until they leave the message table.
    """

    async def messages(
        self,
        *,
        queue: str | None = None,
        state: MessageState | str | None = None,
        key: str | None = None,
        error: str | None = None,
        reason: str | None = None,
        fingerprint: str | None = None,
        headers: Mapping[str, str] | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        archived: bool = False,
        limit: int = 100,
        after: str | None = None,
        bodies: bool = False,
        redact: Redact | None = None,
    ) -> MessagePage:
        """A page of the messages that match all that is given.

        The order is that of an index. Live messages of a queue: those that are leased, by the end
        of their lease, then the others in the order in which they are claimed; of a key, by id.
        Live messages of all queues: the newest first. Archived ones: the last archived first.

        `queue`, `queue` with `key`, the times of archived messages, and the states FAILED and
        DISCARDED are found by an index; of a queue, the last with a search among all queues.
        With any other filter a page looks at 20 000 messages at most. It may then be short or
        empty, has `scanned_until`, and the next page goes on from there.

        Messages that come, go or move between two pages may be missed or shown twice.

        Args:
            queue: Its full name, with the prefix of its router.
            state: A state or its name; COMPLETED, FAILED and DISCARDED look into the archive.
            key: The whole key.
            error: A part of the last error.
            reason: Why it ended, the whole reason; only of archived messages.
            fingerprint: That of its error, as `dead_letters` shows it; only of archived messages.
            headers: Headers whose value is this text, or a number, true or false that JSON writes
                so.
            since: Created (archived, in the archive) at this time or later: an aware datetime, or
                how long ago, by the database's clock.
            until: Created (archived) before this time.
            archived: Look into the archive rather than at live messages.
            limit: Most messages of the page; 1 to 1 000.
            after: `after` of the page before.
            bodies: Read headers and bodies, too; those may be large.
            redact: Changes each message before it is returned, such as
                `lambda m: replace(m, body="***")`. What it raises is raised here.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        if not 1 <= limit <= MOST_LISTED:
            raise SetupError(f"limit must be 1 to {MOST_LISTED}, got {limit!r}")
        filters = filters_of(
            has_archive=self._store.messages.has_archive,
            queue=queue,
            state=state,
            key=key,
            error=error,
            reason=reason,
            fingerprint=fingerprint,
            headers=headers,
            since=since,
            until=until,
            archived=archived,
        )
        try:
            page = await self._store.messages.page(filters, limit, after, hidden=bodies)
        except NotACursorError as error_:
            raise SetupError(
                f"after must be what the page before returned for the same filters, got "
                f"{short(after)}"
            ) from error_
        if redact is None:
            return page
        return replace(page, messages=tuple(redact(message) for message in page.messages))

    async def message(
        self, message_id: int | str, *, body: bool = True, redact: Redact | None = None
    ) -> MessageDetail | None:
        """One message, live or archived, with its history and why it is where it is.

        Args:
            message_id: As `publish` returns it; or as text, as in a handler's `message.message_id`.
            body: Read its headers and body, too.
            redact: Changes the message before it is returned; what it raises is raised here.

        Returns:
            None if there is no such message.

        Raises:
            SetupError: `message_id` is not a whole number of 64 bits.
        """
        number = message_number(message_id)
        message = await self._store.messages.one(number, hidden=body)
        if message is None:
            return None
        if redact is not None:
            message = redact(message)
        return MessageDetail(
            message,
            history(message),
            await self.explain(number),
            came_from(message.headers),
            await self._store.messages.progress(number),
        )

    async def explain(self, message_id: int | str) -> Explanation:
        """Explain why a message is not running, or how it ended.

        It reads one snapshot and counts at most 1 000 messages, so it is cheap at any time and from
        any process. The answer holds for the moment of the snapshot. docs/howto/operating.md lists
        the codes.

        Args:
            message_id: As `publish` returns it; or as text, as in a handler's `message.message_id`.

        Raises:
            SetupError: `message_id` is not a whole number of 64 bits.
        """
        number = message_number(message_id)
        return (await self._store.explanations.explain(number)).at_place(self._pipelines)

    async def dead_letters(
        self,
        *,
        queue: str | None = None,
        key: str | None = None,
        error: str | None = None,
        reason: str | None = None,
        fingerprint: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        limit: int = 50,
    ) -> DeadLetters:
        """The FAILED messages of the archive, grouped by their errors; the largest group first.

        Errors of one type from the same place in the code are one group, whatever their texts say:
        the place is the function of the last three stack frames. Messages without an error are
        grouped by their reason. It looks at 20 000 messages at most, the last archived first, and
        then says until when.

        Dead letters that were moved to a queue (`dead_letter_queue=`) are live messages there:
        `messages` lists them.

        Args:
            queue: Only of this queue.
            key: Only of this key.
            error: A part of the last error.
            reason: The whole reason.
            fingerprint: Only this group.
            since: Archived at this time or later: an aware datetime, or how long ago.
            until: Archived before this time.
            limit: Most groups; 1 to 1 000.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        if not 1 <= limit <= MOST_GROUPS:
            raise SetupError(f"limit must be 1 to {MOST_GROUPS}, got {limit!r}")
        filters = filters_of(
            has_archive=self._store.messages.has_archive,
            state=MessageState.FAILED,
            queue=queue,
            key=key,
            error=error,
            reason=reason,
            fingerprint=fingerprint,
            since=since,
            until=until,
        )
        return await self._store.messages.dead_letters(filters, limit)

    async def unknown(self, queue: str | None = None, *, limit: int = 100) -> list[UnknownOutcome]:
        """Messages whose handler may or may not have run, or may not have finished; oldest first.

        `AckPolicy.ACK_FIRST` removes a message before its handler starts. The message is listed
        here in three cases: its process sent no heartbeat for `release_stuck_timeout` afterwards;
        the answer to the COMMIT of the removal was lost although it was committed; or its handler
        was cancelled or abandoned at the end of `graceful_timeout`. The message itself is in the
        archive.

        Args:
            queue: List only messages of this queue.
            limit: Most messages to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.starts.unknown(queue, limit)

    async def forget_unknown(self, *message_ids: int, by: str | None = None) -> int:
        """Remove messages from the list of `unknown`, once their outcome was found out.

        Args:
            message_ids: Those of the messages.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            How many of them were on the list.

        Raises:
            SetupError: `by` is not text.
        """
        return await self._changing.starts.forget(message_ids, operator_name(by))

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
