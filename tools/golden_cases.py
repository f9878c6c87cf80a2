"""What golden.py runs: the cases as published command lines, and the inputs that both sides share."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

# A reward that needs nothing, named in configurations by its import path (the inputs folder is on the path).
REWARDS = '''
import numpy as np


def brightness(scale: float = 1.0):
    def score(images, items):
        arrays = [np.asarray(image, dtype=np.float64) / 255 for image in images]
        return np.array([scale * (a[..., 0].mean() - a[..., 2].mean()) * 100 for a in arrays])

    return score


def redness():
    def score(images, items):
        return np.array([np.asarray(image, dtype=np.float64)[..., 0].mean() / 255 for image in images])

    return score


def gaps():
    """redness, but missing for one image of eight, chosen by its pixels."""

    def score(images, items):
        arrays = [np.asarray(image, dtype=np.float64) for image in images]
        return np.array([np.nan if int(a.sum()) % 8 == 0 else a[..., 0].mean() / 255 for a in arrays])

    return score
'''


@dataclass(frozen=True)
class Command:
    """A published command: a script or ``-m module`` with its arguments, started in ``folder`` of the repository.

    Arguments may contain ``{inputs}``, ``{out}`` (the case's own folder) and ``{judge}`` (a server's address).
    """

    folder: str
    argv: tuple[str, ...]
    processes: int = 1
    statuses: tuple[int, ...] = (0,)  # exit statuses that are no failure of the case
    prints: bool = False  # the numbers on standard output are compared too


TRAIN = {
    "save_dir": "{out}", "run_name": "run", "num_epochs": 2, "max_train_minutes": None, "save_freq": 1, "eval_freq": 2,
    "num_checkpoint_limit": 5, "logging_platform": "none", "num_threads": 1, "item_size": "aspect", "mixed_precision": "no",
    "sample.num_steps": 3, "sample.noise_steps": 1, "sample.same_latent": False, "sample.noise_level": 0.7,
    "sample.batch_size": 4, "sample.num_images_per_prompt": 4, "sample.unique_sample_num_per_epoch": 2,
    "sample.merge_lora": False,
    "train.resolution": 32, "train.batch_size": 3, "train.learning_rate": 1e-3, "train.gradient_step_per_epoch": 2,
    "train.timesteps": None, "train.adv_clip_max": 5.0, "train.reward_fn": '{"golden_rewards:brightness": 1.0}',
    "train.reward_fn_kwargs": "{}",
    "test.resolution": 32, "test.batch_size": 4, "test.num_steps": 3, "test.num_images": 5, "test.at_start": False,
    "test.reward_fn": '{"golden_rewards:brightness": 1.0, "jpeg_incompressibility": 1.0}',
}  # fmt: skip
MODELS = {
    "flux": ("toy_t2is", {"dataset": "{inputs}/prompts", "pretrained.model": "{inputs}/models/flux"}),
    "kontext": ("toy_kontext", {"dataset": "{inputs}/edits", "pretrained.model": "{inputs}/models/flux_kontext"}),
    "qwen": (
        "toy_qwen_edit",
        {"dataset": "{inputs}/edits", "pretrained.model": "{inputs}/models/qwen_image_edit"}
        | {"train.resolution": 64, "test.resolution": 64, "sample.num_images_per_prompt": 2, "test.num_images": 3},
    ),
}
OBJECTIVES = {
    "ppo": {"train.loss_type": "ppo"},
    "guard": {"train.loss_type": "guard_grpo"},
    "nft": {"train.loss_type": "nft", "sample.noise_level": 0.0, "train.timesteps": "(0,2)"},
}
# Options that a plain run leaves alone, a few together.
VARIANTS = {
    "flux-cps-ranks": ("flux", "ppo", {
        "sample.cps": True, "sample.noise_steps": "(0,1)", "train.rank_grpo": True, "train.beta": 0.05,
        "train.num_inner_epochs": 2, "train.clip_range": 1e-5, "sample.same_latent": True,
        "train.reward_fn": '{"golden_rewards:gaps": 1.0, "golden_rewards:brightness": 0.01}',
        "train.max_missing_reward_fraction": 1.0, "train.ema_update_interval": 2, "train.watch_test_rewards": True,
    }),
    "flux-tail": ("flux", "guard", {
        "sample.num_steps": 6, "sample.tail_steps": 3, "sample.tail_order": 2, "sample.tail_cache": 0.05,
        "sample.global_std": True, "train.old_log_prob": "recompute", "enable_gradient_checkpointing": True,
        "sample.noise_steps": "(0,1,2)", "sample.num_noise_steps": 2, "train.lr_warmup_steps": 3,
        "train.reward_fn": '{"golden_rewards:redness": 1.0, "jpeg_incompressibility": 0.5}',
        "train.aggregate_fn": "geometric_mean_aggregate_fn", "speed.overlap_decode": True,
    }),
    "flux-full": ("flux", "ppo", {
        "use_lora": False, "train.learning_rate": 1e-5, "mixed_precision": "bf16", "sample.merge_lora": False,
        "num_checkpoint_limit": 1, "num_epochs": 1, "max_sequence_length": 0,
    }),
    "flux-judge": ("flux", "ppo", {
        "train.reward_fn": '{"consistency_score": 1.0, "golden_rewards:redness": 0.0}',
        "train.reward_fn_kwargs": '{"consistency_score": {"base_url": "{judge}", "model": "judge"}}',
        "test.reward_fn": '{"consistency_score": 1.0, "grid_layout": 1.0}',
        "test.reward_fn_kwargs": '{"grid_layout": {"base_url": "{judge}", "model": "judge"}}',
        "sample.merge_lora": True,
    }),
    "qwen-guidance": ("qwen", "ppo", {
        "sample.guidance_scale": 4.0, "sample.negative_prompt": " ", "num_epochs": 1, "test.at_start": True,
    }),
    "kontext-judge": ("kontext", "nft", {
        "train.reward_fn": '{"consistency_for_editing": 1.0}', "train.decay_type": 2, "train.nft_beta": 0.5,
        "train.reward_fn_kwargs": '{"consistency_for_editing": {"base_url": "{judge}", "model": "judge"}}',
        "train.beta": 0.05, "speed.offload_vae": True,
    }),
}  # fmt: skip


def options(model: str, objective: str, changes: dict | None = None) -> tuple[str, ...]:
    """The configuration's name and its overrides as command-line arguments."""
    name, places = MODELS[model]
    changed = TRAIN | places | OBJECTIVES[objective] | (changes or {})
    return ("--config", f"config/grpo.py:{name}", *(f"--config.{key}={value}" for key, value in changed.items()))


