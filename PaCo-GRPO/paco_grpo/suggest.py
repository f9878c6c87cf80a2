"""The name that a user probably meant.

Imports nothing, because reward services have only their own packages.
"""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: ``" Did you mean 'x'?"``, or nothing if no name is close."""
    by_lower_case = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return f" Did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""
