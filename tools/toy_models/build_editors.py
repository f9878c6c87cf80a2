"""Builds a toy editor from a seed, in about 25 (Kontext) or 45 minutes.

Next to the folder, in --out's parent: build_NAME.log (what was printed) and quality.json (measured by the oracle, under
"editors"). The parent also holds the base model that an editor starts from (flux/). Times are wall-clock, so another machine
gives other weights of the same kind.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from toy_models.build_models import forget_paths
from toy_models.quality import contact_sheet, editor_quality, record_quality

logger = logging.getLogger(__name__)

# Name -> the module that builds it. A module has
#   new(models, seed) -> pipeline              untrained as an editor; models: folder that holds the other bases
#   load(folder) -> pipeline                   in float32
#   train(pipe, seconds, seed, longer=False, snapshot=f)   in place; f() now and then
#   IMAGE_SIDES                                pixels of the images that it edits well; each is measured
#   draw(pipe, references, instructions, seeds, steps) -> images, by diffusers' own pipeline
EDITORS = {"flux_kontext": "toy_models.kontext", "qwen_image_edit": "toy_models.qwen_edit"}


def editor_module(name: str) -> ModuleType:
    """The module that builds an editor; imported on use."""
    return importlib.import_module(EDITORS[name])


def build(name: str, out: Path, minutes: float, seed: int, longer: float | None = None) -> None:
    """Trains an editor, or the one in ``out`` for ``longer`` minutes more, and replaces the contents of ``out``."""
    module = editor_module(name)
    snapshots = out.parent / f".{out.name}-snapshot"
    pipe = module.load(out) if longer else module.new(out.parent, seed)
    module.train(pipe, 60 * (longer or minutes), seed, bool(longer), lambda: pipe.save_pretrained(snapshots))
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as workplace:
        made = Path(workplace) / "made"
        pipe.to(torch.bfloat16).save_pretrained(made)
        forget_paths(made)
        if out.exists():
            out.rename(Path(workplace) / "replaced")
        made.rename(out)
    shutil.rmtree(snapshots, ignore_errors=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--editor", choices=EDITORS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="its folder, next to the other bases")
    parser.add_argument("--minutes", type=float, default=25.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--continue", dest="longer", type=float, metavar="MINUTES",
        help="train the editor in --out longer, with a new learning rate schedule",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="only measure the editor in --out")
    parser.add_argument("--count", type=int, default=192, help="edits to measure on, at each size")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="also draw some edits into one picture")
    arguments = parser.parse_args()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    name, out = arguments.editor, arguments.out.resolve()
    if not arguments.measure:
        out.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(out.parent / f"build_{name}.log"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers)
    torch.set_num_threads(1)
    if not arguments.measure:
        leg = f"--continue {arguments.longer}" if arguments.longer else f"--minutes {arguments.minutes}"
        logger.info("build_editors --editor %s --seed %d %s", name, arguments.seed, leg)
        build(name, out, arguments.minutes, arguments.seed, arguments.longer)
    module = editor_module(name)
    pipe = module.load(out)
    quality = editor_quality(module, pipe, arguments.seed, arguments.count, module.IMAGE_SIDES)
    if not arguments.measure:
        record_quality(out.parent / "quality.json", {"editors": {name: quality}})
    if arguments.sheet:
        contact_sheet(module, pipe, arguments.seed, module.IMAGE_SIDES[-1]).save(arguments.sheet)


if __name__ == "__main__":
    main()
