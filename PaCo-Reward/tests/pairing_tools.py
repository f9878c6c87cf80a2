"""Grids whose prompts, panels and answers of the judge all differ, and a way to run build-dataset."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image

from paco_judge.files import read_json_lines as read_lines
from paco_judge.images import content_digest
from paco_reward.cli import _parser, check_build
from paco_reward.pairing.build import build as _build

THEMES = ("one fox", "one fox", "two boats", "a tall mill", "three owls", "an old car")
PANELS = 3
GENERATIONS = 3
SIDE = 32


def noise(*seed: int, width: int = SIDE) -> Image.Image:
    """A random picture that is like no other."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, width * 4 // SIDE, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, SIDE), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """grids/<idx>/<generation>.png of 1x3 panels, and metadata.jsonl. p0 and p1 share a theme."""
    folder = tmp_path_factory.mktemp("world")
    lines = []
    for number, theme in enumerate(THEMES):
        panels = [f"[{side}]: scene {number} {side}" for side in ("LEFT", "MIDDLE", "RIGHT")]
        prompt = f"a 1x3 grid of {theme}. {'. '.join(panels)}"
        lines.append({"idx": f"p{number}", "prompt": prompt})
        (folder / "grids" / f"p{number}").mkdir(parents=True)
        for generation in range(GENERATIONS):
            grid = noise(number, generation, width=PANELS * SIDE)
            grid.save(folder / "grids" / f"p{number}" / f"{generation}.png")
    write_lines(folder / "metadata.jsonl", lines)
    return folder


def build(world: Path | None, output: Path, **more: object) -> dict:
    """build-dataset with options by name, on the world's grids; None and False leave one out.

    Returns the numbers of its only name.
    """
    options = {"output": output, "test_share": 0.4, "sets_per_prompt": 4}
    if world is not None:
        options |= {"grids": world / "grids", "metadata": world / "metadata.jsonl"}
    words = ["build-dataset"]
    for name, value in (options | more).items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    args = _parser().parse_args(words)
    check_build(args)
    (stats,) = _build(args).values()
    return stats


def write_lines(file: Path, lines: list) -> Path:
    """``lines`` as texts, or as values to be written in JSON."""
    with file.open("w") as text:
        for line in lines:
            text.write(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False))
            text.write("\n")
    return file


def digest(image: Image.Image) -> str:
    return content_digest(image).hex()


def p_yes_of(*parts: str) -> float:
    """A judge's answer to images by their digests, in their order, a question, a model."""
    return 0.02 + zlib.crc32("|".join(parts).encode()) % 96_000 / 100_000


def judge_model(number: int, request: dict):
    """Scores of their own for each request, and reasons that name the second image."""
    shown, question = fake_judge.request_content(request)
    images = list(map(digest, shown))
    if request.get("logprobs"):
        return 200, fake_judge.answer(p_yes_of(*images, question, request["model"])), {}
    verdict = "Yes" if "The verdict that was given is: Yes" in question else "No"
    other = {"Yes": "No", "No": "Yes"}[verdict]
    words = " ".join(["colour", "differs"] * (int(images[0][:2], 16) % 4))
    answer = f"**{verdict}**, the shape {words} of {images[1][:6]} is why, and not {other}."
    return 200, fake_judge.written(answer), {}


def rows(output: Path, name: str) -> list[dict]:
    return json.loads((output / f"{name}.json").read_text())


def all_bytes(output: Path) -> dict[Path, bytes]:
    """Every file outside work/, by name."""
    contents = {}
    for file in output.rglob("*"):
        if file.is_file() and file.parent != output / "work":
            contents[file.relative_to(output)] = file.read_bytes()
    return contents


def rank_like_people(output: Path) -> Path:
    """sets.jsonl with rank_images, as an annotator returns it: the reference's generation first."""
    lines = read_lines(output / "sets.jsonl")
    for line in lines:
        same = Path(line["ref_image"]).parent
        line["rank_images"] = sorted(
            line["comp_images"], key=lambda name: Path(name).parent != same
        )
    return write_lines(output / "ranked.jsonl", lines)
