"""Query messages: pages, single messages, dead letters, unknown outcomes and lookup values."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from faststream_sqlbroker.admin.filters import (
    check_limit,
    clean_optional_text,
    get_operator_name,
    parse_filters,
)
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.checks import find_name_error
from faststream_sqlbroker.core.mirror import MirroredMessage, validate_info
from faststream_sqlbroker.core.overview import DeadLetters
from faststream_sqlbroker.core.rows import UnknownOutcome
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import Explanation
from faststream_sqlbroker.core.stored import (
    InvalidCursorError,
    MessageDetail,
    MessagePage,
    Redact,
    build_history,
    get_dead_letter_origin,
)
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError

MAX_GROUPS = 1_000
"""Maximum number of groups in one result."""
MAX_PAGE_SIZE = 1_000
"""Maximum number of messages of one page."""


class MessageQueries(AdminOperations):
    """Lists of messages, and single messages.

    Messages with a lookup value can be found from their publish until they leave the message table.
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
        """Return a page of the messages that match all given filters.

        The order is that of an index. Live messages of a queue: leased messages by the end of their
        lease, then the others in the order in which they are claimed; with a key, by id. Live
        messages of all queues: the newest first. Archived messages: the last archived first.

        `queue`, `queue` with `key`, the times of archived messages, and the states FAILED and
        DISCARDED are found by an index; in a queue, the last two by a search among all queues.
        With any other filter a page reads at most 20 000 messages. It may then be short or
        empty, has `scanned_until`, and the next page continues from there.

        Messages that are published, end or move between two pages may be missed or shown twice.

        Args:
            queue: Full name of the queue, with the prefix of its router.
            state: A state or its name; COMPLETED, FAILED and DISCARDED search the archive.
            key: The complete key.
            error: A part of the last error.
            reason: The complete reason why the message ended; only of archived messages.
            fingerprint: Fingerprint of the error, as `dead_letters` shows it; only of archived
                messages.
            headers: Headers whose value is this text, or a number, true or false with this JSON
                text.
            since: Created (archived, in the archive) at this time or later: an aware datetime, or
                how long ago, by the database's clock.
            until: Created (archived) before this time.
            archived: Search the archive instead of the live messages.
            limit: Maximum number of messages; 1 to 1 000.
            after: `after` of the previous page.
            bodies: Read headers and bodies, too, which may be large.
            redact: Changes each message before it is returned, such as
                `lambda m: replace(m, body="***")`. Its errors are raised here.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        if not 1 <= limit <= MAX_PAGE_SIZE:
            raise SetupError(f"limit must be 1 to {MAX_PAGE_SIZE}, got {limit!r}")
        filters = parse_filters(
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
            page = await self._store.messages.read_page(filters, limit, after, with_hidden=bodies)
        except InvalidCursorError as error_:
            raise SetupError(
                "after must be the value that the previous call returned for the same filters, got "
                f"{format_value(after)}"
            ) from error_
        if redact is None:
            return page
        return replace(page, messages=tuple(redact(message) for message in page.messages))

    async def message(
        self, message_id: int | str, *, body: bool = True, redact: Redact | None = None
    ) -> MessageDetail | None:
        """Return a message, live or archived, with history and explanation.

        Args:
            message_id: The result of `publish`; or text, such as a handler's `message.message_id`.
            body: Read headers and body, too.
            redact: Changes the message before it is returned; its errors are raised here.

        Returns:
            None if there is no such message.

        Raises:
            SetupError: `message_id` is not an id, or its row's id was given to another message.
        """
        number = await self._find_row_id(message_id)
        message = await self._store.messages.read_message(number, with_hidden=body)
        if message is None:
            return None
        if redact is not None:
            message = redact(message)
        return MessageDetail(
            message,
            build_history(message),
            await self.explain(number),
            get_dead_letter_origin(message.headers),
            await self._store.messages.find_progress(number),
        )

    async def explain(self, message_id: int | str) -> Explanation:
        """Explain why a message is not running, or how the message ended.

        The explanation reads one snapshot and counts at most 1 000 messages, so it is cheap at any
        time and from any process. The answer holds for the time of the snapshot.
        docs/howto/operating.md lists the codes.

        Args:
            message_id: The result of `publish`; or text, such as a handler's `message.message_id`.

        Raises:
            SetupError: `message_id` is not an id, or its row's id was given to another message.
        """
        number = await self._find_row_id(message_id)
        # With the step that the message's queue is in one of the user's pipelines.
        return (await self._store.explanations.explain(number)).at_place(self._hooks.pipelines)

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
        """Group the archive's FAILED messages by their errors, the largest group first.

        Errors of one type from the same place in the code are one group, whatever their texts say:
        the place is the function of the last three stack frames. Messages without an error are
        grouped by their reason. At most 20 000 messages are read, the last archived first; the
        result then says until when.

        Dead letters that were moved to a queue (`dead_letter_queue=`) are live messages there:
        `messages` lists them.

        Args:
            queue: Only messages of this queue.
            key: Only messages with this key.
            error: A part of the last error.
            reason: The complete reason.
            fingerprint: Only this group.
            since: Archived at this time or later: an aware datetime, or how long ago.
            until: Archived before this time.
            limit: Maximum number of groups; 1 to 1 000.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        if not 1 <= limit <= MAX_GROUPS:
            raise SetupError(f"limit must be 1 to {MAX_GROUPS}, got {limit!r}")
        filters = parse_filters(
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
        return await self._store.messages.group_dead_letters(filters, limit)

    async def unknown(self, queue: str | None = None, *, limit: int = 100) -> list[UnknownOutcome]:
        """List messages whose handler may or may not have run or finished, the oldest first.

        `AckPolicy.ACK_FIRST` removes a message before its handler starts. The message is listed
        here in three cases: its process sent no heartbeat for `release_stuck_timeout` afterwards;
        the answer to the COMMIT of the removal was lost although it was committed; or its handler
        was cancelled or abandoned at the end of `graceful_timeout`. The message itself is in the
        archive.

        Args:
            queue: List only messages of this queue.
            limit: Maximum number of messages; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.ack_first_starts.list_unknown(queue, limit)

    async def forget_unknown(self, *message_ids: int, by: str | None = None) -> int:
        """Remove messages from the list of `unknown`, after you have determined their outcome.

        Args:
            message_ids: Ids of the messages.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            How many of the messages were on the list.

        Raises:
            SetupError: `by` is not text.
        """
        return await self._writable_store.ack_first_starts.forget(
            message_ids, get_operator_name(by)
        )

    async def count_mirrored(self, *, lookup: str | None = None, info: str | None = None) -> int:
        """Count the live messages that were published with this lookup value and have this info.

        Without `lookup` the records of all lookup values are read.

        Args:
            lookup: The lookup value; None for any.
            info: The complete info text; None for any.

        Raises:
            ValueError: `lookup` is no lookup value, or `info` no info text.
        """
        return await self._store.mirror.count(_validate_lookup(lookup), _validate_info(info))

    async def mirrored(
        self, *, lookup: str | None = None, info: str | None = None, limit: int = 100
    ) -> list[MirroredMessage]:
        """List the messages that `count_mirrored` counts, by id, with their headers and bodies.

        Args:
            lookup: As of `count_mirrored`.
            info: As of `count_mirrored`.
            limit: Maximum number of messages; 1 or more.

        Raises:
            ValueError: an argument is not valid.
        """
        check_limit(limit)
        return await self._store.mirror.find(_validate_lookup(lookup), _validate_info(info), limit)

    async def set_info(
        self,
        lookup: str,
        info: str | None,
        *,
        id: int | None = None,  # noqa: A002
        by: str | None = None,
    ) -> int:
        """Replace the info of the live messages with this lookup value, even of running messages.

        Args:
            lookup: The lookup value.
            info: The new text, at most 1,000 characters; None removes the info.
            id: Only the message with this id.
            by: Operator's name for the `audit`. Without it the audit has no entry: handlers
                may set the info of each message.

        Returns:
            Number of changed messages.

        Raises:
            ValueError: an argument is not valid.
            SetupError: `by` is not text.
        """
        valid_lookup = _validate_lookup(lookup)
        if valid_lookup is None:
            raise ValueError("set_info needs a lookup value, got None")
        valid_info = _validate_info(info)
        return await self._writable_store.mirror.set_info(
            valid_lookup, id, valid_info, clean_optional_text("by", by)
        )


def _validate_lookup(value: str | None) -> str | None:
    """Return a lookup value, a text by which live messages are found; None stays None."""
    if value is not None and (problem := find_name_error(value)) is not None:
        msg = f"{format_value(value)} cannot be a lookup value: {problem}"
        raise ValueError(msg)
    return value


def _validate_info(value: str | None) -> str | None:
    """Return the info of a message, a text that may change during a run; None stays None.

    Operators get a ValueError, where a publisher would get a PublishError.
    """
    try:
        return validate_info(value)
    except PublishError as error:
        raise ValueError(str(error)) from None
