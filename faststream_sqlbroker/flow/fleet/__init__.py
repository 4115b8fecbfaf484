"""Coordination between processes: heartbeats, pauses, rights, housekeeping and sampling."""
