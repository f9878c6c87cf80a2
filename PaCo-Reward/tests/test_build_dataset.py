"""`paco-reward build-dataset`: from grids and rankings to data sets that the trainer accepts."""

import base64
import hashlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_judge.grid import split_prompt
from paco_judge.questions import theme_question
from paco_reward import preflight
from paco_reward.cli import main
from paco_reward.errors import PacoRewardError
from paco_reward.pairing import duplicates, split, wording
from paco_reward.pairing.build import build
from paco_reward.pairing.chat import Server
from paco_reward.pairing.journal import Journal
from paco_reward.pairing.options import Options
from paco_reward.pairing.pairs import labels_of_ranking, pairs_of_rankings
from paco_reward.pairing.records import LabelledPair, PromptItem, Ranking
from paco_reward.pairing.sets import candidate_sets
from paco_reward.pairing.sources import read_prompts
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


# --- whole builds ---


def test_scores_of_a_judge_become_a_balanced_label_only_data_set(world, tmp_path):
    with fake_judge.FakeJudge(colour_model) as server:
        stats = build(options(world, tmp_path / "out", server=Server(server.url, "PaCo-Reward-7B")))
        asked = len(server.requests)
    assert stats["counts"]["sub_figures"] == PROMPTS * GENERATIONS * 4
    assert stats["counts"]["sets"] == PROMPTS * SETS
    assert 0 < asked <= PROMPTS * SETS * 4
    themes = {}
    for part in ("train", "test"):
        name = f"consistency_reward_{part}"
        examples = accepted(tmp_path / "out", name)
        numbers = stats["datasets"][name]
        assert numbers["yes"] == numbers["no"] == len(examples) / 2 > 0
        assert {example.answer for example in examples} == {"Yes", "No"}
        themes[part] = {example.prompt for example in examples}
        for example in examples:  # each generation of a prompt has a colour of its own
            assert (len({image.parts[-2] for image in example.images}) == 1) == (example.answer == "Yes")
    assert not themes["train"] & themes["test"]
    known = {theme_question(split_prompt(line["prompt"]).theme) for line in prompt_lines(world)}
    assert {prompt.removeprefix("<image><image>") for prompt in themes["train"] | themes["test"]} == known
    assert Image.open(tmp_path / "out" / "samples.png").size[0] > 600
    assert json.loads((tmp_path / "out" / "stats.json").read_text()) == stats


def test_orders_and_reasons_over_a_server_and_every_byte_by_seed(world, tmp_path):
    made = []
    with fake_judge.FakeJudge(colour_model) as server:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            setting = {"server": Server(server.url, "paco-reward-7b"), "rank_by": "order", "reasons": True}
            stats = build(options(world, tmp_path / name, seed=seed, **setting))
            made.append(all_bytes(tmp_path / name))
    assert made[0] == made[1]
    assert made[0]["consistency_reward_cot_train.json"] != made[2]["consistency_reward_cot_train.json"]
    for example in accepted(tmp_path / "a", "consistency_reward_cot_train"):
        assert example.answer.startswith(("Yes. The two shapes", "No. The two shapes"))
    assert stats["counts"]["reasons_kept"] == sum(n["pairs"] for n in stats["datasets"].values())


def test_contradicting_and_empty_reasons_are_dropped_counted_and_balance_is_kept(world, tmp_path):
    def stubborn(number, request):
        if request.get("logprobs"):
            return colour_model(number, request)
        digest = hashlib.sha256(json.dumps(request).encode()).digest()[0] % 4
        given = "Yes" if "given is: Yes" in request["messages"][0]["content"][-1]["text"] else "No"
        other = "No" if given == "Yes" else "Yes"
        answers = [f"{given}. As one can see in both of them.", f"{other}, they are not at all so.", given, "Perhaps."]
        return 200, completion(answers[digest]), {}

    with fake_judge.FakeJudge(stubborn) as server:
        stats = build(options(world, tmp_path, server=Server(server.url, "PaCo-Reward-7B"), reasons=True, test_share=0))
    counts, numbers = stats["counts"], stats["datasets"]["consistency_reward_cot_train"]
    assert counts["reasons_contradicting"] > 0 and counts["reasons_unreadable"] > 0
    assert numbers["yes"] == numbers["no"] > 0
    assert {row["messages"][1]["content"][:4] for row in rows(tmp_path, "consistency_reward_cot_train")} == {
        "Yes.",
        "No. ",
    }


