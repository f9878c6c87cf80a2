"""build-dataset: what is wrong is said in one line; the real prompts; odd but right inputs."""

import json
from pathlib import Path

import numpy as np
import pytest
from pairing_tools import REAL_PROMPTS, accepted, fake_judge, grid, options, prompt_lines, rank_like_people
from PIL import Image

from paco_reward.cli import main
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.build import build
from paco_reward.pairing.chat import Server
from paco_reward.pairing.options import Options
from paco_reward.pairing.sources import read_prompts
from paco_toy.world import VIEWS

# --- what is wrong is said in one line, before anything is cut or asked ---


def problem(setting: Options) -> str:
    with pytest.raises(PacoRewardError) as caught:
        build(setting)
    message = str(caught.value)
    assert "\n" not in message
    assert not (setting.output / "images").exists()
    return message


def metadata(tmp_path: Path, *lines: object) -> dict:
    file = tmp_path / "lines.jsonl"
    file.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n" for line in lines)
    )
    return {"metadata": file}


def test_problems_of_the_input(world, tmp_path):
    out = tmp_path / "out"
    ranked = tmp_path / "ranked.jsonl"
    good = prompt_lines(world)
    ranked.write_text('{"folder": "p0", "ref_image": "00/0.png", "rank_images": ["00/1.png", "01/1.png"]}\n')

    def said(*lines: object, **more) -> str:
        return problem(
            options(world, out, **{"rankings": ranked} | (metadata(tmp_path, *lines) if lines else {}) | more)
        )

    assert "folder /no/such does not exist; point --grids" in said(grids=Path("/no/such"))
    assert "metadata /no/file cannot be read" in said(metadata=Path("/no/file"))
    assert "lines.jsonl line 2 is not JSON" in said(good[0], "{broken")
    assert "line 1 is not a JSON object but list" in said("[1]")
    assert "line 2 has no prompt" in said(good[0], {"idx": "p1"})
    short = good[0] | {"prompt": good[0]["prompt"].replace("2x2", "2x3")}
    assert "line 1 (idx p0): prompt states a 2x3 layout (6 panels) but has 4" in said(short)
    assert "idx p0 is already another prompt's" in said(good[0], good[1] | {"idx": "p0"})
    assert "idx '../up' cannot name a folder" in said(good[0] | {"idx": "../up"})
    assert "(idx p99) has no image in" in said(good[0] | {"idx": "p99"})
    assert "nowhere.png does not exist" in said(good[0] | {"image": "nowhere.png"})
    assert "contains <image>" in said(good[0] | {"prompt": good[0]["prompt"] + " <image>"})

    for row, message in (
        ({"folder": "p0", "ref_image": "00/0.png"}, "has no rank_images"),
        ({"folder": "p77", "ref_image": "a", "rank_images": ["b", "c"]}, "folder p77 is the idx of no prompt"),
        (
            {"folder": "p0", "ref_image": "00/0.png", "rank_images": ["00/1.png", "09/1.png"]},
            "image '09/1.png' is not a",
        ),
        ({"folder": "p0", "ref_image": "00/1.png", "rank_images": ["00/1.png", "01/1.png"]}, "without the reference"),
        ({"folder": "p0", "ref_image": "00/0.png", "rank_images": ["00/1.png"]}, "at least two candidates"),
    ):
        (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
        shown = said(rankings=tmp_path / "bad.jsonl")
        assert "bad.jsonl line 1" in shown and message in shown

    broken = tmp_path / "broken"
    broken.mkdir()
    whole = [(world / "grids" / f"p0_{generation}.png").read_bytes() for generation in range(2)]
    (broken / "p0_0.png").write_bytes(whole[0])
    assert "takes two generations" in said(good[0], grids=broken, rankings=None, sets_only=True)
    (broken / "p0_1.png").write_bytes(whole[1][:200])
    assert "1 of 2 images cannot be read, first:" in said(good[0], grids=broken)
    few = tmp_path / "few" / "p0" / "one"
    few.mkdir(parents=True)
    grid([1] * 4, VIEWS[:4], 0).save(few / "0.png")
    assert "2x2 = 4 panels, but generation one has 1" in said(good[0], grids=None, sub_figures=tmp_path / "few")


def test_problems_of_options_and_server(world, tmp_path):
    def said(**more) -> str:
        return problem(options(world, tmp_path / "out", **more))

    assert "labels come from rankings" in said()
    assert "exclude each other" in said(sub_figures=world)
    assert "--metadata is missing" in said(metadata=None)
    assert "nothing to build from" in said(grids=None)
    assert "give --server URL" in said(sets_only=True, reasons=True)
    assert "--test_share must lie between" in said(sets_only=True, test_share=1.0)
    assert "need more than --candidates 4" in said(sets_only=True, yes_ranks=3, no_ranks=2)
    assert "no judge answers at http://127.0.0.1:9" in said(server=Server("http://127.0.0.1:9", "m"))
    assert "not an http:// or https:// URL" in said(server=Server("nowhere", "m"))
    with fake_judge.FakeJudge(models=["other"]) as server:
        assert "it serves 'other'" in said(server=Server(server.url, "PaCo-Reward-7B"))
        assert not server.requests


def test_other_inputs_are_not_mixed_into_an_output(world, tmp_path):
    build(options(world, tmp_path / "out", sets_only=True))
    other = metadata(tmp_path, *prompt_lines(world)[:3])
    with pytest.raises(PacoRewardError, match="built from other prompts or images"):
        build(options(world, tmp_path / "out", sets_only=True, **other))


def test_help_teaches(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(["build-dataset", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in text for word in ("--sets_only", "consistency_reward_cot_train", "row-major", "best first"))


def test_a_missing_key_variable_is_named(world, tmp_path, capsys):
    arguments = ["--editing", "x.jsonl", "--output", str(tmp_path), "--server", "http://127.0.0.1:9"]
    assert main(["build-dataset", *arguments, "--api_key_env", "NO_SUCH_KEY"]) == 1
    assert "NO_SUCH_KEY" in capsys.readouterr().err


# --- the real prompts ---


def test_real_prompts_are_cut_by_their_layouts(tmp_path):
    if not REAL_PROMPTS.is_file():
        pytest.skip("shared/data absent")
    items = [json.loads(line) for line in REAL_PROMPTS.read_text().splitlines()]
    (tmp_path / "grids").mkdir()
    rng = np.random.default_rng(0)
    for item in items:
        rows_, cols = map(int, item["layout"].split("x"))
        for generation in range(2):
            pixels = rng.integers(0, 256, (rows_ * 4, cols * 4, 3), dtype=np.uint8)
            image = Image.fromarray(pixels).resize((cols * 16, rows_ * 16), Image.Resampling.NEAREST)
            image.save(tmp_path / "grids" / f"{item['idx']}-{generation}.png")
    setting = Options(
        output=tmp_path / "out", grids=tmp_path / "grids", metadata=REAL_PROMPTS, sets_only=True, candidates=2
    )
    build(setting)
    ranked = rank_like_people(tmp_path / "out")
    stats = build(Options(**{**vars(setting), "sets_only": False, "rankings": ranked, "test_share": 0.1}))
    panels = sum(int(item["layout"][0]) * int(item["layout"][2]) for item in items)
    assert stats["counts"]["sub_figures"] == 2 * panels
    assert sum(numbers["groups"] for numbers in stats["datasets"].values()) == len(items)
    for name, numbers in stats["datasets"].items():
        assert numbers["yes"] == numbers["no"] > 0
        assert all("Given two subfigures" in example.prompt for example in accepted(tmp_path / "out", name))


def test_generations_on_several_lines_as_the_trainers_evaluation_writes_them(world, tmp_path):
    first = json.loads((world / "metadata.jsonl").read_text().splitlines()[0])
    first["note"] = "a line\u2028separator"  # raw in the file: it ends no line
    lines = [first | {"idx": None, "file": f"p0_{g}.png", "seed": g} for g in range(3)]
    (item,) = read_prompts(metadata(tmp_path, *lines)["metadata"], world / "grids", True)
    assert item.folder == "0000" and len(item.generations) == 3 and item.generations[2].names[3] == "02/3.png"
