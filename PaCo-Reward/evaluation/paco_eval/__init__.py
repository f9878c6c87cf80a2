"""Benchmarks of the judge: what they ask, one loop that scores them, and tables of the results."""
