"""Everything that the broker sends to a database."""
