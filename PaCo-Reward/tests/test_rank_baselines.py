"""ConsistencyRank's baselines against direct computations, and eval.py as a command."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rank_tools import FOLDER, BrightnessJudge, outcome, typed
from safetensors.torch import save_file

from paco_eval import baselines
from paco_eval.baselines import Similarity, make_baseline
from paco_judge.client import Pair

# By its file: a module that is called `eval` would hide the builtin.
spec = importlib.util.spec_from_file_location("rank_eval", FOLDER / "eval.py")
rank_eval = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rank_eval)

TINY_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """A tiny OpenCLIP as the hub would have it."""
    import open_clip

    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": TINY_CLIP, "preprocess_cfg": {"mean": mean, "std": std}})
    )
    model = open_clip.CLIP(**{**TINY_CLIP, "vision_cfg": dict(TINY_CLIP["vision_cfg"])})
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture
def evaluated(bench, tmp_path):
    """Runs eval.py: evaluated("clip_i", "--flag", …) -> exit status."""

    def run(scorer, *arguments):
        base = ["--scorer", scorer, "--dataset_dir", str(bench.parent), "--results_dir", str(tmp_path / "results")]
        return rank_eval.main([*base, *map(str, arguments)])

    return run


def rows_of(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / "results" / f"{name}.jsonl").read_text().splitlines()]


def images_of(bench, row):
    return [Image.open(bench / "images" / row["folder"] / name) for name in (row["ref_image"], *row["comp_images"])]


# ---------------------------------------------------------------- similarities without a model

pictures = st.builds(
    lambda seed, w, h, high: Image.fromarray(
        np.random.default_rng(seed).integers(0, high, (h, w, 3), dtype=np.uint8)
    ),
    *(st.integers(0, 99), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 30, 256])),
)


@given(pictures, pictures)
def test_pixel_and_histogram_of_any_images(a, b):
    for name in ("pixel", "histogram"):
        engine = make_baseline(name, None, None, None, 8)
        same, there, back = (verdict.p_yes for verdict in engine([Pair(a, a, ""), Pair(a, b, ""), Pair(b, a, "")]))
        assert same == pytest.approx(1) and 0 <= there <= 1 and there == pytest.approx(back)


def test_histogram_counts_colours(bench):
    red, mixed = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (4, 4), (255, 0, 0))
    mixed.paste((0, 0, 255), (0, 0, 1, 4))  # a quarter is blue
    engine = make_baseline("histogram", None, None, None, 8)
    assert engine([Pair(red, mixed, "")])[0].p_yes == pytest.approx(0.75)
    grey = Image.new("RGB", (3, 5), (51, 51, 51))
    assert make_baseline("pixel", None, None, None, 8)([Pair(red, grey, "")])[0].p_yes == pytest.approx(
        1 - (204 + 51 + 51) / 3 / 255
    )


def test_what_is_no_number_has_no_score():
    zeros = Similarity(lambda images: np.full((len(images), 2), np.nan), lambda a, b: a @ b)
    image = Image.new("RGB", (2, 2))
    assert zeros([Pair(image, image, "")])[0].error == "the similarity is no number"


# ---------------------------------------------------------------- with a model


@pytest.mark.parametrize("form", ["folder", "file"])
def test_clip_i_is_the_cosine_of_image_features(evaluated, clip_folder, bench, tmp_path, form):
    import open_clip

    if form == "folder":
        arguments, name = ["--weights", clip_folder], f"clip_i+{clip_folder.name}"
    else:
        config = tmp_path / "tiny-clip.json"
        config.write_text(json.dumps(TINY_CLIP))
        open_clip.add_model_config(config)
        arguments = ["--weights", clip_folder / "open_clip_model.safetensors", "--clip_model", "tiny-clip"]
        name = "clip_i+tiny-clip+open_clip_model"
    assert evaluated("clip_i", *arguments) == 0
    kwargs = {"model_name": f"local-dir:{clip_folder}"}
    if form == "file":
        kwargs = {"model_name": "tiny-clip", "pretrained": str(clip_folder / "open_clip_model.safetensors")}
    model, _, preprocess = open_clip.create_model_and_transforms(**kwargs)
    rows = rows_of(tmp_path, name)
    assert len(rows) == 5 and all(row["engine"] == "clip_i" and str(clip_folder) in row["model"] for row in rows)
    for row in rows:
        with torch.no_grad():
            features = [model.eval().encode_image(preprocess(image)[None])[0].numpy() for image in images_of(bench, row)]
        reference = features[0] / np.linalg.norm(features[0])
        expected = [(1 + reference @ (f / np.linalg.norm(f))) / 2 for f in features[1:]]
        assert row["scores"] == pytest.approx(expected, abs=1e-5)
    assert len({score for row in rows for score in row["scores"]}) == 15


def test_each_image_is_encoded_once_per_item(clip_folder, tiny):
    engine = make_baseline("clip_i", str(clip_folder), None, None, 3)
    described = []
    counted = Similarity(lambda images: described.append(len(images)) or engine.describe(images), engine.compare)
    reference, candidates = tiny.picture(0), [tiny.picture(seed) for seed in range(1, 5)]
    pairs = [Pair(reference, candidate, "") for candidate in candidates]
    together = [verdict.p_yes for verdict in counted(pairs)]
    assert described == [5]
    alone = [engine([pair])[0].p_yes for pair in pairs]
    assert together == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
def test_dreamsim_is_its_distance(evaluated, bench, tmp_path):
    """The package's own smaller model (ViT-B/32) with random weights in the release's form."""
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
    (folder / "open_clip_vitb32_single_lora" / "adapter_model.safetensors").unlink()
    save_file({}, folder / "open_clip_vitb32_single_lora" / "adapter_model.safetensors")

    assert evaluated("dreamsim", "--weights", folder, "--dreamsim_type", "open_clip_vitb32") == 0
    rows = rows_of(tmp_path, "dreamsim+open_clip_vitb32+release")
    model, preprocess = dreamsim(device="cpu", cache_dir=str(folder), dreamsim_type="open_clip_vitb32")
    for row in rows[:2]:
        reference, *candidates = (preprocess(image) for image in images_of(bench, row))
        with torch.no_grad():
            distances = [model(reference, candidate).item() for candidate in candidates]
        assert row["scores"] == pytest.approx([1 - distance / 2 for distance in distances], abs=1e-5)
    assert len(rows) == 5 and len({score for row in rows for score in row["scores"]}) == 15


# ---------------------------------------------------------------- the command


def test_results_resume_and_broken_items_are_those_of_the_judge(evaluated, bench, tmp_path, capsys):
    broken = bench / "images" / "0001" / "c1.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no picture")
    assert evaluated("pixel") == 1
    said = capsys.readouterr().err
    assert "item 0001: image" in said and "1 items have no result: 0001" in said
    assert [row["folder"] for row in rows_of(tmp_path, "pixel")] == ["0000", "0002", "0003", "0004"]
    broken.write_bytes(whole)
    assert evaluated("pixel") == 0
    assert [row["folder"] for row in rows_of(tmp_path, "pixel")] == ["0000", "0002", "0003", "0004", "0001"]
    for row in rows_of(tmp_path, "pixel"):
        reference, *candidates = (np.asarray(image.resize((32, 32))) / 255 for image in images_of(bench, row))
        assert row["scores"] == pytest.approx([1 - np.abs(reference - c).mean() for c in candidates])


def test_baselines_stand_beside_judges_in_the_table(evaluated, ranked, tmp_path):
    assert ranked(BrightnessJudge()) == 0 and evaluated("pixel") == 0 and evaluated("histogram") == 0
    table = ["--results_dir", tmp_path / "results", "--output_file", tmp_path / "t.txt"]
    status, output = outcome(typed("print_eval_table.py", *table))
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()[2:]] == ["histogram", "judge-v3", "pixel"]


@pytest.mark.slow
def test_a_vlm_is_asked_as_eval_vllm_asks(answering_judge, bench, tmp_path):
    arguments = ["--dataset_dir", bench.parent, "--engine", "transformers", "--batch_size", "16"]
    for script, option, folder in (("eval.py", "--scorer", "a"), ("eval_vllm.py", "--model", "b")):
        run = typed(script, option, answering_judge, *arguments, "--results_dir", tmp_path / folder)
        status, output = outcome(run)
        assert status == 0, output[-2000:]
    ours, theirs = (json.loads((tmp_path / x / "judge-v3.jsonl").read_text().splitlines()[0]) for x in "ab")
    assert ours == theirs


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("pixel", "--weights", "x"), "--weights is an option of clip_i, dreamsim; --scorer pixel does not read it"),
        (("clip_i", "--server", "http://x"), "--server is an option of a VLM; --scorer clip_i does not read it"),
        (("clip_i", "--prompt_template", "2"), "--prompt_template is an option of a VLM"),
        (("dreamsim", "--clip_model", "x"), "--clip_model is an option of clip_i"),
        (("clip_i", "--weights", "gone.bin"), "neither a folder with open_clip_config.json nor a .safetensors file"),
        (("clip_i", "--clip_model", "ViT-B-32"), "cannot be loaded"),
        (("dreamsim", "--weights", "gone"), "--weights gone is no folder"),
    ],
)
def test_options_that_cannot_be_meant(evaluated, capsys, tmp_path, arguments, said):
    assert evaluated(*arguments) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("results/*.jsonl"))


def test_missing_packages_are_named_with_the_command(evaluated, monkeypatch, capsys):
    for scorer, module, package in (("clip_i", "open_clip", "open_clip_torch"), ("dreamsim", "dreamsim", "dreamsim")):
        monkeypatch.setitem(sys.modules, module, None)
        assert evaluated(scorer) == 2
        said = capsys.readouterr().err
        assert f"--scorer {scorer} needs the package {package}" in said and f"pip install {package}" in said


def test_names_tell_weights_apart():
    default, _ = baselines.baseline_names("clip_i", None, None, None)
    assert default == "clip_i ViT-H-14 laion2b_s32b_b79k"
    assert baselines.baseline_names("pixel", None, None, None) == ("pixel", "pixel")
    assert baselines.baseline_names("clip_i", "/w/v1.5", "ViT-L-14", None) == (
        "clip_i ViT-L-14 /w/v1.5",
        "clip_i+ViT-L-14+v1.5",
    )
