# ruff: noqa: N999  (a published name: users run this file)
"""Download the weights of subfig_clipT and subfig_clipI: ``python paco_grpo/rewards/subfig_clipT.py``."""

import os
import sys

if __name__ == "__main__":
    # Run as a script, this folder is on the path, and its modules would hide the standard library's.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    from paco_grpo.rewards.clip import OPEN_CLIP, OPEN_CLIP_WEIGHTS, open_clip_model
    from paco_grpo.rewards.download import download

    download(f"{OPEN_CLIP} {OPEN_CLIP_WEIGHTS}", open_clip_model(OPEN_CLIP, OPEN_CLIP_WEIGHTS, "cpu").load)
