"""What a run needs of a GPU, computed without one: scripts/estimate.py."""
