"""The progress of a series of loads: a small JSON file next to the data."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError
from pyspark_sqlbroker.horizon import Horizon
from pyspark_sqlbroker.horizon.base import Source
from pyspark_sqlbroker.lake.files import read_json, write_json
from pyspark_sqlbroker.load.origin import refuse_other_rows
from pyspark_sqlbroker.moments import parse_moment

FORMAT = 1
"""Version of the file's layout; a file of another version is refused."""


@dataclass(frozen=True)
class Watermark:
    """What the file holds.

    Attributes:
        source: Which rows of which table; no password.
        until: Rows archived before it are loaded or not asked for; None before the first load.
        load: A unique number of the last load that began.
        begun: The end of that load's window; None once the load has ended well.
    """

    source: Mapping[str, Any]
    until: datetime | None = None
    load: str = ""
    begun: Horizon | None = None

    def begin(self, since: datetime | None, end: Horizon) -> "Watermark":
        """Begin a load of [since, end); an earlier load can then no longer change the file."""
        return replace(self, until=since, load=uuid.uuid4().hex, begun=end)

    def finish(self) -> "Watermark":
        """The watermark after a load that ended well."""
        return self if self.begun is None else replace(self, until=self.begun.moment, begun=None)


class WatermarkFile:
    """The file of one series of loads."""

    def __init__(self, spark: SparkSession, path: str, source: Mapping[str, Any]) -> None:
        self._spark = spark
        self._path = path
        self._source = dict(source)

    def read(self) -> Watermark:
        """What it holds; a new one where there is no file.

        Raises:
            SetupError: it is not such a file, of a newer version, of other rows, or cannot be read.
        """
        content = read_json(self._spark, self._path)
        if content is None:
            return Watermark(self._source)
        if content.get("format") != FORMAT or not isinstance(content.get("source"), dict):
            raise SetupError(
                f"{self._path} is no watermark that this version can read: give another path in "
                "state="
            )
        refuse_other_rows(
            f"{self._path} is the state",
            content["source"],
            self._source,
            "give each series of loads its own path",
        )
        try:
            return _parse(content, self._source)
        except (KeyError, TypeError) as error:
            msg = f"{self._path} is a damaged watermark ({error}): restore it from a copy"
            raise SetupError(msg) from error

    def write(self, old: Watermark, new: Watermark) -> None:
        """Replace `old` by `new`.

        Raises:
            ConcurrentLoadError: the file does not hold `old` any more; it stays as it is.
        """
        # Not atomic: two loads that begin at the same instant may both write. The one whose number
        # was overwritten fails at its end.
        found = self.read()
        if found != old:
            raise ConcurrentLoadError(
                f"another load changed {self._path} while this one ran, and that one's rows count: "
                "drop what this one wrote, but no folder that both wrote to, as those of one name "
                "are; if this one wrote to it last, write the window that the other has logged to "
                "it again (read_archive with its since= and until=); run one load of a state at a "
                "time"
            )
        write_json(self._spark, self._path, _render(new))


def _parse(content: Mapping[str, Any], source: Mapping[str, Any]) -> Watermark:
    begun = content["begun"]
    end = None
    if begun is not None:
        moment = cast("datetime", parse_moment("until", begun["until"]))
        end = Horizon(moment, cast("Source", begun["source"]), str(begun["detail"]))
    return Watermark(source, parse_moment("until", content["until"]), str(content["load"]), end)


def _render(mark: Watermark) -> dict[str, Any]:
    end = mark.begun
    begun = end and {"until": end.moment.isoformat(), "source": end.source, "detail": end.detail}
    until = None if mark.until is None else mark.until.isoformat()
    return {
        "format": FORMAT,
        "source": mark.source,
        "until": until,
        "load": mark.load,
        "begun": begun,
    }
