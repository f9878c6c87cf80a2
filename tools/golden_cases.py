"""What golden.py runs: the cases as published command lines, and the inputs that both sides share."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

# Rewards that need no weights, named in configurations by their import path (the inputs folder is on the path).
REWARDS = '''
import numpy as np

def brightness():
    return lambda images, items: np.array([_mean(image, 0) - _mean(image, 2) for image in images])

def redness():
    return lambda images, items: np.array([_mean(image, 0) / 255 for image in images])

def gaps():
    """redness, but missing for some images, chosen by their pixels."""
    return lambda images, items: np.array([_mean(i, 0) if int(np.asarray(i).sum()) % 8 else np.nan for i in images])

def _mean(image, channel):
    return np.asarray(image, dtype=np.float64)[..., channel].mean()
'''
TRAIN = """
save_dir={out} run_name=run num_epochs=2 max_train_minutes=None save_freq=1 eval_freq=2 num_checkpoint_limit=5
logging_platform=none num_threads=1 item_size=aspect mixed_precision=no sample.num_steps=3 sample.noise_steps=1
sample.same_latent=False sample.latents_per_prompt=1 train.aggregate_fn=None sample.noise_level=0.7
sample.batch_size=4 sample.num_images_per_prompt=4 sample.unique_sample_num_per_epoch=2 sample.merge_lora=False train.resolution=32 train.batch_size=3
train.learning_rate=1e-3 train.gradient_step_per_epoch=2 train.timesteps=None train.adv_clip_max=5.0
train.reward_fn='{"golden_rewards:brightness": 1}' train.reward_fn_kwargs={} test.resolution=32 test.batch_size=4
test.num_steps=3 test.num_images=5 test.at_start=False
test.reward_fn='{"golden_rewards:brightness": 1, "jpeg_incompressibility": 1}'
"""
MODELS = {
    "flux": ("toy_t2is", "dataset={inputs}/prompts pretrained.model={inputs}/models/flux"),
    "kontext": ("toy_kontext", "dataset={inputs}/edits pretrained.model={inputs}/models/flux_kontext"),
    "qwen": (
        "toy_qwen_edit",
        """dataset={inputs}/edits pretrained.model={inputs}/models/qwen_image_edit train.resolution=64 test.resolution=64
        sample.num_images_per_prompt=2 test.num_images=3""",
    ),
}
OBJECTIVES = {
    "ppo": "train.loss_type=ppo",
    "guard": "train.loss_type=guard_grpo",
    "nft": "train.loss_type=nft sample.noise_level=0 train.timesteps=(0,2)",
}
RANKS = """train flux ppo sample.cps=True sample.noise_steps=(0,1) train.rank_grpo=True train.beta=0.05
    train.num_inner_epochs=2 train.clip_range=1e-5 sample.same_latent=True train.max_missing_reward_fraction=1
    train.reward_fn='{"golden_rewards:gaps": 1, "golden_rewards:brightness": 0.01}' train.ema_update_interval=2"""
ADAPTER = "{out}/run/checkpoints/epoch_0002"
BUILD = "paco-reward build-dataset --metadata {inputs}/grids.jsonl --grids {inputs}/grids --test_share 0.3"
IMAGES = "{inputs}/images/0.png {inputs}/images/1.png {inputs}/images/2.png {inputs}/images/3.png"
SCORE = f"paco-reward score {IMAGES}"
TRAINED = "--model {inputs}/models/judge --adapter {out}/lora"
# A case is a list of commands. "train MODEL OBJECTIVE [OPTION=VALUE …]", "evaluate MODEL …" and "generate MODEL …" stand
# for the scripts with a tiny configuration, "2x" for two processes. {inputs} are shared, {out} is the case's own folder.
CASES: dict[str, list[str]] = {
    "flux-ppo": [
        "train flux ppo test.at_start=True",
        f"evaluate flux --adapter {ADAPTER} --output {{out}}/evaluated",
        f"""generate flux --adapter {ADAPTER} --output {{out}}/generated --seeds 0,5 --judge {{judge}} --judge-model judge
        --prompt '1x2 grid. [LEFT]: a red star. [RIGHT]: a blue star.'""",
        "2x evaluate flux --output {out}/base",
    ],
    "flux-ppo-2": ["2x train flux ppo test.at_start=True"],
    "flux-ppo-resumed": [
        "train flux ppo test.at_start=True num_epochs=1",
        "train flux ppo test.at_start=True resume_from=latest",
    ],
    "qwen-nft": ["train qwen nft"],
    "flux-guard": ["train flux guard"],
    "flux-guard-2": ["2x train flux guard"],
    "flux-nft": ["train flux nft"],
    "flux-nft-2": ["2x train flux nft"],
    "flux-nft-resumed": ["train flux nft num_epochs=1", "train flux nft resume_from=latest"],
    "kontext-ppo": [
        "train kontext ppo",
        f"""generate kontext --adapter {ADAPTER}/adapter --output {{out}}/generated --prompt 'make it red'
        --image {{inputs}}/edits/test1.png""",
    ],
    "kontext-guard": ["train kontext guard"],
    "kontext-nft": ["train kontext nft"],
    "kontext-nft-2": ["2x train kontext nft"],
    "qwen-ppo": ["train qwen ppo", f"evaluate qwen --adapter {ADAPTER}/diffusers --output {{out}}/evaluated"],
    "qwen-guard": ["train qwen guard"],
    "qwen-ppo-2": ["2x train qwen ppo"],
    "qwen-ppo-resumed": ["train qwen ppo num_epochs=1", "train qwen ppo resume_from=latest"],
    # Options that the runs above leave alone, a few together.
    "flux-ranks": [RANKS],
    "flux-ranks-2": [f"2x {RANKS}"],
    "flux-tail": [
        """train flux guard sample.num_steps=6 sample.tail_steps=3 sample.tail_order=2
        sample.global_std=True train.old_log_prob=recompute enable_gradient_checkpointing=True
        sample.noise_steps=(0,1,2) sample.num_noise_steps=2 speed.overlap_decode=True
        train.reward_fn='{"golden_rewards:redness": 1, "jpeg_incompressibility": 0.5}'
        train.aggregate_fn=geometric_mean_aggregate_fn"""
    ],
    "flux-full": [
        """train flux ppo use_lora=False train.learning_rate=1e-5 mixed_precision=bf16 num_checkpoint_limit=1 num_epochs=1
        max_sequence_length=0"""
    ],
    "flux-judge": [
        """train flux ppo train.reward_fn='{"consistency_score": 1, "golden_rewards:redness": 0}'
        train.reward_fn_kwargs='{"consistency_score": {"base_url": "{judge}", "model": "judge"}}'
        test.reward_fn='{"consistency_score": 1, "grid_layout": 1}' sample.merge_lora=True
        test.reward_fn_kwargs='{"grid_layout": {"base_url": "{judge}", "model": "judge"}}'"""
    ],
    "kontext-judge": [
        """train kontext nft train.decay_type=2 train.nft_beta=0.5 train.beta=0.05 speed.offload_vae=True
        train.reward_fn='{"consistency_for_editing": 1}'
        train.reward_fn_kwargs='{"consistency_for_editing": {"base_url": "{judge}", "model": "judge"}}'"""
    ],
    "qwen-guidance": [
        "train qwen ppo sample.guidance_scale=4 'sample.negative_prompt= ' num_epochs=1 test.at_start=True"
    ],
    "score": [
        # The untrained toy judge answers most questions with other words than Yes and No.
        SCORE + " --model {inputs}/models/judge --theme 'a red circle' --reasons",
        SCORE + " --server {judge} --model judge --reasons",
        SCORE + " --server {judge} --model judge --instruction 'make it blue'",
    ],
    "data": [
        BUILD + " --sets_only --output {out}/sets",
        BUILD + " --rankings {inputs}/ranked.jsonl --output {out}/people",
        BUILD + " --server {judge} --model judge --reasons --output {out}/scores",
        "paco-reward build-dataset --editing {inputs}/edits.jsonl --output {out}/edits --test_share 0.3",
    ],
    "judge": [
        BUILD + " --rankings {inputs}/ranked.jsonl --output {out}/data",
        """paco-reward train config/toy_reward_lora.yaml model_name_or_path={inputs}/models/judge dataset_dir={out}/data
        dataset=consistency_reward_train output_dir={out}/lora max_steps=12 per_device_train_batch_size=4
        learning_rate=0.01 logging_steps=1 preprocessing_num_workers=1 plot_loss=false seed=1""",
        f"""paco-reward accuracy {TRAINED} --dataset_dir {{out}}/data --dataset consistency_reward_train
        --output {{out}}/accuracy.json""",
        f"{SCORE} {TRAINED} --theme 'a red circle'",
        f"{SCORE} {TRAINED} --instruction 'make it blue'",
        "paco-reward export --base {inputs}/models/judge --adapter {out}/lora --output {out}/merged",
    ],
    "rank": [
        "rank eval_vllm.py --server {judge} --model judge --dataset_dir {inputs}/bench --results_dir {out}/results",
        "rank eval.py --scorer histogram --dataset_dir {inputs}/bench --results_dir {out}/results",
        "rank print_eval_table.py --results_dir {out}/results --output_file {out}/table.txt --print_std",
    ],
}
QUICK = ("flux-ppo", "flux-ppo-2", "flux-ppo-resumed", "qwen-nft", "kontext-guard", "score", "data")
# Folders that must hold the same on either side: to continue from a checkpoint changes nothing.
SAME = tuple(
    (f"{name}/run/{part}", f"{name}-resumed/run/{part}")
    for name in ("flux-ppo", "flux-nft", "qwen-ppo")
    for part in ("checkpoints/epoch_0001", "checkpoints/epoch_0002", "eval/epoch_0002")
)


@dataclass(frozen=True)
class Command:
    """A script or ``-m module`` with its arguments, started in ``folder`` of the repository."""

    folder: str
    argv: tuple[str, ...]
    processes: int = 1
    prints: bool = False  # the numbers on standard output are a result; exit status 1 says that some are missing


def command(text: str, **places: object) -> Command:
    """A command of a case, with ``{inputs}``, ``{out}`` and ``{judge}`` replaced by ``places``."""
    words = []
    for word in shlex.split(text.removeprefix("2x ")):
        for key, value in places.items():
            word = word.replace("{" + key + "}", str(value))
        words.append(word)
    verb, *words = words
    if verb == "paco-reward":
        return Command("PaCo-Reward", ("-m", "paco_reward.cli", *words), prints=words[0] in ("score", "export"))
    if verb == "rank":
        return Command("PaCo-Reward/evaluation/Consistency_Rank", tuple(words))
    name, model_options = MODELS[words.pop(0)]
    objective = OBJECTIVES[words.pop(0) if verb == "train" else "ppo"]
    changes = [word for word in words if not word.startswith("--")] if verb == "train" else []
    given = [word for part in (TRAIN, model_options, objective) for word in shlex.split(part)]
    options = dict(word.split("=", 1) for word in [*given, *changes])
    for key, value in options.items():
        for place, path in places.items():
            options[key] = value = value.replace("{" + place + "}", str(path))
    argv = [f"scripts/{verb}.py", "--config", f"config/grpo.py:{name}"]
    argv += [f"--config.{key}={value}" for key, value in options.items()]
    return Command("PaCo-GRPO", (*argv, *([] if verb == "train" else words)), 1 + text.startswith("2x "))


# --- inputs -----------------------------------------------------------------------------------------------------------


def write_inputs(folder: Path, models: Path) -> None:
    """Everything the cases read: models, rewards, prompts, pictures, rankings, a small benchmark."""
    for model in ("flux", "flux_kontext", "qwen_image_edit", "judge"):
        shutil.copytree(models / model, folder / "models" / model)
    (folder / "golden_rewards.py").write_text(REWARDS)
    for split, count in (("train", 4), ("test", 3)):
        for i in range(count):
            _picture(folder / "edits" / f"{split}{i}.png", i, 32, 64 if i % 2 else 32)
        edits = [{"prompt": f"make {split} {i} red", "image": f"{split}{i}.png"} for i in range(count)]
        grids = [
            {"prompt": f"1x2 grid. [LEFT]: a{i}. [RIGHT]: b{split}.", "category": str(i % 2)} for i in range(count)
        ]
        _rows(folder / "edits" / f"{split}_metadata.jsonl", edits)
        _rows(folder / "prompts" / f"{split}_metadata.jsonl", grids)
    for i, color in enumerate(("red", "red", "blue", "green")):
        _picture(folder / "images" / f"{i}.png", i, 64, 64, color)
    _write_pairs(folder)
    _write_bench(folder / "bench" / "ConsistencyRank-Bench")


def _write_pairs(folder: Path, generations: int = 3) -> None:
    prompts, ranked, edits = [], [], []
    for p in range(6):
        panels = "[TOP-LEFT]: a. [TOP-RIGHT]: b. [BOTTOM-LEFT]: c. [BOTTOM-RIGHT]: d."
        prompts.append({"idx": f"p{p}", "prompt": f"A 2x2 grid of thing {p}. {panels}"})
        for g in range(generations):
            _picture(folder / "grids" / f"p{p}_{g}.png", 10 * p + g, 96, 96)
        for panel in range(3):
            names = [f"{(p + panel + g) % generations:02d}/{panel + 1}.png" for g in range(generations)]
            row = {"folder": f"p{p}", "ref_image": f"{p % generations:02d}/{panel}.png", "comp_images": sorted(names)}
            ranked.append(row | {"rank_images": names})
    for i in range(12):
        files = {"source": f"edited/{i}a.png", "edited": f"edited/{i}b.png"}
        for number, file in enumerate(files.values()):
            _picture(folder / file, 200 + 100 * number + i, 48, 48)
        labels = {"consistency": "Yes" if i % 2 else "No", "follows": "Yes" if i % 3 else "No"}
        edits.append({"instruction": f"make thing {i} blue"} | files | labels)
    _rows(folder / "grids.jsonl", prompts)
    _rows(folder / "ranked.jsonl", ranked)
    _rows(folder / "edits.jsonl", edits)


def _write_bench(folder: Path) -> None:
    ranks, prompts = [], []
    names = ["c0.png", "c1.png", "c2.png"]
    for i in range(5):
        for seed, name in enumerate(["ref.png", *names]):
            _picture(folder / "images" / f"{i:04d}" / name, 500 + 10 * i + seed)
        row = {"folder": f"{i:04d}", "ref_image": "ref.png", "comp_images": names}
        ranks.append(row | {"rank_images": names[i % 3 :] + names[: i % 3]})
        criteria = {"style": {"a": "Same colors.", "b": ""}, "identity": {"c": "Same shape."}}
        prompts.append({"idx": i, "prompt": "p", "criteria": criteria})
    _rows(folder / "consistency_full_rank.jsonl", ranks)
    _rows(folder / "prompt_data.jsonl", prompts)


def _picture(path: Path, seed: int, height: int = 32, width: int = 32, disk: str | None = None) -> None:
    """A smooth random image, or a disk on white."""
    import numpy as np
    from PIL import Image, ImageDraw

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    if disk:
        image = Image.new("RGB", (width, height), "white")
        ImageDraw.Draw(image).ellipse((12 + 2 * seed, 14, 50, 48 + seed), fill=disk)
    image.save(path)


def _rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- a judge ----------------------------------------------------------------------------------------------------------


def judge_answer(request: dict) -> dict:
    """A chat completion: log-probabilities, an order of the candidates, or a reason."""
    from PIL import Image

    digest, images = hashlib.sha256(), 0
    for content in (message["content"] for message in request["messages"]):
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "image_url":
                data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
                image = Image.open(io.BytesIO(data)).convert("RGB")
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
