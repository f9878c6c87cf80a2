"""LoRA: attached without changing anything, switched inside a block, saved and loaded in both
formats.
"""

import json
import logging
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_policies import NAMES, disturb, load, sampled, trainable_parameters, trained

from paco_grpo.options import ConfigError
from paco_grpo.policies import PolicyLoadError, adapters
from paco_grpo.policies.adapters import (
    add_frozen_lora,
    add_lora,
    find_lora,
    save_diffusers,
    save_peft,
)
from paco_grpo.policies.lora import (
    add_snapshot,
    blend_snapshot,
    lora_parameters,
    merged,
    reference_weights,
    using_adapter,
)

BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_FORMAT = pytest.mark.parametrize("save", [save_peft, save_diffusers])


def latents_of(policy, name="flux"):
    return sampled(policy, name, "a green cross").clean_latents


@BY_NAME
def test_a_new_lora_sits_on_every_target_and_changes_nothing(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    before = latents_of(policy, name)
    add_lora(policy, rank=3, alpha=6)
    assert torch.equal(latents_of(policy, name), before)
    weights = dict(policy.transformer.named_parameters())
    names = [n for n, p in weights.items() if p.requires_grad]
    assert names and all(".lora_" in n for n in names)
    layers = {n.split(".lora_")[0] for n in names}
    assert {layer.split("blocks.", 1)[1].split(".", 1)[1] for layer in layers} == set(
        policy.lora_targets
    )
    gaussian = torch.cat([p.detach().flatten() for n, p in weights.items() if ".lora_A." in n])
    assert np.std(gaussian.numpy()) == pytest.approx(1 / 3, rel=0.1)


@BY_NAME
def test_reference_and_snapshot(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    base = latents_of(policy, name)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    trainable = trainable_parameters(policy)
    add_snapshot(policy, "old")
    first = latents_of(policy, name)
    start = [p.detach().clone() for p in trainable]
    disturb(policy, seed=1)
    second = latents_of(policy, name)
    flags = [p.requires_grad for p in policy.transformer.parameters()]
    with pytest.raises(KeyError), reference_weights(policy):
        assert torch.equal(latents_of(policy, name), base)
        raise KeyError
    with using_adapter(policy, "old"):
        assert torch.equal(latents_of(policy, name), first)
        with merged(policy):  # the active adapter is merged
            torch.testing.assert_close(latents_of(policy, name), first, rtol=0, atol=1e-4)
    assert torch.equal(latents_of(policy, name), second)
    assert all((a - b).abs().max() > 1e-3 for a, b in ((first, base), (second, first)))
    assert [p.requires_grad for p in policy.transformer.parameters()] == flags
    assert len(lora_parameters(policy)) == 2 * len(trainable)
    blend_snapshot(policy, "old", decay=0.25)
    old = [p for n, p in policy.transformer.named_parameters() if ".old." in n]
    for mixed, before, now in zip(old, start, trainable, strict=True):
        torch.testing.assert_close(mixed, 0.25 * before + 0.75 * now.detach())


@BY_FORMAT
@BY_NAME
def test_round_trip(tiny_folder, name, tmp_path, save):
    folder = tiny_folder(name)
    policy = trained(name, folder, rank=4, alpha=10)
    save(policy, tmp_path)
    again = load(name, folder)
    add_lora(again, rank=64, alpha=1, lora_path=tmp_path)  # rank and alpha come from the file
    torch.testing.assert_close(latents_of(again, name), latents_of(policy, name), rtol=0, atol=1e-5)
    for parameter, saved in zip(
        trainable_parameters(again), trainable_parameters(policy), strict=True
    ):
        assert parameter.shape == saved.shape
    add_snapshot(again, "old")
    disturb(again, seed=1)
    save(again, tmp_path / "again")  # the trained adapter, not the snapshot
    third = load(name, folder)
    add_lora(third, lora_path=tmp_path / "again")
    torch.testing.assert_close(latents_of(third, name), latents_of(again, name), rtol=0, atol=1e-5)


@BY_FORMAT
def test_a_lora_of_a_file_beside_the_trained_one(tiny_folder, tmp_path, caplog, save):
    """It has another rank and more layers than the trained one, whose files stay the same."""
    folder = tiny_folder("flux")
    teacher = trained("flux", folder, rank=3, alpha=9)
    save(teacher, tmp_path / "teacher")
    policy = load("flux", folder)
    add_lora(policy, rank=2, alpha=4, targets="attention")
    disturb(policy, seed=5)
    before = latents_of(policy)
    save(policy, tmp_path / "before")
    trainable = [n for n, p in policy.transformer.named_parameters() if p.requires_grad]
    caplog.clear()
    add_frozen_lora(policy, "teacher", str(tmp_path / "teacher"), "option")
    add_snapshot(policy, "old")
    assert "changes nothing" not in caplog.text
    assert torch.equal(latents_of(policy), before)
    with using_adapter(policy, "teacher"):
        torch.testing.assert_close(latents_of(policy), latents_of(teacher), rtol=0, atol=1e-5)
    with merged(policy):
        torch.testing.assert_close(latents_of(policy), before, rtol=0, atol=1e-4)
    assert [n for n, p in policy.transformer.named_parameters() if p.requires_grad] == trainable
    save(policy, tmp_path / "after")
    (file,) = (tmp_path / "before").glob("*.safetensors")
    weights = load_file(tmp_path / "after" / file.name)
    assert weights.keys() == load_file(file).keys()
    assert all(torch.equal(weights[n], tensor) for n, tensor in load_file(file).items())


def test_a_lora_of_another_model_is_refused(tiny_folder, tmp_path):
    save_peft(trained("z_image", tiny_folder("z_image")), tmp_path)
    policy = load("flux", tiny_folder("flux"))
    add_lora(policy, rank=2, alpha=4)
    with pytest.raises(PolicyLoadError, match="^teacher: the LoRA at .* made for another model"):
        add_frozen_lora(policy, "teacher", tmp_path, "teacher")


ATTENTION = {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_add_out"}
ATTENTION |= {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}


@pytest.mark.parametrize(
    ("targets", "kinds"),
    [
        ("attention", ATTENTION),
        (["to_q", "img_mlp.net.2"], {"attn.to_q", "img_mlp.net.2"}),
        (r"transformer_blocks\.1\..*(attn|norm).*v.*", {"attn.to_v", "attn.add_v_proj"}),
    ],
)
def test_targets(tiny_folder, targets, kinds):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    add_lora(policy, 2, 4, targets)
    layers = [
        n.split(".lora_A")[0] for n, _ in policy.transformer.named_parameters() if ".lora_A" in n
    ]
    assert {layer.split(".", 2)[2] for layer in layers} == kinds
    assert {layer.split(".")[1] for layer in layers} == ({"1"} if "1" in targets else {"0", "1"})


@pytest.mark.parametrize("target", ["ff.net.2", "attenton", "attn.+q"])
def test_a_target_without_a_layer_is_an_error(tiny_folder, target):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    targets = ["attn.to_q", target]  # FLUX's names, which the published training gave Qwen
    with pytest.raises(ConfigError, match=re.escape(target)):
        add_lora(policy, targets=targets)


@pytest.fixture
def with_adapter(tiny_flux_dir):
    """Loads the tiny FLUX with the adapter at a place."""

    def load_both(place):
        policy = load("flux", tiny_flux_dir)
        add_lora(policy, lora_path=place)
        return policy

    return load_both


def test_bad_loras_are_refused(tiny_flux_dir, with_adapter, tmp_path):
    save_diffusers(trained("flux", tiny_flux_dir), tmp_path / "pickle")
    file = next((tmp_path / "pickle").glob("*.safetensors"))
    file.rename(file.with_suffix(".bin"))
    for name in ("nowhere", "pickle"):
        with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path"):
            with_adapter(tmp_path / name)


DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
FILES = {save_peft: "adapter_model.safetensors", save_diffusers: DIFFUSERS_FILE}
PREFIXES = {save_peft: "base_model.model.", save_diffusers: "transformer."}


def rewrite(folder, save, change):
    """Write the adapter's file again after ``change(weights, prefix of names)``, which returns the
    new weights.
    """
    file = folder / FILES[save]
    weights = change(load_file(file), PREFIXES[save])
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(weights, file, metadata)


def block_57(weights, prefix):
    """Of a deeper model."""
    first = f"{prefix}transformer_blocks.0."
    deeper = {
        name.replace(first, f"{prefix}transformer_blocks.57."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(first)
    }
    return weights | deeper


def half_a_pair(weights, prefix):
    del weights[f"{prefix}transformer_blocks.1.attn.to_k.lora_B.weight"]
    return weights


@BY_FORMAT
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (block_57, r"transformer_blocks\.57\."),
        (half_a_pair, r"transformer_blocks\.1\.attn\.to_k\.lora_B"),
    ],
)
def test_tensors_without_a_layer_are_an_error_that_names_them(
    tiny_flux_dir, with_adapter, tmp_path, save, change, named
):
    save(trained("flux", tiny_flux_dir), tmp_path)
    rewrite(tmp_path, save, change)
    with pytest.raises(PolicyLoadError, match=named):
        with_adapter(tmp_path)


def kohya(weights, prefix):
    """FLUX's attention outputs under the names of kohya's scripts, with alpha = rank / 2."""
    renamed = {}
    for number in (0, 1):
        ours = f"{prefix}transformer_blocks.{number}.attn.to_out.0"
        theirs = f"lora_unet_double_blocks_{number}_img_attn_proj"
        renamed[f"{theirs}.lora_down.weight"] = weights[f"{ours}.lora_A.weight"]
        renamed[f"{theirs}.lora_up.weight"] = weights[f"{ours}.lora_B.weight"]
        renamed[f"{theirs}.alpha"] = torch.tensor(2.0)
    return renamed


def test_kohyas_names_are_converted(tiny_flux_dir, with_adapter, tmp_path):
    policy = trained("flux", tiny_flux_dir, rank=4, alpha=4)
    save_diffusers(policy, tmp_path)
    weights = load_file(tmp_path / DIFFUSERS_FILE)
    names = [name for name in weights if ".lora_A." in name]
    alphas = {name.replace(".lora_A.weight", ".alpha"): torch.tensor(2.0) for name in names}
    save_file(weights | alphas, tmp_path / "with_alphas.safetensors")
    again = with_adapter(tmp_path / "with_alphas.safetensors")
    for layer, update in updates(policy).items():
        torch.testing.assert_close(updates(again)[layer], 0.5 * update)
    rewrite(tmp_path, save_diffusers, kohya)
    again = with_adapter(tmp_path)
    name = "transformer_blocks.1.attn.to_out.0"
    # alpha / rank is multiplied into the factors
    torch.testing.assert_close(updates(again)[name], 0.5 * updates(policy)[name])
    # diffusers only warns of a tensor that it has no place for, and training silences it.
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    name = "lora_unet_double_blocks_57_img_attn_proj.lora_down.weight"
    rewrite(tmp_path, save_diffusers, lambda weights, prefix: weights | {name: torch.ones(4, 32)})
    with pytest.raises(PolicyLoadError, match="double_blocks_57"):
        with_adapter(tmp_path)


def updates(policy) -> dict[str, torch.Tensor]:
    """scale · B·A of each layer: what the adapter adds to its weight."""
    return {
        name: layer.get_delta_weight("default").detach()
        for name, layer in policy.transformer.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


def assert_same_updates(policy, expected) -> None:
    actual = updates(policy)
    for layer, update in updates(expected).items():
        torch.testing.assert_close(actual[layer], update)


def test_an_adapter_that_changes_nothing_is_named(tiny_flux_dir, with_adapter, tmp_path, caplog):
    save_diffusers(trained("flux", tiny_flux_dir, rank=4, alpha=10), tmp_path)
    with_adapter(tmp_path)
    assert "changes nothing" not in caplog.text
    rewrite(tmp_path, save_diffusers, zero_b)
    with_adapter(tmp_path)
    assert "changes nothing" in caplog.text


def zero_b(weights, prefix):
    return {name: tensor * ("lora_A" in name) for name, tensor in weights.items()}


def test_an_adapter_of_a_changed_base_is_refused(tiny_flux_dir, with_adapter, tmp_path):
    save_peft(trained("flux", tiny_flux_dir, rank=4, alpha=10), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["target_modules"] == sorted(config["target_modules"])  # equal files if equal
    config["init_lora_weights"] = "pissa_niter_4"
    file.write_text(json.dumps(config))
    with pytest.raises(PolicyLoadError, match="pissa_niter_4"):
        with_adapter(tmp_path)


def test_one_file_of_any_name_is_an_adapter(tiny_flux_dir, with_adapter, tmp_path):
    """As other trainers write it; two files in a folder are a question to the user."""
    policy = trained("flux", tiny_flux_dir, rank=4, alpha=10)
    save_diffusers(policy, tmp_path)
    file = (tmp_path / DIFFUSERS_FILE).rename(tmp_path / "my_style_000002500.safetensors")
    for place in (file, tmp_path):
        again = with_adapter(place)
        assert_same_updates(again, policy)
    shutil.copy(file, tmp_path / "my_style_000003000.safetensors")
    with pytest.raises(PolicyLoadError, match="my_style_000003000"):
        find_lora(tmp_path)
    save_peft(policy, tmp_path / "epoch_0001" / "adapter")
    assert find_lora(tmp_path / "epoch_0001") == tmp_path / "epoch_0001" / "adapter"


def test_a_file_whose_alpha_is_only_in_its_metadata_keeps_its_scale(
    tiny_flux_dir, with_adapter, tmp_path
):
    """As this project wrote it before: B as trained, and alpha / rank = 2.5 for the reader to
    apply.
    """
    policy = trained("flux", tiny_flux_dir, rank=4, alpha=10)
    weights = adapters._weights(policy.transformer)
    config = policy.transformer.peft_config["default"].to_dict()
    config = {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}
    policy.pipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=weights, transformer_lora_adapter_metadata=config
    )
    again = with_adapter(tmp_path)
    assert_same_updates(again, policy)


def test_different_ranks_and_scales_are_multiplied_into_the_file(
    tiny_flux_dir, with_adapter, tmp_path
):
    """An adapter of someone else may have a rank and an alpha for each layer, and rsLoRA's
    scale.
    """
    save_peft(trained("flux", tiny_flux_dir, rank=4, alpha=10), tmp_path / "peft")
    small = "transformer_blocks.0.attn.to_q"
    rewrite(
        tmp_path / "peft",
        save_peft,
        lambda weights, prefix: (
            weights
            | {
                f"{prefix}{small}.lora_A.weight": torch.ones(2, 32),
                f"{prefix}{small}.lora_B.weight": torch.ones(32, 2),
            }
        ),
    )
    file = tmp_path / "peft" / "adapter_config.json"
    patterns = {"rank_pattern": {f"^{small}": 2}, "alpha_pattern": {f"^{small}": 3}}
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns | {"use_rslora": True}))
    policy = with_adapter(tmp_path / "peft")
    save_diffusers(policy, tmp_path / "diffusers")
    again = with_adapter(tmp_path / "diffusers")
    assert_same_updates(again, policy)
