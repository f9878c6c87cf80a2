"""Judges of random weights with a small tokenizer, and a small pair data set.

Qwen2.5-VL of 1.1 M parameters, Qwen3-VL, Qwen3.5, and LLaVA.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from paco_judge.questions import Pair, editing_texts, load_editing_questions, theme_question
from paco_judge.scorer import JudgeScorer
from paco_judge.weights import save_model
from paco_reward.pairing.files import write_datasets
from paco_reward.pairing.select import LabeledPair

TOY_JUDGE = Path(__file__).resolve().parents[2] / "quickstart" / "models" / "judge"
CHAT_TEMPLATE = (TOY_JUDGE / "chat_template.jinja").read_text()
THEMES = ["one red fox in four seasons", "a paper boat", "a tall lighthouse"]
REASONS = [
    "the colour is the same.",
    "both show it.",
    "the shape differs and the colour differs too.",
]


def make_processor() -> Qwen2_5_VLProcessor:
    """496 tokens; 56 x 56 px images."""
    return Qwen2_5_VLProcessor.from_pretrained(TOY_JUDGE)


# The published templates in short: no system text; Qwen3.5 thinks unless it is told not to.
_QWEN3_VL_CHAT = CHAT_TEMPLATE.replace(
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}",
    "",
)
_QWEN3_5_CHAT = _QWEN3_VL_CHAT.replace(
    "assistant\n{% endif %}",
    "assistant\n<think>\n{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '\n' }}</think>\n\n{% endif %}{% endif %}",
)


def save_new_judge(folder: Path, family: str) -> Path:
    """A model folder of a Qwen3-VL (``qwen3_vl``) or Qwen3.5 (``qwen3_5``).

    A token is 32 px, an image 4 to 64 tokens. Yes and No have larger embeddings, because random
    weights seldom put them among the top 20.
    """
    tokenizer = make_processor().tokenizer
    tokenizer.add_tokens(["<think>", "</think>"])
    size = {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}
    images = Qwen2VLImageProcessor(
        size=size, patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    tokenizer.chat_template = chat = _QWEN3_5_CHAT if family == "qwen3_5" else _QWEN3_VL_CHAT
    processor = Qwen3VLProcessor(
        images, tokenizer, Qwen3VLVideoProcessor(patch_size=16), chat_template=chat
    )
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 16,
        "initializer_range": 0.06,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    if family == "qwen3_5":
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
        # vLLM's CPU build has linear attention for few widths, among them the real one.
        text |= {
            "num_hidden_layers": 4,
            "rope_parameters": rope,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
        kind = Qwen3_5ForConditionalGeneration
        config = Qwen3_5Config
    else:
        text |= {"num_hidden_layers": 3, "rope_parameters": rope | {"mrope_section": [8, 4, 4]}}
        vision |= {"deepstack_visual_indexes": [0, 1]}
        kind = Qwen3VLForConditionalGeneration
        config = Qwen3VLConfig
    torch.manual_seed(0)
    model = kind(
        config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    ).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(["Yes", "No"])] *= 4
    save_model(model, folder)
    processor.save_pretrained(folder)
    return folder


_OTHER_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}assistant: "
)


def save_other_judge(folder: Path) -> Path:
    """A model folder of another maker's architecture, LLaVA, with 28 px images."""
    tokenizer = make_processor().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    pixels = {"height": 28, "width": 28}
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=pixels)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=_OTHER_CHAT,
        num_additional_image_tokens=1,
    )
    text = LlamaConfig(
        vocab_size=len(processor.tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    image_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=text, image_token_id=image_id, vision_config=CLIPVisionConfig(**vision)
    )
    LlavaForConditionalGeneration(config).eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_judge(folder: Path) -> Path:
    """A model folder of random weights, float32."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig.from_pretrained(TOY_JUDGE)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return folder


def save_qwen_judge(folder: Path, tokenizer: Path) -> Path:
    """A random Qwen2.5-VL with Qwen's own tokenizer, and the real size of vocabulary and images.

    No is as probable as Yes on average, and both are among the top 20.
    """
    own = Qwen2Tokenizer.from_pretrained(tokenizer)
    own.chat_template = CHAT_TEMPLATE
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size),
        own,
        make_processor().video_processor,
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen2_5_VLConfig.from_pretrained(TOY_JUDGE)
    config.image_token_id, config.video_token_id = own.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>"]
    )
    config.vision_start_token_id, config.vision_end_token_id = own.convert_tokens_to_ids(
        ["<|vision_start|>", "<|vision_end|>"]
    )
    text = config.text_config
    text.vocab_size = 152064  # more than there are tokens
    text.hidden_size = config.vision_config.out_hidden_size = 64
    text.num_attention_heads = 2
    text.num_key_value_heads = 1
    text.max_position_embeddings = 32768
    text.eos_token_id, text.pad_token_id = own.eos_token_id, own.pad_token_id
    text.bos_token_id = None
    torch.manual_seed(0)
    save_model(Qwen2_5_VLForConditionalGeneration(config).eval(), folder / "random")
    processor.save_pretrained(folder / "random")
    return save_answering(folder / "random", folder / "judge")


def picture(seed: int, size: int = 32) -> Image.Image:
    """A smooth random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)


def save_pairs(
    folder: Path, count: int = 8, name: str = "pairs", seed: int = 0, size: int = 32
) -> Path:
    """A ShareGPT data set of ``count`` pairs with answers of different lengths; its folder."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    pairs = []
    for index in range(count):
        files = [f"images/{name}_{index}_{side}.png" for side in "ab"]
        for side, file in enumerate(files):
            picture(seed + 2 * index + side * (index % 2), size).save(folder / file)
        answer = "Yes. " + REASONS[index % 3]
        if index % 2:
            answer = "No. " + " ".join(REASONS[: index % 3 + 1])
        question = theme_question(THEMES[index % 3])
        pairs.append(LabeledPair(*files, question, index % 2 == 0, "pair", "", answer))
    write_datasets(folder, name, {name: pairs}, "<image><image>")
    return folder


def save_answering(source: Path, folder: Path, least: float = 40) -> Path:
    """A judge as a folder, changed so that Yes and No are its most probable tokens.

    Otherwise no pair has a score. A multiple of the mean last hidden state is added to both rows of
    the head, which keeps the logits' difference.
    """
    judge = JudgeScorer.from_pretrained(source)
    states = []
    hook = judge.model.lm_head.register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0][:, -1])
    )
    texts = list(editing_texts(load_editing_questions(), "make it red").values())
    judge.score([Pair(picture(i), picture(i + 1), texts[(i + 1) % 2]) for i in range(8)])
    hook.remove()
    states = torch.cat(states)
    towards = states.mean(0)
    head = torch.nn.Parameter(judge.model.lm_head.weight.detach().clone())
    head.data[[*judge.yes_ids, *judge.no_ids]] += towards * least / (states @ towards).min()
    judge.model.lm_head.weight = head
    judge.model.config.tie_word_embeddings = False
    judge.model.config.get_text_config().tie_word_embeddings = False
    save_model(judge.model, folder)
    judge.processor.save_pretrained(folder)
    return folder
