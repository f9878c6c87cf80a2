"""What test_alone.py runs in an environment with PaCo-GRPO alone.

    python alone_grpo.py prepare FOLDER      tiny CLIP weights, a judge that answers every question
    python alone_grpo.py score FOLDER PORT   one score of each reward
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tiny_pipelines import save_clip, save_open_clip
from transformers import AutoModelForImageTextToText, AutoProcessor

from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item

TOY_JUDGE = Path("../quickstart/models/judge")


def prepare(folder: Path) -> None:
    save_clip(folder / "clip")
    save_open_clip(folder / "open_clip")
    # All tokens but Yes and No have the logit 0, so that one of those two is always the most probable token.
    judge, processor = AutoModelForImageTextToText.from_pretrained(TOY_JUDGE), AutoProcessor.from_pretrained(TOY_JUDGE)
    yes, no = processor.tokenizer.convert_tokens_to_ids(["Yes", "No"])
    old, new = judge.lm_head.weight.detach(), torch.zeros_like(judge.lm_head.weight)
    new[yes], new[no] = old[yes], -old[yes]
    judge.lm_head.weight = torch.nn.Parameter(new)
    judge.config.tie_word_embeddings = judge.config.get_text_config().tie_word_embeddings = False
    for part in (judge, processor):
        part.save_pretrained(folder / "judge")


def score(folder: Path, port: str) -> None:
    image = Image.new("RGB", (512, 256), "white")
    ImageDraw.Draw(image).text((60, 60), "HELLO", fill="black", font=ImageFont.load_default(90))
    item = Item(0, 'A 1x2 grid layout of "HELLO". [LEFT]:The first half. [RIGHT]:The other half.', image=image)
    served, open_clip = {"port": int(port), "model": "Paco-Reward-7B"}, {"model": f"local-dir:{folder}/open_clip"}
    arguments = {
        "consistency_score": served,
        "consistency_for_editing": served,
        "grid_layout": {"port": int(port), "model": "Gemma-3-4B-IT"},
        "subfig_clipT": open_clip,
        "subfig_clipI": open_clip,
        "pickscore": {"model": f"{folder}/clip", "processor": f"{folder}/clip"},
        "clipscore": {"model": f"{folder}/clip"},
        "ocr": {},
        "jpeg_compressibility": {},
        "jpeg_incompressibility": {},
    }
    for name, reward in build_rewards(dict.fromkeys(arguments, 1.0), arguments).items():
        reward.check()
        (value,) = reward([image], [item])
        assert np.isfinite(value), name
        print(f"{name} {value:.3f}")


if __name__ == "__main__":
    {"prepare": prepare, "score": score}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
