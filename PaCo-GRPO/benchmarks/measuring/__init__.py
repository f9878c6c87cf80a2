"""What the benchmarks share: generators of any size with random weights, counted FLOPs, timed epochs, JSON files."""
