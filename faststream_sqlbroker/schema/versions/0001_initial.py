"""Create the tables of messages and of their archive."""

from alembic import op

from faststream_sqlbroker.schema.tables import build_ddl, build_tables

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    context = op.get_context()
    tables = build_tables(context.opts["sqlbroker_config"])
    for statement in build_ddl(tables, context.dialect.name):
        op.execute(statement)


def downgrade() -> None:
    """Drop the tables with all messages."""
    for table in reversed(build_tables(op.get_context().opts["sqlbroker_config"]).broker_tables):
        op.drop_table(table.name, schema=table.schema)
