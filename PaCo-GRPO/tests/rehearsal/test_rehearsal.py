"""The fake GPU refuses and counts what a GPU would, and a rehearsal finds what breaks on one."""

import runpy
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from named import NAMES, load
from torch import nn
from torch.nn import functional

from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.rehearsal import fake_gpu
from paco_grpo.rehearsal.architectures import PRESETS
from paco_grpo.rehearsal.epoch import _tested_images, rehearse
from paco_grpo.rehearsal.fake_gpu import DEVICE, FakeGPU
from paco_grpo.rehearsal.models import pipeline_of, policy_of
from paco_grpo.types import Item

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.alone  # PyTorch's answers about CUDA are replaced for the process


@pytest.fixture
def gpu():
    with FakeGPU() as made:
        yield made


def counted(gpu, function):
    with gpu.meter.phase("test") as phase:
        function()
    return phase


# --- the fake GPU -----------------------------------------------------------------------------------------------------


def test_cudas_autocast_lists_are_active(gpu):
    layer = nn.Linear(8, 8, device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(torch.zeros(2, 8, device=DEVICE))
        normed = functional.rms_norm(y, (8,))
    assert (y.dtype, normed.dtype, y.device) == (torch.bfloat16, torch.float32, DEVICE)


def test_two_devices_do_not_go_together(gpu):
    weight = torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="device"):
        functional.linear(torch.zeros(2, 4), weight)


def test_after_it_nothing_is_left():
    with FakeGPU():
        pass
    assert not torch.cuda.is_available() or torch.cuda.device_count()
    assert torch.nn.functional.scaled_dot_product_attention is not fake_gpu.attention
    a = torch.ones(3, requires_grad=True)
    a.sum().backward()
    assert a.grad.tolist() == [1, 1, 1]


def test_values_from_the_cpu_are_known_on_the_device(gpu):
    grid = torch.tensor([[1, 4, 6]]).to(DEVICE)
    assert (grid[:, 1:] * 2).tolist() == [[8, 12]]
    assert torch.zeros(5, 3, device=DEVICE)[torch.tensor([1, 0, 1, 0, 0]).to(DEVICE).bool()].shape == (2, 3)


def test_gradients_have_the_kernels_and_shapes_of_the_real_engine(gpu):
    """The walk over the graph gives every gradient that autograd gives, with its shape and type."""
    torch.manual_seed(0)

    def grads(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3)).to(device)
        bias = nn.Parameter(torch.zeros(1, 3).to(device))
        x = torch.ones(4, 6).to(device)
        with gpu.recording():
            loss = ((model(x) + bias) * bias.exp()).square().mean()
            loss = loss + model[0](x).bfloat16().float().sum()
        loss.backward()
        return {name: (tuple(p.grad.shape), p.grad.dtype) for name, p in [*model.named_parameters(), ("bias", bias)]}

    fake = grads(DEVICE)
    assert len(fake) == 7 and all(fake[name][0] == shape for name, (shape, _) in fake.items())
    assert {dtype for _, dtype in fake.values()} == {torch.float32}


def test_memory_is_what_lives(gpu):
    def work():
        x = torch.zeros(1024, device=DEVICE)  # 4 KiB
        y = x + 1
        del x
        y.mul_(2)

    phase = counted(gpu, work)
    assert phase.peak == 8192 and gpu.meter.now == 0


def test_saved_activations_are_freed_as_the_backward_pass_uses_them(gpu):
    layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(8)]).to(DEVICE)
    start = gpu.meter.now
    with gpu.recording():
        x = torch.zeros(1024, 256, device=DEVICE, requires_grad=True)
        y = x
        for layer in layers:
            y = layer(y).sin()
        loss = y.sum()
    kept = gpu.meter.now - start
    del y
    with gpu.meter.phase("backward") as phase:
        loss.backward()
    size = 1024 * 256 * 4
    assert 16 * size <= kept <= 18 * size  # input and product of each layer
    assert phase.peak - start - kept <= 4 * size  # gradients of weights take the place of activations


def test_kernels_bytes_and_casts_of_a_layer(gpu):
    x, layer = torch.zeros(4, 8, device=DEVICE), nn.Linear(8, 16, device=DEVICE)

    def work():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            layer(x).add(1)

    counts = counted(gpu, work).counts
    # three casts (input, weight, bias), one product, one sum; a cast reads four bytes and writes two
    cast_bytes = 6 * (4 * 8 + 8 * 16 + 16)
    assert (counts.kernels, counts.casts, counts.flops) == (5, 3, 2 * 4 * 8 * 16)
    assert (counts.cast_bytes, counts.bytes) == (cast_bytes, cast_bytes + 2 * 2 * 4 * 16)


