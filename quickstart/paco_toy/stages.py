"""The stages of the quickstart. Each runs the commands that a user with GPUs types, and returns its results as JSON.

Commands run in the folders that their guides name: PaCo-Reward/, PaCo-Reward/evaluation/Consistency_Rank/, PaCo-GRPO/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paco_toy.console import Console
from paco_toy.processes import Commands, QuickstartError
from paco_toy.reward_data import TESTS, TRAIN
from paco_toy.server import PORT, JudgeServer
from paco_toy.summary import MEASURES, policy_measures, read_rows

SERVED_NAME = "PaCo-Reward-Toy"
CONFIG = "toy_t2is_awm"  # and the name of the run
BASE = "../quickstart/models/judge"  # as seen from PaCo-Reward, as the next two
DATA = "../quickstart/out/world/reward_data"
LORA = "../quickstart/out/judge_lora"


@dataclass
class Context:
    """What the stages share. ``key`` and what follows it are kept in state.json.

    Attributes:
        minutes: Time limit of RL's training epochs.
        overrides: Further arguments of train_flux.sh.
        key: A hash of the settings.
        results: Stage name -> results of the finished stages.
        seconds: Stage name -> duration of the finished stages.
    """

    repo: Path
    out: Path
    python: str
    seed: int
    commands: Commands
    console: Console
    minutes: float
    overrides: tuple[str, ...]
    key: str = ""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_rss_mb: int = 0

    def __post_init__(self) -> None:
        self.reward, self.grpo = self.repo / "PaCo-Reward", self.repo / "PaCo-GRPO"
        self.models = self.repo / "quickstart" / "models"
        self.world, self.judge, self.run = self.out / "world", self.out / "judge", self.out / "runs" / CONFIG
        self.server = JudgeServer(self.commands, self.console, self.grpo, self.judge, SERVED_NAME, "4-server")

    def paco_reward(self, arguments: list[object], log: str, what: str, span: tuple[float, float]) -> str:
        """Runs the command paco-reward."""
        return self.commands.run([Path(self.python).parent / "paco-reward", *arguments], self.reward, log, what, span=span)


@dataclass(frozen=True)
class Stage:
    """A numbered stage.

    Attributes:
        expected: Seconds on two cores, for the time left.
    """

    name: str
    title: str
    expected: float
    work: Callable[[Context], dict[str, Any]]


def world(ctx: Context) -> dict[str, Any]:
    """Renders the data sets and builds the judge's pairs; the world ranks and gives reasons in place of people."""
    missing = [str(ctx.models / name) for name in ("judge", "flux") if not any((ctx.models / name).rglob("*.safetensors"))]
    if missing:
        raise QuickstartError(
            f"the toy base models are missing ({', '.join(missing)}).\n"
            "Restore them (git checkout -- quickstart/models) or build them (bash quickstart/run.sh --rebuild, about 90 minutes)."
        )
    toy, drawn, out = [ctx.python, "-m"], ctx.world / "drawn", os.path.relpath(ctx.world, ctx.reward)
    command = [*toy, "paco_toy.build_world", "--seed", ctx.seed, "--out", ctx.world]
    ctx.commands.run(command, ctx.repo, "1-world", "rendering", span=(0.0, 0.15))
    for name in ("drawn", "reward_data"):
        shutil.rmtree(ctx.world / name, ignore_errors=True)
    command = [*toy, "paco_toy.reward_data", "draw", "--out", drawn, "--seed", ctx.seed]
    ctx.commands.run(command, ctx.repo, "1-draw", "drawing grids", span=(0.15, 0.55))
    build = ["build-dataset", "--grids", f"{out}/drawn/grids", "--metadata", f"{out}/drawn/metadata.jsonl",
             "--output", f"{out}/reward_data", "--name", "toy_pairs", "--seed", ctx.seed]  # fmt: skip
    ctx.paco_reward([*build, "--sets_only"], "1-sets", "pairing sub-figures", (0.55, 0.68))
    command = [*toy, "paco_toy.reward_data", "annotate", "--out", drawn, "--sets", ctx.world / "reward_data" / "sets.jsonl"]
    ctx.commands.run(command, ctx.repo, "1-annotate", "annotating", span=(0.68, 0.7))
    written = ["--rankings", f"{out}/drawn/rankings.jsonl", "--reasons_file", f"{out}/drawn/reasons.jsonl"]
    ctx.paco_reward([*build, *written], "1-pairs", "labeling pairs", (0.7, 0.8))
    command = [*toy, "paco_toy.reward_data", "finish", "--out", drawn, "--data", ctx.world / "reward_data",
               "--flux", ctx.models / "flux", "--seed", ctx.seed]  # fmt: skip
    ctx.commands.run(command, ctx.repo, "1-finish", "sampling broken panels", span=(0.8, 1.0))
    counts = {split: len(read_rows(ctx.world / f"prompts/{split}_metadata.jsonl")) for split in ("train", "test")}
    each = {name: len(json.loads((ctx.world / f"reward_data/{name}.json").read_text())) for name in (TRAIN, *TESTS)}
    pairs = {"train": each.pop(TRAIN), "test": sum(each.values())}
    ctx.console.line(
        f"{counts['train']} training and {counts['test']} test prompts, "
        f"{pairs['train']} pairs to learn from, {pairs['test']} held out"
    )
    return {"prompts": counts, "pairs": pairs}


