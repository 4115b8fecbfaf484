"""The tables of messages and of their archive."""

from alembic import op

from faststream_sqlbroker.schema.tables import build_tables, ddl

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables without what later migrations add."""
    context = op.get_context()
    tables = build_tables(context.opts["sqlbroker_config"], revision=revision)
    for statement in ddl(tables, context.dialect.name):
        op.execute(statement)


def downgrade() -> None:
    """Drop the tables with every message in them."""
    for table in reversed(
        build_tables(op.get_context().opts["sqlbroker_config"], revision=revision).ours
    ):
        op.drop_table(table.name, schema=table.schema)
