"""Options of a run: declared once (``schema``), checked (``checks``), read and saved (``parse``)."""

from paco_grpo.options.checks import ConfigError, find_problems, refuse
from paco_grpo.options.parse import (  # fmt: skip
    config_dict,
    load_options,
    make_options,
    options_to_dict,
    options_to_yaml,
    parse_command_line,
    read_options,
)
from paco_grpo.options.published import PUBLISHED
from paco_grpo.options.schema import (  # fmt: skip
    OPTIONS,
    HealthOptions,
    PretrainedOptions,
    RunOptions,
    SampleOptions,
    SpeedOptions,
    TestOptions,
    TrainOptions,
)
from paco_grpo.suggest import did_you_mean, suggest

__all__ = [
    "OPTIONS", "PUBLISHED", "ConfigError", "HealthOptions", "PretrainedOptions", "RunOptions", "SampleOptions", "SpeedOptions",
    "TestOptions", "TrainOptions", "config_dict", "did_you_mean", "find_problems", "load_options",
    "make_options", "options_to_dict", "options_to_yaml", "parse_command_line", "read_options", "refuse", "suggest",
]  # fmt: skip