def test_a_flux_forward_is_the_closed_form(gpu):
    """FLOPs, kernels and weights of one block of each kind at FLUX.1-dev's width, extended to its 19 and 38 blocks.

    Counted elsewhere for the whole model: 21.50 TFLOP, 3304 kernels and 11.9 B weights at 1024 + 512 tokens. The last
    block leaves out what nothing reads: queries, feed-forward and output of the text.
    """

    def measured(double, single):
        architecture = PRESETS["flux-dev"].with_blocks(double, single)
        with gpu.building():
            policy = policy_of(pipeline_of(architecture, torch.bfloat16, "cpu", random=False), dtype=torch.bfloat16)
            policy.transformer.to(DEVICE)
        policy.device = DEVICE
        conditioning = type("C", (), {})()
        conditioning.prompt_embeds = torch.zeros(1, 512, 4096, device=DEVICE, dtype=torch.bfloat16)
        conditioning.pooled_prompt_embeds = torch.zeros(1, 768, device=DEVICE, dtype=torch.bfloat16)
        latents, sigma = torch.zeros(1, 1024, 64, device=DEVICE), torch.full((1,), 0.5, device=DEVICE)

        def forward():
            with torch.no_grad():
                policy.velocity(latents, sigma, conditioning, 512, 512)

        forward()  # position ids are made once
        counts = counted(gpu, forward).counts
        weights = sum(p.numel() for p in policy.transformer.parameters())
        return counts.flops, counts.kernels, weights

    phases = gpu.meter.phases
    one = measured(1, 1)
    phases.pop("test")
    two = measured(2, 1)
    phases.pop("test")
    more = measured(1, 2)
    flops, kernels, weights = (a + 18 * (b - a) + 37 * (c - a) for a, b, c in zip(one, two, more, strict=True))
    width, text, both = 3072, 512, 1536
    left_out = 2 * text * width**2 * (1 + 4 + 5) + 4 * text * both * width
    assert flops == pytest.approx(21.50e12 - left_out, rel=0.001)
    assert weights == pytest.approx(11.901e9, rel=0.001)
    assert kernels == pytest.approx(3304, rel=0.01)


def test_the_same_operations_as_on_real_tensors(tiny_flux_dir):
    """A rehearsal of a tiny model in float32 does what real tensors do: the same FLOPs and bytes kept."""
    from torch.utils.flop_counter import FlopCounterMode

    from paco_grpo.policies import load_policy

    policy = load_policy(tiny_flux_dir, max_sequence_length=24)
    conditioning = policy.encode([Item(i, text, 64, 64) for i, text in enumerate(("red", "blue"))])

    noise = policy.initial_latents([1, 2], 64, 64)

    def velocity(policy, conditioning, device):
        latents, sigma = noise.to(device), torch.full((2,), 0.5).to(device)
        with torch.no_grad():
            return policy.velocity(latents, sigma, conditioning, 64, 64)

    with FlopCounterMode(display=False) as real:
        velocity(policy, conditioning, "cpu")
    with FakeGPU() as gpu:
        policy.transformer.to(DEVICE)
        policy.device = DEVICE
        policy._image_ids.clear()
        moved = type(conditioning)(**{k: v.to(DEVICE) for k, v in vars(conditioning).items()})
        counts = counted(gpu, lambda: velocity(policy, moved, DEVICE)).counts
    config, tokens = policy._transformer_config, 24 + noise.shape[1]
    width = config.num_attention_heads * config.attention_head_dim
    # PyTorch does not count the CPU's attention kernel: two products of tokens x tokens in each block of each image
    attention = 2 * (config.num_layers + config.num_single_layers) * 4 * tokens**2 * width
    attention -= 2 * 4 * 24 * tokens * width  # the last block has no queries of the text
    assert counts.flops == real.get_total_flops() + attention


def test_the_peak_of_a_training_step_is_what_a_real_allocator_says(tiny_flux_dir):
    """The profiler reports each allocation and release on the CPU; nothing of ours counts there."""
    from paco_grpo.policies import load_policy
    from paco_grpo.policies.lora import add_lora

    policy = load_policy(tiny_flux_dir, max_sequence_length=24)
    add_lora(policy, 4, 8)
    conditioning = policy.encode([Item(i, text, 64, 64) for i, text in enumerate(("red", "blue", "green"))])
    noise, sigma = policy.initial_latents([1, 2, 3], 64, 64), torch.full((3,), 0.5)

    def step():
        policy.velocity(noise, sigma, conditioning, 64, 64).square().mean().backward()
        policy.transformer.zero_grad()

    step()  # kernels that set something aside at their first call
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    now = measured = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            now += event.nbytes()
            measured = max(measured, now)
    with FakeGPU() as gpu:
        policy.transformer.to(DEVICE)
        policy.device = DEVICE
        policy._image_ids.clear()
        noise, sigma = noise.to(DEVICE), sigma.to(DEVICE)
        conditioning = type(conditioning)(**{k: v.to(DEVICE) for k, v in vars(conditioning).items()})
        before = gpu.meter.now
        with gpu.recording():
            computed = counted(gpu, step).peak - before
    assert computed / 1.05 <= measured <= 1.15 * computed  # what kernels set aside for themselves; blocks of 512 bytes


# --- rehearsals -------------------------------------------------------------------------------------------------------

FAST = ("t2is", "kontext_editing_24gb", "toy_t2is", "qwen_editing")


