"""`paco-reward build-dataset`: generated images become labeled pairs (arXiv 2512.04784)."""
