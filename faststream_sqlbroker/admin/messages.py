"""Which messages there are."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from faststream_sqlbroker.admin.arguments import message_number
from faststream_sqlbroker.admin.explaining import Explaining
from faststream_sqlbroker.admin.filters import filters_of
from faststream_sqlbroker.core.states import MessageState
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
from faststream_sqlbroker.exceptions import SetupError

MOST_LISTED = 1_000
"""Messages of one page."""


class Messages(Explaining):
    """Lists of messages, and single ones."""

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