@pytest.mark.parametrize("name", FAST)
def test_configurations_run(name, monkeypatch):
    """With few blocks, so times and memory are not those of the whole model."""
    monkeypatch.chdir(ROOT)
    found = rehearse(load(name), name, 8, shallow=True)
    names = [work.name for work in found.work]
    assert {"encode", "denoise", "decode", "train", "optimizer"} <= set(names)
    assert all(work.each.kernels > 0 for work in found.work if work.name not in ("texts to GPU", "pictures to GPU"))
    assert found.peak > sum(found.resident.values()) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in FAST])
def test_every_configuration_runs(name, monkeypatch):
    test_configurations_run(name, monkeypatch)


# Each generator and each way to make it fit; the others differ in objective, rewards or resolution.
FULL_DEPTH = (
    ("t2is", "t2is_80gb", "t2is_48gb", "t2is_24gb", "kontext_editing", "kontext_editing_80gb", "kontext_editing_48gb",
     "kontext_editing_24gb", "ocr_128", "sd3_t2is", "sd3_t2is_24gb", "sd3_large_t2is_24gb", "z_image_t2is", "z_image_t2is_24gb"),
    ("qwen_editing", "qwen_editing_80gb", "qwen_editing_48gb", "t2is_qwen", "qwen_editing_2511_48gb", "klein_t2is",
     "klein_editing_9b", "flux2_t2is"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_configurations_fit_at_full_depth():
    """The command, in two processes: on the card of a configuration's name, else on 80 GB."""
    command = [sys.executable, str(ROOT / "scripts" / "rehearse.py"), "--processes", "8", "--table"]
    runs = [subprocess.Popen([*command, *names], cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) for names in FULL_DEPTH]
    found = [(run.communicate(), run.returncode) for run in runs]
    for names, ((out, err), status) in zip(FULL_DEPTH, found, strict=True):
        assert status == 0, out + err[-2000:]
        assert all(f"| `{name}` |" in out for name in names)


def tiny(folder, *more):
    pairs = {
        "pretrained.model": str(folder), "max_sequence_length": "24", "train.lora_rank": "4", "train.resolution": "64",
        "test.resolution": "64",
    }  # fmt: skip
    return load("t2is", *(pairs | dict(more)).items())


def test_a_text_encoder_left_on_the_cpu_is_found(tiny_flux_dir, monkeypatch):
    place = DiffusersPolicy.__init__.__globals__["_place"]

    def forgetful(module, device, dtype):
        place(module, "cpu" if type(module).__name__ == "CLIPTextModel" else device, dtype)

    # diffusers sends the ids to where the weights are, so only what comes back is on the wrong device
    monkeypatch.setitem(DiffusersPolicy.__init__.__globals__, "_place", forgetful)
    monkeypatch.setattr(
        FluxPolicy,
        "encode",
        lambda self, items: FluxPolicy_conditioning(self, items),
    )
    with pytest.raises(RuntimeError, match="device"):
        rehearse(tiny(tiny_flux_dir, ("speed.offload_text_encoders", "false")), "planted")


def FluxPolicy_conditioning(policy, items):
    """``encode`` without the copy to the device that hides where the encoder was."""
    from paco_grpo.policies.flux import FluxConditioning

    rows = [policy._encode_text(item.prompt) for item in items]
    return FluxConditioning(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))


def test_a_text_of_the_wrong_width_is_found(tiny_flux_dir, monkeypatch):
    encode = FluxPolicy._encode_text
    monkeypatch.setattr(
        FluxPolicy, "_encode_text", lambda self, prompt: (encode(self, prompt)[0][:, :-1], encode(self, prompt)[1])
    )
    with pytest.raises(RuntimeError, match="reduction dim|shape"):
        rehearse(tiny(tiny_flux_dir), "planted")


def test_an_evaluation_of_all_items_counts_all(monkeypatch):
    monkeypatch.chdir(ROOT)
    notes = []
    assert [_tested_images(load("t2is", *more), notes) for more in ((), (("test.num_images", "9"),))] == [60, 9]
    elsewhere = load("t2is", ("dataset", "elsewhere"), ("test.batch_size", "7"))
    assert not notes and _tested_images(elsewhere, notes) == 7
    assert "elsewhere is not here" in notes[0]


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_command_reports_and_sets_its_status(tiny_flux_dir, capsys):
    main = runpy.run_path(str(ROOT / "scripts" / "rehearse.py"))["main"]
    common = [
        "--config", f"{ROOT}/config/grpo.py:t2is", f"--config.pretrained.model={tiny_flux_dir}",
        "--config.max_sequence_length=24", "--config.train.lora_rank=4", "--config.train.resolution=64",
        "--config.test.resolution=64",
    ]  # fmt: skip
    assert main([*common, "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "fits: peak" in text and "<- best" in text
    assert main([*common, "--gpu", "none"]) == 2
    assert main([*common, "--memory_gb", "8"]) == 1  # the CLIP rewards alone take 7.3 GiB
    assert "it fits with --config.speed.offload_vae=true --config.train.reward_fn_kwargs." in capsys.readouterr().out
