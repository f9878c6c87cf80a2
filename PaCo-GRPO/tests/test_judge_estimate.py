"""The judge's part of scripts/estimate.py: questions, tokens, FLOPs, and the training's wait."""

import math

import numpy as np
import pytest
import torch
from named import load
from PIL import Image
from test_estimate import run_on_fake
from tiny_run import write_edits, write_prompts
from transformers import Qwen2VLImageProcessor

from paco_grpo.architectures import pipeline_of
from paco_grpo.estimate import judge
from paco_grpo.estimate.judge import Judge, Questions, judge_part, questions_of_epoch
from paco_grpo.training.state import make_plan
from paco_judge.files import read_json_lines, write_json_lines
from paco_judge.questions import Pair

# Qwen2.5-VL-7B's published shapes: 28 blocks of query and output, key and value, and three matrices
# of the feed-forward part; biases and norms are below 0.01 %.
LANGUAGE = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
VISION = 32 * (4 * 1280**2 + 3 * 1280 * 3420)  # of its encoder
MERGER = 5120**2 + 5120 * 3584


@pytest.fixture(scope="module")
def judges():
    """By number of copies."""
    return {copies: Judge(copies) for copies in (1, 2, math.inf)}


@pytest.mark.parametrize("size", [(256, 256), (341, 512), (170, 30), (20, 24), (3000, 1400)])
def test_an_image_has_the_tokens_that_the_real_processor_gives_it(size):
    image = Image.new("RGB", size)
    limits = {"shortest_edge": 3136, "longest_edge": 2_097_152}
    processed = Qwen2VLImageProcessor(size=limits)(images=[image], return_tensors="np")
    assert judge.image_tokens(image) == np.prod(processed["image_grid_thw"]) / 4


@pytest.mark.parametrize(("copies", "kept", "encoded"), [(1, 3, 4), (2, 1, 8), (math.inf, 0, 12)])
def test_what_is_kept_of_a_grid(judges, copies, kept, encoded):
    """The six pairs of a 2x2 grid begin with its first panel three times, with its second twice.

    The first panel is shown three times, as is each other one; with two copies, its third question
    finds what the first has left.
    """
    panels = [Image.new("RGB", (256, 256)) for _ in range(4)]  # of 9 · 9 tokens
    pairs = []
    for first in range(4):
        pairs += [Pair(panels[first], panels[second], "ab c") for second in range(first + 1, 4)]
    questions, tokens, kept_tokens, encoded_tokens, flops = judges[copies].cost(pairs)
    assert questions == 6
    words = len(judges[copies]._tokenizer("ab c").input_ids)
    assert tokens == 6 * (14 + 2 * (81 + 2) + words + 5)
    assert kept_tokens == kept * 96  # of 97, in blocks of 16
    assert encoded_tokens == encoded * 81
    expected = 2 * LANGUAGE * (tokens - kept_tokens) + 2 * (4 * VISION + MERGER) * encoded_tokens
    assert flops == pytest.approx(expected, rel=1e-3)


def test_the_second_question_about_an_edit_begins_with_both_images(judges):
    reference = Image.new("RGB", (112, 140))  # 4 · 5 tokens
    edits = [Image.new("RGB", (112, 168)) for _ in range(2)]  # 4 · 6
    pairs = [Pair(reference, edit, text) for edit in edits for text in ("is it", "was it so")]
    _, _, kept, encoded, _ = judges[1].cost(pairs)
    # 14 + 22 + 26 of the second and fourth, 14 + 22 of the third, in blocks of 16.
    assert (kept, encoded) == (48 + 32 + 48, 20 + 24 + 24)


def options_of(name, folder, **changes):
    options = {"dataset": str(folder), "sample.unique_sample_num_per_epoch": "6"}
    options |= {"sample.num_images_per_prompt": "4", "train.resolution": "224"}
    return load(name, *(options | changes).items())


def test_an_epoch_asks_what_its_rewards_ask(tmp_path):
    """1x2 grids: a question about each image, and three prompts of eight compare its four images,
    each with all others.
    """
    options = options_of("t2is_variety", write_prompts(tmp_path, train=8, first_open=3))
    plan = make_plan(options, 2, 1)
    of_epoch = questions_of_epoch(options, plan, 1)
    single, compared = of_epoch["consistency_score"], of_epoch["between_images"]
    assert (single.count, compared.count) == (6 * 4, pytest.approx(6 * 3 / 8 * 6))
    assert (single.after_sampling, compared.after_sampling) == (False, True)
    # Panels of 112 x 224 px have 4 · 8 tokens.
    assert single.encoded_tokens == 24 * 2 * 32
    assert "pickscore" not in of_epoch


def test_prompt_sets_ask_by_their_shares(tmp_path):
    """Three quarters of the prompts are of the set that asks."""
    folder = str(write_prompts(tmp_path, train=5))
    sets = {
        "asked": {"folder": folder, "share": 3},
        "other": {"folder": folder, "share": 1, "reward_fn": {"pickscore": 1.0}},
    }
    changes = {"datasets": str(sets), "sample.unique_sample_num_per_epoch": "8"}
    options = options_of("t2is", "", **changes)
    of_epoch = questions_of_epoch(options, make_plan(options, 1, 2), 1)
    assert of_epoch["consistency_score"].count == pytest.approx(6 * 4)


