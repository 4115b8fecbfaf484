"""From the claim of a message until its outcome is written."""
