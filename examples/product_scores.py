"""Can a judge tell your product from others? It is asked about your photos what training asks.

python examples/product_scores.py PHOTOS OTHERS --server http://127.0.0.1:8000
python examples/product_scores.py PHOTOS OTHERS                      # CLIP-I: no judge is needed

Each photo of the product, cut to its box (boxes.json, see product.py), is compared with every other
one and with the photos of other products in OTHERS, which should be as similar as you can find.
"""

import argparse
from pathlib import Path

import numpy as np
from product import boxes_of

from paco_grpo.item import Item
from paco_grpo.rewards.registry import build_rewards
from paco_judge.images import read_image

parser = argparse.ArgumentParser(description="Scores of a product's photos and of other photos.")
parser.add_argument("photos", type=Path)
parser.add_argument("others", type=Path)
parser.add_argument("--server", help="address of a judge; without it, the reward reference_clipI")
parser.add_argument("--model", help="served name of the judge")
parser.add_argument("--question", default="same_object", help="name of a question or text file")
arguments = parser.parse_args()

name, kwargs = "reference_clipI", {}
if arguments.server:
    name = "consistency_for_editing"
    kwargs = {
        "base_url": arguments.server,
        "model": arguments.model,
        "question": arguments.question,
    }
reward = build_rewards({name: 1.0}, {name: kwargs})[name]
reward.check()

boxes = boxes_of(arguments.photos)
items = []
for number, (path, box) in enumerate(boxes.items()):
    row = {"reference_boxes": [box]}
    items.append(Item(number, "", metadata=row, references=(read_image(path),)))
scores = {}
for kind, paths in (("same", boxes), ("other", boxes_of(arguments.others))):
    answers = []
    for path in paths:
        compared = [item for item, own in zip(items, boxes, strict=True) if own != path]
        answers.append(reward([read_image(path)] * len(compared), compared))
    of_kind = np.concatenate(answers)
    scores[kind] = of_kind[~np.isnan(of_kind)]  # NaN: the judge did not answer
    print(f"{kind} product: {len(scores[kind])} pairs, mean {scores[kind].mean():.3f}")
ahead = np.subtract.outer(scores["same"], scores["other"])
print(f"same above other: {np.mean((ahead > 0) + (ahead == 0) / 2):.3f} of all comparisons")