def judge(ctx: Context) -> dict[str, Any]:
    """Accuracy of the base, LoRA training, accuracy after, merged weights."""
    shutil.rmtree(ctx.out / "rank_results", ignore_errors=True)  # of an earlier judge in the same folder

    def accuracy(name: str, span: tuple[float, float], *adapter: str) -> dict[str, Any]:
        output = ctx.out / f"judge_{name}.json"
        command = ["accuracy", "--model", BASE, *adapter, "--dataset_dir", DATA, "--dataset", ",".join(TESTS),
                   "--output", output]  # fmt: skip
        ctx.paco_reward(command, f"2-judge-accuracy-{name}", f"accuracy, {name}", span)
        m = json.loads(output.read_text())
        ctx.console.line(f"{name}: accuracy {m['accuracy']:.3f}, AUC {m['auc']:.3f} on {m['n']} pairs of held-out characters")
        each = (f"{test.split('_')[2]} {own['accuracy']:.3f}" for test, own in m["kinds"].items())
        ctx.console.line(f"  by theme, and with broken panels: {', '.join(each)}")
        return m

    found = {"base": accuracy("base", (0.0, 0.08))}
    train = ["bash", "train/paco_reward.sh", "config/toy_reward_lora.yaml", f"seed={ctx.seed}", f"data_seed={ctx.seed}", f"output_dir={LORA}"]
    ctx.commands.run(train, ctx.reward, "2-judge-train", "training", span=(0.08, 0.84))
    found["lora"] = accuracy("lora", (0.84, 0.92), "--adapter", LORA)
    export = ["export", "--base", BASE, "--adapter", LORA, "--output", "../quickstart/out/judge", "--force"]
    output = ctx.paco_reward(export, "2-judge-export", "merging", (0.92, 1.0))
    ctx.console.line(next((line for line in output.splitlines() if "difference" in line), "merged weights: quickstart/out/judge"))
    return found


def rank(ctx: Context) -> dict[str, Any]:
    """The judge on rankings in ConsistencyRank-Bench's format."""
    folder = ctx.reward / "evaluation" / "Consistency_Rank"
    results, shown, up = ctx.out / "rank_results", ctx.out / "rank_table.txt", os.path.relpath(ctx.out, folder)
    command = [ctx.python, "eval_vllm.py", "--model", f"{up}/judge", "--dataset_dir", f"{up}/world", "--engine", "transformers",
               "--batch_size", "32", "--results_dir", results]  # fmt: skip
    ctx.commands.run(command, folder, "3-rank-eval", "ranking", span=(0.0, 0.8))
    command = [ctx.python, "eval.py", "--scorer", "histogram", "--dataset_dir", f"{up}/world", "--results_dir", results]
    ctx.commands.run(command, folder, "3-rank-histogram", "ranking by color histograms", span=(0.8, 0.9))
    command = [ctx.python, "print_eval_table.py", "--results_dir", results, "--output_file", shown, "--output_format", "txt"]
    ctx.commands.run(command, folder, "3-rank-table", "table", span=(0.9, 1.0))
    ctx.console.line(shown.read_text().strip())
    baseline = results / "histogram.jsonl"
    judged = next(path for path in results.glob("*.jsonl") if path != baseline)
    return rank_measures(judged) | {"histogram": rank_measures(baseline)}


