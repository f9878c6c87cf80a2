"""Download the weights of pickscore: ``python paco_grpo/rewards/pickscore_scores.py``."""

import os
import sys

if __name__ == "__main__":
    # Run as a script, this folder is on the path, and its modules would hide the standard library's.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    from paco_grpo.rewards.clip import PICKSCORE, pickscore
    from paco_grpo.rewards.download import download

    download(PICKSCORE, pickscore().load)
