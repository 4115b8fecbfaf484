"""PostgreSQL triggers that notify listeners of every change that makes a message claimable.

They are optional: `max_fetch_interval=None` needs them. Without them only publishes of the
broker send notifications, after the commit.
"""

from sqlalchemy import Connection, text

from faststream_sqlbroker.schema.tables import Tables

# Not FOR EACH ROW: a batch of a thousand rows sends a single notification per queue. A trigger with
# a transition table cannot name columns, so it also runs at claims, where it sends nothing.
_FUNCTION = """
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $notify$
BEGIN
  PERFORM pg_notify(TG_ARGV[0], waiting.queue) FROM (
    SELECT DISTINCT n.queue FROM new_rows n WHERE n.state IN ('PENDING', 'RETRYABLE')) waiting;
  RETURN NULL;
END
$notify$
"""
_TRIGGER = """
CREATE TRIGGER {trigger} AFTER {event} ON {table} REFERENCING NEW TABLE AS new_rows
FOR EACH STATEMENT EXECUTE FUNCTION {function}('{channel}')
"""
_EVENTS = ("insert", "update")
_COUNT_TRIGGERS = text(
    "SELECT count(*) FROM pg_trigger t WHERE t.tgrelid = to_regclass(:name) "
    "AND t.tgname = ANY(string_to_array(:triggers, ' ')) AND t.tgenabled IN ('O', 'A')"
)


def _build_trigger_names(tables: Tables) -> list[str]:
    return [f"{tables.message.name}_notify_{event}" for event in _EVENTS]


def build_notify_trigger(tables: Tables) -> list[str]:
    """Return PostgreSQL's statements that create or replace the triggers.

    The triggers notify subscribers of messages that become claimable.
    """
    config = tables.config
    prefix = "" if config.schema is None else f'"{config.schema}".'
    table = f'{prefix}"{config.message_table_name}"'
    function = f'{prefix}"{config.message_table_name}_notify"'
    statements = [_FUNCTION.format(function=function).strip()]
    for name, event in zip(_build_trigger_names(tables), _EVENTS, strict=True):
        trigger = _TRIGGER.format(
            trigger=f'"{name}"',
            event=event.upper(),
            table=table,
            function=function,
            channel=config.channel,
        )
        statements += [f'DROP TRIGGER IF EXISTS "{name}" ON {table}', trigger.strip()]
    return statements


def create_notify_trigger(connection: Connection, tables: Tables) -> None:
    """Create or replace the triggers, if `tables` are to have triggers and this is PostgreSQL."""
    if tables.config.notify_trigger and connection.dialect.name == "postgresql":
        for statement in build_notify_trigger(tables):
            connection.exec_driver_sql(statement)


def has_notify_trigger(connection: Connection, tables: Tables) -> bool:
    """Return True if PostgreSQL has both triggers in an enabled state."""
    table = connection.dialect.identifier_preparer.format_table(tables.message)
    binds = {"name": table, "triggers": " ".join(_build_trigger_names(tables))}
    return bool(connection.execute(_COUNT_TRIGGERS, binds).scalar_one() == len(_EVENTS))
