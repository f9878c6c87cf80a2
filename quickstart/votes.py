"""Trains the toy generator on votes; the oracle votes on the run's page, as a person would.

    votes.py --seeds 3 4 5                    # the configuration toy_people_t2is
    votes.py --seeds 3 --runs two_passes      # one of RUNS
    votes.py --table                          # trains nothing: the table of votes.csv

A picture is liked if all its panels show one character, and what the prompt names. One vote in ten
is wrong. votes.csv has a row for each epoch and evaluation. A run that is in it is not repeated,
and a stopped run continues. The prompts are those of study.py.
"""

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import httpx
import numpy as np
import pandas as pd
from PIL import Image

from paco_judge.files import read_json_lines
from paco_toy.build_world import build_prompt_sets
from paco_toy.oracle import read_grids, read_prompt
from paco_toy.summary import commit

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent / "PaCo-GRPO"
RESULTS = HERE / "votes.csv"
OUT = HERE / "out" / "votes"
WRONG = 0.1  # share of votes
FAST = {"train.learning_rate": 5e-4, "sample.global_std": False}
# Run → options besides those of the configuration.
RUNS: dict[str, dict[str, Any]] = {
    "recipe": {},
    # Tried before it: larger steps on the same votes, one or two of them.
    "one_pass": FAST | {"train.num_inner_epochs": 1},
    "two_passes": FAST,
}


class Voter:
    """Answers on a run's page."""

    def __init__(self, log: Path, seed: int) -> None:
        """``log``: of the run, which has the address; ``seed``: of the wrong votes."""
        address = re.search(r"(http\S+)/\?key=(\S+)", log.read_text())
        if address is None:
            raise ValueError(f"{log} has no address yet")
        headers = {"authorization": f"Bearer {address[2]}"}
        self.client = httpx.Client(base_url=address[1], headers=headers, trust_env=False)
        self.seed = seed

    def vote(self) -> None:
        """Answer about every picture that has no answer."""
        for group in self.client.get("/state").json()["groups"]:
            named = [read_prompt(group["prompt"])]
            for picture in group["pictures"]:
                if picture["answer"] is not None:
                    continue
                encoded = self.client.get(f"/picture/{picture['name']}").content
                reading = read_grids([Image.open(io.BytesIO(encoded)).convert("RGB")])
                is_good = reading.consistency()[0] == 1 and reading.alignment(named)[0] == 1
                # A stopped run shows the same picture, and gets the same vote.
                random = np.random.default_rng([self.seed, zlib.crc32(encoded)])
                is_liked = is_good != (random.random() < WRONG)
                answer = "like" if is_liked else "dislike"
                body = {"picture": picture["name"], "answer": answer}
                self.client.post("/answer", json=body).raise_for_status()


def train(run: str, seed: int) -> None:
    """Train one run to its end, and add its rows to votes.csv."""
    name = f"{run}-seed{seed}-{commit()}"
    folder = OUT / name
    OUT.mkdir(parents=True, exist_ok=True)
    options = {
        "seed": seed,
        "dataset": os.path.relpath(OUT / "world" / "prompts", GRPO),
        "save_dir": os.path.relpath(OUT, GRPO),
        "run_name": name,
        "resume_from": "latest",
        "num_checkpoint_limit": 1,
        "train.reward_fn_kwargs.votes.port": 0,
        "test.seed": 1000 + seed,
        "test.num_images": 96,
    } | RUNS[run]
    arguments = [f"--config.{option}={value}" for option, value in options.items()]
    log = OUT / f"{name}.log"
    before = getrusage(RUSAGE_CHILDREN)
    script = "scripts/single_node/train_flux.sh"
    with log.open("w") as file:
        trainer = subprocess.Popen(
            ["bash", script, "toy_people_t2is", *arguments], cwd=GRPO, stdout=file, stderr=file
        )
        try:
            vote_until_end(trainer, log, seed)
        finally:
            trainer.terminate()
            trainer.wait()
    if trainer.returncode:
        sys.exit(f"the training of {name} failed, see {log}")
    after = getrusage(RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = pd.DataFrame(measures(folder))
    rows["cpu_minutes"] = seconds / 60  # of a run that was stopped, since it was continued
    key = {"run": run, "seed": seed, "commit": commit()}
    rows = rows.assign(**key)[[*key, *rows.columns]]
    earlier = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame()
    pd.concat([earlier, rows]).to_csv(RESULTS, index=False, float_format="%.4f")


def vote_until_end(trainer: subprocess.Popen[bytes], log: Path, seed: int) -> None:
    """Vote whenever the page asks, until the training ends."""
    voter = None
    while trainer.poll() is None:
        time.sleep(0.3)
        try:
            voter = voter or Voter(log, seed)
            voter.vote()
        except (ValueError, httpx.TransportError):
            continue  # the page is not open yet, or has closed


def measures(folder: Path) -> list[dict[str, Any]]:
    """The oracle's consistency and alignment after so many votes.

    Of the 96 images of each evaluation, and of the 24 that each epoch shows before its update.
    """
    answers = read_json_lines(folder / "votes.jsonl")
    rows = []
    for row in read_json_lines(folder / "metrics.jsonl"):
        is_test = row["phase"] == "eval"
        epochs = row["epoch"] if is_test else row["epoch"] - 1
        group = "eval" if is_test else "reward"
        num_votes = 0
        for answer in answers:
            num_votes += answer["epoch"] <= epochs and answer["score"] is not None
        measured = {"images": "test" if is_test else "train", "votes": num_votes}
        for name in ("consistency", "alignment"):
            measured[name] = row[f"{group}/oracle_{name}_mean"]
        rows.append(measured)
    return rows


def table() -> str:
    """Consistency and alignment by votes, of each run and seed."""
    results = pd.read_csv(RESULTS)
    results = results[results["images"] == "test"]
    columns = ["consistency", "alignment"]
    return results.pivot_table(columns, ["run", "seed"], "votes").round(3).to_string()


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["recipe"])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the training, too
    build_prompt_sets(OUT / "world", 0)
    for run in options.runs:
        for seed in options.seeds:
            done = (
                pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=["run", "seed"])
            )
            if not ((done["run"] == run) & (done["seed"] == seed)).any():
                train(run, seed)
    print(table())


if __name__ == "__main__":
    main()
