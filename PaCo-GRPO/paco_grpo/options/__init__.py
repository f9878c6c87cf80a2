"""Options of a run: declared once (``schema``), read and saved (``parse``)."""

from paco_grpo.options.parse import (
    ConfigError,
    config_dict,
    describe_options,
    load_options,
    make_options,
    options_to_yaml,
    public_options,
    read_options,
)
from paco_grpo.options.schema import OPTIONS, RunOptions, TrainOptions

__all__ = [
    "OPTIONS",
    "ConfigError",
    "RunOptions",
    "TrainOptions",
    "config_dict",
    "describe_options",
    "load_options",
    "make_options",
    "options_to_yaml",
    "public_options",
    "read_options",
]
