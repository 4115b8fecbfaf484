"""What a process says of itself to the fleet, learns of it, and does for all."""
