"""The longer studies: what they ask the trainer for is known to it, and the judge's answers get longer."""

import pytest

import judge_study
import study
from paco_grpo.options import read_options
from paco_grpo.training.checks import contradictions
from paco_toy.reward_data import verdict
from paco_toy.world import CHARACTERS

KINDS = [pytest.param(name, kind, id=f"{name}-{kind.name}") for name, kinds in study.STUDIES.items() for kind in kinds]


@pytest.mark.parametrize("name, kind", KINDS)
def test_the_trainer_takes_the_options_of_every_run(name, kind, monkeypatch):
    monkeypatch.chdir(study.GRPO)
    run = study.StudyRun(kind, kind.seeds[0])
    options, _ = read_options(["--config", f"config/grpo.py:{kind.config}", *study.arguments_of(run, 10, 5)])
    assert contradictions(options) == []
    assert options.num_epochs == 10 * kind.times and options.train.reward_fn == dict(kind.rewards)
    assert all("model" in options.train.reward_fn_kwargs.get(judged, {}) for judged in study.JUDGE if judged in kind.rewards)


def test_no_two_runs_share_a_folder():
    names = [run.name for name in study.STUDIES for run in study.runs_of(name)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("shown", [(CHARACTERS[0], CHARACTERS[0]), (CHARACTERS[0], CHARACTERS[40]), (CHARACTERS[7], None)])
def test_reasons_are_lengthened_and_keep_the_verdict(shown):
    answer = verdict(*shown)
    longer = [judge_study.lengthened(answer, length) for length in judge_study.LENGTHS]
    assert all(text.split(".")[0] == answer.split(".")[0] for text in longer)
    assert len(longer[0]) < len(longer[1]) < len(longer[2])
