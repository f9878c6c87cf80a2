"""`paco-reward build-dataset`: generated images become labeled pairs for training a judge (arXiv 2512.04784).

command   the command and its summary       records   what the steps exchange
options   declared and checked              select    candidate sets, labels, near-duplicates, splits, balance
build     the steps in order                answers   a model's rankings, labels and reasons, journaled
inputs    reading and checking inputs       outputs   sub-figures, data set files
"""
