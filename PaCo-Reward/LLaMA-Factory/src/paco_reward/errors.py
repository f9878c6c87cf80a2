"""The error of this package that users can repair."""


class PacoRewardError(ValueError):
    """The message names the thing and the remedy; the command line shows it without a traceback."""
