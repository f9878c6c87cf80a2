"""One score of each reward, in test_alone.py's environment: alone_grpo.py PORT CLIP OPEN_CLIP."""

import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item

port, clip, open_clip = sys.argv[1:]
judge = {"port": int(port), "model": "Paco-Reward-7B"}
image = Image.new("RGB", (512, 256), "white")
ImageDraw.Draw(image).text((60, 60), "HELLO", fill="black", font=ImageFont.load_default(90))
prompt = 'A 1x2 grid layout of "HELLO". [LEFT]:The first half. [RIGHT]:The other half.'
item = Item(0, prompt, references=(image,))
clips = {"model": open_clip}
arguments = {
    "consistency_score": judge,
    "consistency_for_editing": judge,
    "grid_layout": judge | {"model": "Gemma-3-4B-IT"},
    "subfig_clipT": clips,
    "subfig_clipI": clips,
    "pickscore": {"model": clip, "processor": clip},
    "clipscore": {"model": clip},
    "ocr": {},
    "jpeg_compressibility": {},
    "jpeg_incompressibility": {},
}
for name, reward in build_rewards(dict.fromkeys(arguments, 1.0), arguments).items():
    reward.check()
    (value,) = reward([image], [item])
    assert np.isfinite(value), name
    print(f"{name} {value:.3f}")
