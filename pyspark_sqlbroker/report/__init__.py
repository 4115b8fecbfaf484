"""Render the archive as one HTML page."""

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame

from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError
from pyspark_sqlbroker.moments import TimeInput
from pyspark_sqlbroker.report.figures import compute_figures


def write_report(
    frame: DataFrame,
    path: str | Path,
    *,
    live: DataFrame | None = None,
    every: Duration | None = None,
    as_of: TimeInput | None = None,
    title: str = "Message archive",
    before: DataFrame | None = None,
    message_url: str | None = None,
    replay_options: Sequence[str] = (),
) -> Path:
    """Render an archive to a single HTML page that needs no network: figures, tables and charts.

    The page has no script: charts are SVG, and show numbers under the mouse. Its size is some
    hundred kilobytes. Each error has links to its latest messages and the command that publishes
    its messages again.

    The frame is read once and cached (memory, then disk) while everything is computed in Spark; the
    driver receives figures of at most twelve queues and some hundred buckets, whatever the
    archive's size. Names and texts of messages are escaped, so they cannot run scripts.

    Args:
        frame: A frame of `ARCHIVE_SCHEMA`, from `read_archive`, exported Parquet or the data
            source. It may be empty.
        path: The file, on the driver's own disk; it is replaced atomically.
        live: A frame of `read_messages`, which adds messages in dead letter queues to the ages.
        every: Width of the buckets of time; None chooses one that gives at most 150.
        as_of: Time for which ages are computed; None is the latest in the frames.
        title: Title of the page.
        before: A frame of the previous period, with the same columns: its figures are shown for
            comparison, and errors that did not occur in it are marked as new.
        message_url: Address of a message's page that contains "{id}", such as
            "https://ops.example/ui/messages/{id}" of the dashboard: ids become links to it.
        replay_options: Arguments to append to each replay command, such as ("--path",
            "/lake/shop").

    Returns:
        The file's path.

    Raises:
        MissingExtraError: matplotlib or Jinja is not installed: the extra `report` brings them.
        SetupError: columns are missing, `every` is no duration or gives more than 2 000 buckets,
            `as_of` is no time, `message_url` is no such address, the file's folder does not exist,
            or `path` is itself a folder.
    """
    try:
        from pyspark_sqlbroker.report.page import render_page  # noqa: PLC0415 - the extra's packages
    except ModuleNotFoundError as error:
        msg = f"{error.name!r} is not installed: pip install 'sqlbroker[report]'"
        raise MissingExtraError(msg) from error
    # A browser would run an address that begins with "javascript:".
    if message_url is not None and not re.match("https?://.*{id}", message_url, re.DOTALL):
        raise SetupError(
            'message_url must begin with "https://" or "http://" and have "{id}" in it, like '
            f'"https://ops.example/ui/messages/{{id}}", got {message_url!r}'
        )
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise SetupError(
            f"path {str(path)!r}: the folder {str(target.parent)!r} does not exist; create it first"
        )
    if target.is_dir():
        raise SetupError(
            f"path {str(path)!r} is a folder: give a file, such as {str(target / 'report.html')!r}"
        )
    figures = compute_figures(frame, live=live, every=every, as_of=as_of, before=before)
    # Readers see the complete old page or the complete new page.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(
            render_page(figures, title, message_url, replay_options), encoding="utf-8"
        )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
