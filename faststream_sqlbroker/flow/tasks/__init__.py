"""Work besides subscribers: locks, schedules, requests, reserved messages, the archive."""
