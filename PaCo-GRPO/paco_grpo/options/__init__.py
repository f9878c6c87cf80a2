"""Options of a run: declared once (``schema``), read and saved (``parse``)."""

from paco_grpo.options.parse import (  # fmt: skip
    ConfigError,
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

__all__ = [
    "OPTIONS", "PUBLISHED", "ConfigError", "HealthOptions", "PretrainedOptions", "RunOptions", "SampleOptions", "SpeedOptions",
    "TestOptions", "TrainOptions", "config_dict", "load_options", "make_options", "options_to_dict", "options_to_yaml",
    "parse_command_line", "read_options",
]  # fmt: skip
