"""A client with a long job: takes one, says so, sends heartbeats, and does nothing more until it is
killed.

python -m tests.http.long_job URL [finish]
"""

import signal
import sys

import httpx

from tests.http.known import JOBS, LEASE, TOKENS, say

BEATS = 3
"""Heartbeats. None is under way when the client is killed: it would hold the job once more."""


def main(url: str, *options: str) -> None:
    with httpx.Client(base_url=url, headers=TOKENS, timeout=90) as client:
        [job] = client.get(f"{JOBS}/queued-jobs").json()["Result"]
        path = f"{JOBS}/job/{job['ID']}"
        body = {"NextState": "INFLIGHT", "IncrementalTimeout": 600}
        lease = client.post(path, json=body).headers[LEASE]
        headers = {LEASE: lease}
        say(f"took {lease}")
        if options == ("finish",):
            ended = client.post(path, json={"NextState": "DELIVERED"}, headers=headers)
            say(f"ended {ended.status_code}")
            return
        for _ in range(BEATS):
            beat = client.post(
                f"{path}/heartbeat", json={"IncrementalTimeout": 600}, headers=headers
            )
            say(f"beat {beat.status_code}")
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
