"""Claims under scheduling policies: reads and writes for the decisions of `core/policies`."""
