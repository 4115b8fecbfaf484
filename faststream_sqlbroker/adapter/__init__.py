"""The internal parts of FastStream that every broker is built on.

Only this package imports `faststream._internal`, so changes of a new FastStream version surface
here first. `tests/unit/test_adapter.py` documents the use of each name. FastStream's public names
are imported directly.
"""
