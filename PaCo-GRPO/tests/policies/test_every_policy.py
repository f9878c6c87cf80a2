"""What training asks of a policy, for each of the three: adapters, averages, ratios, losses."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_policies import EDITORS, NAMES, disturb, items, load

from paco_grpo.checkpoint.ema import EMA
from paco_grpo.objectives import OBJECTIVES, get_objective
from paco_grpo.objectives.nft import _FRESH, nft_terms
from paco_grpo.policies.adapters import (
    add_lora,
    add_old_adapter,
    save_diffusers,
    save_peft,
    trainable_parameters,
    unwrap,
)
from paco_grpo.sampling.denoise import recompute_old, record_transition, rollout, step_noise

PROMPTS = ("make the star blue", "b", "a circle in place of the star")
ARGUMENTS = {"num_steps": 3, "noise_steps": (0, 1), "noise_level": 0.7}


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def with_lora(name, tiny_folder, rank=3, alpha=6, **options):
    policy = load(name, tiny_folder(name), **options)
    add_lora(policy, rank=rank, alpha=alpha)
    disturb(policy)
    return policy


def record_of(policy, name, prompts=PROMPTS, **options):
    conditioning = policy.encode(items(name, *prompts))
    count = len(prompts)
    return rollout(policy, conditioning, range(count), range(4, 4 + count), 32, 32, **ARGUMENTS | options)


def image_of(policy, name):
    record = record_of(policy, name, PROMPTS[:1], noise_steps=())
    return np.asarray(policy.decode(record.clean_latents, 32, 32)[0], np.int16)


def test_lora_sits_where_the_method_says_and_changes_nothing_yet(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    before = record_of(policy, name).clean_latents
    add_lora(policy, rank=2, alpha=4)
    assert torch.equal(record_of(policy, name).clean_latents, before)
    names = [n.split(".lora_")[0] for n, p in unwrap(policy.transformer).named_parameters() if p.requires_grad]
    touched = {n.split("blocks.", 1)[1].split(".", 1)[1] for n in names}
    assert touched == set(policy.lora_targets) and len(policy.lora_targets) == 12
    blocks = len(policy.transformer.transformer_blocks)
    assert len({n for n in names if n.startswith("transformer_blocks.")}) == 12 * blocks  # none is left out


@pytest.mark.parametrize("same_latent", [False, True])
def test_merged_sampling_and_a_shared_beginning(tiny_folder, name, same_latent):
    policy = with_lora(name, tiny_folder)
    base = {n: p.clone() for n, p in unwrap(policy.transformer).named_parameters()}
    options = {"num_steps": 4, "noise_steps": (1, 2)}
    prompts = ("x", "x", "y")
    conditioning = policy.encode(items(name, *prompts)).select([0, 0, 2])
    if same_latent:
        options["group_index"] = torch.tensor([0, 0, 1])
    arguments = (policy, conditioning, [0, 0, 2], [4, 5, 6], 32, 32)
    plain = rollout(*arguments, **ARGUMENTS | options)
    forwards = []
    forward = policy.transformer.forward
    policy.transformer.forward = lambda *a, **k: forwards.append(len(k["hidden_states"])) or forward(*a, **k)
    fast = rollout(*arguments, merge_lora=True, **ARGUMENTS | options)
    policy.transformer.forward = forward
    times = 2 if policy.has_true_cfg else 1
    assert forwards == ([2] if same_latent else [3]) * times + [3] * 3 * times
    torch.testing.assert_close(fast.clean_latents, plain.clean_latents, rtol=0, atol=1e-4)
    assert torch.equal(recompute_old(policy, fast).log_prob, fast.log_prob)
    assert torch.equal(plain.latents[0, 0], plain.latents[1, 0]) == same_latent
    for n, parameter in unwrap(policy.transformer).named_parameters():
        assert torch.equal(parameter, base[n]), n


def test_plain_diffusers_gives_the_same_image(tiny_folder, name, tmp_path, monkeypatch):
    policy = with_lora(name, tiny_folder)
    ours = image_of(policy, name)
    policy.save_lora(tmp_path)
    pipe = policy.pipeline_class.from_pretrained(tiny_folder(name))
    pipe.set_progress_bar_config(disable=True)
    (item,) = items(name, PROMPTS[0])
    arguments = {
        "prompt": item.prompt, "height": 32, "width": 32, "num_inference_steps": 3,
        "latents": policy.initial_latents([4], 32, 32),
    }  # fmt: skip
    if name == "qwen_image_edit":
        monkeypatch.setattr(
            "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions", lambda *_: (32, 32, None)
        )
        arguments |= {"image": item.image, "negative_prompt": " ", "true_cfg_scale": 4.0}
    else:
        arguments |= {"guidance_scale": 3.5, "max_sequence_length": 24}
    if name == "flux_kontext":
        arguments |= {"image": item.image, "max_area": 32 * 32, "_auto_resize": False}
    base = np.asarray(pipe(**arguments).images[0], np.int16)
    pipe.load_lora_weights(str(tmp_path))
    theirs = np.asarray(pipe(**arguments).images[0], np.int16)
    assert np.abs(theirs - ours).max() <= 1
    assert np.abs(theirs - base).max() > 3


@pytest.mark.parametrize("name", EDITORS)  # FLUX: test_adapters.py
@pytest.mark.parametrize("save", [save_peft, save_diffusers])
def test_round_trip(tiny_folder, name, tmp_path, save):
    policy = with_lora(name, tiny_folder, rank=4, alpha=10)
    save(policy, tmp_path)
    again = load(name, tiny_folder(name))
    add_lora(again, rank=64, alpha=1, lora_path=tmp_path)  # rank and alpha come from the file
    torch.testing.assert_close(
        record_of(again, name).clean_latents, record_of(policy, name).clean_latents, rtol=0, atol=1e-5
    )
    assert [p.shape for p in trainable_parameters(again)] == [p.shape for p in trainable_parameters(policy)]


def test_average_and_reference_and_old_weights(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    base = record_of(policy, name).clean_latents
    add_lora(policy, rank=2, alpha=4)
    average = EMA({n: p for n, p in policy.transformer.named_parameters() if p.requires_grad}, 0.5, 1)
    disturb(policy)
    average.update(1)
    disturb(policy, seed=1)
    add_old_adapter(policy)
    last = record_of(policy, name).clean_latents
    disturb(policy, seed=2)
    now = record_of(policy, name).clean_latents
    with average.applied():
        averaged = record_of(policy, name).clean_latents
    with policy.old():
        assert torch.equal(record_of(policy, name).clean_latents, last)
    with policy.reference():
        assert torch.equal(record_of(policy, name).clean_latents, base)
    assert torch.equal(record_of(policy, name).clean_latents, now)
    different = [base, last, now, averaged]
    assert all((a - b).abs().max() > 1e-4 for i, a in enumerate(different) for b in different[:i])


def test_gradient_checkpointing_changes_no_gradient(tiny_folder, name):
    policy = with_lora(name, tiny_folder)
    conditioning = policy.encode(items(name, *PROMPTS[:2]))

    def gradient():
        velocity = policy.velocity(
            policy.initial_latents([1, 2], 32, 32), torch.tensor([0.5, 0.7]), conditioning, 32, 32
        )
        found = torch.autograd.grad(
            velocity.square().mean(), trainable_parameters(policy), allow_unused=True, materialize_grads=True
        )
        return torch.cat([g.flatten() for g in found])

    before = gradient()
    policy.transformer.enable_gradient_checkpointing()
    torch.testing.assert_close(gradient(), before, rtol=1e-5, atol=1e-7)
    assert before.abs().max() > 0


def test_first_ratio_is_exactly_one(tiny_folder, name):
    policy = with_lora(name, tiny_folder)
    record = record_of(policy, name)
    for rows in ([0, 1, 2], [2, 0], [1]):
        part = record.select(rows)
        for position in range(2):
            transition = record_transition(policy, part, position)
            assert transition.mean.requires_grad
            ratio = (transition.log_prob(part.next_latents[:, position]) - part.log_prob[:, position]).exp()
            if len(rows) == 3:
                assert torch.equal(ratio, torch.ones(3))
            # in a micro-batch of another size the last bit of a matrix product may differ
            torch.testing.assert_close(ratio, torch.ones(len(rows)), rtol=0, atol=1e-5)


def training_config(loss_type):
    train = SimpleNamespace(
        loss_type=loss_type, clip_range=0.2, adv_clip_max=5.0, beta=0.1, nft_beta=0.7, timesteps=None
    )
    return SimpleNamespace(train=train)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_loss_of_a_sample_does_not_depend_on_its_batch(tiny_folder, name, loss_type):
    policy = with_lora(name, tiny_folder)
    add_old_adapter(policy)
    record = record_of(policy, name)
    disturb(policy, seed=3, scale=0.02)  # so that ratios are not 1
    record = dataclasses.replace(record, advantages=torch.tensor([1.0, -0.7, 0.3]), weights=torch.ones(3))
    objective, config = get_objective(loss_type), training_config(loss_type)

    def loss_and_gradient(rows):
        loss, _ = objective(record.select(rows), policy, config)
        # Qwen-Image's last block computes text features that nothing reads: their weights have no gradient
        gradient = torch.autograd.grad(loss, trainable_parameters(policy), allow_unused=True, materialize_grads=True)
        return loss.detach(), torch.cat([g.flatten() for g in gradient])

    singles = [loss_and_gradient([i]) for i in range(3)]
    for rows in ([0, 1, 2], [2, 0]):
        loss, gradient = loss_and_gradient(rows)
        torch.testing.assert_close(loss, sum(singles[i][0] for i in rows), rtol=1e-4, atol=1e-5)
        expected = sum(singles[i][1] for i in rows)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        assert gradient.abs().max() > 0


def test_nft_trains_the_conditional_velocity(tiny_folder, name):
    policy = with_lora(name, tiny_folder)
    add_old_adapter(policy)
    disturb(policy, seed=3, scale=0.05)
    record = record_of(policy, name, noise_steps=(1,))
    record = dataclasses.replace(record, advantages=torch.tensor([1.0, -0.7, 0.3]), weights=torch.ones(3))
    config = training_config("nft")
    config.train.beta = 0.0
    loss, _ = get_objective("nft")(record, policy, config)

    t = record.sigmas[1].expand(3)
    noisy = (1 - t[0]) * record.clean_latents + t[0] * step_noise([4, 5, 6], _FRESH + 1, record.clean_latents)
    arguments = noisy, t, record.conditioning, 32, 32
    with torch.no_grad():
        velocity, guided = policy.conditional_velocity(*arguments), policy.velocity(*arguments)
        with policy.old():
            old = policy.conditional_velocity(*arguments)
    preference = record.advantages / 10 + 0.5
    expected = 5.0 * nft_terms(record.clean_latents, noisy, t, velocity, old, preference, 0.7).sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(guided, velocity) != policy.has_true_cfg
