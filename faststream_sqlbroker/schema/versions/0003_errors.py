"""What the last error of an archived message has in common with others, and an index of what was
not COMPLETED.

The column is nullable: no row is written anew, and processes of the version before go on writing.
"""

from faststream_sqlbroker.schema.additions import add, drop

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and the index to the archive."""
    add(revision)


def downgrade() -> None:
    """Drop them, with what is in them."""
    drop(revision)
