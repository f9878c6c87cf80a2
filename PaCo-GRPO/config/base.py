"""The options that every configuration starts from. Each is declared in ``paco_grpo/options/schema.py`` and listed with
its default and meaning in ``docs/configuration.md``."""

from ml_collections import ConfigDict

from paco_grpo.options import config_dict, table


def get_config() -> ConfigDict:
    """All options with their defaults."""
    return config_dict()


def open_dict(**entries) -> ConfigDict:
    """A table with the user's keys, such as reward names; a plain dict does the same."""
    return table(entries)