def rank_like_people(output: Path) -> Path:
    """sets.jsonl with rank_images: what an annotator hands back (here: the own generation first)."""
    lines = [json.loads(line) for line in (output / "sets.jsonl").read_text().splitlines()]
    for line in lines:
        own = line["ref_image"].split("/")[0]
        line["rank_images"] = sorted(line["comp_images"], key=lambda name: (not name.startswith(own), name))
    file = output / "ranked.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_sets_for_people_then_their_rankings(world, tmp_path, capsys):
    common = ["--grids", str(world / "grids"), "--metadata", str(world / "metadata.jsonl"), "--output", str(tmp_path)]
    assert main(["build-dataset", *common, "--sets_only"]) == 0
    assert "rank_images (best first)" in capsys.readouterr().out
    assert not (tmp_path / "dataset_info.json").exists()
    ranked = rank_like_people(tmp_path)
    assert (
        main(["build-dataset", *common, "--rankings", str(ranked), "--test_share", "0.25", "--sets_per_prompt", "3"])
        == 0
    )
    assert "consistency_reward_train" in capsys.readouterr().out
    for row in rows(tmp_path, "consistency_reward_train"):
        generations = {Path(image).parts[2] for image in row["images"]}
        assert (len(generations) == 1) == (row["messages"][1]["content"] == "Yes")


def test_sub_figures_already_cut_in_the_benchmarks_form(world, tmp_path):
    build(options(world, tmp_path / "first", sets_only=True))
    ranked = rank_like_people(tmp_path / "first")
    cut = {
        "grids": None,
        "sub_figures": tmp_path / "first" / "images",
        "metadata": tmp_path / "first" / "prompt_data.jsonl",
    }
    build(options(world, tmp_path / "second", rankings=ranked))
    build(options(world, tmp_path / "third", rankings=ranked, **cut))
    assert all_bytes(tmp_path / "third") == all_bytes(tmp_path / "second")
    flat = tmp_path / "bench" / "images" / "0007"
    flat.mkdir(parents=True)
    for name, seed, character in (("ref", 1, 3), ("a", 2, 3), ("b", 3, 90)):
        grid([character] * 4, VIEWS[seed : seed + 4], seed).save(flat / f"{name}.png")
    (tmp_path / "bench" / "prompts.jsonl").write_text('{"idx": "0007", "prompt": "Two views of a star."}\n')
    row = {
        "folder": "0007",
        "ref_image": "ref.png",
        "comp_images": ["b.png", "a.png"],
        "rank_images": ["a.png", "b.png"],
    }
    (tmp_path / "bench" / "ranks.jsonl").write_text(json.dumps(row) + "\n")
    stats = build(
        Options(
            output=tmp_path / "fourth",
            sub_figures=flat.parent,
            metadata=tmp_path / "bench" / "prompts.jsonl",
            rankings=tmp_path / "bench" / "ranks.jsonl",
        )
    )
    assert stats["datasets"] == {"consistency_reward_train": {"pairs": 2, "yes": 1, "no": 1, "images": 3, "groups": 1}}


def test_edits_by_label_and_by_judge(tmp_path):
    lines = []
    for number in range(12):
        for name, seed in (("source", 0), ("edited", 1 + number % 2)):
            views = [VIEWS[(number + k) % len(VIEWS)] for k in range(4)]
            character = of_colour(7 * number % len(CHARACTERS), list(COLOURS)[seed])
            grid([character] * 4, views, 10 * number + seed).save(tmp_path / f"{name}{number}.png")
        label = "Yes" if number % 2 else "No"
        line = {"source": f"source{number}.png", "edited": f"edited{number}.png", "instruction": f"make it {number}"}
        lines.append(line | {"consistency": label, "follows": label != "Yes"})
    file = tmp_path / "edits.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stats = build(Options(output=tmp_path / "out", editing=file, test_share=0.3, duplicate_bits=0))
    assert sum(numbers["pairs"] for numbers in stats["datasets"].values()) > 12
    sides = {}
    for part in ("train", "test"):
        examples = accepted(tmp_path / "out", f"sharegpt_editing_{part}")
        sides[part] = {image for example in examples for image in example.images}
        for question in ("follow the instruction", "stay consistent"):
            answers = Counter(example.answer for example in examples if question in example.prompt)
            assert answers["Yes"] == answers["No"]
        for example in examples:
            number = int(example.prompt.split("make it ")[1].split('"')[0])
            consistent = "stay consistent" in example.prompt
            assert example.answer == ("Yes" if consistent == bool(number % 2) else "No")
    assert not sides["train"] & sides["test"]

    bare = tmp_path / "bare.jsonl"
    bare.write_text(
        "".join(json.dumps({k: line[k] for k in ("source", "edited", "instruction")}) + "\n" for line in lines)
    )
    with pytest.raises(PacoRewardError, match=r"line 1 has no label; add consistency or follows .* --server"):
        build(Options(output=tmp_path / "none", editing=bare))

    def by_number(number, request):
        text = request["messages"][0]["content"][-1]["text"]
        edit = int(text.split("make it ")[1].split('"')[0])
        return 200, fake_judge.answer(0.5 if edit == 3 else 0.9 if edit % 2 else 0.1), {}

    with fake_judge.FakeJudge(by_number) as server:
        setting = {"server": Server(server.url, "PaCo-Reward-7B"), "test_share": 0, "duplicate_bits": 0}
        stats = build(Options(output=tmp_path / "judged", editing=bare, **setting))
        asked = len(server.requests)
        build(Options(output=tmp_path / "judged", editing=bare, **setting))
        assert len(server.requests) == asked == 24
    assert stats["counts"]["editing_unclear"] == 2
    assert stats["datasets"]["sharegpt_editing_train"]["yes"] == stats["datasets"]["sharegpt_editing_train"]["no"] == 10


