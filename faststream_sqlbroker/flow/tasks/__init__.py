"""What is done apart from subscribers: locks, schedules, requests, held messages, the archive."""
