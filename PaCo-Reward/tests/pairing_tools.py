"""A small generated set of grids, a server that ranks colours, and ways to look at what build-dataset wrote."""

import base64
import hashlib
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paco_reward import preflight
from paco_reward.pairing.options import Options
from paco_toy.world import CHARACTERS, COLOURS, VIEWS, assemble_grid, grid_prompt, random_jitter, render_panel, to_uint8

HERE = Path(__file__).parent
REAL_PROMPTS = HERE.parents[2] / "shared" / "data" / "t2is_sample.jsonl"
_spec = importlib.util.spec_from_file_location(
    "paco_reward_fake_judge", HERE.parent / "judge" / "tests" / "fake_judge.py"
)
fake_judge = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_judge)

GENERATIONS, SIDE, PROMPTS, SETS = 4, 24, 5, 3


def grid(characters, views, seed: int) -> Image.Image:
    """A 2x2 grid of the shapes world."""
    rng = np.random.default_rng(seed)
    panels = [render_panel(CHARACTERS[c], v, SIDE, random_jitter(rng)) for c, v in zip(characters, views, strict=True)]
    return Image.fromarray(to_uint8(assemble_grid(panels)))


def of_colour(character: int, colour: str) -> int:
    own = CHARACTERS[character]
    return next(i for i, c in enumerate(CHARACTERS) if (c.style, c.shape, c.colour) == (own.style, own.shape, colour))


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """grids/<idx>_<generation>.png and metadata.jsonl; each generation of a prompt has a colour of its own."""
    folder = tmp_path_factory.mktemp("grids")
    (folder / "grids").mkdir()
    lines = []
    for number in range(PROMPTS):
        views = [VIEWS[v] for v in np.random.default_rng(number).permutation(len(VIEWS))[:4]]
        first = 13 * number % 35  # filled ones: their colour is plain to see
        for generation in range(GENERATIONS):
            character = of_colour(first, list(COLOURS)[(generation + number) % len(COLOURS)])
            image = grid([character] * 4, views, 100 * number + generation)
            image.save(folder / "grids" / f"p{number}_{generation}.png")
        lines.append({"idx": f"p{number}", "prompt": grid_prompt(CHARACTERS[first], views)})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def options(world: Path, output: Path, **more) -> Options:
    return Options(
        **{
            "output": output,
            "grids": world / "grids",
            "metadata": world / "metadata.jsonl",
            "test_share": 0.25,
            "sets_per_prompt": SETS,
        }
        | more
    )


# --- a vision-language model of a few lines, over HTTP ---


def colour_of(url: str) -> np.ndarray:
    """Mean colour of what is not white, (3,) in [0, 1]."""
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))).convert("RGB")
    pixels = np.asarray(image, dtype=float).reshape(-1, 3) / 255
    shown = pixels[pixels.min(axis=1) < 0.7]
    return shown.mean(axis=0) if len(shown) else np.ones(3)


def completion(text: str) -> dict:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def colour_model(number: int, request: dict):
    """Judges by colour alone: scores, orders and reasons."""
    content = request["messages"][0]["content"]
    colours = [colour_of(part["image_url"]["url"]) for part in content if part["type"] == "image_url"]
    text = content[-1]["text"]
    distances = [float(np.abs(c - colours[0]).max()) for c in colours[1:]]
    if request.get("logprobs"):
        return 200, fake_judge.answer(float(np.clip(1 - 2 * distances[0], 0.01, 0.99))), {}
    if "Rank the candidates" in text:
        return 200, completion(" > ".join(str(i + 1) for i in np.argsort(distances, kind="stable"))), {}
    same = distances[0] < 0.12
    word = "Yes" if same else "No"
    return 200, completion(f"**{word}**, the two shapes have {'one colour' if same else 'colours that differ'}."), {}


def prompt_lines(world: Path) -> list[dict]:
    return [json.loads(line) for line in (world / "metadata.jsonl").read_text().splitlines()]


def rows(output: Path, name: str) -> list[dict]:
    return json.loads((output / f"{name}.json").read_text())


def all_bytes(output: Path) -> dict[str, str]:
    """Hash of every file but those under work/, by name."""
    return {
        str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(output.rglob("*"))
        if file.is_file() and "work" not in file.relative_to(output).parts
    }


def accepted(output: Path, name: str) -> list[preflight.Example]:
    """The examples as training reads them, images checked."""
    examples = preflight.load_examples(output, name)
    preflight.check_images({image: example.place for example in examples for image in example.images})
    return examples


def rank_like_people(output: Path) -> Path:
    """sets.jsonl with rank_images: what an annotator hands back (here: the own generation first)."""
    lines = [json.loads(line) for line in (output / "sets.jsonl").read_text().splitlines()]
    for line in lines:
        own = line["ref_image"].split("/")[0]
        line["rank_images"] = sorted(line["comp_images"], key=lambda name: (not name.startswith(own), name))
    file = output / "ranked.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
