"""How consistent are two images?

python examples/score_pair.py a.png b.png --theme "one red fox in four seasons"

``--model`` takes a folder or a hub name. The published judge has 8.3 billion parameters, which are
17 GB in bfloat16 on a GPU.
"""

import argparse

from paco_judge import Judge

parser = argparse.ArgumentParser(description="P(Yes) and the judge's reasons for a pair.")
parser.add_argument("first")
parser.add_argument("second")
parser.add_argument("--theme", help="what both images are about")
parser.add_argument("--model", default="X-GenGroup/PaCo-Reward-7B")
arguments = parser.parse_args()

judge = Judge.from_pretrained(arguments.model)
score = judge.score(arguments.first, arguments.second, theme=arguments.theme)
print("no score" if score is None else f"P(Yes) = {score:.3f}")
print(judge.explain(arguments.first, arguments.second, theme=arguments.theme))
