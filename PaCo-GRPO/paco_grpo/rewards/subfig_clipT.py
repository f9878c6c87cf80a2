# ruff: noqa: N999  (a published name: users run this file)
"""Download the weights of subfig_clipT and subfig_clipI: ``python paco_grpo/rewards/subfig_clipT.py``."""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would hide the standard library's
    from paco_grpo.rewards.clip import OPEN_CLIP, OPEN_CLIP_WEIGHTS, download, open_clip_model

    download(f"{OPEN_CLIP} {OPEN_CLIP_WEIGHTS}", open_clip_model(OPEN_CLIP, OPEN_CLIP_WEIGHTS, "cpu").load)
