"""The one error of this package that the command line shows without a traceback."""


class PacoRewardError(RuntimeError):
    """Something the user can repair; the message names the thing and the remedy."""
