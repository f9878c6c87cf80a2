"""Can a judge tell your product from others? It is asked about your photos what training asks.

python examples/product_scores.py PHOTOS OTHERS --server http://127.0.0.1:8000
python examples/product_scores.py PHOTOS OTHERS                      # CLIP-I: no judge is needed

Each photo of the product, cut to its box (boxes.json, see product.py), is compared with every other
one and with the photos of other products in OTHERS, which should be as similar as you can find.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from product import boxes_of

from paco_grpo.item import Item
from paco_grpo.rewards.registry import build_rewards
from paco_judge.errors import UserError, run_command
from paco_judge.images import read_image

parser = argparse.ArgumentParser(description="Scores of a product's photos and of other photos.")
parser.add_argument("photos", type=Path)
parser.add_argument("others", type=Path)
parser.add_argument("--server", help="address of a judge; without it, the reward reference_clipI")
parser.add_argument("--model", help="served name of the judge")
parser.add_argument("--question", default="same_object", help="name of a question or text file")


def compare(photos, others, server, model, question):
    """Print the mean score of each kind of pair, and how often the first is above the second."""
    name = "reference_clipI"
    kwargs = {}
    if server:
        name = "consistency_for_editing"
        kwargs = {"base_url": server, "model": model, "question": question}
    reward = build_rewards({name: 1.0}, {name: kwargs})[name]
    reward.check()
    boxes = boxes_of(photos)
    if len(boxes) < 2:
        raise UserError(f"{photos} has one photo, which is compared with none: two are needed")
    items = []
    for number, (path, box) in enumerate(boxes.items()):
        row = {"reference_boxes": [box]}
        items.append(Item(number, "", metadata=row, references=(read_image(path),)))
    scores = []
    for kind, paths in (("same", boxes), ("other", boxes_of(others))):
        answers = []
        for path in paths:
            compared = [item for item, photo in zip(items, boxes, strict=True) if photo != path]
            answers.append(reward([read_image(path)] * len(compared), compared))
        of_kind = np.concatenate(answers)
        of_kind = of_kind[~np.isnan(of_kind)]  # the judge did not answer
        print(f"{kind} product: {len(of_kind)} pairs, mean {of_kind.mean():.3f}")
        scores.append(of_kind)
    ahead = np.subtract.outer(*scores)
    print(f"same above other: {np.mean((ahead > 0) + (ahead == 0) / 2):.3f} of all comparisons")


if __name__ == "__main__":
    sys.exit(run_command(lambda: compare(**vars(parser.parse_args())), OSError))