# --- resuming ---

_RUN = "import sys; from paco_reward.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_killed_run_continues_with_nothing_lost_or_doubled(world, tmp_path):
    with fake_judge.FakeJudge(colour_model) as server:
        setting = {"server": Server(server.url, "PaCo-Reward-7B"), "rank_by": "order", "reasons": True}
        build(options(world, tmp_path / "whole", **setting))
        needed = len(server.requests)
    with fake_judge.FakeJudge(colour_model, delay_s=0.03) as server:
        command = ["build-dataset", "--grids", str(world / "grids"), "--metadata", str(world / "metadata.jsonl")]
        command += ["--server", server.url, "--rank_by", "order", "--reasons", "--test_share", "0.25"]
        command += ["--output", str(tmp_path / "killed"), "--max_concurrency", "2", "--sets_per_prompt", str(SETS)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for enough in (8, 24):
            process = subprocess.Popen([sys.executable, "-c", _RUN, *command], env=environment)
            deadline = time.monotonic() + 120
            while len(server.requests) < enough and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
        journal = tmp_path / "killed" / "work" / "rankings.jsonl"
        kept = len(journal.read_bytes().splitlines())
        with journal.open("ab") as file:
            file.write(b'{"key": "cut off by a ki')
        assert kept >= 8
        assert main(command) == 0
        # Each kill costs at most the answers that were under way.
        assert needed <= len(server.requests) <= needed + 2 * 2 * 2
        assert all_bytes(tmp_path / "killed") == all_bytes(tmp_path / "whole")
        done = len(server.requests)
        assert main(command) == 0
        assert len(server.requests) == done


def test_a_server_that_dies_is_said_and_its_answers_are_kept(world, tmp_path):
    def dies(number, request):
        return colour_model(number, request) if number <= 9 else (404, {"error": {"message": "model unloaded"}}, {})

    with fake_judge.FakeJudge(dies) as server:
        setting = options(world, tmp_path, server=Server(server.url, "PaCo-Reward-7B", None, 4), rank_by="order")
        with pytest.raises(
            PacoRewardError, match=r"stopped answering \(HTTP 404: model unloaded\).*run the same command"
        ):
            build(setting)
        assert len(Journal(tmp_path / "work" / "rankings.jsonl").values) >= 5


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


# --- properties ---

rankings_of_n = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.permutations(range(n)),
        st.integers(1, 5),
        st.integers(1, 5),
        st.none() | st.lists(st.floats(0, 1), min_size=n, max_size=n),
    )
)


@given(rankings_of_n, st.floats(0, 1))
def test_the_rule_labels_the_best_yes_and_the_worst_no(drawn, min_gap):
    order, yes_ranks, no_ranks, scores = drawn
    names = tuple(str(i) for i in order)
    scores = None if scores is None else tuple(sorted(scores, reverse=True))
    labels = labels_of_ranking(Ranking("f", "ref", names, scores), yes_ranks, no_ranks, min_gap)
    if len(names) < yes_ranks + no_ranks:
        assert labels is None
        return
    if scores is not None and scores[yes_ranks - 1] - scores[len(names) - no_ranks] < min_gap:
        assert labels is None
        return
    assert [name for name, label in labels if label] == list(names[:yes_ranks])
    assert [name for name, label in labels if not label] == list(names[len(names) - no_ranks :])


