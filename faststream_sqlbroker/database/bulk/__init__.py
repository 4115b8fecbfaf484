"""Jobs of operators: bulk actions on messages, batch by batch, and how they are undone."""