def train(model: str, objective: str, processes: int = 1, **changes) -> Command:
    """``scripts/train.py``; ``__`` in the names of changes stands for a dot."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return Command("PaCo-GRPO", ("scripts/train.py", *options(model, objective, changes)), processes)


def uses(model: str, script: str, *arguments: str, processes: int = 1) -> Command:
    """``scripts/evaluate.py`` or ``scripts/generate.py``."""
    return Command("PaCo-GRPO", (script, *options(model, "ppo"), *arguments), processes)


def paco_reward(*arguments: str, statuses: tuple[int, ...] = (0,)) -> Command:
    """The ``paco-reward`` command line."""
    prints = arguments[0] in ("score", "export")
    return Command("PaCo-Reward", ("-m", "paco_reward.cli", *arguments), statuses=statuses, prints=prints)


def rank(script: str, *arguments: str) -> Command:
    """A script of ConsistencyRank."""
    return Command("PaCo-Reward/evaluation/Consistency_Rank", (script, *arguments))


ADAPTER = "{out}/run/checkpoints/epoch_0002"
JUDGE = ("--model", "{inputs}/models/judge")
IMAGES = tuple(f"{{inputs}}/images/{i}.png" for i in range(4))
BUILD = ("build-dataset", "--metadata", "{inputs}/grids.jsonl", "--grids", "{inputs}/grids", "--test_share", "0.3")
CASES: dict[str, tuple[Command, ...]] = {
    "flux-ppo": (
        train("flux", "ppo", test__at_start=True),
        uses("flux", "scripts/evaluate.py", "--adapter", ADAPTER, "--output", "{out}/evaluated"),
        uses(
            "flux", "scripts/generate.py", "--adapter", ADAPTER, "--output", "{out}/generated", "--seeds", "0,5",
            "--prompt", "1x2 grid. [LEFT]: a red star. [RIGHT]: a blue star.", "--judge", "{judge}", "--judge-model", "judge",
        ),
        uses("flux", "scripts/evaluate.py", "--output", "{out}/base", processes=2),
    ),
    "flux-ppo-2": (train("flux", "ppo", 2, test__at_start=True),),
    "flux-ppo-resumed": (
        train("flux", "ppo", test__at_start=True, num_epochs=1),
        train("flux", "ppo", test__at_start=True, resume_from="latest"),
    ),
    "qwen-nft": (train("qwen", "nft"),),
    "flux-guard": (train("flux", "guard"),),
    "flux-guard-2": (train("flux", "guard", 2),),
    "flux-nft": (train("flux", "nft"),),
    "flux-nft-2": (train("flux", "nft", 2),),
    "flux-nft-resumed": (train("flux", "nft", num_epochs=1), train("flux", "nft", resume_from="latest")),
    "kontext-ppo": (
        train("kontext", "ppo"),
        uses(
            "kontext", "scripts/generate.py", "--adapter", ADAPTER + "/adapter", "--output", "{out}/generated",
            "--prompt", "make it red", "--image", "{inputs}/edits/test1.png",
        ),
    ),
    "kontext-guard": (train("kontext", "guard"),),
    "kontext-nft": (train("kontext", "nft"),),
    "kontext-nft-2": (train("kontext", "nft", 2),),
    "qwen-ppo": (
        train("qwen", "ppo"),
        uses("qwen", "scripts/evaluate.py", "--adapter", ADAPTER + "/diffusers", "--output", "{out}/evaluated"),
    ),
    "qwen-guard": (train("qwen", "guard"),),
    "qwen-ppo-2": (train("qwen", "ppo", 2),),
    "qwen-ppo-resumed": (train("qwen", "ppo", num_epochs=1), train("qwen", "ppo", resume_from="latest")),
    **{name: (Command("PaCo-GRPO", ("scripts/train.py", *options(*variant))),) for name, variant in VARIANTS.items()},
    "flux-cps-ranks-2": (Command("PaCo-GRPO", ("scripts/train.py", *options(*VARIANTS["flux-cps-ranks"])), 2),),
    "score": (
        # The untrained toy judge answers most questions with other words than Yes and No: no mean, exit status 1.
        paco_reward("score", *IMAGES, *JUDGE, "--theme", "a red circle", "--reasons", statuses=(1,)),
        paco_reward("score", *IMAGES, "--server", "{judge}", "--model", "judge", "--reasons"),
        paco_reward("score", *IMAGES, "--server", "{judge}", "--model", "judge", "--instruction", "make it blue"),
    ),
    "data": (
        paco_reward(*BUILD, "--sets_only", "--output", "{out}/sets"),
        paco_reward(*BUILD, "--rankings", "{inputs}/ranked.jsonl", "--output", "{out}/people"),
        paco_reward(*BUILD, "--server", "{judge}", "--model", "judge", "--reasons", "--output", "{out}/scores"),
        paco_reward(*BUILD, "--server", "{judge}", "--model", "judge", "--rank_by", "order", "--output", "{out}/orders"),
        paco_reward("build-dataset", "--editing", "{inputs}/edits.jsonl", "--output", "{out}/edits", "--test_share", "0.3"),
    ),
    "judge": (
        paco_reward(*BUILD, "--rankings", "{inputs}/ranked.jsonl", "--output", "{out}/data"),
        paco_reward(
            "train", "config/toy_reward_lora.yaml", "model_name_or_path={inputs}/models/judge", "dataset_dir={out}/data",
            "dataset=consistency_reward_train", "output_dir={out}/lora", "max_steps=12", "per_device_train_batch_size=4",
            "learning_rate=0.01", "logging_steps=1", "preprocessing_num_workers=1", "plot_loss=false", "seed=1",
        ),
        paco_reward(
            "accuracy", *JUDGE, "--adapter", "{out}/lora", "--dataset_dir", "{out}/data", "--dataset",
            "consistency_reward_train", "--output", "{out}/accuracy.json",
        ),
        paco_reward("score", *IMAGES, *JUDGE, "--adapter", "{out}/lora", "--theme", "a red circle"),
        paco_reward("score", *IMAGES, *JUDGE, "--adapter", "{out}/lora", "--instruction", "make it blue"),
        paco_reward("export", "--base", "{inputs}/models/judge", "--adapter", "{out}/lora", "--output", "{out}/merged"),
    ),
    "rank": (
        rank(
            "eval_vllm.py", "--server", "{judge}", "--model", "judge", "--dataset_dir", "{inputs}/bench",
            "--results_dir", "{out}/results",
        ),
        rank("eval.py", "--scorer", "histogram", "--dataset_dir", "{inputs}/bench", "--results_dir", "{out}/results"),
        rank(
            "print_eval_table.py", "--results_dir", "{out}/results", "--output_file", "{out}/table.txt", "--output_format",
            "txt", "--print_std",
        ),
    ),
}  # fmt: skip
QUICK = ("flux-ppo", "flux-ppo-2", "flux-ppo-resumed", "qwen-nft", "kontext-guard", "score", "data")
# Pairs of folders that must hold the same run on either side: going on from a checkpoint changes nothing.
SAME = tuple(
    (f"{name}/run/{part}", f"{name}-resumed/run/{part}")
    for name in ("flux-ppo", "flux-nft", "qwen-ppo")
    for part in ("checkpoints/epoch_0001", "checkpoints/epoch_0002", "eval/epoch_0002")
)


def write_inputs(folder: Path, models: Path) -> None:
    """Everything the cases read: models, prompts, pictures, rewards, a small benchmark."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True)
    for model in ("flux", "flux_kontext", "qwen_image_edit", "judge"):
        shutil.copytree(models / model, folder / "models" / model)
    (folder / "golden_rewards.py").write_text(REWARDS)
    _write_prompts(folder / "prompts")
    _write_edits(folder)
    _write_grids(folder)
    _write_bench(folder / "bench" / "ConsistencyRank-Bench")
    for number, color in enumerate(("red", "red", "blue", "green")):
        shape = Image.new("RGB", (64, 64), "white")
        ImageDraw.Draw(shape).ellipse((12 + 2 * number, 14, 50, 48 + number), fill=color)
        shape.save(_parent(folder / "images" / f"{number}.png"))


