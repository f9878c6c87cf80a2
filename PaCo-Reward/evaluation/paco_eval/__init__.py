"""What the benchmarks in this folder share: engines, batches, results files, tables."""
