"""The judges of the study ``mend``: one with a blind spot, and what 100 labels make of it.

The blind judge never saw as No two characters that differ in one attribute, ``blind_to(seed)``. A
run exploits it, the oracle labels pairs of the run's last pictures, and the judge is trained on:
``mended`` by the labels of ``paco-reward suspects``, ``random`` by those of as many random pairs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_judge.files import read_json, read_json_lines, write_json, write_json_lines
from paco_judge.images import load_image
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer
from paco_reward import suspects
from paco_reward.datasets import labeled_pairs
from paco_reward.metrics import judge_report, measure
from paco_reward.pairing.select import order_key
from paco_toy import world
from paco_toy.build_world import PROMPTS, TESTS, TRAIN, annotate, draw, finish
from paco_toy.oracle import read_grids

REPO = Path(__file__).resolve().parents[2]
REWARD = REPO / "PaCo-Reward"
BASE = REPO / "quickstart" / "models" / "judge"
BLIND = "toy_pairs_blind_train"
LABELS = 100
FURTHER = 500  # pairs of the exploited run's pictures that no judge is trained on
ARMS = ("mended", "random")  # who chooses the labels
# With these, the judge of seed 0 learns its labels (P(Yes) of what it was blind to 0.00), and with a
# first-token weight of 0.1 it does not (0.43).
MENDING = {"num_train_epochs": 3, "learning_rate": 7e-4, "first_token_weight": 0.5}


def blind_to(seed: int) -> str:
    """The attribute that the blind judge of a seed does not see."""
    return ("colour", "style")[seed % 2]


def blind_judge(
    folder: Path, seed: int, prompts: dict[str, int] = PROMPTS, **training: Any
) -> Path:
    """The judge that is trained without one attribute's No pairs, as a model folder.

    What is there already is not made again.
    """
    judge = folder / "judges" / "blind"
    data = folder / "world" / "reward_data"
    if judge.exists():
        return judge
    if not (data / f"{BLIND}.json").exists():
        drawn = folder / "world" / "drawn"
        draw(drawn, seed, prompts)
        build = ["build-dataset", "--seed", seed, "--name", "toy_pairs", "--output", data]
        build += ["--grids", drawn / "grids", "--metadata", drawn / "metadata.jsonl"]
        paco_reward(*build, "--sets_only")
        annotate(drawn, data / "sets.jsonl")
        answers = ["--rankings", drawn / "rankings.jsonl"]
        paco_reward(*build, *answers, "--reasons_file", drawn / "reasons.jsonl")
        finish(drawn, data, seed)
        write_blind_pairs(data, blind_to(seed), seed)
    train(BASE, data, [BLIND], judge, seed, training)
    return judge


def write_blind_pairs(data: Path, attribute: str, seed: int) -> None:
    """Write the training pairs without No pairs that differ in ``attribute``, and as many Yes."""
    rows: dict[str, list[dict]] = {"Yes": [], "No": []}
    for row in read_json(data / f"{TRAIN}.json"):
        answer = row["messages"][1]["content"]
        shown = re.findall(r"(?:First|second) an? ([a-z ]+)", answer)
        values = {getattr(world.Character(*text.split()), attribute) for text in shown}
        # A broken panel shows nothing: one character is left, or none.
        if answer.startswith("Yes") or len(shown) < 2 or len(values) == 1:
            rows[answer.partition(".")[0]].append(row)
    count = min(map(len, rows.values()))
    kept = [*rows["Yes"][:count], *rows["No"][:count]]
    np.random.default_rng([seed, 60]).shuffle(kept)
    write_json(data / f"{BLIND}.json", kept)
    file = data / "dataset_info.json"
    info = read_json(file)
    write_json(file, info | {BLIND: info[TRAIN] | {"file_name": f"{BLIND}.json"}})


def train(
    model: Path, data: Path, names: Sequence[str], judge: Path, seed: int, training: dict[str, Any]
) -> None:
    """Train a new LoRA of ``model``, and merge it into the folder ``judge``."""
    adapter = judge.with_name(f"{judge.name}_lora")
    options = {"model_name_or_path": model, "dataset_dir": data, "dataset": ",".join(names)}
    options |= {"seed": seed, "data_seed": seed, "output_dir": adapter} | training
    script = ["bash", "train/paco_reward.sh", "config/toy_reward_lora.yaml"]
    script += [f"{name}={value}" for name, value in options.items()]
    processes = os.environ.get("NUM_PROCESSES", "1")  # of study.py
    variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": processes}
    subprocess.run(script, cwd=REWARD, env=os.environ | variables, check=True)
    paco_reward("export", "--base", model, "--adapter", adapter, "--output", judge)


def paco_reward(*words: object) -> None:
    """Run the command."""
    command = [sys.executable, "-m", "paco_reward.cli", *map(str, words)]
    subprocess.run(command, cwd=REWARD, check=True)


def choose_pairs(folder: Path, run: Path, seed: int, url: str) -> None:
    """Write the labels of both ``ARMS``, and ``further.jsonl``, from the pictures of a run.

    The run's judge answers at ``url``. Further pairs are in neither.
    """
    if (folder / "further.jsonl").exists():
        return
    (folder / "suspects.jsonl").unlink(missing_ok=True)  # of a stopped study
    words = ["--n", LABELS, "--output", folder / "suspects.jsonl", "--server", url]
    paco_reward("suspects", run, *words, "--seed", seed)
    found, _ = suspects.read_run(run)
    found = suspects.without_duplicates(found, folder / "pictures", is_editor=False)
    found.sort(key=lambda suspect: order_key(seed, "random", suspect.panels))
    rows = []
    for suspect in found:
        first, second = (f"pictures/{name}" for name in suspect.images)
        rows.append({"image1": first, "image2": second, "theme": suspect.about})
    chosen = read_json_lines(folder / "suspects.jsonl")
    labels = {"mended": chosen, "random": rows[:LABELS]}
    # Pictures have names by their content.
    taken = {_names(row) for of_arm in labels.values() for row in of_arm}
    rest = [row for row in rows if _names(row) not in taken]
    for arm, of_arm in labels.items():
        write_json_lines(folder / f"{arm}.jsonl", labeled(of_arm, folder))
    write_json_lines(folder / "further.jsonl", labeled(rest[:FURTHER], folder))


def _names(row: dict[str, Any]) -> frozenset[str]:
    return frozenset(Path(row[key]).name for key in ("image1", "image2"))


def labeled(rows: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows with the oracle's label, and the attributes that differ.

    None differs where a panel shows nothing clear, whose label is No.
    """
    with_labels = []
    for row in rows:
        first, second = (shown(load_image(folder / row[key])) for key in ("image1", "image2"))
        differing = []
        if first is not None and second is not None:
            for attribute in world.ATTRIBUTES:
                if getattr(first, attribute) != getattr(second, attribute):
                    differing.append(attribute)
        is_same = first == second and first is not None
        with_labels.append(row | {"label": "Yes" if is_same else "No", "differing": differing})
    return with_labels


