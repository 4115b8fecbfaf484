"""The archive on one HTML page."""

import os
import secrets
from pathlib import Path

from pyspark.sql import DataFrame

from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError
from faststream_sqlbroker.spark.moments import Moment
from faststream_sqlbroker.spark.report.figures import gather


def write_report(
    frame: DataFrame,
    path: str | Path,
    *,
    live: DataFrame | None = None,
    every: Duration | None = None,
    as_of: Moment | None = None,
    title: str = "Message archive",
) -> Path:
    """Render an archive to one HTML page that needs no network: figures, tables and plots.

    The frame is read once and kept (memory, then disk) while everything is computed in Spark; the
    driver gets figures of at most twelve queues and some hundred buckets, whatever the archive's
    size. Names and texts of messages are shown as they are, and run nothing.

    Args:
        frame: Of `ARCHIVE_SCHEMA`, from `read_archive`, exported Parquet or the data source. It may
            be empty.
        path: The file, on the driver's own disk; it is replaced as a whole.
        live: A frame of `read_messages`: adds what waits in dead letter queues to their ages.
        every: Width of the buckets of time; None chooses one that gives at most 150.
        as_of: The moment as of which ages are told; None is the latest in the frames.
        title: Of the page.

    Returns:
        The file's path.

    Raises:
        MissingExtraError: Plotly is not installed.
        SetupError: columns are missing, `every` is no length of time or gives more than 2 000
            buckets, `as_of` is no moment, the file's folder is not there, or `path` is itself a
            folder.
    """
    try:
        from faststream_sqlbroker.spark.report.page import render  # noqa: PLC0415 - Plotly is an extra
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("plotly"):
            raise
        msg = f"{error.name!r} is not installed: pip install 'sqlbroker[report]'"
        raise MissingExtraError(msg) from error
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise SetupError(
            f"path {str(path)!r}: there is no folder {str(target.parent)!r}; make it first"
        )
    if target.is_dir():
        raise SetupError(
            f"path {str(path)!r} is a folder: give a file, like {str(target / 'report.html')!r}"
        )
    page = render(gather(frame, live=live, every=every, as_of=as_of), title)
    # Readers find the old page or the new one, never half of it.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, target)  # noqa: PTH105 - Path.replace is this
    finally:
        temporary.unlink(missing_ok=True)
    return target
