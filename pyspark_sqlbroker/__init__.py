"""The archive and the live table in Spark: `pip install "sqlbroker[spark]"`.

Users import these names from `faststream_sqlbroker.spark`. Spark imports this module in each
session that names a format written in Python, and looks for `DefaultSource`. Therefore everything
is imported on first access, including the broker's package and pyspark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_sqlbroker.horizon import Horizon, find_horizon
    from pyspark_sqlbroker.lake.erasure import EraseResult, erase_messages
    from pyspark_sqlbroker.lake.export import ExportResult, export_archive
    from pyspark_sqlbroker.lake.prune import PruneResult, prune_archive
    from pyspark_sqlbroker.lake.reading import read_export
    from pyspark_sqlbroker.lake.repair import RepairResult, repair_export
    from pyspark_sqlbroker.lake.status import (
        ExportStatus,
        Freshness,
        describe_export,
        measure_freshness,
    )
    from pyspark_sqlbroker.lake.verify import VerifyResult, verify_export
    from pyspark_sqlbroker.load.decode import decode_payload
    from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA, MESSAGE_SCHEMA
    from pyspark_sqlbroker.load.incremental import Load, new_rows
    from pyspark_sqlbroker.load.models import struct_of
    from pyspark_sqlbroker.load.read import Snapshot, open_snapshot, read_archive, read_messages
    from pyspark_sqlbroker.replays.replay import ReplayResult, replay
    from pyspark_sqlbroker.report import write_report
    from pyspark_sqlbroker.session import build_session
    from pyspark_sqlbroker.source import DefaultSource

_PUBLIC_NAMES = {
    "horizon": ("Horizon", "find_horizon"),
    "lake.erasure": ("EraseResult", "erase_messages"),
    "lake.export": ("ExportResult", "export_archive"),
    "lake.prune": ("PruneResult", "prune_archive"),
    "lake.reading": ("read_export",),
    "lake.repair": ("RepairResult", "repair_export"),
    "lake.status": ("ExportStatus", "Freshness", "describe_export", "measure_freshness"),
    "lake.verify": ("VerifyResult", "verify_export"),
    "load.decode": ("decode_payload",),
    "load.frames": ("ARCHIVE_SCHEMA", "MESSAGE_SCHEMA"),
    "load.incremental": ("Load", "new_rows"),
    "load.models": ("struct_of",),
    "load.read": ("Snapshot", "open_snapshot", "read_archive", "read_messages"),
    "replays.replay": ("ReplayResult", "replay"),
    "report": ("write_report",),
    "session": ("build_session",),
    "source": ("DefaultSource",),
}
"""Public names of each module; Spark is imported on first access to one of the names."""

_HOMES = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}

__all__ = (
    "ARCHIVE_SCHEMA",
    "MESSAGE_SCHEMA",
    "DefaultSource",
    "EraseResult",
    "ExportResult",
    "ExportStatus",
    "Freshness",
    "Horizon",
    "Load",
    "PruneResult",
    "RepairResult",
    "ReplayResult",
    "Snapshot",
    "VerifyResult",
    "build_session",
    "decode_payload",
    "describe_export",
    "erase_messages",
    "export_archive",
    "find_horizon",
    "measure_freshness",
    "new_rows",
    "open_snapshot",
    "prune_archive",
    "read_archive",
    "read_export",
    "read_messages",
    "repair_export",
    "replay",
    "struct_of",
    "verify_export",
    "write_report",
)


def __getattr__(name: str) -> Any:
    """Import the name's module.

    Raises:
        MissingExtraError: a package of the extra is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("faststream_sqlbroker", "pyspark_sqlbroker")):
            raise
        from faststream_sqlbroker.exceptions import MissingExtraError  # noqa: PLC0415

        msg = f"{error.name!r} is not installed: pip install 'sqlbroker[spark]'"
        raise MissingExtraError(msg) from error
    return getattr(module, name)
