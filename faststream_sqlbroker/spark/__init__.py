"""The archive and the live table in Spark: `pip install "sqlbroker[spark]"`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.exceptions import MissingExtraError

if TYPE_CHECKING:
    from faststream_sqlbroker.spark.compact import compact_export
    from faststream_sqlbroker.spark.decode import decode_payload
    from faststream_sqlbroker.spark.export import ExportResult, export_archive, read_export
    from faststream_sqlbroker.spark.horizon import Horizon, find_horizon
    from faststream_sqlbroker.spark.incremental import Load, new_rows
    from faststream_sqlbroker.spark.models import struct_of
    from faststream_sqlbroker.spark.prune import PruneResult, prune_archive
    from faststream_sqlbroker.spark.read import read_archive, read_messages
    from faststream_sqlbroker.spark.replays import ReplayResult, replay
    from faststream_sqlbroker.spark.report import write_report
    from faststream_sqlbroker.spark.schemas import ARCHIVE_SCHEMA, MESSAGE_SCHEMA
    from faststream_sqlbroker.spark.session import build_session
    from faststream_sqlbroker.spark.snapshot import Snapshot, open_snapshot
    from faststream_sqlbroker.spark.status import ExportStatus, describe_export

_HOMES = {
    "ARCHIVE_SCHEMA": "schemas",
    "Horizon": "horizon",
    "Load": "incremental",
    "MESSAGE_SCHEMA": "schemas",
    "ReplayResult": "replays",
    "ExportResult": "export",
    "ExportStatus": "status",
    "PruneResult": "prune",
    "Snapshot": "snapshot",
    "build_session": "session",
    "compact_export": "compact",
    "decode_payload": "decode",
    "describe_export": "status",
    "export_archive": "export",
    "find_horizon": "horizon",
    "new_rows": "incremental",
    "open_snapshot": "snapshot",
    "prune_archive": "prune",
    "read_archive": "read",
    "read_export": "export",
    "read_messages": "read",
    "replay": "replays",
    "struct_of": "models",
    "write_report": "report",
}
"""Where each public name lives: Spark is imported when one of them is asked for."""

__all__ = (
    "ARCHIVE_SCHEMA",
    "MESSAGE_SCHEMA",
    "ExportResult",
    "ExportStatus",
    "Horizon",
    "Load",
    "PruneResult",
    "ReplayResult",
    "Snapshot",
    "build_session",
    "compact_export",
    "decode_payload",
    "describe_export",
    "export_archive",
    "find_horizon",
    "new_rows",
    "open_snapshot",
    "prune_archive",
    "read_archive",
    "read_export",
    "read_messages",
    "replay",
    "struct_of",
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
        if str(error.name).startswith("faststream_sqlbroker"):
            raise
        msg = f"{error.name!r} is not installed: pip install 'sqlbroker[spark]'"
        raise MissingExtraError(msg) from error
    return getattr(module, name)
