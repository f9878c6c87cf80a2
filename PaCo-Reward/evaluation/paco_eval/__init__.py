"""What the two benchmarks share: running, engines, baselines, results files and tables."""
