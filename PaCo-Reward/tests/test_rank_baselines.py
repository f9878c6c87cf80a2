"""ConsistencyRank's baselines against direct computations."""

import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_pipelines import save_open_clip

from paco_eval import baselines
from paco_judge.questions import Pair


@pytest.fixture
def evaluate(rank):
    """``eval.py`` on ``bench``: ``evaluate(scorer)`` -> rows of its results file."""

    def run(scorer):
        assert rank.main("--scorer", scorer) == 0
        rank.file = rank.out / "results" / f"{scorer}.jsonl"
        return rank.rows

    return run


def pictures_of(bench, row):
    return [
        Image.open(bench / "images" / row["folder"] / name)
        for name in (row["ref_image"], *row["comp_images"])
    ]


def test_histogram_values(evaluate):
    assert len(evaluate("histogram")) == 5
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    mixed = Image.new("RGB", (4, 4), (255, 0, 0))
    mixed.paste((0, 0, 255), (0, 0, 1, 4))  # a quarter is blue
    (verdict,) = baselines.make_baseline("histogram")([Pair(red, mixed, "")])
    assert verdict.p_yes == pytest.approx(0.75)


def test_a_missing_package_is_named(rank, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert rank.main("--scorer", "clip_i") == 1
    assert "open_clip_torch" in capsys.readouterr().err


def test_clip_i_is_the_cosine_of_image_features(evaluate, bench, tmp_path, monkeypatch):
    import open_clip

    save_open_clip(tmp_path / "clip")
    monkeypatch.setattr(baselines, "CLIP", (name := f"local-dir:{tmp_path}/clip", None))
    rows = evaluate("clip_i")
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    scores = []
    for row in rows:
        assert row["model"] == "clip_i ViT-H-14 laion2b_s32b_b79k"
        images = torch.stack([preprocess(image) for image in pictures_of(bench, row)])
        with torch.no_grad():
            features = model.eval().encode_image(images, normalize=True)
        expected = (1 + features[1:] @ features[0]) / 2
        assert row["scores"] == pytest.approx(expected.tolist(), abs=1e-5)
        scores += row["scores"]
    assert len(set(scores)) == 14


@pytest.mark.long
def test_dreamsim_is_its_distance(evaluate, bench, tmp_path, monkeypatch):
    """A smaller model with random weights in the release's format."""
    from dreamsim import dreamsim
    from dreamsim.feature_extraction.vision_transformer import vit_base
    from peft import LoraConfig, get_peft_model

    monkeypatch.setattr(baselines, "DREAMSIM_TYPE", kind := "open_clip_vitb32")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    folder = tmp_path / "dreamsim" / kind
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    vit = vit_base(patch_size=32)
    vit.pos_drop = torch.nn.LayerNorm(vit.embed_dim)
    weights = vit.state_dict() | {"proj": torch.randn(768, 512) * 0.05}
    torch.save({"state_dict": weights}, folder / "open_clip_vitb32_pretrain.pth.tar")
    layers = torch.nn.ModuleDict({"qkv": torch.nn.Linear(2, 2)})
    lora = get_peft_model(layers, LoraConfig(r=2, target_modules=["qkv"]))
    lora.save_pretrained(folder / "open_clip_vitb32_single_lora")
    save_file({}, folder / "open_clip_vitb32_single_lora" / "adapter_model.safetensors")

    rows = evaluate("dreamsim")
    model, preprocess = dreamsim(device="cpu", cache_dir=str(folder), dreamsim_type=kind)
    for row in rows[:2]:
        reference, *candidates = (preprocess(image) for image in pictures_of(bench, row))
        with torch.no_grad():
            expected = [1 - model(reference, candidate).item() / 2 for candidate in candidates]
        assert row["scores"] == pytest.approx(expected, abs=1e-5)
        assert len(set(row["scores"])) == len(candidates)
