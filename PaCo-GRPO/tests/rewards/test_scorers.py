"""subfig_clipT and pickscore with tiny local weights, against a direct computation; text features are cached."""

import numpy as np
import pytest
import torch
from PIL import Image

from paco_grpo.rewards.pickscore_scores import PickScore, pickscore
from paco_grpo.rewards.subfig_clipT import subfig_clipT
from paco_grpo.types import Item
from paco_judge.grid import split_image

RNG = np.random.default_rng(0)
PROMPT = "1x2 grid of a cat. [LEFT]: asleep. [RIGHT]: awake."
IMAGES = [Image.fromarray(RNG.integers(0, 255, (32, 64, 3), dtype=np.uint8)) for _ in range(3)]
ITEMS = [Item(0, PROMPT), Item(1, PROMPT.replace("cat", "dog")), Item(0, PROMPT)]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {
        "vocab_size": 32,
        "max_position_embeddings": 77,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = sizes | {"image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", "<unk>", "grid", "of", "a", "cat", "dog"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(processor, fast).save_pretrained(folder)
    return str(folder)


def test_pickscore_is_scaled_cosine(clip_folder):
    from transformers import CLIPModel, CLIPProcessor

    scores = pickscore(clip_folder, clip_folder, batch_size=2)(IMAGES, ITEMS)
    model, processor = CLIPModel.from_pretrained(clip_folder).eval(), CLIPProcessor.from_pretrained(clip_folder)
    for image, item, score in zip(IMAGES, ITEMS, scores, strict=True):
        inputs = processor(text=[item.prompt], images=[image], return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            assert score == pytest.approx(model(**inputs).logits_per_image.item() / 26, rel=1e-5)


def test_pickscore_encodes_a_prompt_once(clip_folder, monkeypatch):
    score = PickScore(clip_folder, clip_folder, "cpu", 8)
    score.load()
    calls = []
    forward = score._model.text_model.forward
    monkeypatch.setattr(score._model.text_model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    score(IMAGES, ITEMS)
    score(IMAGES, ITEMS)
    assert len(calls) == 2


def test_subfig_clipT_is_the_mean_over_panels():
    import open_clip

    torch.manual_seed(0)
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    open_clip.factory._MODEL_CONFIGS["tiny-test"] = config
    model, _, preprocess = open_clip.create_model_and_transforms("tiny-test")
    score = subfig_clipT("tiny-test", pretrained=None, batch_size=2)
    score._model, score._preprocess, score._tokenize = model.eval(), preprocess, open_clip.get_tokenizer("ViT-H-14")
    scores = score(IMAGES[:2], ITEMS[:2])
    for image, got in zip(IMAGES, scores, strict=False):
        cosines = []
        for cell, text in zip(split_image(image, 1, 2), ("asleep.", "awake."), strict=True):
            with torch.no_grad():
                a = model.encode_image(preprocess(cell)[None])[0].numpy().astype(np.float64)
                b = model.encode_text(score._tokenize([text]))[0].numpy().astype(np.float64)
            cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        assert got == pytest.approx(np.mean(cosines), rel=1e-5)
