"""The pictures of docs/explanation/policies.md: what each policy does to a stream of messages."""
