"""ConsistencyRank's baselines against direct computations, and eval.py."""

import numpy as np
import pytest
import torch
from bench_tools import BrightnessJudge
from PIL import Image
from safetensors.torch import save_file
from tiny_pipelines import save_open_clip

from paco_eval import runner
from paco_eval.baselines import make_baseline
from paco_judge.client import Pair


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """A tiny OpenCLIP in the hub's format."""
    save_open_clip(folder := tmp_path_factory.mktemp("clip"))
    return folder


@pytest.fixture
def evaluate(rank):
    """``eval.py`` on ``bench``: ``evaluate(scorer, "--flag", …)`` -> rows of its results file, or its exit status."""

    def run(scorer, *arguments):
        if status := rank.main("--scorer", scorer, *arguments):
            return status
        (rank.file,) = rank.out.glob(f"results/{scorer}*.jsonl")
        return rank.rows

    return run


def pictures_of(bench, row):
    return [Image.open(bench / "images" / row["folder"] / name) for name in (row["ref_image"], *row["comp_images"])]


def test_histogram_values(evaluate):
    assert len(evaluate("histogram")) == 5
    red, mixed = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (4, 4), (255, 0, 0))
    mixed.paste((0, 0, 255), (0, 0, 1, 4))  # a quarter is blue
    assert make_baseline("histogram")([Pair(red, mixed, "")])[0].p_yes == pytest.approx(0.75)


def test_clip_i_is_the_cosine_of_image_features(evaluate, clip_folder, bench):
    import open_clip

    rows = evaluate("clip_i", "--weights", clip_folder)
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{clip_folder}")
    assert len(rows) == 5 and all(row["engine"] == "clip_i" and str(clip_folder) in row["model"] for row in rows)
    for row in rows:
        with torch.no_grad():
            features = [model.eval().encode_image(preprocess(x)[None])[0].numpy() for x in pictures_of(bench, row)]
        reference, *others = (feature / np.linalg.norm(feature) for feature in features)
        assert row["scores"] == pytest.approx([(1 + reference @ other) / 2 for other in others], abs=1e-5)
    assert len({score for row in rows for score in row["scores"]}) == 15


@pytest.mark.long
def test_dreamsim_is_its_distance(evaluate, bench, tmp_path):
    """The package's smaller model (ViT-B/32) with random weights in the release's format."""
    from dreamsim import dreamsim
    from dreamsim.feature_extraction.vision_transformer import vit_base
    from peft import LoraConfig, get_peft_model

    folder = tmp_path / "release"
    folder.mkdir()
    torch.manual_seed(0)
    vit = vit_base(patch_size=32)
    vit.pos_drop = torch.nn.LayerNorm(vit.embed_dim)
    weights = vit.state_dict() | {"proj": torch.randn(768, 512) * 0.05}
    torch.save({"state_dict": weights}, folder / "open_clip_vitb32_pretrain.pth.tar")
    lora = get_peft_model(torch.nn.ModuleDict({"qkv": torch.nn.Linear(2, 2)}), LoraConfig(r=2, target_modules=["qkv"]))
    lora.save_pretrained(folder / "open_clip_vitb32_single_lora")
    save_file({}, folder / "open_clip_vitb32_single_lora" / "adapter_model.safetensors")

    rows = evaluate("dreamsim", "--weights", folder, "--dreamsim_type", "open_clip_vitb32")
    model, preprocess = dreamsim(device="cpu", cache_dir=str(folder), dreamsim_type="open_clip_vitb32")
    for row in rows[:2]:
        reference, *candidates = (preprocess(image) for image in pictures_of(bench, row))
        with torch.no_grad():
            distances = [model(reference, candidate).item() for candidate in candidates]
        assert row["scores"] == pytest.approx([1 - distance / 2 for distance in distances], abs=1e-5)
    assert len(rows) == 5 and len({score for row in rows for score in row["scores"]}) == 15


def test_a_vlm_is_asked_as_by_eval_vllm(rank, monkeypatch):
    judge, other, file = BrightnessJudge(), BrightnessJudge(), rank.file.with_name("judge-v2.jsonl")
    assert rank(other, "--prompt_template", "2", "--batch_size", "8") == 0
    expected = file.read_text()
    monkeypatch.setattr(runner, "make_engine", lambda args: ("brightness", judge))
    for option in ("--scorer", "--model"):  # published: --model and --port
        file.unlink()
        assert rank.main(option, "some/judge", "--prompt_template", "2") == 0
        assert file.read_text() == expected
    assert judge.questions == 2 * other.questions


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("histogram", "--weights", "x"), "--weights"),
        (("histogram", "--question", "pair"), "--question"),
        (("clip_i", "--model", "some/judge"), "--model"),
        (("dreamsim", "--weights", "gone"), "--weights gone"),
    ],
)
def test_unusable_options(evaluate, capsys, arguments, named):
    assert evaluate(*arguments) == 2
    assert named in capsys.readouterr().err
