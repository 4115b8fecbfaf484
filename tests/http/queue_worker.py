"""A process of a fleet that takes messages over HTTP until it is killed.

python -m tests.http.queue_worker URL [hold]
"""

import signal
import sys

import httpx

from tests.http.known import CONSUME, PATH, bearer, say


def main(url: str, *options: str) -> None:
    """Say of each message when it is taken, and what its commit was answered; with "hold" there is
    no commit.
    """
    with httpx.Client(base_url=url, headers=bearer(CONSUME), timeout=90) as client:
        while True:
            body = {"limit": 2, "wait": 5, "lease_seconds": 3600}
            found = client.post(f"{PATH}/reserve", json=body).json()["messages"]
            for message in found:
                say(f"took {message['id']} {message['lease_token']}")
            if options == ("hold",):
                signal.pause()
            for message in found:
                path = f"{PATH}/messages/{message['id']}/commit"
                done = client.post(path, json={"lease_token": message["lease_token"]})
                say(f"committed {message['id']} {done.status_code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