def test_images_of_an_edit_share_its_reference(tmp_path):
    options = options_of("kontext_editing", write_edits(tmp_path), prompt_fn="geneval_image")
    (asked,) = questions_of_epoch(options, make_plan(options, 1, 2), 1).values()
    assert asked.count == 6 * 4 * 2
    one_of_each = options_of(
        "kontext_editing",
        tmp_path,
        prompt_fn="geneval_image",
        **{"sample.num_images_per_prompt": "1"},
    )
    (alone,) = questions_of_epoch(one_of_each, make_plan(one_of_each, 1, 2), 1).values()
    assert asked.encoded_tokens < 4 * alone.encoded_tokens
    file = tmp_path / "train_metadata.jsonl"
    rows = [row | {"reference_boxes": [[0.25, 0, 0.75, 1]]} for row in read_json_lines(file)]
    write_json_lines(file, rows)
    (cut,) = questions_of_epoch(options, make_plan(options, 1, 2), 1).values()
    (cut_alone,) = questions_of_epoch(one_of_each, make_plan(one_of_each, 1, 2), 1).values()
    assert cut.encoded_tokens < 4 * cut_alone.encoded_tokens
    assert cut.encoded_tokens != asked.encoded_tokens  # the part, beside the whole


@pytest.mark.parametrize(("work", "compared"), [(2.0, 0.0), (7.0, 3.0), (19.0, 5.5)])
def test_the_wait_is_that_of_a_queue(work, compared):
    """Beside a judge that takes up one batch after the other."""
    sampling, batches, speed = 8.0, 5, 1e15
    free = 0.0  # when the judge has answered all so far
    for number in range(1, batches + 1):
        free = max(free, number * sampling / batches) + work / batches
    asked = [
        Questions(1, 1, 0, 1, flops=work * speed, after_sampling=False),
        Questions(1, 1, 0, 1, flops=compared * speed, after_sampling=True),
    ]
    waiting = judge.waiting_seconds(asked, sampling, batches, speed)
    assert waiting == pytest.approx(free - sampling + compared)


def test_the_report_adds_the_wait_to_the_epoch(tmp_path):
    options = options_of("t2is_variety", write_prompts(tmp_path, train=8, first_open=3))
    phases = {"denoise": 3.0, "decode": 1.0, "train": 2.5}
    plan = make_plan(options, 3, 1)
    of_epoch = questions_of_epoch(options, plan, 2)
    speed = 2 * judge.SHARE * 0.5e12
    waiting = judge.waiting_seconds(of_epoch.values(), 4.0, plan.rollout_batches, speed)
    total = 6.5 + waiting
    part = judge_part(options, phases, 3, 2, 0.5)
    assert part[1:] == (pytest.approx(waiting), 2, {})
    assert f"an epoch takes {total:.1f} s: {plan.samples / total:.2f} images" in part.lines[-1]
    assert judge_part(options_of("ocr", tmp_path), phases, 3, 2, 0.5) == ([], 0.0, 0, {})


def test_a_judge_beside_the_training_waits_for_it_and_takes_its_memory(tmp_path):
    options = options_of("t2is_variety", write_prompts(tmp_path, train=8, first_open=3))
    asked = questions_of_epoch(options, make_plan(options, 1, 1), math.inf).values()
    part = judge_part(options, {"denoise": 3.0, "train": 2.5}, 1, 0, 0.5)
    work = sum(of_reward.flops for of_reward in asked)
    assert part.waiting == pytest.approx(work / (judge.SHARE * 0.5e12)) and part.gpus == 0
    linear = LANGUAGE + VISION + MERGER
    others = 2 * 152_064 * 3584 + 1280 * 3 * 2 * 14**2  # embeddings, head, patches
    expected = (1 / 2 + 1 / 64 + 1 / 4096) * linear + 2 * others
    assert part.beside["judge"] == pytest.approx(expected, rel=2e-3)
    tokens = max(of_reward.tokens / of_reward.count for of_reward in asked)
    of_token = 28 * 2 * 2 * 512 + 4 * 2 * 18_944
    largest = 2 * 3584 * 18_944
    assert part.beside["its questions"] == pytest.approx(32 * tokens * of_token + largest, rel=1e-3)


def test_a_token_of_the_judge_takes_what_its_forward_does():
    """On fake tensors, with three of its layers and no images."""
    model = pipeline_of("Qwen/Qwen-Image", torch.bfloat16).text_encoder
    language = model.model.language_model
    language.layers = language.layers[:3]
    model.config.text_config.num_hidden_layers = 3

    def ask(model, _):
        ids = torch.ones(2, 700, dtype=torch.int64)
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True, logits_to_keep=1)

    peak = run_on_fake(model, ask, (1,)).peak
    of_token = judge.bytes_of_token(model.config.text_config)
    assert peak == pytest.approx(2 * 700 * of_token, rel=0.2)


def test_without_its_prompts_a_run_has_no_judge_in_the_report(tmp_path):
    part = judge_part(options_of("t2is", tmp_path / "none"), {"train": 2.5}, 1, 2, 0.5)
    (line,) = part.lines
    assert line.startswith("the judge is left out: ") and part[1:] == (0.0, 0, {})
