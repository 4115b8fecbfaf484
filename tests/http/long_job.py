"""A client with a long job: takes one, says so, and sends heartbeats until it is killed.

python -m tests.http.long_job URL [finish]
"""

import sys
import time

import httpx

from tests.http.pulling import JOBS, LEASE, TOKENS

BEATS = 0.02
"""Seconds between two heartbeats."""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(url: str, *options: str) -> None:
    with httpx.Client(base_url=url, headers=TOKENS) as client:
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
        while True:
            beat = client.post(
                f"{path}/heartbeat", json={"IncrementalTimeout": 600}, headers=headers
            )
            say(f"beat {beat.status_code}")
            time.sleep(BEATS)


if __name__ == "__main__":
    main(*sys.argv[1:])
