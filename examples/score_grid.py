"""How consistent are the panels of one grid? Computes what the reward ``consistency_score`` does.

python examples/score_grid.py grid.png "A 1x2 grid layout of one fox. [LEFT]: It eats. [RIGHT]: It runs."

Ask a server (``--server http://127.0.0.1:8000``; ``--model`` if it serves several) or load a judge
here (``--model``).
"""

import argparse

from PIL import Image

from paco_judge import Judge
from paco_judge.grid import index_pairs, split_image, split_prompt

parser = argparse.ArgumentParser(description="P(Yes) of every two panels, and their mean.")
parser.add_argument("image")
parser.add_argument("prompt")
parser.add_argument("--server")
parser.add_argument("--model", help="folder or hub name; with --server the served name")
arguments = parser.parse_args()

if arguments.server:
    judge = Judge(arguments.server, arguments.model)
else:
    judge = Judge.from_pretrained(arguments.model or "X-GenGroup/PaCo-Reward-7B")
grid = split_prompt(arguments.prompt)
panels = split_image(Image.open(arguments.image), grid.rows, grid.cols)
numbers = index_pairs(len(panels))
first = [panels[i] for i, _ in numbers]
second = [panels[j] for _, j in numbers]
scores = judge.score(first, second, theme=grid.theme)
for (i, j), score in zip(numbers, scores, strict=True):
    print(f"panels {i + 1} and {j + 1}: {score}")
if None not in scores:
    print(f"consistency_score = {sum(scores) / len(scores):.3f}")
