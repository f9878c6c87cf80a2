"""The parser of every command's arguments."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """Refuses abbreviated options, and empty values, which variables that are not set leave.

    An option with underscores may be written with dashes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As ``ArgumentParser``'s, which ``parse_args`` calls."""
        known = self.option_strings()
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            option, equals, value = word.partition("=")
            underscored = "--" + option[2:].replace("-", "_")
            if option.startswith("--") and underscored in known:
                option = underscored
            if not word:
                self.error(f"the value after {' '.join(words[-1:])} is empty: is a variable unset?")
            if equals and not value and option in known:
                self.error(f"{option} is empty: is a variable unset?")
            words.append(option + equals + value)
        return super().parse_known_args(words, namespace)

    def option_strings(self) -> list[str]:
        """All options, as they are written."""
        return list(self._option_string_actions)
