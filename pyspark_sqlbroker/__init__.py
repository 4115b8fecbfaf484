"""The archive and the live table in Spark: `pip install "sqlbroker[spark]"`.

Users import these names from `faststream_sqlbroker.spark`. Spark imports this module in each
session that names a format written in Python, whichever it is, and looks for `DefaultSource`:
everything is imported when it is asked for, the broker's package and pyspark as well.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_sqlbroker.horizon import Horizon, find_horizon
    from pyspark_sqlbroker.lake.compact import compact_export
    from pyspark_sqlbroker.lake.erasure import EraseResult, erase_messages
    from pyspark_sqlbroker.lake.export import ExportResult, export_archive
    from pyspark_sqlbroker.lake.prune import PruneResult, prune_archive
    from pyspark_sqlbroker.lake.reading import read_export, register_export
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

_HOMES = {
    "ARCHIVE_SCHEMA": "load.frames",
    "DefaultSource": "source",
    "Horizon": "horizon",
    "Load": "load.incremental",
    "MESSAGE_SCHEMA": "load.frames",
    "ReplayResult": "replays.replay",
    "ExportResult": "lake.export",
    "ExportStatus": "lake.status",
    "PruneResult": "lake.prune",
    "Snapshot": "load.read",
    "build_session": "session",
    "compact_export": "lake.compact",
    "decode_payload": "load.decode",
    "describe_export": "lake.status",
    "export_archive": "lake.export",
    "Freshness": "lake.status",
    "find_horizon": "horizon",
    "measure_freshness": "lake.status",
    "new_rows": "load.incremental",
    "open_snapshot": "load.read",
    "prune_archive": "lake.prune",
    "read_archive": "load.read",
    "read_export": "lake.reading",
    "read_messages": "load.read",
    "EraseResult": "lake.erasure",
    "RepairResult": "lake.repair",
    "VerifyResult": "lake.verify",
    "erase_messages": "lake.erasure",
    "register_export": "lake.reading",
    "repair_export": "lake.repair",
    "replay": "replays.replay",
    "struct_of": "load.models",
    "verify_export": "lake.verify",
    "write_report": "report",
}
"""Where each public name lives: Spark is imported when one of them is asked for."""

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
    "compact_export",
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
    "register_export",
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