def rank_measures(path: Path) -> dict[str, float]:
    """Means over items of every number in a results file (`accuracy`, `kendalltau`, …), and the standard error of `kendalltau`."""
    rows = [row.get("metrics", row) for row in read_rows(path) if not row.get("error")]
    names = [n for n, v in rows[0].items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    values = {n: [row[n] for row in rows if isinstance(row.get(n), (int, float))] for n in names}
    found = {n: sum(v) / len(v) for n, v in values.items() if v} | {"items": len(rows)}
    if len(tau := values.get("kendalltau", [])) > 1:
        found["kendalltau_stderr"] = statistics.stdev(tau) / len(tau) ** 0.5
    return found


def server(ctx: Context) -> dict[str, Any]:
    """Serves the merged judge over HTTP."""
    return ctx.server.start()


class EpochProgress:
    """Progress of a training script: by epochs, or by training time where that limit comes first.

    Args:
        reward: Whose mean is shown, as ``what``.
    """

    def __init__(self, run: Path, minutes: float | None, reward: str = "consistency_score", what: str = "judge's score") -> None:
        self.metrics, self.minutes, self.what = run / "metrics.jsonl", minutes, what
        self._line = re.compile(rf"epoch (\d+)/(\d+): .*?\b{reward} ([\d.]+)")

    def __call__(self, line: str) -> tuple[float | None, str] | None:
        """(fraction, the epoch's score) at an epoch's line."""
        found = self._line.search(line)
        if not found:
            return None
        fraction = int(found[1]) / int(found[2])
        if self.minutes and self.metrics.is_file() and (rows := read_rows(self.metrics)):
            fraction = max(fraction, rows[-1].get("train_time", 0.0) / (60 * self.minutes))
        return min(fraction, 1.0), f"epoch {found[1]}, {self.what} {float(found[3]):.3f}"


def rl(ctx: Context) -> dict[str, Any]:
    """GRPO at the training resolution; evaluation at the test resolution before, during and after."""
    command = ["bash", "scripts/single_node/train_flux.sh", CONFIG, f"--config.seed={ctx.seed}",
               f"--config.save_dir={os.path.relpath(ctx.run.parent, ctx.grpo)}", f"--config.run_name={CONFIG}",
               "--config.resume_from=latest", f"--config.max_train_minutes={ctx.minutes}"]  # fmt: skip
    port = ctx.results["server"]["port"]
    if port != PORT:  # evaluation inherits training's arguments
        names = ("consistency_score", "between_images")
        command += [f"--config.train.reward_fn_kwargs.{name}.base_url=http://127.0.0.1:{port}" for name in names]
    progress = EpochProgress(ctx.run, ctx.minutes)
    ctx.commands.run([*command, *ctx.overrides], ctx.grpo, "5-rl", "training", env=cpu_processes(), progress=progress)
    found = policy_measures(ctx.run)
    for when in ("before", "after"):
        shown = (f"{MEASURES[name]} {found[when][name]:.3f}" for name in ("consistency", "agreement", "reward") if name in found[when])
        ctx.console.line(f"{when}: {', '.join(shown)}")
    return found | resolutions(ctx.run)


def cpu_processes() -> dict[str, str]:
    """Two processes of one thread use two cores better than one process of two threads; on GPUs the script decides."""
    if "NUM_PROCESSES" in os.environ or shutil.which("nvidia-smi"):
        return {}
    return {"NUM_PROCESSES": str(min(2, len(os.sched_getaffinity(0))))}


def resolutions(run: Path) -> dict[str, int]:
    """Training and test resolution from the configuration that a run saved."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    return {f"{part}_resolution": config[part]["resolution"] for part in ("train", "test")}


def report(ctx: Context) -> dict[str, Any]:
    """One page and PNGs from the run directory."""
    times, page = ctx.out / "stage_seconds.json", ctx.out / "report.html"
    times.write_text(json.dumps(ctx.seconds))
    command = [ctx.python, "-m", "paco_grpo.report", ctx.run, "--judge", ctx.out / "judge_base.json", ctx.out / "judge_lora.json",
               "--stage-seconds", times, "--title", "PaCo-RL quickstart", "--out", page]  # fmt: skip
    ctx.commands.run(command, ctx.grpo, "6-report", "drawing")
    return {"page": str(page)}


STAGES = (
    Stage("world", "World: data sets are rendered, pairs are built", 60, world),
    Stage("judge", "Judge: LoRA of Qwen2.5-VL with the first-token-weighted loss", 400, judge),
    Stage("rank", "Benchmark: rankings in ConsistencyRank's format", 35, rank),
    Stage("server", "Server: the judge over HTTP", 15, server),
    Stage("rl", "RL: PaCo-GRPO of FLUX, trained small, evaluated large", 330, rl),
    Stage("report", "Report", 10, report),
)
