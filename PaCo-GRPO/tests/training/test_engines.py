"""However weights are spread over however many processes: the same advantages, losses and weights; and memory shared."""

import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from engines import COMMON, TOLERANCE, asked, assert_same_training, moved, seen, tensors, watch, write_uneven_prompts
from safetensors.torch import load_file
from survival import rows, run, state
from tiny_run import tiny_options

from paco_grpo.distributed.launch import build_strategy
from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run

PPO = {"train__loss_type": "ppo", "train__beta": 0.01}
NFT = {"train__loss_type": "nft", "train__max_grad_norm": 1e3}
FULL = {"use_lora": False, "train__learning_rate": 1e-3}
FSDP2 = {"train__sharding": "fsdp2"}


@pytest.fixture(scope="module")
def trained(tiny_flux_dir, tmp_path_factory):
    """Folder of a finished run of so many processes; each is run once."""
    done = {}

    def of(processes: int, uneven: bool = False, **changes):
        key = (processes, uneven, *sorted(changes.items()))
        if key not in done:
            folder = done[key] = tmp_path_factory.mktemp("run")
            options = COMMON | changes
            kwargs = {"folder": str(folder)}
            if uneven:
                write_uneven_prompts(folder / "prompts")
                kwargs["without"] = "1train"
                options |= {"sample__unique_sample_num_per_epoch": 4}
            options["train__reward_fn_kwargs"] = repr({"engines:gapped": kwargs})
            assert run(tiny_flux_dir, folder, processes, watch=watch, **options) == [0] * processes, [
                (folder / f"stderr_{rank}").read_text()[-2000:] for rank in range(processes)
            ]
        return done[key]

    return of


def processes(kind: DistributedType, count: int = 2, **state):
    """The part of accelerate that ``build_strategy`` reads."""
    return SimpleNamespace(
        distributed_type=kind, num_processes=count, device=torch.device("cpu"), state=SimpleNamespace(**state)
    )


def zero_of(stage, **options):
    settings = {"zero_optimization": {"stage": stage, **options}}
    return processes(DistributedType.DEEPSPEED, deepspeed_plugin=SimpleNamespace(deepspeed_config=settings))


def fsdp_of(**settings):
    defaults = {"fsdp_version": 2, "activation_checkpointing": False, "reshard_after_forward": True,
                "cpu_offload": None, "transformer_cls_names_to_wrap": None}  # fmt: skip
    return processes(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(**(defaults | settings)))


CPUS = processes(DistributedType.MULTI_CPU)


@pytest.mark.parametrize(
    ("accelerator", "changes", "said"),
    [
        (CPUS, FSDP2 | {"sample__tail_cache": 0.1}, "config.sample.tail_cache=0.1"),
        (CPUS, FSDP2 | {"sample__tail_weights": "int8"}, "config.sample.tail_weights='int8'"),
        (CPUS, FSDP2 | {"speed__compile": True}, "config.speed.compile=True"),
        (fsdp_of(), {"sample__tail_cache": 0.1}, "config.sample.tail_cache=0.1"),
        (fsdp_of(), {"pretrained__quantize": "nf4"}, "config.pretrained.quantize='nf4'"),
        (fsdp_of(fsdp_version=1), {}, "fsdp_version: 2"),
        (zero_of(3), {}, "fsdp2.yaml"),
        (zero_of(2, offload_optimizer={"device": "nvme"}), {}, "nvme"),
        (zero_of(2), FSDP2, "config.train.sharding='fsdp2'"),
        (zero_of(2), {"train__use_8bit_adam": True}, "config.train.use_8bit_adam=True"),
        (processes(DistributedType.MEGATRON_LM), {}, "accelerate_configs"),
    ],
)
def test_unsupported_options_are_refused_before_weights_are_loaded(
    tiny_flux_dir, tmp_path, accelerator, changes, said
):
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_strategy(tiny_options(tiny_flux_dir, tmp_path, **changes), accelerator)


@pytest.mark.parametrize(
    ("accelerator", "changes", "name"),
    [
        (CPUS, {}, "replicated"),
        (CPUS, FSDP2, "fsdp2"),
        (fsdp_of(), {}, "fsdp2"),
        (zero_of(1), {}, "deepspeed-zero1"),
        (zero_of(2, offload_optimizer={"device": "cpu"}), {}, "deepspeed-zero2"),
    ],
)
def test_the_engine_is_what_accelerate_was_started_with(tiny_flux_dir, tmp_path, accelerator, changes, name):
    assert build_strategy(tiny_options(tiny_flux_dir, tmp_path, **changes), accelerator).name == name


def test_falling_back_is_a_warning(tiny_flux_dir, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert build_strategy(tiny_options(tiny_flux_dir, tmp_path), CPUS).name == "replicated"
    assert "falls back to plain data parallelism on a CPU" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "engine"), [(2, FSDP2)], ids=["fsdp2-2"])
