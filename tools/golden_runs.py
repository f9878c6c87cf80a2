"""What tools/golden.py runs: user commands of the whole repository on tiny models.

A command is a line of bash that starts in the root of a commit's files. INPUTS is a folder that
both commits read (``python tools/golden_runs.py FOLDER`` makes it), OUT the folder of the results.
No setting is at its default if another one costs nothing: then a default that changes is a
difference in `options` alone, and a setting that is no longer read is one in a training.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

Commands = list[str]

TRAIN = "cd PaCo-GRPO && python scripts/train.py --config config/grpo.py:"
SETTINGS = {
    "pretrained.model": "../quickstart/models/flux",
    "dataset": "INPUTS/prompts",
    "save_dir": "OUT",
    "run_name": "run",
    "seed": 5,
    "num_epochs": 2,
    "max_train_minutes": None,
    "save_freq": 1,
    "eval_freq": 1,
    "num_checkpoint_limit": 3,
    "logging_platform": "none",
    "max_sequence_length": 24,
    "health.probe_images": 2,
    "sample.num_steps": 4,
    "sample.noise_steps": "1,2",
    "sample.noise_level": 0.6,
    "sample.guidance_scale": 3.0,
    "sample.same_latent": False,
    "sample.latents_per_prompt": 1,
    "sample.global_std": True,
    "sample.batch_size": 5,
    "sample.num_images_per_prompt": 4,
    "sample.unique_sample_num_per_epoch": 3,
    "sample.reward_batch_size": 3,
    "train.resolution": 32,
    "train.batch_size": 5,
    "train.learning_rate": 2e-3,
    "train.adam_beta1": 0.8,
    "train.adam_beta2": 0.95,
    "train.adam_weight_decay": 0.01,
    "train.max_grad_norm": 0.5,
    "train.num_inner_epochs": 2,
    "train.gradient_step_per_epoch": 2,
    "train.adv_clip_max": 1.2,
    "train.beta": 0.03,
    "train.ema_decay": 0.7,
    "train.lora_rank": 4,
    "train.lora_alpha": 6,
    "train.lora_targets": "attention",
    "train.reward_fn": {
        "INPUTS/golden_rewards.py:brightness": 1.0,
        "jpeg_compressibility": 40.0,
        "INPUTS/golden_rewards.py:redness": 0.0,
    },
    "train.reward_fn_kwargs": {"INPUTS/golden_rewards.py:brightness": {"scale": 3.0}},
    "train.aggregate_fn": None,
    "test.resolution": 48,
    "test.batch_size": 2,
    "test.num_steps": 3,
    "test.num_images": 5,
    "test.seed": 7,
    "test.reward_fn": {"INPUTS/golden_rewards.py:redness": 1.0, "jpeg_incompressibility": 1.0},
}
OBJECTIVES = {
    "ppo": {
        "sample.cps": True,
        "sample.same_latent": True,
        "train.clip_range": 1e-3,
        "train.rank_grpo": True,
    },
    "guard_grpo": {"train.clip_range": 2e-3, "train.old_log_prob": "recompute"},
    "nft": {
        "sample.noise_level": 0,
        "train.num_sigmas": 2,
        "train.sigma_fraction": 0.8,
        "train.sigma_one": True,
        "train.nft_beta": 0.4,
        "train.decay_type": 2,
    },
    "awm": {
        "sample.noise_level": 0,
        "sample.num_steps": 6,
        "train.num_sigmas": 3,
        "train.sigma_fraction": 0.7,
        "train.awm_clip_range": 0.5,
        "train.awm_slow_beta": 0.6,
    },
    "dgpo": {
        "sample.noise_level": 0,
        "train.num_sigmas": 2,
        "train.dgpo_beta": 60,
        "train.dgpo_reference": "slow",
        "train.dgpo_clip_range": 0.02,
        "train.ema": False,
    },
    "flow_dppo": {
        "sample.noise_steps": "0,1,2",
        "sample.num_noise_steps": 2,
        "train.dppo_divergence": 1e-4,
        "train.ema_update_interval": 2,
    },
}
# One epoch without an evaluation before it.
SHORT = {
    "num_epochs": 1,
    "eval_freq": 0,
    "sample.num_steps": 2,
    "sample.noise_steps": "1",
    "sample.num_images_per_prompt": 2,
    "sample.unique_sample_num_per_epoch": 2,
    "train.num_inner_epochs": 1,
    "train.lora_targets": "default",
    "test.num_images": 1,
}
EDITING = {
    "prompt_fn": "geneval_image",
    "item_size": "aspect",
    "train.timesteps": None,
    "train.loss_type": "ppo",
}


def training(changes: Mapping[str, object], program: str = TRAIN, name: str = "toy_t2is") -> str:
    """The command of a small training, of ``SETTINGS`` with some changed."""
    words = []
    for option, value in (SETTINGS | dict(changes)).items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words.append(shlex.quote(f"--config.{option}={text}"))
    return f"{program}{name} {' '.join(words)}"


def objective_runs() -> dict[str, Commands]:
    """Two epochs with each objective."""
    runs = {}
    for name, changes in OBJECTIVES.items():
        runs[f"objective-{name}"] = [training({"train.loss_type": name} | changes)]
    return runs


def family_runs(families: Mapping[str, dict]) -> dict[str, Commands]:
    """An epoch of each generator; ``families`` is INPUTS/families.json."""
    runs = {}
    for name, family in families.items():
        changes = SHORT | {"pretrained.model": f"INPUTS/families/{name}"} | family["options"]
        if family["references"]:
            changes |= EDITING | {"dataset": f"INPUTS/edits{family['references']}"}
        runs[f"family-{name}"] = [training(changes)]
    return runs


def whole_runs() -> dict[str, Commands]:
    """A resumed run and what is done with its adapter; a run of two processes."""
    longer = {"num_epochs": 3, "resume_from": "latest"}
    adapter = "--adapter OUT/run/checkpoints/epoch_0003"
    evaluate = TRAIN.replace("train.py", "evaluate.py")
    generate = TRAIN.replace("train.py", "generate.py")
    again = {"save_dir": "OUT/unused"}
    return {
        "resumed": [
            training({}),
            training(longer),
            f"{training(again, evaluate)} {adapter} --against base --output OUT/evaluation",
            (
                f"{training(again, generate)} {adapter} --prompt 'a1 1x2 grid. [LEFT]: a. [RIGHT]: b.'"
                " --seeds 0-2 --output OUT/generated"
            ),
            "cd PaCo-GRPO && python scripts/report.py OUT/run --out OUT/report.html",
        ],
        "processes-2": [
            training(
                {},
                "cd PaCo-GRPO && NUM_PROCESSES=2 bash scripts/launch.sh --config config/grpo.py:",
            )
        ],
    }


JUDGE = (
    "cd PaCo-Reward && NPROC_PER_NODE=PROCESSES bash train/paco_reward.sh"
    " config/toy_reward_lora.yaml dataset_dir=OUT/pairs dataset=mine_train"
    " output_dir=OUT/adapter max_steps=4 logging_steps=1 seed=3 data_seed=4 lora_rank=8"
    " first_token_weight=0.3 preprocessing_num_workers=1"
)
REWARD = "python -m paco_reward.cli"


def judge_runs() -> dict[str, Commands]:
    """Training of a judge on pairs in a table, and what is done with its adapter."""
    pairs = (
        f"{REWARD} build-dataset --pairs INPUTS/pairs.csv --output OUT/pairs --name mine"
        " --test_share 0.3 --seed 2"
    )
    accuracy = (
        f"cd PaCo-Reward && {REWARD} accuracy --model ../quickstart/models/judge"
        " --adapter OUT/adapter --dataset_dir OUT/pairs --dataset mine_train,mine_test"
        " --output OUT/accuracy.json || [[ -s OUT/accuracy.json ]]"
    )
    export = (
        f"cd PaCo-Reward && {REWARD} export --base ../quickstart/models/judge"
        " --adapter OUT/adapter --output OUT/judge"
    )
    return {
        "judge-1": [pairs, JUDGE.replace("PROCESSES", "1"), accuracy, export],
        "judge-2": [pairs, JUDGE.replace("PROCESSES", "2")],
    }


def world_runs() -> dict[str, Commands]:
    """The quickstart's data, and rankings of its benchmark by the toy judges."""
    build_world = "python -m paco_toy.build_world"
    build_dataset = (
        f"{REWARD} build-dataset --seed 1 --name toy_pairs --grids OUT/world/drawn/grids"
        " --metadata OUT/world/drawn/metadata.jsonl --output OUT/world/reward_data"
    )
    rank = "cd PaCo-Reward/evaluation/Consistency_Rank && python"
    places = "--dataset_dir OUT/world --results_dir OUT/rank"
    return {
        "world": [
            f"{build_world} world --out OUT/world --seed 1",
            f"{build_dataset} --sets_only",
            f"{build_world} annotate --out OUT/world --seed 1",
            (
                f"{build_dataset} --rankings OUT/world/drawn/rankings.jsonl"
                " --reasons_file OUT/world/drawn/reasons.jsonl"
            ),
            f"{build_world} finish --out OUT/world --seed 1",
            (
                f"{rank} eval_vllm.py --model ../../../quickstart/models/study_judge"
                f" --engine transformers --batch_size 32 {places}"
            ),
            f"{rank} eval.py --scorer histogram {places}",
            (
                f"{rank} print_eval_table.py --results_dir OUT/rank --output_file OUT/table.txt"
                " --output_format txt --print_std"
            ),
        ],
        "edits": [f"{build_world} edits --out OUT/edits --seed 1"],
    }


