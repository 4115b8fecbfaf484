"""The parts of FastStream that it counts as internal, and that every broker is built on.

Only this package imports `faststream._internal`, so a new FastStream is met here first.
`tests/unit/test_adapter.py` says what each name is used for. What FastStream offers publicly is
imported from there, not from here.
"""