def test_sharded_weights_change_nothing(trained, processes, engine):
    one, several = trained(1, **PPO), trained(processes, **PPO, **engine)
    assert moved(one) > 10 * TOLERANCE
    assert_same_training(one, several)


@pytest.mark.long
@pytest.mark.parametrize("objective", [PPO, NFT], ids=["ppo", "nft"])
@pytest.mark.parametrize(
    ("processes", "engine"),
    [(2, {}), (4, {}), (2, FSDP2), (4, FSDP2)],
    ids=["replicated-2", "replicated-4", "fsdp2-2", "fsdp2-4"],
)
def test_more_processes_change_nothing(trained, processes, engine, objective):
    assert_same_training(trained(1, **objective), trained(processes, **objective, **engine))


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_uneven_work_does_not_hang_and_changes_nothing(trained, processes):
    """Two image sizes and a prompt without scores: processes differ in their batches of sampling, training and
    evaluation, and where a forward is a collective operation, those with fewer join the others'."""
    changes = PPO | {"sample__merge_lora": True, "enable_gradient_checkpointing": True, "sample__batch_size": 2}
    one = trained(1, uneven=True, **changes)
    assert_same_training(one, trained(processes, uneven=True, **changes, **FSDP2))


@pytest.mark.long
def test_training_everything(trained):
    """Without LoRA, parameters, gradients and optimizer are sharded too."""
    one, two = trained(1, **FULL), trained(2, **FULL, **FSDP2)
    assert_same_training(one, two)
    assert seen(two)["optimizer_here"] < 0.6 * seen(one)["optimizer_here"]
    alone, shared = (folder / "runs" / "run" / "checkpoints" / "epoch_0002" / "transformer" for folder in (one, two))
    assert (alone / "config.json").read_text() == (shared / "config.json").read_text()
    (name,) = (path.name for path in alone.glob("*.safetensors"))
    weights, others = load_file(alone / name), load_file(shared / name)
    assert weights.keys() == others.keys()
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("changes", [PPO, FULL], ids=["lora", "full"])
def test_going_on_gives_the_same_bits(trained, tiny_flux_dir, changes):
    whole = trained(2, **changes, **FSDP2, save_freq=1)
    half = trained(2, **changes, **FSDP2, save_freq=1, num_epochs=1)
    options = COMMON | changes | FSDP2 | {"save_freq": 1, "resume_from": "latest"}
    kwargs = repr({"engines:gapped": {"folder": str(half)}})
    assert run(tiny_flux_dir, half, 2, train__reward_fn_kwargs=kwargs, **options) == [0, 0]
    assert state(whole, 2) == state(half, 2)


TWO_OR_FOUR = pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]
)


@TWO_OR_FOUR
def test_each_process_holds_its_part_of_the_base(trained, processes):
    parts = [seen(trained(processes, **PPO, **FSDP2), rank) for rank in range(processes)]
    assert sum(part["base_here"] for part in parts) == parts[0]["base"]
    assert all(part["sharded"] == [True] and part["lora_whole"] for part in parts)
    # rows are not divisible in every matrix, so parts are equal up to a few rows
    assert max(part["base_here"] for part in parts) < 1.1 * parts[0]["base"] / processes


@TWO_OR_FOUR
def test_each_process_asks_for_the_scores_of_its_own_images(trained, processes):
    """Training: 16 images in each of two epochs; evaluation: 5 images, dealt out."""
    folder = trained(processes, **PPO, **FSDP2)
    evaluated = [len(range(rank, 5, processes)) for rank in range(processes)]
    assert [asked(folder, rank) for rank in range(processes)] == [2 * 16 // processes + n for n in evaluated]


@pytest.mark.long
def test_low_precision_base_with_float32_adapters(trained):
    """bfloat16: another micro-batch rounds otherwise, so only the size of the numbers is compared."""
    one, two = (trained(n, **PPO, mixed_precision="bf16", **engine) for n, engine in ((1, {}), (2, FSDP2)))
    assert seen(two)["dtypes"] == ["torch.bfloat16"] and seen(two)["sharded"] == [True]
    assert rows(two)[0]["train/grad_norm"] == pytest.approx(rows(one)[0]["train/grad_norm"], rel=0.3)
    for key, value in tensors(one).items():
        torch.testing.assert_close(tensors(two)[key], value, rtol=0, atol=5e-3)


@pytest.mark.slow
def test_one_process_has_nothing_to_shard(tiny_flux_dir, tmp_path, caplog):
    build_run(tiny_options(tiny_flux_dir, tmp_path, **FSDP2))
    assert "there is only one process: nothing is sharded" in caplog.text
