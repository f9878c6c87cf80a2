"""The options that every configuration starts from. Each is declared in ``paco_grpo/options/schema.py`` and listed with
its default and meaning in ``docs/configuration.md``."""

from ml_collections import ConfigDict

from paco_grpo.options import config_dict


def get_config() -> ConfigDict:
    """All options with their defaults."""
    return config_dict()


open_dict = dict  # for configuration files of version 0.1: a table whose keys are the user's
