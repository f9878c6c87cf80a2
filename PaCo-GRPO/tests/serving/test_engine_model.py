"""The engine's numbers against transformers, one request at a time; LoRA adapters against merged weights."""

import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import httpx
import pytest
import torch
from engine_tools import ids, pair_requests, parse, plain_inputs, plain_logprobs, plain_model, request, run
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from paco_grpo.asgi import ApiError
from paco_judge.images import data_url
from paco_judge.questions import build_messages
from vllm_server.transformers_engine import model as model_module
from vllm_server.transformers_engine.__main__ import named_folder
from vllm_server.transformers_engine.model import JudgeModel
from vllm_server.transformers_engine.server import build_app

TEXT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VISION = ["attn.qkv", "attn.proj", "mlp.0"]


@pytest.fixture(scope="module")
def plain(judge_folder):
    return plain_model(judge_folder)


def damaged(folder: Path, change: Callable[[dict, str], None], chosen: str, file: str = "model.safetensors") -> str:
    """Changes a tensor of a weights file, the first with ``chosen`` in its name; the name."""
    weights = load_file(folder / file)
    name = next(name for name in weights if chosen in name)
    change(weights, name)
    save_file(weights, folder / file, {"format": "pt"})
    return name


def remove(weights: dict, name: str) -> None:
    del weights[name]


def shorten(weights: dict, name: str) -> None:
    weights[name] = weights[name][:-1].clone()


def poison(weights: dict, name: str) -> None:
    weights[name][0, 0] = float("nan")


@pytest.mark.parametrize("change", [remove, shorten])
def test_weights_without_a_tensor_or_with_one_of_another_shape_are_not_served(judge_folder, tmp_path, change):
    folder = shutil.copytree(judge_folder, tmp_path / "judge")
    name = damaged(folder, change, "k_proj.weight")
    with pytest.raises(ValueError, match=name.rsplit(".layers.", maxsplit=1)[-1]) as error:
        JudgeModel.load(str(folder), max_model_len=1024)
    assert "\n" not in str(error.value) and (change is remove or " instead of 64x128" in str(error.value))


def scores_of_a_plain_forward(judge, plain, rows):
    """Log-probabilities in one padded batch, compared with those of transformers."""
    batch = judge.prepare([row[2] for row in rows])
    assert len({len(row) for row in batch}) > 1, "the batch is padded"
    together = judge.first_token_logprobs(batch)
    for index, (images, question, _) in enumerate(rows):
        expected = plain_logprobs(plain, judge.processor, images, question)
        torch.testing.assert_close(together[index], expected, atol=2e-4, rtol=0)
    return together


def test_a_padded_batch_gives_the_scores_of_a_plain_forward(judge, plain, tiny):
    rows = pair_requests(tiny, 7, max_tokens=1)
    together = scores_of_a_plain_forward(judge, plain, rows)
    alone = judge.first_token_logprobs(judge.prepare([rows[3][2]]))
    torch.testing.assert_close(alone[0], together[3], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "patches", "passes"),
    [({}, 1 << 15, [4]), ({}, 20, [1, 1, 1, 1]), ({"image_cache_mb": 0}, 1 << 15, [4, 3])],
    ids=["one batch", "few patches a pass", "a cache of one image"],
)
def test_each_image_passes_the_vision_tower_once(judge_folder, tiny, monkeypatch, settings, patches, passes):
    judge = JudgeModel.load(str(judge_folder), max_model_len=1024, **settings)
    monkeypatch.setattr(model_module, "_VISION_PATCHES", patches)
    tower, seen = judge.model.model.get_image_features, []
    counted = mock.patch.object(
        judge.model.model, "get_image_features", lambda pixels, grids: seen.append(len(grids)) or tower(pixels, grids)
    )
    requests = [row[2] for row in pair_requests(tiny, 6)]  # on four different images
    with counted:
        judge.prepare(requests)
        judge.prepare(requests)
    assert seen == passes


def test_messages_without_images_and_with_a_system_text(judge, plain):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a paper boat"}]
    (row,) = judge.prepare([parse(messages=turns, max_tokens=1)])
    text = judge.processor.apply_chat_template(turns, add_generation_prompt=True)
    logits = plain(**judge.processor(text=[text], return_tensors="pt")).logits[0, -1]
    expected = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(judge.first_token_logprobs([row])[0], expected, atol=2e-4, rtol=0)


def test_bad_requests_are_errors_of_their_own(judge, tiny):
    url = data_url(tiny.picture(0))
    bad = {
        "half a file": build_messages(url, url[: url.index(",") + 1 + 160], "q"),
        "not base64": build_messages(url, "data:image/png;base64,a?b", "q"),
        "an image token in the text": build_messages(url, url, "<|image_pad|>"),
        "too long": build_messages(url, url, "words " * 2000),
    }
    good = request(tiny.picture(0), tiny.picture(1))
    results = judge.prepare([good, *(parse(messages=messages) for messages in bad.values())])
    assert not isinstance(results[0], ApiError)
    assert all(isinstance(row, ApiError) and row.status == 400 and row.param == "messages" for row in results[1:])
    assert results[1].code == "invalid_image" and results[4].code == "context_length_exceeded"


