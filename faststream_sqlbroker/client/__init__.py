"""HTTP clients of the broker: `pip install "sqlbroker[client]"`.

`PullConsumer` takes the jobs of a channel's consumer; `QueueClient` works on any queue.
"""

from faststream_sqlbroker.exceptions import MissingExtraError

try:
    from faststream_sqlbroker.client.pull_client import PullConsumer, QueuedJob, TakenJob
    from faststream_sqlbroker.client.queue_client import HttpMessage, NewHttpMessage, QueueClient
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "httpx":
        raise
    msg = "the client needs 'httpx', which is not installed: pip install 'sqlbroker[client]'"
    raise MissingExtraError(msg) from error

__all__ = ("HttpMessage", "NewHttpMessage", "PullConsumer", "QueueClient", "QueuedJob", "TakenJob")
