"""Builds a toy editor from a seed: `python -m paco_toy.build_editors --editor flux_kontext --out quickstart/models/flux_kontext`.

Beside the folder, in --out's parent: build_NAME.log (what was printed) and quality.json (what the oracle measured, under
"editors"). The parent also holds the base models that an editor starts from (flux/).

Times are wall-clock, so another machine gives other weights of the same kind. `--continue 10` trains the editor that is in
the folder for 10 more minutes with a learning rate that starts afresh; `--measure` only measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from paco_toy.bases.edit_quality import contact_sheet, editor_quality
from paco_toy.build_models import forget_paths

logger = logging.getLogger(__name__)

# name -> the module that builds it. A module has
#   new(models, seed) -> pipeline              untrained as an editor; models: folder that holds the other bases
#   load(folder) -> pipeline                   in float32
#   train(pipe, seconds, seed, snapshot=f)     in place; f(copy of the pipeline) now and then
#   train_longer(pipe, seconds, seed, snapshot=f)
#   IMAGE_SIDES                                pixels of the images that it edits well, each is measured
#   draw(pipe, references, instructions, seeds, steps) -> images, through diffusers' own pipeline
EDITORS = {"flux_kontext": "paco_toy.bases.kontext", "qwen_image_edit": "paco_toy.bases.qwen_edit"}


def editor_module(name: str) -> ModuleType:
    """The module that builds an editor; imported on use."""
    return importlib.import_module(EDITORS[name])


def build(name: str, out: Path, minutes: float, seed: int, longer: float | None = None) -> None:
    """Trains an editor, or trains it on for ``longer`` minutes, and puts it in place of what ``out`` held."""
    module = editor_module(name)
    snapshots = out.parent / f".{out.name}-snapshot"

    def snapshot(pipe) -> None:
        pipe.save_pretrained(snapshots)
        logger.info("snapshot in %s", snapshots)

    if longer:
        pipe = module.load(out)
        module.train_longer(pipe, 60 * longer, seed, snapshot=snapshot)
    else:
        pipe = module.new(out.parent, seed)
        module.train(pipe, 60 * minutes, seed, snapshot=snapshot)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as workplace:
        made = Path(workplace) / "made"
        pipe.to(torch.bfloat16).save_pretrained(made)
        forget_paths(made)
        if out.exists():
            out.rename(Path(workplace) / "replaced")
        made.rename(out)
    shutil.rmtree(snapshots, ignore_errors=True)


def measure(name: str, folder: Path, seed: int, count: int = 192) -> dict:
    """What an editor's folder does, by the oracle; logged."""
    module = editor_module(name)
    quality = editor_quality(module, module.load(folder), seed, count=count, sizes=module.IMAGE_SIDES)
    for size, figures in quality.items():
        logger.info("%s at %s: %s", name, size, " ".join(f"{k} {v:.3f}" for k, v in figures.items()))
    return quality


def note_quality(path: Path, name: str, figures: dict) -> None:
    """Puts figures into quality.json under "editors", and leaves the rest."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known.setdefault("editors", {})[name] = figures
    path.write_text(json.dumps(known, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--editor", choices=EDITORS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="its folder, beside the other bases")
    parser.add_argument("--minutes", type=float, default=25.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--continue", dest="longer", type=float, metavar="MINUTES", help="train what is in --out longer")
    parser.add_argument("--measure", action="store_true", help="measure what is in --out, train nothing, note nothing")
    parser.add_argument("--count", type=int, default=192, help="edits to measure on, at each size")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="also draw some edits into one picture")
    arguments = parser.parse_args()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    out: Path = arguments.out.resolve()
    if not arguments.measure:
        out.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(out.parent / f"build_{arguments.editor}.log"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers)
    torch.set_num_threads(1)
    if not arguments.measure:
        leg = f"--continue {arguments.longer}" if arguments.longer else f"--minutes {arguments.minutes}"
        logger.info("build_editors --editor %s --seed %d %s", arguments.editor, arguments.seed, leg)
        build(arguments.editor, out, arguments.minutes, arguments.seed, arguments.longer)
    quality = measure(arguments.editor, out, arguments.seed, arguments.count)
    if not arguments.measure:
        note_quality(out.parent / "quality.json", arguments.editor, quality)
    if arguments.sheet:
        module = editor_module(arguments.editor)
        contact_sheet(module, module.load(out), arguments.seed, size=module.IMAGE_SIDES[-1]).save(arguments.sheet)


if __name__ == "__main__":
    main()
