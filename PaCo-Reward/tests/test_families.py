"""Judges of each family, the newer ones from training to the servers' scores, on random weights."""

import shutil

import numpy as np
import pytest
import torch
from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset
from llamafactory.hparams import get_train_args
from training_tools import adapter, train_config

from paco_judge.errors import UserError
from paco_judge.scorer import JudgeScorer
from paco_judge.weights import image_limits
from paco_reward import launch, overlay
from paco_reward.datasets import labeled_pairs
from paco_reward.export import export
from paco_reward.families import with_template, write_limits

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
LIMIT = 128 * 128  # pixels, of images with 150 x 150


@pytest.fixture(scope="module", params=FAMILIES)
def judge(request, tiny, judge_dir, tmp_path_factory):
    """A random judge of each family; the newer ones answer Yes or No."""
    if request.param == "qwen2_5_vl":
        return judge_dir
    folder = tmp_path_factory.mktemp("judges") / request.param
    return tiny.save_answering(tiny.save_new_judge(folder / "random", request.param), folder, 8)


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """Pairs of images that are larger than ``LIMIT``."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny.save_pairs(folder, 4, "pairs", size=150)
    return tiny.save_pairs(folder, 4, "held_out", seed=500, size=150)


def config_of(judge, data, output, **changes):
    """As a user writes it: without a template."""
    config = train_config(judge, data, output, first_token_weight=0.1, lora_target="all")
    del config["template"], config["freeze_vision_tower"]
    config |= {"image_max_pixels": LIMIT, "per_device_train_batch_size": 4}
    return config | {"max_steps": 1, "learning_rate": 0.05} | changes


def test_labels_begin_with_yes_or_no_and_inputs_are_the_servers(judge, data, tmp_path):
    """LLaMA-Factory's data against the processor of an export: prompts, first labels, pixels."""
    overlay.install()
    from llamafactory.train.sft import workflow

    config = with_template(config_of(judge, data, tmp_path))
    model_args, data_args, training_args, *_ = get_train_args(config)
    loaded = workflow.load_tokenizer(model_args)
    template = workflow.get_template_and_fix_tokenizer(loaded["tokenizer"], data_args)
    options = (model_args, data_args, training_args)
    rows = get_dataset(template, *options, stage="sft", **loaded)["train_dataset"]
    loaded["processor"].save_pretrained(tmp_path / "adapter")
    served = shutil.copytree(judge, tmp_path / "served")
    write_limits(served, image_limits(tmp_path / "adapter"))
    scorer = JudgeScorer.from_pretrained(served)
    pairs, labels = labeled_pairs(data, "pairs")
    inputs = scorer.inputs([scorer.chat(pair) for pair in pairs])
    patch = scorer.processor.image_processor.patch_size
    assert int(inputs["image_grid_thw"].prod(-1).max()) * patch**2 <= LIMIT
    for index, row in enumerate(rows):
        first = row["labels"].count(-100)
        assert row["labels"][first] == (scorer.yes_ids if labels[index] else scorer.no_ids)[0]
        real = inputs["attention_mask"][index].bool()
        assert row["input_ids"][:first] == inputs["input_ids"][index][real].tolist()
    collator = SFTDataCollatorWith4DAttentionMask(template=template, **loaded)
    batch = collator([dict(row) for row in rows])
    for name in ("pixel_values", "image_grid_thw"):
        torch.testing.assert_close(batch[name], inputs[name])


@pytest.mark.slow
@pytest.mark.parametrize("judge", FAMILIES[1:], indirect=True)
def test_from_training_to_scores(judge, data, tmp_path, monkeypatch):
    """``train`` with an evaluation, ``export``, and the scorer: one P(Yes)."""
    evaluated = []
    statistics = overlay.answer_statistics

    def recorded(*args, **kwargs):
        evaluated.append(statistics(*args, **kwargs))
        return evaluated[-1]

    monkeypatch.setattr(overlay, "answer_statistics", recorded)
    trained = tmp_path / "trained"
    merged = tmp_path / "merged"
    evaluation = {"eval_dataset": "held_out", "do_eval": True, "compute_accuracy": True}
    launch.train(config_of(judge, data, trained, **evaluation))
    weights = adapter(trained)
    names = " ".join(weights)
    assert "visual" not in names and "mlp.down_proj" in names
    assert ("qwen3_5" in judge.name) == ("linear_attn.in_proj_qkv" in names)
    assert all(np.abs(value).max() > 0 for name, value in weights.items() if "lora_B" in name)
    training = torch.cat(evaluated)[:, 0, 2].numpy()
    assert np.ptp(training) > 1e-2  # otherwise any numbers would agree
    export(str(judge), str(trained), merged)
    pairs, _ = labeled_pairs(data, "held_out")
    for model in ((judge, trained), (merged,)):
        scores = [verdict.p_yes for verdict in JudgeScorer.from_pretrained(*model).score(pairs)]
        assert training == pytest.approx(scores, abs=1e-3)


def test_a_missing_model_is_explained_before_anything_is_loaded():
    """Also where the template is set."""
    config = {"model_name_or_path": "runs/no/model", "template": "qwen2_vl"}
    with pytest.raises(UserError, match="runs/no/model"):
        with_template(config)


@pytest.mark.parametrize("judge", FAMILIES[1:], indirect=True)
def test_a_model_that_always_thinks_is_refused(judge, data, tmp_path):
    """As the -Thinking models: only the server's prompt ends with an opened block of thoughts."""
    model = shutil.copytree(judge, tmp_path / "thinking")
    file = model / "chat_template.jinja"
    file.write_text(file.read_text() + "<think>\n")
    with pytest.raises(UserError, match="<think>"):
        launch.train(config_of(model, data, tmp_path / "out"))