@settings(max_examples=60)
@given(st.lists(st.permutations(range(5)).map(lambda p: (p[0], p[1:])), min_size=1, max_size=30), st.integers(0, 99))
def test_each_two_images_are_paired_once_with_the_label_of_the_majority(drawn, seed):
    item = PromptItem("f", "p", "theme", 1, 1, "here", "g")
    rankings = [Ranking("f", f"{ref}.png", tuple(f"{i}.png" for i in order)) for ref, order in drawn]
    counts = Counter()
    made = pairs_of_rankings(rankings, {"f": item}, yes_ranks=1, no_ranks=2, min_gap=0, seed=seed, counts=counts)
    votes = {}
    for ref, order in drawn:
        for other, vote in ((order[0], 1), (order[-1], -1), (order[-2], -1)):
            key = frozenset((f"images/f/{ref}.png", f"images/f/{other}.png"))
            votes[key] = votes.get(key, 0) + vote
    expected = {key: vote > 0 for key, vote in votes.items() if vote}
    assert {frozenset((pair.first, pair.second)): pair.label for pair in made} == expected
    assert len(made) == len(expected) and counts["pairs_disputed"] == len(votes) - len(expected)


@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.integers(1, 40), st.integers(0, 9)
)
def test_sets_compare_one_panel_of_different_generations(generations, rows_, cols, candidates, wanted, seed):
    from paco_reward.pairing.records import Generation

    made = tuple(
        Generation((Path("x"),), tuple(f"{g:02d}/{p}.png" for p in range(rows_ * cols)), True)
        for g in range(generations)
    )
    item = PromptItem("f", "p", "t", rows_, cols, "here", "g", made)
    formed = candidate_sets(item, candidates, wanted, seed)
    panels = rows_ * cols
    expected = min(wanted, generations * panels * (panels - 1)) if generations > 1 else 0
    assert len(formed) == len({(s.ref_image, s.comp_images) for s in formed}) == expected
    assert formed == candidate_sets(item, candidates, wanted, seed)
    for one in formed:
        shown = [name.split("/") for name in one.comp_images]
        assert len({g for g, _ in shown}) == len(shown) == min(candidates, generations)
        assert len({p for _, p in shown}) == 1
        own, panel = one.ref_image.split("/")
        assert own in {g for g, _ in shown} and panel != shown[0][1]


labelled = st.builds(
    LabelledPair,
    first=st.integers(0, 30).map(str),
    second=st.integers(31, 60).map(str),
    question=st.sampled_from(["q", "r"]),
    label=st.booleans(),
    kind=st.sampled_from(["theme", "editing_consistency", "editing_instruction"]),
    group=st.integers(0, 6).map(str),
)


@given(st.lists(labelled, max_size=60, unique_by=lambda p: (p.first, p.second, p.question, p.kind)), st.integers(0, 9))
def test_balance_is_exact_takes_no_more_than_it_must_and_ignores_the_order(pairs, seed):
    kept = split.balanced(pairs, seed)
    for kind in {pair.kind for pair in pairs}:
        before = Counter(pair.label for pair in pairs if pair.kind == kind)
        after = Counter(pair.label for pair in kept if pair.kind == kind)
        assert after[True] == after[False] == min(before[True], before[False])
    assert set(kept) == set(split.balanced(pairs[::-1], seed))
    assert kept == [pair for pair in pairs if pair in set(kept)]


@given(st.sets(st.integers(0, 200).map(str)), st.floats(0, 0.9), st.integers(0, 99))
def test_the_split_has_its_share_and_leaves_both_sides_something(groups, share, seed):
    testing = split.test_groups(groups, share, seed)
    assert testing <= groups and testing == split.test_groups(sorted(groups), share, seed)
    if share > 0 and len(groups) > 1:
        assert 1 <= len(testing) < len(groups)
        assert abs(len(testing) - share * len(groups)) <= 1
    else:
        assert not testing


@given(st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=3), max_size=25))
def test_groups_share_no_key(keys):
    groups = split.connected([sorted(own) for own in keys])
    for i, own in enumerate(keys):
        for j, other in enumerate(keys):
            if own & other:
                assert groups[i] == groups[j]
    for group in set(groups):  # and no larger than they must be: each is one connected whole
        members = [i for i, g in enumerate(groups) if g == group]
        reached = {members[0]}
        while True:
            grown = {i for i in members if any(keys[i] & keys[j] for j in reached)} | reached
            if grown == reached:
                break
            reached = grown
        assert reached == set(members)


