"""benchmarks/epoch.py on a tiny model."""

import json

import pytest
from tiny_run import ROOT, as_arguments, overrides_for

import epoch


def test_the_phases_are_those_of_the_metrics(tiny_flux_dir, tmp_path, capsys):
    options = as_arguments(overrides_for(tiny_flux_dir, tmp_path))
    command = ["--config", f"{ROOT}/config/grpo.py:toy_t2is", *options, "--repeats", "1"]
    assert epoch.main(command) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["time/epoch_s"] > figures["time/sample_s"] > 0
    assert figures["images_per_second"] * figures["time/epoch_s"] == pytest.approx(8)
    assert epoch.main([*command, "--config.sample.merge_lra=on"]) == 1
