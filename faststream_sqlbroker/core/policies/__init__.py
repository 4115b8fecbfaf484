"""Scheduling policies: what they are given, checked, and what they decide; pure, by times as numbers."""
