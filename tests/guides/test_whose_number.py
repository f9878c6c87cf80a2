"""Every place that continues, reuses or compares a number, and the test of whose number it is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IDENTITY = "PaCo-Reward/judge/tests/test_identity.py"
FOLDER = "PaCo-GRPO/tests/evaluation/test_folder.py"
RESUME = "PaCo-GRPO/tests/training/test_resume.py"
BENCH = "PaCo-Reward/tests/test_bench_runs.py"
BUILD = "PaCo-Reward/tests/test_build_dataset.py"
TRAINING = "PaCo-Reward/tests/test_resume.py"
SERVICE = "PaCo-GRPO/tests/rewards/test_service.py"
STUDY = "quickstart/tests/test_study.py"

NO_GENERATOR = "it samples no images"
NO_SERVER = "generators and adapters are not served"
ONLY_SERVED = "a reward asks a judge over a server alone"
NO_REWARD = "its only reward is the judge"
AS_FOLDER = f"{IDENTITY}::test_a_hub_model_is_its_snapshot"
ADAPTER_ON_HUB = "find_lora downloads it, and it is compared as a folder"
REWARDS = (
    f"{FOLDER}::test_a_users_reward_is_its_code",
    "PaCo-GRPO/tests/rewards/test_registry.py::test_a_reward_is_its_weights",
    f"{SERVICE}::test_a_service_says_whose_scores_it_gives",
)
KINDS = ("generator", "adapter", "judge", "reward")
PLACES = ("folder", "hub", "server")
# Place → (kind, folder, hub, server): a test, or why there is none.
TABLE = {
    "evaluate.py, --output and --output/against": {
        "generator": (
            f"{FOLDER}::test_other_files_under_the_same_path_are_refused",
            AS_FOLDER,
            NO_SERVER,
        ),
        "adapter": (
            f"{FOLDER}::test_other_files_under_the_same_path_are_refused",
            ADAPTER_ON_HUB,
            NO_SERVER,
        ),
        "judge": (
            ONLY_SERVED,
            ONLY_SERVED,
            f"{FOLDER}::test_other_rewards_only_score_again",
        ),
        "reward": REWARDS,
    },
    "resume_from, plan.json": {
        "generator": (
            f"{RESUME}::test_other_files_in_the_same_folders_are_refused",
            AS_FOLDER,
            NO_SERVER,
        ),
        "adapter": (
            f"{RESUME}::test_another_adapter_to_start_from_is_refused",
            ADAPTER_ON_HUB,
            NO_SERVER,
        ),
        "judge": (
            ONLY_SERVED,
            ONLY_SERVED,
            f"{RESUME}::test_a_judge_exchanged_under_its_name_is_refused",
        ),
        "reward": REWARDS,
    },
    "resume_from another run, into a folder with rows": {
        "generator": (
            f"{RESUME}::test_a_folder_with_rows_of_its_own_is_not_continued_from_another_run",
            "as a folder: runs are compared, not weights",
            NO_SERVER,
        ),
        "adapter": ("as of the generator",) * 2 + (NO_SERVER,),
        "judge": ("as of the generator",) * 3,
        "reward": ("as of the generator",) * 3,
    },
    "benchmarks, results files": {
        "generator": (NO_GENERATOR,) * 3,
        "adapter": (
            f"{BENCH}::test_results_of_other_weights_or_items_are_not_continued",
            AS_FOLDER,
            f"{IDENTITY}::test_a_server_is_believed_as_far_as_it_says",
        ),
        "judge": (
            f"{BENCH}::test_results_of_other_weights_or_items_are_not_continued",
            AS_FOLDER,
            f"{BENCH}::test_results_of_a_judge_exchanged_under_its_name_are_not_shown",
        ),
        "reward": (NO_REWARD,) * 3,
    },
    "build-dataset, OUTPUT/work": {
        "generator": (NO_GENERATOR,) * 3,
        "adapter": ("its server says which", "its server says which", AS_FOLDER),
        "judge": (
            "it asks a server alone",
            "it asks a server alone",
            f"{BUILD}::test_answers_of_a_judge_exchanged_under_its_name",
        ),
        "reward": (NO_REWARD,) * 3,
    },
    "paco-reward train, output_dir": {
        "generator": (NO_GENERATOR,) * 3,
        "adapter": (
            f"{TRAINING}::test_another_model_at_the_same_place_is_named",
            AS_FOLDER,
            "it trains no served model",
        ),
        "judge": (
            f"{TRAINING}::test_another_model_at_the_same_place_is_named",
            AS_FOLDER,
            "it trains no served model",
        ),
        "reward": (NO_REWARD,) * 3,
    },
    "quickstart/study.py, results.csv": {
        "generator": ("the toy's, which its commit holds",) * 3,
        "adapter": ("a run's own",) * 3,
        "judge": (
            f"{STUDY}::test_a_run_is_of_the_judge_and_the_commit_that_it_was_trained_with",
            "the toy's judge is a folder",
            "study.py serves the folder itself",
        ),
        "reward": ("the toy's, which its commit holds",) * 3,
    },
}
CELLS = []
for place, rows in TABLE.items():
    for kind, cells in rows.items():
        for where, cell in zip(PLACES, cells, strict=True):
            CELLS.append(pytest.param(cell, id=f"{place}-{kind}-{where}"))


def test_every_cell_is_filled():
    assert all(tuple(rows) == KINDS for rows in TABLE.values())


@pytest.mark.parametrize("cell", CELLS)
def test_the_cell_names_a_test_or_a_reason(cell):
    file, colons, name = cell.partition("::")
    if not colons:
        assert len(cell.split()) > 2, "no reason"
        return
    tree = ast.parse((ROOT / file).read_text())
    assert name in {getattr(node, "name", None) for node in tree.body}
