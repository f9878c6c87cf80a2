"""`paco-reward build-dataset`: generated images become labeled pairs for training a judge (arXiv 2512.04784)."""
