"""ConsistencyRank: metrics, items without an answer, images, and baselines."""

import shutil
import sys
from functools import partial
from itertools import combinations
from unittest.mock import Mock
from urllib.error import URLError
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from bench_tools import ContentJudge
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import example, given
from hypothesis import strategies as st
from pairing_tools import write_lines
from PIL import Image
from tiny_judge import picture
from tiny_pipelines import save_open_clip

from paco_eval import baselines
from paco_eval.rank import METRICS, PUBLISHED, make_table, rank_metrics, table_main
from paco_judge.encoders import open_clip_encoder
from paco_judge.errors import UserError
from paco_judge.questions import Pair
from paco_judge.verdict import Verdict

FEW_SCORES = st.sampled_from([0.1, 0.5, 0.55, 0.9])  # of seven candidates, some tie


def positions(scores, last_is_first):
    """Each candidate's place from 0; of a tie the first listed is first, or the last listed."""
    listed = np.arange(len(scores)) * (-1 if last_is_first else 1)
    higher = np.greater.outer(scores, scores)
    tied_before = np.equal.outer(scores, scores) & np.less.outer(listed, listed)
    return (higher | tied_before).sum(axis=0)


def tau_b(first, second):
    """Kendall's τ-b; 0 if one has no order."""
    signs = np.sign(np.subtract.outer(first, first)), np.sign(np.subtract.outer(second, second))
    norm = np.sqrt((signs[0] ** 2).sum() * (signs[1] ** 2).sum())
    return (signs[0] * signs[1]).sum() / norm if norm else 0.0


def rho(first, second):
    """Pearson's correlation of mean ranks; 0 if one has no order."""
    ranks = [(np.sign(np.subtract.outer(x, x))).sum(axis=1) for x in (first, second)]
    norm = np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum())
    return (ranks[0] * ranks[1]).sum() / norm if norm else 0.0


@given(st.lists(FEW_SCORES, min_size=2, max_size=7), st.randoms())
@example([0.9, 0.9, 0.1], None)
def test_metrics_of_random_rankings(scores, random):
    n = len(scores)
    true = np.arange(n) if random is None else np.array(random.sample(range(n), n))
    order = np.argsort(true)  # candidates, best first
    expected = {"kendalltau": tau_b(scores, -true), "spearmanr": rho(scores, -true)}
    for suffix, last_is_first in (("", False), ("_published", True)):
        place = positions(scores, last_is_first)
        expected |= {
            f"accuracy{suffix}": (place == true).mean(),
            f"footrule{suffix}": np.abs(place - true).sum(),
            f"top1{suffix}": float(place[order[0]] == 0),
            f"bottom1{suffix}": float(place[order[-1]] == n - 1),
        }
        both = expected[f"top1{suffix}"] + expected[f"bottom1{suffix}"]
        expected[f"top_bottom_mean{suffix}"] = both / 2
    predicted = np.argsort(place)  # as published
    expected["kendalltau_published"] = tau_b(predicted, order)
    expected["spearmanr_published"] = rho(predicted, order)
    expected["ties"] = sum(a == b for a, b in combinations(scores, 2))
    metrics = rank_metrics(scores, order.tolist())
    assert metrics == pytest.approx(expected, abs=1e-9)
    if random is None:
        assert metrics["accuracy"] == 1 and metrics["accuracy_published"] == pytest.approx(1 / 3)


def published_row(number, scores, **others):
    """As the paper's script writes it; its metrics are no ranking's."""
    metrics = {}
    for place, name in enumerate(PUBLISHED):
        metrics[name] = 0.1 * place + 0.01 * number
    row = {"folder": f"{number:04d}", "ref_image": "r.png", "scores": scores, "pred_rank": ["b"]}
    return row | {"comp_images": ["a", "b", "c"], "rank_images": ["a", "b", "c"]} | metrics | others


