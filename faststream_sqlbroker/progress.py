"""What a handler says of its progress."""

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import clean_text, short
from faststream_sqlbroker.exceptions import SetupError

LONGEST_TEXT = 1_000
"""Bytes of the text; longer text is cut."""


async def report(row: ClaimedMessage, fraction: float, text: str | None) -> bool:
    """Write how far the handler of `row` has come; whether the lease is held, as far as is known.

    Raises:
        SetupError: an argument is not valid, or no running subscriber holds the row.
    """
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not number or not 0 <= fraction <= 1:
        raise SetupError(f"fraction must be a number from 0 to 1, got {short(fraction)}")
    if text is not None and not isinstance(text, str):
        raise SetupError(f"text must be text, got {short(text)}")
    holder = row.holder
    if holder is None or holder.progress is None or holder.ack_first:
        raise SetupError(
            "only a message that a subscriber has leased tells of its progress; ACK_FIRST has "
            "removed it before its handler starts"
        )
    said = None if text is None else clean_text(text, limit=LONGEST_TEXT)
    return await holder.progress(row, float(fraction), said)
