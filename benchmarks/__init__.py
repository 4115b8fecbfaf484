"""Claims of speed, as ratios taken in one run."""
