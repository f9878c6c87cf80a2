"""The overlay inside LLaMA-Factory: its loss and ours in every process, and the evaluation."""

import copy
import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from training_tools import adapter, losses, run_processes, train_config
from transformers import AutoProcessor, Trainer

from paco_judge.errors import UserError
from paco_judge.images import load_image
from paco_judge.scorer import JudgeScorer
from paco_reward import launch, overlay
from paco_reward.families import limit_images

# Trains several configurations in one process: the first with upstream alone.
SEVERAL = """
import sys, yaml
from llamafactory.train.tuner import run_exp
run_exp(yaml.safe_load(open(sys.argv[1])))
from paco_reward.launch import train
for file in sys.argv[2:]:
    train(yaml.safe_load(open(file)))
"""


@pytest.fixture(scope="module")
def installed():
    overlay.install()


@pytest.fixture
def plugin(installed):
    """What LLaMA-Factory reads images with."""
    from llamafactory.data.mm_plugin import get_mm_plugin

    return get_mm_plugin("qwen2_vl", image_token="<|image_pad|>")


def test_training_sees_the_pictures_that_the_judge_sees(plugin, judge_dir, tiny, tmp_path):
    """A photo on its side, as a file and as the judge loads it."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer turns it by 90 degrees
    photo = tmp_path / "photo.webp"
    tiny.picture(1).resize((96, 64)).save(photo, exif=exif)
    processor = AutoProcessor.from_pretrained(judge_dir)
    limit_images(processor, 1 << 20)
    shown, judged = (
        plugin._get_mm_inputs([image], [], [], processor)
        for image in (str(photo), load_image(photo))
    )
    for name in ("image_grid_thw", "pixel_values"):
        assert torch.equal(shown[name], judged[name])


@pytest.mark.parametrize("packed", [False, True])
def test_examples_that_cutoff_len_would_cut_are_refused(packed, judge_dir, data_dir, tmp_path):
    """Whole ones have 60 tokens and more."""
    config = train_config(judge_dir, data_dir, tmp_path, first_token_weight=0.1, cutoff_len=40)
    config |= {"packing": packed, "neat_packing": packed}
    with pytest.raises(UserError, match="cutoff_len"):
        launch.train(config)


@pytest.fixture
def sorted_data(tiny, tmp_path):
    """Data set `yes_first` of 5 Yes, then 4 No; `no` of 3 No and 1 Maybe."""
    for name, count in (("yes_first", 9), ("no", 7)):
        file = tiny.save_pairs(tmp_path, count, name) / f"{name}.json"
        rows = json.loads(file.read_text())
        rows.sort(key=lambda row: row["messages"][1]["content"], reverse=True)
        if name == "no":
            del rows[:3]
            rows[0]["messages"][1]["content"] = "Maybe."
        file.write_text(json.dumps(rows))
    return tmp_path


PACKING = {"packing": True, "neat_packing": True, "cutoff_len": 2048}
ONE_ANSWER = "; one answer only: accuracy means little, no AUC"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (PACKING | {"max_samples": 8}, ["training pairs: 5 Yes, 3 No"]),
        (
            {"dataset": "yes_first,no", "max_samples": 3, "eval_dataset": "no"},
            [
                "training pairs: 3 Yes, 2 No, 1 others",
                f"evaluation pairs: 0 Yes, 2 No, 1 others{ONE_ANSWER}",
            ],
        ),
        (
            {"eval_dataset": "no,yes_first", "eval_on_each_dataset": True},
            [
                "training pairs: 5 Yes, 4 No",
                f"evaluation pairs of no: 0 Yes, 3 No, 1 others{ONE_ANSWER}",
                "evaluation pairs of yes_first: 5 Yes, 4 No",
            ],
        ),
        ({"max_samples": 4}, ["training pairs: 4 Yes, 0 No"]),
        ({"dataset": "no"}, ["training pairs: 0 Yes, 3 No, 1 others"]),
    ],
)
def test_yes_and_no_are_counted_and_one_answer_is_not_trained_on(
    changes, said, judge_dir, sorted_data, tmp_path, monkeypatch, caplog, installed
):
    """As LLaMA-Factory takes the rows, and before a model is loaded."""
    from llamafactory.train.sft import workflow

    def load_model(*args):
        raise InterruptedError

    monkeypatch.setattr(workflow, "load_model", load_model)
    caplog.set_level("INFO", "paco_reward")
    config = train_config(judge_dir, sorted_data, tmp_path / "out", dataset="yes_first")
    has_both = "0 Yes" not in said[0] and "0 No" not in said[0]
    expected = InterruptedError if has_both else UserError
    with pytest.raises(expected, match=None if has_both else said[0]):
        launch.train(config | changes)
    assert [message for message in caplog.messages if " pairs" in message] == said


def test_a_judge_is_asked_without_cudnns_attention(judge_dir):
    torch.backends.cuda.enable_cudnn_sdp(True)
    JudgeScorer.from_pretrained(judge_dir)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_loss_that_is_not_finite_ends_a_training(judge_dir, data_dir, tmp_path, monkeypatch):
    """From the loss on, with the real trainer, which alone would log 0 and go on.

    Before that it evaluates: pairs that fill the last batch of several processes do not count.
    """
    gathered = []
    gather_for_metrics = Accelerator.gather_for_metrics

    def observed(accelerator, *arguments, **settings):
        gathered.append(arguments)
        return gather_for_metrics(accelerator, *arguments, **settings)

    monkeypatch.setattr(Accelerator, "gather_for_metrics", observed)
    losses_until_nan = iter((1.0, *5 * (1.0,), float("nan")))  # five of the evaluation
    loss = overlay.first_token_loss_func

    def loss_until_nan(*args, **settings):
        assert (settings["weight"], settings["scheme"]) == (0.3, "released")  # as they are set
        return loss(*args, **settings) * next(losses_until_nan)

    monkeypatch.setattr(overlay, "first_token_loss_func", loss_until_nan)
    weighted = {"first_token_weight": 0.3, "first_token_scheme": "released"}
    config = train_config(judge_dir, data_dir, tmp_path, **weighted, max_steps=4)
    config |= {"save_strategy": "steps", "save_steps": 1, "max_grad_norm": 1.0}
    config |= EVALUATION | {"eval_strategy": "steps", "eval_steps": 1}
    torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(UserError, match="checkpoint-1"):
        launch.train(config)
    assert next(losses_until_nan, None) is None and gathered
    assert not (tmp_path / "adapter_model.safetensors").exists()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("trained", [False, True])
def test_a_frozen_tower_keeps_no_activations(trained, scorer, caplog):
    """Also where gradient checkpointing makes its inputs require gradients."""
    caplog.set_level("INFO", "paco_reward")
    model = copy.deepcopy(scorer.model).requires_grad_(trained)
    overlay.compute_frozen_towers_without_gradients(model)
    assert ("vision tower is frozen" in caplog.text) == (not trained)
    pixels = torch.randn(16, 3 * 2 * 14 * 14, requires_grad=True)
    features = model.model.visual(pixels, grid_thw=torch.tensor([[1, 4, 4]]))
    assert features.last_hidden_state.requires_grad == trained


GENERATION = {"eval_dataset": "held_out", "predict_with_generate": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"bf16": True}, False), ({"bf16": True} | GENERATION, True)],
)
def test_peft_casts_inputs_only_where_autocast_does_not(
    changes, expected, judge_dir, data_dir, tmp_path, monkeypatch
):
    casts = []

    def train(trainer, **_):
        for layer in trainer.model.modules():
            if isinstance(layer, BaseTunerLayer):
                casts.append(layer.cast_input_dtype_enabled)
        raise InterruptedError

    # Generation needs libraries for its measures.
    monkeypatch.setattr("llamafactory.hparams.parser._check_extra_dependencies", lambda *_: None)
    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(InterruptedError):
        launch.train(train_config(judge_dir, data_dir, tmp_path, **changes))
    assert casts and set(casts) == {expected}


# The last batch is not full: ten pairs on two processes.
EVALUATION = {
    "eval_dataset": "held_out",
    "do_eval": True,
    "compute_accuracy": True,
    "per_device_eval_batch_size": 2,
}
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ALL_AT_ONCE = {"max_steps": 1, "first_token_weight": 0.1} | EVALUATION
PACKED = {"neat_packing": True, "packing": True, "cutoff_len": 4096}
RELEASED = {"first_token_weight": 0.1, "first_token_scheme": "released"}
# Steps are 8 sequences. LLaMA-Factory alone trains the first.
TRAININGS = {
    "upstream": {"bf16": True} | ACCUMULATED,
    "null": {"bf16": True, "first_token_weight": None} | ACCUMULATED,
    "sequence": {"first_token_weight": 0.1} | ACCUMULATED | EVALUATION,
    "whole": {"first_token_weight": 0.1},
    "released": RELEASED | ACCUMULATED | EVALUATION,
    "sixteen": {"per_device_train_batch_size": 16} | ALL_AT_ONCE,
    "packed": {"per_device_train_batch_size": 1} | PACKED | ALL_AT_ONCE,
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def evaluation_metrics(folder) -> dict[str, float]:
    """Measures over the pairs: what an evaluation says, without times and the loss of batches."""
    results = json.loads((folder / "eval_results.json").read_text())
    names = ("accuracy", "first_token_accuracy", "judge_accuracy", "judge_auc", "judge_ece")
    assert results["eval_judge_missing"] == 0
    return {name: results[f"eval_{name}"] for name in names}


@pytest.fixture(scope="module")
def answering(judge_dir, tiny, tmp_path_factory):
    """The random judge, changed so that its answers have scores."""
    return tiny.save_answering(judge_dir, tmp_path_factory.mktemp("answering") / "judge", 5)


@pytest.fixture(scope="module")
def trained(answering, data_dir, tmp_path_factory):
    """The trainings, in one process: a folder of outputs by name."""
    folder = tmp_path_factory.mktemp("trained")
    configs = []
    for name, changes in TRAININGS.items():
        configs.append(train_config(answering, data_dir, folder / name, **changes))
    run_processes(["-c", SEVERAL], configs, folder)
    return folder


def assert_same_training(folder, reference):
    """Weights (after plain gradient descent: they show the gradients) and logged losses agree."""
    expected = adapter(reference)
    assert any(np.abs(value).max() > 1e-3 for name, value in expected.items() if "lora_B" in name)
    weights = adapter(folder)
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, atol=2e-6, err_msg=key)
    np.testing.assert_allclose(losses(folder), losses(reference), atol=1e-4)


@pytest.mark.slow
def test_null_is_llama_factorys_own_loss_bit_for_bit(trained):
    """In bfloat16, where peft casts the inputs of LLaMA-Factory's LoRA layers, and not ours."""
    upstream = trained / "upstream"
    overlaid = trained / "null"
    assert losses(upstream) == losses(overlaid)
    weights = adapter(overlaid)
    for name, value in adapter(upstream).items():
        assert np.array_equal(value, weights[name]), name