async def test_longer_answers_are_those_of_generate(judge, plain, tiny):
    rows = pair_requests(tiny, 4, max_tokens=9)
    scores = pair_requests(tiny, 3, max_tokens=1)
    answers = await run(judge, [row[2] for row in rows + scores])
    for (images, question, _), (tokens, reason) in zip(rows, answers, strict=False):
        inputs = plain_inputs(judge.processor, images, question)
        expected = plain.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert [token.id for token in tokens] == expected.tolist()
        assert reason == ("stop" if tokens[-1].id in judge.eos_ids else "length")
    assert all(len(tokens) == 1 for tokens, _ in answers[4:])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
async def test_newer_families_score_and_answer_as_transformers_does(family, tiny, tmp_path):
    """Deepstack features and linear attention, in padded batches."""
    folder = tiny.save_new_judge(tmp_path / family, family)
    judge, plain = JudgeModel.load(str(folder), max_model_len=1024), plain_model(folder)
    rows = pair_requests(tiny, 4, max_tokens=5)
    scores_of_a_plain_forward(judge, plain, rows)
    for (images, question, _), answer in zip(rows, await run(judge, [row[2] for row in rows]), strict=True):
        inputs = plain_inputs(judge.processor, images, question)
        expected = plain.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert ids(answer) == expected.tolist()


def test_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match="gpt2"):
        JudgeModel.load(str(tmp_path), 1024)


def save_adapter(base, folder, targets, seed) -> str:
    """An adapter whose B is not zero, as after training."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(plain_model(base), config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapters(judge_folder, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "judge-v1.5": save_adapter(judge_folder, folder / "text", TEXT, 1),
        "all": save_adapter(judge_folder, folder / "all", TEXT + VISION, 2),
    }


@pytest.fixture(scope="module")
def tuned(judge_folder, adapters):
    """The judge with both adapters."""
    return JudgeModel.load(str(judge_folder), 1024, adapters=adapters)


def named_requests(tiny, names, adapters, **fields) -> list[tuple]:
    fields |= {"served": ("base", *adapters), "adapters": adapters}
    rows = []
    for index, name in enumerate(names):
        images = [tiny.picture(seed, size=40) for seed in (0, 1 + index % 2)]
        rows.append((images, "same?", request(*images, model=name, **fields)))
    return rows


async def test_each_name_gives_the_scores_of_its_own_merged_weights(tuned, judge_folder, adapters, tiny):
    names = ["base", "judge-v1.5", "all", "judge-v1.5", "base", "all"]
    rows = named_requests(tiny, names, adapters, max_tokens=1, logprobs=True, top_logprobs=20)
    found = await run(tuned, [row[2] for row in rows])
    expected = {}
    for name in dict.fromkeys(names):
        model = plain_model(judge_folder)
        if name in adapters:
            model = PeftModel.from_pretrained(model, adapters[name]).merge_and_unload()
        expected[name] = [plain_logprobs(model, tuned.processor, images, question) for images, question, _ in rows]
    for index, name in enumerate(names):
        own = expected[name][index]
        ((token,), _) = found[index]
        assert len(token.top) == 20 and max(abs(own[id].item() - logprob) for id, logprob in token.top) < 1e-3
        others = [expected[other][index] for other in expected if other != name]
        assert all((own - other).abs().max() > 1e-2 for other in others), "the adapters differ"


async def test_an_answer_keeps_its_adapter_while_scores_of_others_run(tuned, adapters, tiny):
    (long,) = named_requests(tiny, ["all"], adapters, max_tokens=6)
    scores = [row[2] for row in named_requests(tiny, ["base"] * 3, adapters, max_tokens=1)]
    together = await run(tuned, [long[2], *scores], max_batch=1)
    assert ids(together[0]) == ids((await run(tuned, [long[2]]))[0])


async def test_adapters_are_listed_after_their_base(tuned, adapters):
    app = build_app(tuned, ("base",), adapters=adapters)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e") as http:
        rows = {row["id"]: row for row in (await http.get("/v1/models")).json()["data"]}
    assert list(rows) == ["base", *adapters]
    assert rows["all"]["parent"] == "base" and adapters["all"] not in str(rows), "no folders of the server"


@pytest.mark.parametrize("given", ["name", "=folder", "name="])
def test_a_bad_lora_argument_is_refused(given):
    with pytest.raises(ArgumentTypeError, match="NAME=FOLDER"):
        named_folder(given)


def test_an_adapter_that_does_not_fit_is_refused(judge_folder, tiny, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"])
    get_peft_model(plain_model(judge_folder), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="modules_to_save"):
        JudgeModel.load(str(judge_folder), 1024, adapters={"a": str(tmp_path)})
    with pytest.raises((OSError, ValueError), match="adapter_config"):
        JudgeModel.load(str(judge_folder), 1024, adapters={"a": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(("change", "said"), [(remove, "lacks"), (shorten, "does not fit"), (poison, "not finite")])
def test_a_damaged_adapter_is_refused_by_the_name_of_its_tensor(judge_folder, adapters, tmp_path, change, said):
    folder = shutil.copytree(adapters["judge-v1.5"], tmp_path / "adapter")
    name = damaged(folder, change, "q_proj.lora_B", "adapter_model.safetensors")
    with pytest.raises(ValueError, match=said) as error:
        JudgeModel.load(str(judge_folder), 1024, adapters={"a": str(folder)})
    module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
    assert module in str(error.value) and "\n" not in str(error.value)
