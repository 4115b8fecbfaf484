"""What is done apart from subscribers: locks, schedules, requests, pulled messages, the archive."""
