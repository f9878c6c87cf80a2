"""Errors of a benchmark run."""


class BenchError(RuntimeError):
    """The run cannot continue: benchmark, engine or results file. The message says what to do."""


class ItemError(RuntimeError):
    """One item cannot be scored; the run continues without it."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
