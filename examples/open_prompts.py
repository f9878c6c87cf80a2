"""Write a prompt set of your own, here one whose prompts leave the animal's color open.

python examples/open_prompts.py PaCo-GRPO/dataset/foxes
cd PaCo-GRPO && bash scripts/single_node/train_flux.sh t2is --config.dataset=dataset/foxes

``"open": true`` lets the reward ``between_images`` and the measure w − b compare the images of a prompt.
"""

import argparse
import json
from pathlib import Path

ANIMALS = {"train": ["fox", "owl", "cat", "bear", "horse", "frog"], "test": ["hare", "goat"]}
PANELS = ["It sleeps.", "It eats.", "It runs.", "It looks at the moon."]
LABELS = ["[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]"]

parser = argparse.ArgumentParser(description="Write train_metadata.jsonl and test_metadata.jsonl.")
parser.add_argument("folder", type=Path)
folder = parser.parse_args().folder

folder.mkdir(parents=True, exist_ok=True)
for split, animals in ANIMALS.items():
    lines = []
    for animal in animals:
        theme = f"A 2x2 grid layout depicting one {animal}, watercolor. Its color is up to you."
        panels = [f"{label}: {text}" for label, text in zip(LABELS, PANELS, strict=True)]
        prompt = " ".join([theme, *panels])
        lines.append(json.dumps({"prompt": prompt, "open": True}) + "\n")
    (folder / f"{split}_metadata.jsonl").write_text("".join(lines), encoding="utf-8")
