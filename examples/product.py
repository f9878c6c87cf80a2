"""Write a prompt set of one product: your photos of it, and scenes that should show it.

python examples/product.py PHOTOS scenes.txt PaCo-GRPO/dataset/product --references 2

PHOTOS is a folder of .jpg, .png or .webp files. Its boxes.json may have a box around the product:
left, top, right and bottom in pixels, {"front.jpg": [120, 80, 860, 940]}. A line of scenes.txt is
an instruction, such as "Show this shoe on wet asphalt". Every fifth scene is for evaluations.
Not every editor takes several references (docs/real-weights.md#models).
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from paco_grpo.data.prompts import load_prompts
from paco_judge.errors import UserError, run_command
from paco_judge.images import FORMATS, read_image

SUFFIXES = {".jpg", *(f".{name.lower()}" for name in FORMATS)}


def boxes_of(photos):
    """{file: box in shares of width and height, or None} of the photos in a folder."""
    file = photos / "boxes.json"
    in_pixels = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    boxes = {}
    for path in sorted(photos.glob("[!.]*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        image = read_image(path)  # upright: a camera may have stored it turned
        width, height = image.size
        box = in_pixels.pop(path.name, None)
        if box is not None:
            left, top, right, bottom = box if len(box) == 4 else [0] * 4
            # Shares of width and height would be a box of one pixel.
            if not (0 <= left <= right - 2 <= width - 2 and 0 <= top <= bottom - 2 <= height - 2):
                raise UserError(
                    f"{file}: {box} is no box in {path.name}, which has {width}x{height} pixels: "
                    "left, top, right and bottom in pixels are needed"
                )
            box = [left / width, top / height, right / width, bottom / height]
        boxes[path] = box
    if in_pixels:
        raise UserError(f"{file} names {min(in_pixels)!r}, which is no photo in {photos}")
    if not boxes:
        raise UserError(f"{photos} has no photos: {', '.join(sorted(SUFFIXES))}")
    return boxes


def write(photos, scenes, folder, references):
    """Each scene with each photo first, and the next ones after it."""
    boxes = boxes_of(photos)
    lines = []
    for line in scenes.read_text(encoding="utf-8").splitlines():
        if line.strip():
            lines.append(line.strip())
    if not 1 <= references <= len(boxes) or len(lines) < 5:
        raise UserError(
            f"{len(lines)} scenes and {len(boxes)} photos, but at least five scenes and "
            f"{references} photos are needed"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in boxes:
        shutil.copy(path, folder)
    in_turn = [*boxes, *boxes]
    for split in ("train", "test"):
        rows = ""
        for number, scene in enumerate(lines):
            if (number % 5 == 4) != (split == "test"):
                continue
            for first in range(len(boxes)):
                row = {"prompt": scene, "images": [], "reference_boxes": []}
                for path in in_turn[first : first + references]:
                    row["images"].append(path.name)
                    row["reference_boxes"].append(boxes[path])
                rows += f"{json.dumps(row)}\n"
        (folder / f"{split}_metadata.jsonl").write_text(rows, encoding="utf-8")
        print(f"{split}: {len(load_prompts(folder, split, 'geneval_image'))} items")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a prompt set of one product.")
    parser.add_argument("photos", type=Path)
    parser.add_argument("scenes", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--references", type=int, default=1, help="photos of an item (default 1)")
    sys.exit(run_command(lambda: write(**vars(parser.parse_args())), OSError, ValueError))
