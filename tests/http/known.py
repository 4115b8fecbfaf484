"""What clients know: paths and tokens. Processes of their own import nothing else of the tests."""

import sys

CHANNEL = "orders"
CONSUMER = "billing"
JOBS = f"/channel/{CHANNEL}/consumer/{CONSUMER}"
TOKENS = {
    "X-Broker-Channel-Token": "channel-token-1234",
    "X-Broker-Consumer-Token": "consumer-token-1234",
}
LEASE = "X-Broker-Lease"
SHOP = "shop/orders"
"""A queue with a slash, as names may have them."""
PATH = f"/v1/queues/{SHOP}"
PUBLISH = "publish-token-1234"
CONSUME = "consume-token-1234"


def bearer(token: str) -> dict[str, str]:
    """The headers of a request."""
    return {"Authorization": f"Bearer {token}"}


def say(line: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