@pytest.mark.slow
def test_accumulated_micro_batches_equal_one_batch(trained):
    assert_same_training(trained / "sequence", trained / "whole")


@pytest.mark.slow
def test_packed_answers_equal_separate_rows(trained):
    """In the evaluation too, where all pairs are one row."""
    assert_same_training(trained / "packed", trained / "sixteen")
    expected = evaluation_metrics(trained / "sixteen")
    assert evaluation_metrics(trained / "packed") == pytest.approx(expected, abs=1e-4)


@pytest.mark.long
def test_packed_rows_of_two_processes_may_have_other_numbers_of_pairs(
    answering, data_dir, tmp_path
):
    """And an evaluation does not depend on how pairs are packed."""
    seen = []
    for cutoff in (480, 704):  # multiples of 8
        changes = TRAININGS["packed"] | {"cutoff_len": cutoff, "learning_rate": 0.0}
        changes |= {"per_device_eval_batch_size": 1}
        folder = tmp_path / str(cutoff)
        config = train_config(answering, data_dir, folder, **changes)
        run_processes([*TORCHRUN, "-m", "paco_reward.launch"], [config], tmp_path)
        seen.append(evaluation_metrics(folder))
    assert seen[0] == pytest.approx(seen[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["sequence", pytest.param("released", marks=pytest.mark.long)])
def test_two_processes_train_and_evaluate_as_one(scheme, trained, answering, data_dir, tmp_path):
    """With another loss, divisor or micro-batch on one process, the weights would differ."""
    config = train_config(answering, data_dir, tmp_path / "two", **TRAININGS[scheme])
    config["gradient_accumulation_steps"] //= 2
    run_processes([*TORCHRUN, "-m", "paco_reward.launch"], [config], tmp_path)
    assert_same_training(tmp_path / "two", trained / scheme)
    expected = evaluation_metrics(trained / scheme)
    assert evaluation_metrics(tmp_path / "two") == pytest.approx(expected, abs=1e-4)
