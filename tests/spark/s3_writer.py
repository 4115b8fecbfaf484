"""One of two processes that commit to a table in S3 at the same moment; see test_s3.py."""

import sys

from faststream_sqlbroker.exceptions import ConcurrentLoadError
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.s3 import S3Folders


def say(line: str) -> None:
    """To the test."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


writer = DeltaWriter(S3Folders(sys.argv[1], None), None)
for _ in range(int(sys.argv[2])):
    say("ready")
    sys.stdin.readline()
    tries = 1
    while True:
        try:
            writer.commit(writer.write_state(sys.argv[3].encode()), ())
            break
        except ConcurrentLoadError:
            tries += 1
            writer.load()
    say(str(tries))
    sys.stdin.readline()
    writer.load()
