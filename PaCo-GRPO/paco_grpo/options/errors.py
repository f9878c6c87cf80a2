"""The error of this package."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the option and what to do."""


def refuse(problems: Iterable[str]) -> None:
    """Report all problems at once.

    Args:
        problems: One line each, beginning with the option's name without ``config.``.

    Raises:
        ConfigError: There is a problem.
    """
    lines = [f"config.{problem}" for problem in problems]
    if lines:
        raise ConfigError("\n".join(lines))