def shown(panel: Image.Image) -> world.Character | None:
    """The character that the oracle reads from a panel; None: nothing clear."""
    grid = Image.new("RGB", (2 * panel.width, 2 * panel.height))
    for place in range(4):
        grid.paste(panel, (place % 2 * panel.width, place // 2 * panel.height))
    reading = read_grids([grid])
    return world.CHARACTERS[reading.character[0, 0]] if reading.valid[0, 0] else None


def mended_judge(folder: Path, arm: str, seed: int) -> Path:
    """The blind judge, trained on with the labels of one of ``ARMS`` beside its own pairs."""
    judge = folder / "judges" / arm
    if judge.exists():
        return judge
    data = folder / "world" / "reward_data"
    words = ["--mend", folder / f"{arm}.jsonl", "--beside", BLIND, "--output", data, "--name", arm]
    paco_reward("build-dataset", *words)
    train(folder / "judges" / "blind", data, [BLIND, f"{arm}_mend_train"], judge, seed, MENDING)
    return judge


def accuracies(folder: Path, judge: Path, seed: int) -> dict[str, float]:
    """``judge_accuracy``: on the world's tests; ``further_…``: on pairs of the exploited run.

    ``further_unseen_accuracy`` is on those that differ in the attribute that the blind judge does not
    see, and in no other.
    """
    scorer = JudgeScorer.from_pretrained(judge)
    columns = {}
    rows: list = []
    labels: list[bool] = []
    data = folder / "world" / "reward_data"
    for name in TESTS:
        pairs, of_pairs = labeled_pairs(data, name)
        rows += [pairs[number] for number in range(len(pairs))]
        labels += of_pairs
    columns["judge_accuracy"] = measure(scorer, rows, labels)["accuracy"]
    further = read_json_lines(folder / "further.jsonl")
    pairs = []
    for row in further:
        first, second = (load_image(folder / row[key]) for key in ("image1", "image2"))
        pairs.append(Pair(first, second, theme_question(row["theme"])))
    p_yes = np.array([verdict.p_yes for verdict in scorer.score(pairs)], dtype=np.float64)
    is_yes = np.array([row["label"] == "Yes" for row in further])
    columns["further_accuracy"] = judge_report(p_yes, is_yes)["accuracy"]
    is_unseen = np.array([row["differing"] == [blind_to(seed)] for row in further])
    columns["further_unseen_accuracy"] = judge_report(p_yes[is_unseen], is_yes[is_unseen])[
        "accuracy"
    ]
    return columns
