"""All that is sent to a database."""
