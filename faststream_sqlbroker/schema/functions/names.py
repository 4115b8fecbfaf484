"""What the functions are called, and what those of all databases have in common."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from faststream_sqlbroker.core.checks import LONGEST_NAME
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import COPIED_COLUMNS, Tables

CLAIMABLE = ", ".join(f"'{s.name}'" for s in MessageState if s in CLAIMABLE_STATES)
LONGEST = LONGEST_NAME
MOST_LOAD = 10_000
"""Where the load of a queue ends: more workers than that are not started, and a count of ten
thousand entries takes some milliseconds."""
NO_QUEUE = "^[.]{1,2}$|(?<![{])[{][a-zA-Z0-9_]+[}](?![}])"
"""As in `core.checks`: steps of a path, and what FastStream takes for a parameter of an address."""
UNCHANGED_COLUMNS = tuple(n for n in COPIED_COLUMNS if n not in {"state", "last_error"})
"""The columns that a cancelled message takes into the archive as they are."""
VERSION = 1
"""Of the functions; it stands in the comment of each."""
COMMENT = f"faststream_sqlbroker functions, version {VERSION}"


@dataclass(frozen=True, slots=True)
class FunctionNames:
    """Names of the functions of one set of tables."""

    publish: str
    publish_bytes: str
    cancel: str
    load: str

    @classmethod
    def of(cls, config: SqlBrokerSchemaConfig) -> "FunctionNames":
        """`sqlbroker_publish` and so on; for a table of another name `events_publish`."""
        table = config.message_table_name
        prefix = "sqlbroker" if table == "message" else table
        return cls(*(f"{prefix}_{verb}" for verb in ("publish", "publish_bytes", "cancel", "load")))


NAMES = FunctionNames.of(SqlBrokerSchemaConfig())
"""The default ones."""


def parts_of(tables: Tables, of: Callable[[str], str]) -> dict[str, Any]:
    """What the bodies of all databases name; `of` makes SQL of a name of the schema."""
    names = asdict(FunctionNames.of(tables.config))
    archive = tables.archive
    return {
        **{verb: of(name) for verb, name in names.items()},
        "message": of(tables.message.name),
        "policy_state": of(tables.policy_state.name),
        "archive": "" if archive is None else of(archive.name),
        "comment": COMMENT,
        "claimable": CLAIMABLE,
        "most": MOST_LOAD,
        "reason": CANCELLED,
    }
