"""Tables of the quickstart over seeds."""

import json
import re

import seeds


def test_the_mean_over_seeds_has_the_error_of_independent_runs():
    runs = [{"change": {"x": {"mean": mean, "stderr": error}}} for mean, error in ((0.1, 0.03), (0.3, 0.04))]
    assert seeds.mean_change(runs, "x") == "+0.200 ± 0.025"


def test_the_spread_tells_seeds_that_settings_were_chosen_on_from_the_others():
    summary = json.loads(seeds.RESULTS.read_text())[str(seeds.SHOWN)]
    worse = json.loads(json.dumps(summary))
    worse["judge"]["lora"]["accuracy"] -= 0.1
    head, _, accuracy, *_ = seeds.spread({0: summary, 10: summary, 11: worse}).splitlines()
    value = summary["judge"]["lora"]["accuracy"]
    assert head == "| | settings chosen on 0 | run once: 10, 11 |"
    assert accuracy.endswith(f"| {value:.3f} ({value:.3f} to {value:.3f}) | {value - 0.05:.3f} ({value - 0.1:.3f} to {value:.3f}) |")


def test_aims_that_a_seed_misses_are_not_counted():
    summary = json.loads(seeds.RESULTS.read_text())[str(seeds.SHOWN)] | {"warnings": {}}
    worse = json.loads(json.dumps(summary)) | {"warnings": {"max_velocity_change": 3}}
    worse["judge"]["lora"]["accuracy"] = 0.96
    worse["policy"]["change"]["consistency"]["mean"] = 0.14
    worse["policy"]["change"]["valid"] = {"mean": -0.08, "stderr": 0.01}
    assert re.findall(r" in (\d)", seeds.aims([summary, summary])) == ["2"] * 5
    assert re.findall(r" in (\d)", seeds.aims([summary, worse])) == ["1", "2", "1", "1", "1"]
