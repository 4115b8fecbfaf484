"""A model of when a subscriber claims and looks."""
