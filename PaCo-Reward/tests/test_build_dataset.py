"""paco-reward build-dataset, whole: from generated grids to training data, resumed after a kill."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from pairing_tools import (
    GENERATIONS,
    PROMPTS,
    SETS,
    accepted,
    all_bytes,
    colour_model,
    completion,
    fake_judge,
    grid,
    of_colour,
    options,
    prompt_lines,
    rank_like_people,
    rows,
)
from PIL import Image

from paco_judge.grid import split_prompt
from paco_judge.questions import theme_question
from paco_reward.cli import main
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.build import build
from paco_reward.pairing.chat import Server
from paco_reward.pairing.journal import Journal
from paco_reward.pairing.options import Options
from paco_toy.world import CHARACTERS, COLOURS, VIEWS

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
