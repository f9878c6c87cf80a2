"""DeepSpeed ZeRO-1 and 2 against one process. DeepSpeed is no part of the environment: where it is installed, these run
(a CPU will do)."""

import functools

import pytest
from engines import COMMON, assert_same_training, assert_same_weights, on_deepspeed, seen, watch
from survival import STOPPED, Harm, run, said, state

pytest.importorskip("deepspeed", reason="DeepSpeed not installed")
pytestmark = pytest.mark.long
FINE = {"train__reward_fn": "{'tiny_run:brightness': 1}", "train__reward_fn_kwargs": "{}"}


@pytest.fixture(scope="module")
def trained(tiny_flux_dir, tmp_path_factory):
    """Folder of a finished run: of one process, or with the ZeRO stage of two."""

    @functools.cache
    def of(stage: int | None, loss_type: str = "ppo", num_epochs: int = 2):
        folder = tmp_path_factory.mktemp("run")
        start(tiny_flux_dir, folder, stage, train__loss_type=loss_type, num_epochs=num_epochs)
        return folder

    return of


def start(flux, folder, stage, **changes):
    processes = 2 if stage else 1
    kwargs = repr({"engines:gapped": {"folder": str(folder)}})
    options = COMMON | {"save_freq": 1, "train__reward_fn_kwargs": kwargs} | changes
    before = functools.partial(on_deepspeed, stage) if stage else None
    assert run(flux, folder, processes, watch=watch, before=before, **options) == [0] * processes, [
        (folder / f"stderr_{rank}").read_text()[-3000:] for rank in range(processes)
    ]


@pytest.mark.parametrize(("stage", "loss_type"), [(1, "ppo"), (2, "ppo"), (2, "nft")])
def test_a_sharded_optimizer_changes_nothing(trained, stage, loss_type):
    one, two = trained(None, loss_type), trained(stage, loss_type)
    assert seen(two)["engine"] == f"deepspeed-zero{stage}"
    assert_same_training(one, two)
    assert seen(two)["optimizer_here"] < 0.55 * seen(one)["optimizer_here"]


def test_going_on_gives_the_same_bits(trained, tiny_flux_dir):
    whole, half = trained(2), trained(2, num_epochs=1)
    start(tiny_flux_dir, half, 2, resume_from="latest")
    assert state(whole, 2) == state(half, 2)


def test_going_on_with_another_engine(trained, tiny_flux_dir):
    """A checkpoint says nothing of who held what."""
    whole, half = trained(None), trained(1, num_epochs=1)
    start(tiny_flux_dir, half, None, resume_from="latest")
    assert_same_weights(whole, half)


def test_a_loss_that_is_not_finite_stops_before_the_update(tiny_flux_dir, tmp_path):
    """On one process in the second step: both stop, with the weights of the first step."""
    harm = Harm("backward", 3, action="spoil", rank=1)
    status = run(tiny_flux_dir, tmp_path, 2, harm, before=functools.partial(on_deepspeed, 2), **FINE)
    assert status == [STOPPED, STOPPED]
    assert "the loss is nan" in said(tmp_path, 1) and "not finite on another process" in said(tmp_path, 0)
