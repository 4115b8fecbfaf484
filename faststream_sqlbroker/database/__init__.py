"""What is sent to a database: its statements."""
