"""A small set of grids, a model that judges by color, and a way to run build-dataset."""

import argparse
import base64
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image

from paco_reward.pairing.build import build as _build
from paco_reward.pairing.command import add_parser, check
from paco_toy.world import (
    CHARACTERS,
    COLOURS,
    VIEWS,
    assemble_grid,
    grid_prompt,
    random_jitter,
    render_panel,
    to_uint8,
)

GENERATIONS = 4
SIDE = 24
PROMPTS = 5
SETS = 3


def grid(characters, views, seed: int) -> Image.Image:
    """A 2x2 grid of the shapes world."""
    rng = np.random.default_rng(seed)
    panels = []
    for character, view in zip(characters, views, strict=True):
        panels.append(render_panel(CHARACTERS[character], view, SIDE, random_jitter(rng)))
    return Image.fromarray(to_uint8(assemble_grid(panels)))


def of_colour(character: int, colour: str) -> int:
    """The number of a character that differs in its color alone."""
    style = CHARACTERS[character].style
    shape = CHARACTERS[character].shape
    looks = [(c.style, c.shape, c.colour) for c in CHARACTERS]
    return looks.index((style, shape, colour))


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """grids/<idx>_<generation>.png and metadata.jsonl; each generation of a prompt has a color."""
    folder = tmp_path_factory.mktemp("grids")
    (folder / "grids").mkdir()
    lines = []
    for number in range(PROMPTS):
        views = [VIEWS[v] for v in np.random.default_rng(number).permutation(len(VIEWS))[:4]]
        first = 13 * number % 35  # filled ones, whose color is clear
        for generation in range(GENERATIONS):
            character = of_colour(first, list(COLOURS)[(generation + number) % len(COLOURS)])
            image = grid([character] * 4, views, 100 * number + generation)
            image.save(folder / "grids" / f"p{number}_{generation}.png")
        lines.append({"idx": f"p{number}", "prompt": grid_prompt(CHARACTERS[first], views)})
    write_lines(folder / "metadata.jsonl", lines)
    return folder


def build(world: Path | None, output: Path, **more: object) -> dict:
    """build-dataset with options by name, on the world's grids; None and False leave one out.

    Returns the numbers of its only name.
    """
    (stats,) = build_all(world, output, **more).values()
    return stats


def build_all(world: Path | None, output: Path, **more: object) -> dict:
    """``build`` that returns the numbers of every name."""
    options = {"output": output, "test_share": 0.25, "sets_per_prompt": SETS}
    if world is not None:
        options |= {"grids": world / "grids", "metadata": world / "metadata.jsonl"}
    options |= more
    arguments = ["build-dataset"]
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None and value is not False:
            arguments += [f"--{name}", str(value)]
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(arguments)
    check(args)
    return _build(args)


def write_lines(file: Path, lines: list) -> Path:
    """``lines`` as texts, or as values to be written in JSON."""
    with file.open("w") as text:
        for line in lines:
            text.write(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False))
            text.write("\n")
    return file


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def colour_of(url: str) -> np.ndarray:
    """Mean color of all pixels that are not white, (3,) in [0, 1]."""
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))).convert("RGB")
    pixels = np.asarray(image, dtype=float).reshape(-1, 3) / 255
    shown = pixels[pixels.min(axis=1) < 0.7]
    return shown.mean(axis=0) if len(shown) else np.ones(3)


def colour_model(number: int, request: dict):
    """Scores and reasons by color alone."""
    urls = []
    for part in request["messages"][0]["content"]:
        if part["type"] == "image_url":
            urls.append(part["image_url"]["url"])
    distance = np.abs(colour_of(urls[0]) - colour_of(urls[1])).max()
    if request.get("logprobs"):
        return 200, fake_judge.answer(float(np.clip(1 - 2 * distance, 0.01, 0.99))), {}
    text = "**No**, the two shapes have colours that differ."
    if distance < 0.12:
        text = "**Yes**, the two shapes have one colour."
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}, {}


def rows(output: Path, name: str) -> list[dict]:
    return json.loads((output / f"{name}.json").read_text())


def all_bytes(output: Path) -> dict[str, str]:
    """Hash of every file outside work/, by name."""
    hashes = {}
    for file in output.rglob("*"):
        if file.is_file() and file.parent != output / "work":
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            hashes[str(file.relative_to(output))] = digest
    return hashes


def rank_like_people(output: Path) -> Path:
    """sets.jsonl with rank_images, as an annotator returns it: the reference's generation first."""
    lines = read_lines(output / "sets.jsonl")
    for line in lines:
        generation = line["ref_image"].split("/")[0]
        names = sorted(line["comp_images"])
        same = [name for name in names if name.startswith(generation)]
        others = [name for name in names if not name.startswith(generation)]
        line["rank_images"] = same + others
    return write_lines(output / "ranked.jsonl", lines)
