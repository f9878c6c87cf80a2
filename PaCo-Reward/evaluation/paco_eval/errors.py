"""The two ways in which a benchmark run goes wrong."""


class BenchError(RuntimeError):
    """The run cannot go on (benchmark, engine or results file); the message says what to do."""


class ItemError(RuntimeError):
    """One item cannot be scored; the run goes on without it."""
