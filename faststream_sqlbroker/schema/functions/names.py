"""What the functions are called."""

from dataclasses import dataclass

from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig

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
