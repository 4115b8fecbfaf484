"""Messages of a queue: published, handled by a transaction, popped and started."""
