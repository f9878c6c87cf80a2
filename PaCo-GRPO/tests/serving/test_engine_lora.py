"""LoRA adapters beside their base in the transformers engine: each gives the scores of the same weights merged."""

import asyncio

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from paco_judge.images import png_data_url
from paco_judge.questions import build_messages, theme_question
from vllm_server.transformers_engine.__main__ import named_folders
from vllm_server.transformers_engine.batching import Batcher, Job
from vllm_server.transformers_engine.model import JudgeModel
from vllm_server.transformers_engine.protocol import parse_request
from vllm_server.transformers_engine.server import build_app

TEXT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VISION = ["attn.qkv", "attn.proj", "mlp.0"]


def plain_model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapter(base, folder, targets, seed):
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
def judge(judge_folder, adapters):
    return JudgeModel.load(str(judge_folder), 1024, adapters=adapters)


def requests(tiny, names, adapters, **more):
    rows = []
    for index, name in enumerate(names):
        images = [tiny.picture(seed, size=40) for seed in (0, 1 + index % 2)]
        question = theme_question("a fox" + " and a boat" * (index % 2))
        body = {"model": name, "messages": build_messages(*map(png_data_url, images), question), **more}
        rows.append((images, question, parse_request(body, ("base", *adapters), adapters)))
    return rows


def merged_logprobs(judge, judge_folder, adapter, rows) -> list[torch.Tensor]:
    model = plain_model(judge_folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    found = []
    for images, question, _ in rows:
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question}]
        text = judge.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = judge.processor(images=images, text=[text], return_tensors="pt")
        with torch.inference_mode():
            found.append(torch.log_softmax(model(**inputs).logits[0, -1].float(), -1))
    return found


async def answers(judge, asked) -> list[dict[int, float]]:
    """Top log-probabilities of the first token of each request, all of them queued at once."""
    batcher = Batcher(judge)
    batcher.start(asyncio.get_running_loop())
    try:
        jobs = [Job(each) for each in asked]
        for job in jobs:
            batcher.submit(job)
        return [dict((await asyncio.wait_for(job.tokens.get(), 120))[0].top) for job in jobs]
    finally:
        await asyncio.to_thread(batcher.stop)


async def test_each_name_gives_the_scores_of_its_own_weights(judge, judge_folder, adapters, tiny):
    names = ["base", "judge-v1.5", "all", "judge-v1.5", "base", "all"]
    rows = requests(tiny, names, adapters, max_tokens=1, logprobs=True, top_logprobs=20)
    found = await answers(judge, [row[2] for row in rows])
    by_name = {name: merged_logprobs(judge, judge_folder, adapters.get(name), rows) for name in set(names)}
    for index, name in enumerate(names):
        expected = by_name[name][index]
        assert max(abs(expected[token].item() - logprob) for token, logprob in found[index].items()) < 1e-3
        others = [by_name[other][index] for other in by_name if other != name]
        assert all((expected - other).abs().max() > 1e-2 for other in others), "the adapters differ"


async def test_an_answer_keeps_its_adapter_while_scores_of_others_are_asked(judge, judge_folder, adapters, tiny):
    (long,) = requests(tiny, ["all"], adapters, max_tokens=6, logprobs=True, top_logprobs=1)
    scores = [row[2] for row in requests(tiny, ["base"] * 3, adapters, max_tokens=1)]

    async def tokens(batch):
        batcher = Batcher(judge, max_batch=1)
        batcher.start(asyncio.get_running_loop())
        try:
            jobs = [Job(each) for each in batch]
            for job in jobs:
                batcher.submit(job)
            found = []
            while (part := await asyncio.wait_for(jobs[0].tokens.get(), 120)) is not None:
                found += part
            return [token.id for token in found]
        finally:
            await asyncio.to_thread(batcher.stop)

    assert await tokens([long[2], *scores]) == await tokens([long[2]])


async def test_adapters_are_listed_beside_their_base(judge, adapters):
    app = build_app(judge, ("base",), adapters=adapters)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e") as http:
        rows = {row["id"]: row for row in (await http.get("/v1/models")).json()["data"]}
    assert list(rows) == ["base", *adapters]
    assert rows["all"]["parent"] == "base" and rows["all"]["root"] == adapters["all"]


@pytest.mark.parametrize("given", [["name"], ["=folder"], ["name="], ["a=1", "a=2"], ["base=1"]])
def test_a_bad_lora_argument_is_said(given):
    with pytest.raises(ValueError, match="--lora"):
        named_folders(given, ("base",))


def test_an_adapter_that_does_not_fit_is_said(judge_folder, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"])
    get_peft_model(plain_model(judge_folder), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="serves plain LoRA"):
        JudgeModel.load(str(judge_folder), 1024, adapters={"a": str(tmp_path)})
    with pytest.raises((OSError, ValueError), match="adapter_config"):
        JudgeModel.load(str(judge_folder), 1024, adapters={"a": str(tmp_path / "nowhere")})
