"""What the benchmarks share."""

import importlib.util
import sys
from pathlib import Path

EVALUATION = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("paco_judge") is None:  # an environment with vLLM and nothing of ours
    sys.path.append(str(EVALUATION.parent / "judge"))
needed = {name: name for name in ("aiohttp", "numpy", "pandas", "scipy", "tqdm")} | {
    "PIL": "pillow"
}
if missing := [
    package for module, package in needed.items() if importlib.util.find_spec(module) is None
]:
    sys.exit(
        f"error: {sys.executable} lacks {', '.join(missing)}; run: pip install -r {EVALUATION}/requirements.txt"
    )
