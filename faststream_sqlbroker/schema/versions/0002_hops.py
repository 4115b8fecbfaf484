"""How far a message has come, which message a reason is about, and what policies need.

Each column is nullable or has a constant default: no row is written anew, except in MariaDB's
message table, and processes of the version before go on writing.
"""

from faststream_sqlbroker.schema.additions import add, drop

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and an index to the table of policies."""
    add(revision)


def downgrade() -> None:
    """Drop them, with what is in them."""
    drop(revision)
