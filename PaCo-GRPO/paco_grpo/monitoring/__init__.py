"""What a run reports: metrics file, trackers, console lines, signs of collapse."""
