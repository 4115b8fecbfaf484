"""The last module that the fork server imports: it does what each fork would do anew."""

from faststream_sqlbroker.subscriber.pipeline import fingerprints
from faststream_sqlbroker.subscriber.pipeline.fingerprints import KNOWN
from tests import garbage

# Each process that subscribes compares FastStream's functions with those that are known.
for group in KNOWN:
    fingerprints.unknown(group)
garbage.look_seldom()
