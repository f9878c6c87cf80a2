"""Options of a run: declared once (``schema``), checked (``checks``), read and saved (``parse``)."""

from paco_grpo.options.checks import ConfigError, check_options, find_problems, refuse
from paco_grpo.options.parse import (  # fmt: skip
    config_dict,
    load_options,
    make_options,
    options_to_dict,
    options_to_yaml,
    parse_command_line,
    read_options,
    table,
)
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
    "OPTIONS", "ConfigError", "HealthOptions", "PretrainedOptions", "RunOptions", "SampleOptions", "SpeedOptions",
    "TestOptions", "TrainOptions", "check_options", "config_dict", "did_you_mean", "find_problems", "load_options",
    "make_options", "options_to_dict", "options_to_yaml", "parse_command_line", "read_options", "refuse", "suggest", "table",
]  # fmt: skip
