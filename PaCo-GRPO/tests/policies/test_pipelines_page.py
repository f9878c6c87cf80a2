"""docs/pipelines.md has every pipeline of diffusers, and what it says is so."""

from pathlib import Path

import diffusers
import pytest
from any_pipelines import flow_matching_pipelines, rows
from pipelines_page import LEAST_EFFECT, OBJECTIVES, coverage_of, line_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "pipelines.md"
LINES = {line.split(" | ")[0][2:]: line for line in PAGE.read_text().splitlines() if " | " in line}
LINES.pop("pipeline")


def test_every_pipeline_is_in_the_table():
    message = "python PaCo-GRPO/tests/pipelines_page.py > docs/pipelines.md, after a row in "
    message += "any_pipelines.yaml for each pipeline that this version of diffusers has added"
    assert flow_matching_pipelines() == set(rows()) == set(LINES), message
    assert f"diffusers {diffusers.__version__} " in PAGE.read_text(), message
    assert sum(line.split(" | ")[2] == "yes" for line in LINES.values()) >= 25


def without_levels(line):
    """A row's cells without differences and effects, which depend on the processor."""
    name, own, generic, _image, weights, _reload, objectives, _effects = line.split(" | ")
    return name, own, generic, weights, objectives


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(rows()))
def test_the_generic_policy(name, tmp_path):
    coverage = coverage_of(name, tmp_path)
    line = line_of(name, coverage)
    if coverage.reason:
        assert line == LINES[name]
        return
    # Before figures are compared: without effect they say nothing.
    assert min(coverage.effects.values()) >= LEAST_EFFECT, coverage.effects
    assert max(coverage.difference, coverage.reloaded) <= 1
    assert coverage.objectives == list(OBJECTIVES)
    assert without_levels(line) == without_levels(LINES[name])