def test_near_duplicates_are_told_from_other_colours_and_shapes(tmp_path):
    # Grids: a single centred shape is symmetric, and the signs of frequencies that are zero are noise.
    def pixels(character, views):
        return assemble_grid([render_panel(CHARACTERS[character], view, 48) for view in views])

    views = [VIEWS[number] for number in (1, 3, 7, 5)]
    base = pixels(0, views)
    shown = {
        "a": base,
        "b": base + np.random.default_rng(0).normal(scale=0.01, size=base.shape),
        "c": pixels(of_colour(0, "blue"), views),
        "d": pixels(0, views[::-1]),
        "e": pixels(3, views),
    }
    for name, image in shown.items():
        Image.fromarray(to_uint8(image)).save(tmp_path / f"{name}.png")
    leader = duplicates.leaders([f"{name}.png" for name in shown], tmp_path, 6)
    assert leader == {"a.png": "a.png", "b.png": "a.png", "c.png": "c.png", "d.png": "d.png", "e.png": "e.png"}


def test_pairs_that_say_nothing_new_are_left_out():
    def pair(first, second, label=True, kind="theme", question="q"):
        return LabelledPair(first, second, question, label, kind, "g")

    leader = {"a": "a", "a2": "a", "b": "b", "c": "c", "c2": "c"}
    counts = Counter()
    kept = duplicates.without_duplicates(
        [
            pair("a", "b"),
            pair("b", "a2"),  # again, turned round
            pair("a", "a2"),  # a copy
            pair("a", "c"),
            pair("c2", "a", label=False),  # disputes the one before
            pair("a", "a2", kind="editing_consistency"),
            pair("a2", "a", kind="editing_consistency"),  # again
            pair("a", "a2", kind="editing_consistency", question="another instruction"),
        ],
        leader,
        counts,
    )
    assert [(p.first, p.second, p.kind, p.question) for p in kept] == [
        ("a", "b", "theme", "q"),
        ("a", "a2", "editing_consistency", "q"),
        ("a", "a2", "editing_consistency", "another instruction"),
    ]
    assert counts == {"repeated": 2, "near_duplicate": 1, "repeated_disputed": 2}


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("Yes. Both show a red star.", ("Yes", "Both show a red star.")),
        ("**No**, the hair\n differs in colour.", ("No", "The hair differs in colour.")),
        ('"yes" - the same fox in both.', ("Yes", "The same fox in both.")),
        ("Yes", None),
        ("Yesterday both were the same.", None),
        ("Nothing differs between the two.", None),
        ("I think yes, since both are red.", None),
        ("Yes. Look at <image> and its colours.", None),
        ("", None),
    ],
)
def test_reading_reasons(answer, read):
    assert wording.read_reason(answer) == read


@given(st.permutations(range(5)), st.sampled_from(["{}", "The order is {}.", "1 > 2? No: {}", "Best first:\n\n{}\n"]))
def test_reading_orders(order, around):
    text = around.format(" > ".join(str(i + 1) for i in order))
    assert wording.read_order(text, 5) == tuple(order)
    assert wording.read_order(text, 4) is None


@settings(max_examples=20)
@given(st.lists(st.text('aé\n\r\u2028"', min_size=1), unique=True, max_size=6), st.data())
def test_a_journal_keeps_every_whole_answer_wherever_it_is_cut(tmp_path_factory, texts, data):
    file = tmp_path_factory.mktemp("journal") / "j.jsonl"
    journal = Journal(file)
    for text in texts:
        journal.add(text, text * 2)
        journal.add(text, "a second answer")
    raw = file.read_bytes() if texts else b""
    cut = data.draw(st.integers(0, len(raw)))
    file.write_bytes(raw[:cut])
    again = Journal(file)
    assert list(again.values) == texts[: raw[:cut].count(b"\n")]
    for text in texts:
        again.add(text, text * 2)
    assert file.read_bytes() == raw and Journal(file).values == {text: text * 2 for text in texts}


def test_a_damaged_journal_names_its_line(tmp_path):
    (tmp_path / "j.jsonl").write_text('{"key": "a", "value": 1}\nnot json\n')
    with pytest.raises(PacoRewardError, match=r"j.jsonl line 2 is damaged"):
        Journal(tmp_path / "j.jsonl")
