"""Each rule of the pretended GPU is broken by a small program and refused; what a GPU allows stays
allowed.
"""

import copy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from pretend_cuda import RefusedByGPU, pretended_gpu
from torch import nn


@pytest.fixture(autouse=True)
def gpu():
    with pretended_gpu():
        yield
    assert not torch.cuda.is_available() and (torch.ones(3) + 1).device.type == "cpu"


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (3,), device="cuda")


def on_cpu() -> torch.Tensor:
    return torch.ones(3)


def place_a_value(base: torch.Tensor, value: torch.Tensor) -> None:
    base[torch.tensor([0, 1, 2])] = value


def unfinished() -> torch.Tensor:
    return on_gpu().to("cpu", non_blocking=True)


def copied_into() -> torch.Tensor:
    return torch.empty(3).copy_(on_gpu(), non_blocking=True)


def assign_gradient() -> None:
    parameter = nn.Parameter(on_gpu())
    parameter.grad = on_cpu()


class Worker(threading.Thread):
    """A thread with a ``run`` of its own, as servers have."""

    error = None

    def run(self) -> None:
        try:
            on_gpu() + on_cpu()
        except RefusedByGPU as error:
            self.error = error


def in_another_thread() -> None:
    worker = Worker()
    worker.start()
    worker.join()
    if worker.error:
        raise worker.error


def in_a_backward_pass() -> None:
    parameter = nn.Parameter(on_gpu())
    parameter.register_hook(lambda _: on_gpu().numpy())
    parameter.sum().backward()


REFUSED = {
    "a sum": lambda: on_gpu() + on_cpu(),
    "tensors in a list": lambda: torch.cat([on_gpu(), on_cpu()]),
    "a module": lambda: nn.Linear(3, 2).cuda()(on_cpu()),
    "a module that stayed": lambda: nn.Linear(3, 2)(on_gpu()),
    "a gathered index": lambda: on_gpu().gather(0, torch.tensor([1])),
    "a GPU index into the CPU": lambda: on_cpu()[torch.tensor([1], device="cuda")],
    "a value at indices": lambda: place_a_value(on_gpu(), on_cpu()),
    "a gradient": assign_gradient,
    "in another thread": in_another_thread,
    "in a backward pass": in_a_backward_pass,
    "numpy": lambda: on_gpu().numpy(),
    "pinning": lambda: on_gpu().pin_memory(),
    "a missing GPU": lambda: torch.ones(3, device="cuda:1"),
    "moving to a missing GPU": lambda: on_cpu().to("cuda:1"),
    "a generator of the CPU": lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
    "its noise in place": lambda: on_gpu().normal_(generator=torch.Generator()),
    "a generator of the GPU": lambda: torch.randn(3, generator=torch.Generator("cuda")),
    "an unfinished copy": lambda: unfinished().sum(),
    "a view of one": lambda: unfinished()[1:].numpy(),
    "one made by copy_": lambda: copied_into().tolist(),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_refused(rule):
    with pytest.raises(RefusedByGPU):
        REFUSED[rule]()


def test_the_device_follows_every_view_and_result():
    gpu = on_gpu(2, 3)
    views = gpu[0], gpu.T, gpu.view(6), gpu.data, gpu.detach(), nn.Parameter(gpu), *gpu.unbind()
    made = gpu + 1, gpu @ gpu.T, torch.zeros_like(gpu), gpu.new_zeros(2), gpu.half(), gpu.max(0)[1]
    for tensor in (*views, *made):
        assert tensor.device == torch.device("cuda:0") and tensor.is_cuda and not tensor.is_cpu
    assert on_cpu().device.type == gpu.cpu().device.type == "cpu"
    assert on_gpu().get_device() == 0 and on_cpu().get_device() == -1


def test_a_cpu_scalar_and_cpu_indices_are_fine():
    gpu, scalar = on_gpu(), torch.tensor(2.0)
    assert (gpu * scalar).is_cuda and gpu[torch.tensor([1])].is_cuda
    gpu[1:] = torch.zeros(2)
    gpu[torch.tensor([0])] = scalar
    assert gpu.tolist() == [2, 0, 0]


def test_a_copy_between_devices_shares_no_memory():
    cpu, gpu = on_cpu(), on_gpu()
    moved = cpu.cuda(), cpu.to("cuda"), cpu.to(gpu), torch.as_tensor(cpu, device="cuda")
    for there in moved:
        there.zero_()
        assert there.is_cuda and cpu.tolist() == [1, 1, 1] and cpu.is_cpu
    for back in (gpu.cpu(), gpu.to("cpu"), gpu.to(cpu)):
        back.zero_()
        assert back.is_cpu and gpu.tolist() == [1, 1, 1]
    assert gpu.to("cuda") is gpu and cpu.cpu() is cpu
    assert copy.deepcopy(nn.Linear(3, 2).cuda()).weight.is_cuda


@pytest.mark.parametrize(
    "wait",
    [
        lambda _: torch.cuda.synchronize(),
        lambda _: torch.cuda.current_stream().synchronize(),
        lambda _: torch.cuda.Event().synchronize(),
    ],
)
def test_a_synchronization_finishes_copies(wait):
    arriving = unfinished()
    wait(arriving)
    assert arriving.sum() == 3


def test_a_training_step():
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast("cuda", torch.bfloat16):
        output = model(on_gpu(1, 3))
        with torch.autocast("cpu", torch.float16):  # nothing to a tensor of the GPU
            assert output.dtype == model(on_gpu(1, 3)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda") and model(on_gpu(1, 3)).dtype == torch.float32
    output.float().sum().backward()
    assert model.weight.grad.is_cuda
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].is_cuda


class Squared(torch.autograd.Function):
    """Its gradient is made where Python cannot see it, so nobody knows that it is on the GPU."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 2 * x * gradient


def test_a_backward_pass_recomputes_on_the_gpu():
    model = nn.Linear(3, 3).cuda()

    def activations(x):
        assert x.is_cuda
        return Squared.apply(model(x + torch.ones(3, device="cuda")))

    torch.utils.checkpoint.checkpoint(activations, on_gpu(), use_reentrant=False).sum().backward()
    assert model.weight.grad.is_cuda


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group(backend="nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
total = torch.ones(2, device="cuda")
dist.all_reduce(total)
objects = [None, None]
dist.all_gather_object(objects, rank)
assert total.tolist() == [2, 2] and str(total.device) == f"cuda:{rank}" and objects == [0, 1]
mesh = init_device_mesh("cuda", (2,))
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
model(total).sum().backward()
torch.optim.AdamW(model.parameters()).step()
assert model[0].weight.device == model[0].weight.grad.device == total.device
if sys.argv[1:] == ["broken"]:
    dist.all_reduce(torch.ones(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_two_processes_with_nccl_and_fsdp2(tmp_path, monkeypatch, broken):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PRETENDED_GPUS", "2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(Path(__file__).with_name("pretend_cuda.py"))]
    command += [str(tmp_path / "program.py"), *(["broken"] if broken else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) == broken, done.stderr[-3000:]
    assert ("No backend type associated with device type cpu" in done.stderr) == broken