def picture(seed: int, height: int = 32, width: int = 32):
    """A smooth random image."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def _write_prompts(folder: Path) -> None:
    for split, count in (("train", 4), ("test", 3)):
        rows = [
            {
                "prompt": f"1x2 grid. [LEFT]: a{i}{split}. [RIGHT]: b{i}.",
                "idx": f"{i:03d}",
                "category": ["even", "odd"][i % 2],
            }
            for i in range(count)
        ]
        _write_rows(folder / f"{split}_metadata.jsonl", rows)


def _write_edits(folder: Path) -> None:
    for split, count in (("train", 4), ("test", 3)):
        for i in range(count):
            picture(i, 32, 64 if i % 2 else 32).save(_parent(folder / "edits" / f"{split}{i}.png"))
        rows = [
            {"prompt": f"make {split} {'red' if i % 2 else 'blue'}", "image": f"{split}{i}.png"} for i in range(count)
        ]
        _write_rows(folder / "edits" / f"{split}_metadata.jsonl", rows)
    rows = []
    for i in range(12):
        picture(200 + i, 48, 48).save(_parent(folder / "edited" / f"{i}a.png"))
        picture(300 + i, 48, 48).save(folder / "edited" / f"{i}b.png")
        labels = {"consistency": "Yes" if i % 2 else "No", "follows": "Yes" if i % 3 else "No"}
        rows.append(
            {"source": f"edited/{i}a.png", "edited": f"edited/{i}b.png", "instruction": f"make thing {i} blue"} | labels
        )
    _write_rows(folder / "edits.jsonl", rows)


def _write_grids(folder: Path, prompts: int = 6, generations: int = 3) -> None:
    from PIL import Image

    rows, ranked = [], []
    for p in range(prompts):
        for g in range(generations):
            grid = Image.new("RGB", (96, 96))
            for panel in range(4):
                grid.paste(picture(1000 * p + 100 * g + panel, 48, 48), (48 * (panel % 2), 48 * (panel // 2)))
            grid.save(_parent(folder / "grids" / f"p{p}_{g}.png"))
        panels = " ".join(
            f"[{place}]: thing {p} seen {place.lower()}."
            for place in ("TOP-LEFT", "TOP-RIGHT", "BOTTOM-LEFT", "BOTTOM-RIGHT")
        )
        rows.append({"idx": f"p{p}", "prompt": f"A 2x2 grid of thing {p}. {panels}"})
        for reference in range(3):
            candidates = [f"{g:02d}/{reference + 1}.png" for g in range(generations)]
            order = candidates[(p + reference) % generations :] + candidates[: (p + reference) % generations]
            row = {"folder": f"p{p}", "ref_image": f"{p % generations:02d}/{reference}.png", "comp_images": candidates}
            ranked.append(row | {"rank_images": order})
    _write_rows(folder / "grids.jsonl", rows)
    _write_rows(folder / "ranked.jsonl", ranked)


def _write_bench(folder: Path) -> None:
    ranks, prompts = [], []
    for index in range(5):
        names = ["c0.png", "c1.png", "c2.png"]
        for seed, name in enumerate(["ref.png", *names]):
            picture(5000 + 100 * index + seed).save(_parent(folder / "images" / f"{index:04d}" / name))
        ordered = names[index % 3 :] + names[: index % 3]
        ranks.append({"folder": f"{index:04d}", "ref_image": "ref.png", "comp_images": names, "rank_images": ordered})
        criteria = {"style": {"a": "Same colors.", "b": ""}, "identity": {"c": "Same shape."}}
        prompts.append({"idx": index, "prompt": "p", "criteria": criteria})
    _write_rows(folder / "consistency_full_rank.jsonl", ranks)
    _write_rows(folder / "prompt_data.jsonl", prompts)


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_rows(path: Path, rows: list[dict]) -> None:
    _parent(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def judge_server() -> http.server.ThreadingHTTPServer:
    """An OpenAI-compatible server: every answer is a hash of the pixels and the text that were sent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_):
            pass

        def do_GET(self):
            self._reply({"data": [{"id": "judge", "object": "model"}]})

        def do_POST(self):
            self._reply(judge_answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _reply(self, answer: dict) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def judge_answer(request: dict) -> dict:
    """A chat completion: log-probabilities, an order of the candidates, or a reason."""
    from PIL import Image

    digest, images = hashlib.sha256(), 0
    for message in request["messages"]:
        parts = (
            message["content"]
            if isinstance(message["content"], list)
            else [{"type": "text", "text": message["content"]}]
        )
        for part in parts:
            if part["type"] == "image_url":
                image = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",", 1)[1]))).convert(
                    "RGB"
                )
                digest.update(repr(image.size).encode() + image.tobytes())
                images += 1
            else:
                digest.update(part["text"].encode())
    value = digest.digest()
    p_yes = 0.02 + 0.96 * int.from_bytes(value[:4], "big") / 2**32
    word = "Yes" if value[4] % 2 else "No"
    choice = {"index": 0, "message": {"role": "assistant", "content": word}, "finish_reason": "stop"}
    if request.get("logprobs"):
        top = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in (("Yes", p_yes), ("No", 1 - p_yes))]
        choice["logprobs"] = {"content": [top[0] | {"top_logprobs": top}]}
    elif images > 2:
        order = sorted(range(1, images), key=lambda number: value[number])
        choice["message"]["content"] = " > ".join(map(str, order))
    else:
        choice["message"]["content"] = f"{word}. The two images agree in {value[5]} of 255 points."
    return {"id": "0", "object": "chat.completion", "model": "judge", "choices": [choice]}
