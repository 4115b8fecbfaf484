"""The command that publishes the messages of an error again."""

import hashlib
import shlex
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from faststream_sqlbroker.core.text import visible
from pyspark_sqlbroker.report.rows import Row

_LATEST = datetime(9999, 12, 31, tzinfo=timezone.utc)


def replay_command(error: Row, totals: Row, options: Sequence[str]) -> str | None:
    """The line for a POSIX shell: it shows what it would publish, then asks.

    The name of its job comes from the error and the period, so that the same line publishes each
    message once, however often it runs.

    Args:
        error: A row of `top_errors`.
        totals: Of the period, with the first and last moment.
        options: More words of the command: where the rows are.

    Returns:
        None where a name has characters that a page cannot show.
    """
    # The last row belongs to the period.
    until = min(totals["last"], _LATEST) + timedelta(microseconds=1)
    times = [totals["first"].isoformat(), until.isoformat()]
    named = [error["queue"], error["reason"] or "", error["error_type"] or ""]
    digest = hashlib.sha256("\0".join((*named, *times)).encode()).hexdigest()
    words = ["sqlbroker", "archive", "replay", "--job", f"report-{digest[:12]}"]
    for name, value in zip(("--failed-in", "--reason", "--error-type"), named, strict=True):
        words.append(f"{name}={value}")
    words += [f"--into={error['queue']}", "--since", times[0], "--until", times[1], *options]
    line = shlex.join(words)
    return line if visible(line) == line else None