def test_results_of_the_published_script_stand_in_one_table_with_ours(rank, tmp_path, capsys):
    results = tmp_path / "results"
    assert rank(ContentJudge()) == 0
    rows = [published_row(1, [0.9, 0.9, 0.1]), published_row(2, [0.2, 0.3, 0.5])]
    write_lines(results / "theirs.jsonl", rows)
    for row in rows:
        del row["scores"], row["footrule_distance"]
    write_lines(results / "bare.jsonl", rows)

    table = make_table(results, print_std=False).set_index("model")
    assert table.loc["theirs", "items"] == 2
    for place, name in enumerate(PUBLISHED.values()):
        column = METRICS[name]
        assert table.loc["theirs", column] == pytest.approx(0.1 * place + 0.015)
        if name != "footrule_published":
            assert table.loc["bare", column] == table.loc["theirs", column]
    # Of scores .9 .9 .1 and .2 .3 .5, the true order being the listed one.
    expected = {"accuracy": 2 / 3, "top-1": 1 / 2, "footrule": 2, "rho": (3**0.5 / 2 - 1) / 2}
    for column, value in expected.items():
        assert table.loc["theirs", column] == pytest.approx(value)
    assert table.loc["theirs", "ties"] == 1
    assert table.loc["bare", [*expected, "ties", METRICS["footrule_published"]]].isna().all()

    command = ["--results_dir", str(results), "--output_file", str(tmp_path / "table.txt")]
    for options in ([], ["--print_std"], ["--output_format", "latex"]):
        assert table_main([*command, *options]) == 0
        written = (tmp_path / "table.txt").read_text()
        (line,) = (line for line in written.splitlines() if line.split()[0] == "bare")
        assert " - " in line and "nan" not in written and "NA" not in written
    for other in ({"key": ["a", "b"], "scores": [0.1, 0.2]}, published_row(3, [0.1, "x", 0.2])):
        write_lines(results / "other.jsonl", [*rows, other])
        capsys.readouterr()
        assert table_main(command) == 1
        message = capsys.readouterr().err
        assert "other.jsonl row 3" in message and message.count("\n") == 1


@pytest.mark.parametrize(("unanswered", "item"), [(2, 0), (3, 1)])
def test_an_item_without_one_of_its_answers_has_no_row(rank, capsys, unanswered, item):
    """Item 0 has three answers, and the fourth is the first of item 1."""
    judge = ContentJudge()

    def answers(pairs):
        verdicts = judge(pairs)
        verdicts[unanswered] = Verdict(None, "silence")
        return verdicts

    assert rank(answers, "--batch_size", "99") == 1
    assert f"item {item} " in capsys.readouterr().err
    assert [row["index"] for row in rank.rows] == [n for n in range(5) if n != item]


def test_images_are_unpacked_once(rank):
    """The first of the published templates asks about the criteria."""
    images = rank.data / "images"
    archive = rank.data / "images.zip"
    with ZipFile(archive, "w") as packed:
        for file in images.rglob("*.png"):
            packed.write(file, file.relative_to(rank.data))
    shutil.rmtree(images)
    judge = ContentJudge()
    assert rank(judge, "--prompt_template", "1") == 0
    assert all("the following criteria? Same" in question for question in judge.questions)
    assert len(list(images.glob("*/*.png"))) == 19
    archive.write_bytes(b"no archive")
    assert rank(ContentJudge()) == 0  # unpacked already


def test_histogram_values(rank):
    assert rank.main("--scorer", "histogram") == 0
    rank.file = rank.file.with_name("histogram.jsonl")
    assert len(rank.rows) == 5
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    mixed = Image.new("RGB", (4, 4), (255, 0, 0))
    mixed.paste((0, 0, 255), (0, 0, 1, 4))  # a quarter is blue
    (verdict,) = baselines.make_baseline("histogram")([Pair(red, mixed, "")])
    assert verdict.p_yes == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("scorer", "named"),
    [
        ("clip_i", "hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K"),
        ("dreamsim", "/.cache/dreamsim and were not downloaded: <urlopen error offline>"),
    ],
)
def test_missing_weights_of_a_baseline_are_named(scorer, named, monkeypatch, tmp_path):
    missing = RuntimeError("Failed to download")
    missing.__cause__ = LocalEntryNotFoundError("offline")
    monkeypatch.setattr("open_clip.create_model_and_transforms", Mock(side_effect=missing))
    offline = Mock(side_effect=URLError("offline"))
    monkeypatch.setitem(sys.modules, "dreamsim", Mock(dreamsim=offline))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=named):
        baselines.make_baseline(scorer)


def test_clip_i_is_the_cosine_of_image_features(tmp_path, monkeypatch):
    import open_clip

    save_open_clip(tmp_path / "clip")
    name = f"local-dir:{tmp_path}/clip"
    load = partial(open_clip_encoder, name=name, pretrained=None)
    monkeypatch.setitem(baselines.ENCODERS, "clip_i", ("open_clip_torch", load))
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    pictures = [picture(number) for number in range(4)]
    with torch.no_grad():
        images = torch.stack([preprocess(image) for image in pictures])
        features = model.eval().encode_image(images, normalize=True)
    expected = (1 + features[1:] @ features[0]) / 2
    assert len(set(expected.tolist())) == 3
    pairs = [Pair(pictures[0], other, "") for other in pictures[1:]]
    scores = [verdict.p_yes for verdict in baselines.make_baseline("clip_i", 3)(pairs)]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
