"""benchmarks/epoch.py at tiny size: the report is complete, and the measured work is the work that was counted."""

import argparse
import dataclasses
import json

import pytest
import torch

import epoch
from measuring import workload
from paco_grpo.rehearsal import architectures

pytestmark = pytest.mark.slow
TINY = ["--preset", "tiny", "--k", "2", "--m", "2", "--steps", "3", "--batch", "4", "--train-batch", "4"]


@pytest.fixture
def measured(tmp_path):
    """Runs epoch.py's measurement in this process; the report's result."""

    def run(arguments):
        given, overrides = epoch.parser().parse_known_args(f"--preset tiny {arguments} --warmup 0 --repeats 1".split())
        folder = tmp_path / ("published" if given.published_work else "ours")
        (result,) = epoch.measure(given, overrides, folder)["results"]
        return result

    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    output = tmp_path_factory.mktemp("epoch") / "epoch.json"
    command = [*TINY, "--repeats", "2", "--profile", "--lora-scale", "0.01", "--config.train.lora_rank=4"]
    assert epoch.main([*command, "--images", str(output.with_suffix(".npz")), "--output", str(output)]) == 0
    return json.loads(output.read_text()) | {"page": output.with_suffix(".md").read_text()}


def test_the_report_describes_machine_and_settings(report):
    assert report["benchmark"] == "epoch" and report["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert {"processor", "cores", "memory_gib", "gpus", "load"} <= set(report["machine"])
    assert report["versions"]["torch"] and "commit" in report["git"]
    assert report["settings"]["preset"] == "tiny" and report["settings"]["overrides"] == ["--config.train.lora_rank=4"]
    assert report["peak"]["flops_per_second"] == max(report["peak"]["by_size"].values()) > 1e8
    assert report["parameters"]["transformer"] == 132_176
    assert "| `as configured` |" in report["page"] and "MFU" in report["page"]


def test_seconds_rates_and_counts(report):
    (result,) = report["results"]
    seconds = {name: found["median"] for name, found in result["seconds"].items()}
    assert len(result["epochs"]) == 2 == result["seconds"]["epoch"]["n"]
    assert seconds["epoch"] > seconds["sampling"] > seconds["denoising"] > 0
    assert seconds["encode"] > 0 and seconds["decode"] > 0 and seconds["optimizer"] > 0
    assert seconds["training"] > seconds["forward"] + seconds["gradient"] > seconds["gradient"] > 0
    phases = report["page"].partition("Where the time")[2].partition("Operations")[0].splitlines()[4:]
    shares = [float(line.split("|")[3].split()[0]) for line in phases if line]
    assert len(shares) == 10 and 99 < sum(shares) < 101
    texts = {"text_encoder": 2, "text_encoder_2": 2}
    assert result["calls"] == {"transformer": 4 * 3 + 4, "backward": 4, "decoder": 4} | texts
    forwards = {(each["phase"], each["gradient"]): each["images"] for each in result["epochs"][0][0]["forwards"]}
    assert forwards == {("sampling", False): 12, ("training", True): 4}
    rates, flops, peak = result["rates"], result["flops"], report["peak"]["flops_per_second"]
    assert rates["sampling_tokens_per_second"] == pytest.approx(12 * 16 / seconds["sampling"])
    assert rates["epoch_mfu"] == pytest.approx(sum(flops.values()) / seconds["epoch"] / peak)
    assert rates["training_mfu"] == pytest.approx(flops["training"] / seconds["training"] / peak)
    assert 0 <= rates["reward_hidden"] <= 1 and result["memory"]["peak_rss_mib"] > 100
    assert result["config"]["train"]["lora_rank"] == 4


def test_the_profile_names_operations(report):
    rows = report["profile"]["operations"]
    assert rows[0]["ms"] >= rows[-1]["ms"] and sum(row["share"] for row in rows) <= 1 + 1e-9
    assert any("mm" in row["name"] for row in rows)


def test_calls_are_those_of_the_counting_test_and_of_the_published_code(measured):
    ours, published = measured(""), measured("--published-work")
    assert (ours["calls"], published["calls"]) == (workload.OUR_CALLS, workload.PUBLISHED_CALLS)
    # the forwards of the old and of the reference policy
    assert published["flops"]["training"] - ours["flops"]["training"] == 2 * 64 * ours["flops"]["sampling"] / 640
    assert published["flops"]["decode"] == 2 * ours["flops"]["decode"]


def test_a_slow_reward_overlaps_sampling(measured):
    result = measured("--k 8 --m 1 --steps 4 --batch 1 --train-batch 8 --reward-seconds 0.001")
    assert 0 < result["rates"]["reward_hidden"] <= 1


@pytest.mark.parametrize("family", ["flux_kontext", "qwen_image_edit"])
def test_editors_run_and_are_counted(family, measured, monkeypatch):
    tiny = dataclasses.replace(architectures.PRESETS["tiny"], pipeline="FluxKontextPipeline")
    if family == "qwen_image_edit":
        tiny = architectures.QWEN_EDIT.with_modules(
            transformer={"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 64,
                         "axes_dims_rope": [4, 6, 6]},
            text_encoder={
                "text_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
                                "num_attention_heads": 2, "num_key_value_heads": 1,
                                "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
                "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                                  "out_hidden_size": 64, "fullatt_block_indexes": [0]},
            },
            vae={"base_dim": 4, "num_res_blocks": 1},
        )  # fmt: skip
    monkeypatch.setitem(workload.PRESETS, "tiny", tiny)
    work = "--resolution 64 --k 2 --m 1 --steps 3 --train-steps 1 --batch 2 --train-batch 2"
    result = measured(f"{work} --config.train.lora_rank=4 --config.max_sequence_length=128")
    guided = 2 if family == "qwen_image_edit" else 1  # true CFG: two forwards per step, in training too
    assert result["calls"]["transformer"] == guided * (2 * 3 + 2)
    tokens = {each["image_tokens"] for each in result["epochs"][0][0]["forwards"]}
    assert tokens == {2 * (64 // result["size_multiple"]) ** 2}
    assert result["flops"]["training"] > 0 and result["flops"]["decode"] > 0


def test_an_unknown_option_is_refused(capsys):
    assert epoch.main([*TINY, "--config.sample.merge_lra=on"]) == epoch.REFUSED
    assert "config.sample.merge_lora" in capsys.readouterr().err


def test_workloads():
    given = epoch.parser().parse_args(["--preset", "kontext-dev", "--k", "3"])
    work = workload.resolve(given)
    assert (work.resolution, work.k, work.m, work.steps, work.train_steps) == (384, 3, 8, 10, 1)
    assert workload.resolve(argparse.Namespace(**vars(given) | {"workload": "config"})).m is None