# Every configuration with every suffix.
TABLES = """
import inspect, json, runpy, sys, yaml
from paco_grpo.options import load_options, options_to_yaml
file = "PaCo-GRPO/config/grpo.py"
names = runpy.run_path(file, run_name="grpo")
suffixes = tuple(names["SUFFIXES"])
tables = {}
for name, value in names.items():
    is_ours = inspect.isfunction(value) and value.__module__ == "grpo"
    if not is_ours or inspect.signature(value).parameters or name.endswith(suffixes):
        continue
    for suffix in ("", *suffixes):
        options = load_options(f"{file}:{name}{suffix}")
        tables[name + suffix] = yaml.safe_load(options_to_yaml(options))
json.dump(tables, open(sys.argv[1] + "/options.json", "w"))
"""


def all_runs(inputs: Path) -> dict[str, Commands]:
    """Name -> commands; longer ones first, so that two jobs end at the same time."""
    families = json.loads((inputs / "families.json").read_text())
    options = {"options": [f"python -c {shlex.quote(TABLES)} OUT"]}
    runs = world_runs() | judge_runs() | whole_runs() | objective_runs()
    return runs | family_runs(families) | options


def write_inputs(folder: Path) -> None:
    """Prompts, edits, pairs of pictures, and a tiny pipeline of every family."""
    from tiny_policies import FAMILIES, NAMES, picture
    from tiny_run import write_edits, write_prompts

    families = {}
    for name, family in FAMILIES.items():
        family.build().save_pretrained(folder / "families" / name)
        options = {}
        for option, value in ({} if name in NAMES else family.options).items():
            is_of_run = option == "max_sequence_length"
            options[option if is_of_run else f"sample.{option}"] = value
        if name == "qwen_image_21":
            options |= {"train.resolution": 32, "test.resolution": 32}  # the least it has
        families[name] = {"options": options, "references": family.references}
    (folder / "families.json").write_text(json.dumps(families, indent=1))

    write_prompts(folder / "prompts", first_open=2)
    for references in (1, 2):
        write_edits(folder / f"edits{references}", references)
    (folder / "pictures").mkdir()
    lines = ["image1,image2,label,theme,reason"]
    for i in range(24):
        files = [f"pictures/{i}{side}.png" for side in "ab"]
        for side, file in enumerate(files):
            picture(2 * i + side * (i % 2), 32 + 8 * side).save(folder / file)
        answer = "No" if i % 2 else "Yes"
        reason = f"{answer}. Reason {i % 5} of many."
        lines.append(f"{files[0]},{files[1]},{answer},theme {i % 3},{reason}")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")
    shutil.copy(Path(__file__).with_name("golden_rewards.py"), folder)


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
