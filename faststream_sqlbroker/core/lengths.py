"""Leases and waits as users give them, in seconds."""

from faststream_sqlbroker.core.duration import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError


def lease_seconds(lease: Duration) -> float:
    """A lease in seconds.

    Raises:
        SetupError: it is no length of time longer than 0.
    """
    seconds = parse_duration(lease, name="lease")
    if seconds <= 0:
        raise SetupError(f"lease must be longer than 0 seconds, got {lease!r}")
    return seconds


def wait_seconds(wait: Duration | None) -> float | None:
    """How long to wait, in seconds; None for ever.

    Raises:
        SetupError: it is negative or no length of time.
    """
    if wait is None:
        return None
    seconds = parse_duration(wait, name="wait")
    if seconds < 0:
        raise SetupError(f"wait must be 0 or more seconds, or None for no limit, got {wait!r}")
    return seconds
