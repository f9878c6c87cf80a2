"""What the commands of golden_runs.yaml read, and call where no command of ours does it.

python golden_parts.py inputs FOLDER    tiny pipelines, prompts, pictures, and this file
python golden_parts.py options FILE     every configuration with every suffix, as tables
python golden_parts.py judge COMMAND …  runs a command beside a server that answers as a judge would
"""

import inspect
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

Score = Callable[[Sequence[Image.Image], Sequence[object]], np.ndarray]
CONFIGURATIONS = "PaCo-GRPO/config/grpo.py"


def redness(scale: float = 1.0) -> Score:
    """A reward, which varies between images of random weights."""

    def score(images: Sequence[Image.Image], items: Sequence[object]) -> np.ndarray:
        return np.array([scale * np.asarray(image)[..., 0].mean() / 255 for image in images])

    return score


def write_inputs(folder: Path) -> None:
    """Needs the tests' folders in the path."""
    import fake_judge
    from tiny_policies import FAMILIES, picture
    from tiny_run import write_edits, write_prompts

    settings = {}
    for name, family in FAMILIES.items():
        family.build().save_pretrained(folder / "families" / name)
        settings[name] = {"pretrained.model": f"INPUTS/families/{name}"}
        for option, value in family.options.items():
            group = "" if option == "max_sequence_length" else "sample."
            settings[name][group + option] = value
        if family.references:
            edits = f"INPUTS/edits{family.references}"
            settings[name] |= {"dataset": edits, "prompt_fn": "geneval_image"}
    (folder / "families.json").write_text(json.dumps(settings, indent=1))
    write_prompts(folder / "prompts", train=6, test=4, first_open=3)
    for references in (1, 2):
        write_edits(folder / f"edits{references}", references)

    lines = ["image1,image2,label,theme,reason"]
    (folder / "pictures").mkdir()
    for i in range(24):
        files = [f"pictures/{i}{side}.png" for side in "ab"]
        for side, file in enumerate(files):
            # The two pictures of a Yes differ in size.
            picture(2 * i + side * (i % 2), 32 + 8 * side).save(folder / file)
        answer = "No" if i % 2 else "Yes"
        reason = f"{answer}. Reason {i % 5} of many."
        lines.append(f"{files[0]},{files[1]},{answer},theme {i % 3},{reason}")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")
    shutil.copy(__file__, folder)
    shutil.copy(fake_judge.__file__, folder)


def write_options(file: Path) -> None:
    """Started in the root of a commit's files."""
    import yaml

    from paco_grpo.options import load_options, options_to_yaml

    names = runpy.run_path(CONFIGURATIONS, run_name="configurations")
    suffixes = tuple(names["SUFFIXES"])
    tables = {}
    for name, value in names.items():
        is_ours = inspect.isfunction(value) and value.__module__ == "configurations"
        if not is_ours or inspect.signature(value).parameters or name.endswith(suffixes):
            continue
        for suffix in ("", *suffixes):
            options = load_options(f"{CONFIGURATIONS}:{name}{suffix}")
            tables[name + suffix] = yaml.safe_load(options_to_yaml(options))
    file.write_text(json.dumps(tables))


def run_with_judge(command: Sequence[str]) -> int:
    """Returns the command's exit status; "$PORT" in it is the server's."""
    from fake_judge import FakeJudge, by_content

    models = ["PaCo-Reward-7B", "PaCo-Reward-Toy"]
    with FakeJudge(by_content, models) as judge:
        words = [word.replace('"$PORT"', str(judge.port)) for word in command]
        return subprocess.run(words, check=False).returncode


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "judge":
        sys.exit(run_with_judge(arguments))
    (write_inputs if kind == "inputs" else write_options)(Path(arguments[0]))
