"""benchmarks/epoch.py at tiny size: the JSON holds what it promises, and the work is the work that is counted."""

import json

import pytest
import torch
from paco_grpo.training.configuration import ConfigError

import epoch
from measuring.turns import AS_IT_IS, Turns, comparisons
from measuring.workload import OUR_CALLS, PUBLISHED_CALLS, Workload

pytestmark = pytest.mark.slow
TINY = ["--preset", "tiny", "--k", "2", "--m", "2", "--steps", "3", "--batch", "4", "--train-batch", "4"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A report of two rounds: merged or not, and the published work or ours."""
    output = tmp_path_factory.mktemp("epoch") / "epoch.json"
    command = [*TINY, "--compare", "sample.merge_lora=off,on", "--compare", "work=published,ours", "--repeats", "2"]
    command += ["--warmup", "0", "--profile", "--output", str(output), "--config.train.lora_rank=4"]
    assert epoch.main(command) == 0
    return json.loads(output.read_text())


def test_the_report_says_where_and_how(measured):
    assert measured["benchmark"] == "epoch" and measured["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert {"processor", "cores", "memory_gib", "gpus", "load"} <= set(measured["machine"])
    assert measured["versions"]["torch"] and "commit" in measured["git"]
    assert measured["settings"]["preset"] == "tiny" and measured["settings"]["overrides"] == {"train.lora_rank": "4"}
    assert measured["peak"]["flops_per_second"] == max(measured["peak"]["by_size"].values()) > 1e8
    assert measured["parameters"]["transformer"] == 132_176


def test_every_setting_has_its_repeats_medians_and_shares(measured):
    labels = [each["label"] for each in measured["results"]]
    assert labels == [AS_IT_IS, "sample.merge_lora=on", "work=published"]  # what is the same is measured once
    for each in measured["results"]:
        assert len(each["epochs"]) == 2 == each["seconds"]["epoch"]["n"]
        assert {"epoch", "cpu", "sampling", "reward_wait", "training"} <= set(each["seconds"])
        assert {"encode", "denoising", "decode", "training", "optimizer"} <= set(each["detailed_seconds"])
        seconds = each["seconds"]
        assert seconds["epoch"]["low"] <= seconds["epoch"]["median"] <= seconds["epoch"]["high"]
        assert 0 < each["rates"]["epoch_mfu"] < 1 and each["rates"]["sampling_tokens_per_second"] > 0
        assert 0 <= each["rates"]["reward_hidden"] <= 1
        assert each["memory"]["peak_rss_mib"] > 100
        assert each["config"]["train"]["lora_rank"] == 4
    merged = measured["results"][1]
    assert merged["config"]["sample"]["merge_lora"] is True and merged["overrides"] == {"sample.merge_lora": "on"}


def test_comparisons_are_ratios_within_a_round(measured):
    merged, ours = measured["compared"]
    assert (merged["setting"], merged["base"]) == ("sample.merge_lora=on", "sample.merge_lora=off")
    assert (ours["setting"], ours["base"]) == ("work=ours", "work=published")
    plain, merged_result, _ = measured["results"]
    rounds = zip(merged_result["epochs"], plain["epochs"], strict=True)
    expected = [a[0]["seconds"]["epoch"] / b[0]["seconds"]["epoch"] for a, b in rounds]
    assert merged["ratio"]["epoch"]["raw"] == pytest.approx(expected)


def test_the_profile_names_operations(measured):
    rows = measured["profile"]["operations"]
    assert rows[0]["ms"] >= rows[-1]["ms"] and sum(row["share"] for row in rows) <= 1 + 1e-9
    assert any("mm" in row["name"] for row in rows)


def test_flops_are_images_times_what_an_image_costs(measured):
    plain, _, published = measured["results"]
    assert plain["calls"]["transformer"] == 4 * 3 + 4 and plain["calls"]["backward"] == 4
    assert published["calls"]["transformer"] == 4 * 3 + 3 * 4
    assert published["flops"]["decode"] == 2 * plain["flops"]["decode"]
    assert published["flops"]["encode"] == (4 + 3 * 4) / 2 * plain["flops"]["encode"]
    assert published["flops"]["training"] - plain["flops"]["training"] == 2 * plain["flops"]["sampling"] / 3


def test_calls_are_those_of_the_counting_test_and_of_the_published_code(tmp_path):
    turns = Turns(Workload("tiny").resolved(), ["work=published,ours"], [], tmp_path, 1)
    for watched, expected in zip(turns.watched, (PUBLISHED_CALLS, OUR_CALLS), strict=True):
        assert watched.epoch()["calls"] == expected
    assert PUBLISHED_CALLS == {
        "transformer": 832, "text_encoder": 256, "text_encoder_2": 256, "decoder": 128, "backward": 64,
    }  # fmt: skip
    turns.close()


def test_a_reward_that_takes_time_is_hidden_behind_sampling(tmp_path):
    work = Workload("tiny", k=8, m=1, steps=4, batch=1, train_batch=8, reward_seconds=0.001).resolved()
    turns = Turns(work, [], [], tmp_path, 1)
    seconds = turns.watched[0].epoch()["seconds"]
    turns.close()
    assert seconds["reward"] >= 8 * 0.001
    assert seconds["reward_wait"] < seconds["reward"]


@pytest.mark.parametrize("family", ["flux_kontext", "qwen_image_edit"])
def test_editors_run_and_are_counted(family, tmp_path, monkeypatch):
    import dataclasses

    from measuring import workload
    from measuring.architectures import PRESETS, QWEN_EDIT

    tiny = dataclasses.replace(PRESETS["tiny"], family=family)
    if family == "qwen_image_edit":
        narrow = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 64,
                  "axes_dims_rope": [4, 6, 6]}  # fmt: skip
        text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}  # fmt: skip
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
                  "fullatt_block_indexes": [0]}  # fmt: skip
        tiny = dataclasses.replace(
            QWEN_EDIT, transformer=QWEN_EDIT.transformer | narrow, text=QWEN_EDIT.text | text,
            vision=QWEN_EDIT.vision | vision, vae=QWEN_EDIT.vae | {"base_dim": 4, "num_res_blocks": 1},
        )  # fmt: skip
    monkeypatch.setitem(workload.PRESETS, "tiny-editor", tiny)
    monkeypatch.setitem(workload.RESOLUTIONS, "tiny-editor", 64)
    work = Workload("tiny-editor", k=2, m=1, steps=3, train_steps=1, batch=2, train_batch=2).resolved()
    turns = Turns(work, [], [("train.lora_rank", "4")], tmp_path, 2)
    result = turns.result(0, turns.measure(0, 1)[0], 1e9)
    turns.close()
    guided = 2 if family == "qwen_image_edit" else 1  # true CFG: two forwards a step, in training too
    assert result["calls"]["transformer"] == guided * (2 * 3 + 2)
    tokens = {each["image_tokens"] for each in result["forwards"]}
    assert tokens == {2 * (64 // result["size_multiple"]) ** 2}
    assert result["flops"]["training"] > 0 and result["flops"]["decode"] > 0


def test_what_cannot_be_compared_is_said(capsys):
    for text in ("sample.merge_lora", "sample.merge_lora=on", "work=theirs,ours"):
        with pytest.raises(ConfigError, match="--compare"):
            comparisons([text], Workload("tiny"))
    assert epoch.main([*TINY, "--config.sample.merge_lra=on"]) == epoch.REFUSED
    assert "Did you mean config.sample.merge_lora" in capsys.readouterr().err


def test_several_options_at_once():
    settings, pairs = comparisons(["a.b+c=off,on", "sample.noise_steps=1|1,2"], Workload("tiny"))
    assert settings[1].overrides == (("a.b", "on"), ("c", "on"))
    assert [(pair.key, pair.index, pair.base) for pair in pairs] == [("a.b+c", 1, 0), ("sample.noise_steps", 3, 2)]
    assert settings[3].overrides == (("sample.noise_steps", "1,2"),)
