"""A server's key, which is named by its environment variable: command lines are seen by other users."""

import os

from paco_reward.errors import PacoRewardError


def api_key(variable: str | None) -> str | None:
    """The value of an environment variable; None where none is named.

    Raises:
        PacoRewardError: it is not set.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise PacoRewardError(f"--api_key_env {variable}: this environment variable is not set; export it")
    return os.environ[variable]
