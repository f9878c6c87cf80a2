"""The exception that reward code raises."""


class RewardError(RuntimeError):
    """A reward that cannot be built or does not keep to the interface; the message names it."""
