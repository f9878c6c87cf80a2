"""CLIP models of a few thousand random weights, in the formats of transformers and of OpenCLIP."""

import json
from pathlib import Path

import torch


def save_clip(folder: Path) -> str:
    """A transformers CLIP model and its processor; returns the folder, for ``pickscore`` and ``clipscore``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

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


def save_open_clip(folder: Path) -> tuple[str, str]:
    """An OpenCLIP model, registered in this process; returns its name and its file of weights, for ``subfig_clipT``.

    Another process names it ``local-dir:FOLDER``.
    """
    import open_clip
    from safetensors.torch import save_file

    sizes = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny-test.json").write_text(json.dumps(sizes))
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes, "preprocess_cfg": {}}))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    weights = open_clip.create_model("tiny-test").state_dict()
    file = folder / "open_clip_model.safetensors"
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    return "tiny-test", str(file)
