"""Only what pyproject.toml cannot say: where paco-judge lies on this machine."""

from pathlib import Path

from setuptools import setup

JUDGE = Path(__file__).resolve().parent.parent / "judge"

setup(
    install_requires=[
        f"paco-judge[pages] @ {JUDGE.as_uri()}",
        # Every release that src/paco_reward/overlay.py was tested with; it refuses the others.
        "llamafactory==0.9.5",
        "gradio>=5.50",  # earlier ones do not import beside huggingface_hub 1
        "imagehash>=4.3.1",
        "jinja2>=3.1.2",
        "numpy>=2.0",
        "omegaconf>=2.3",
        "peft>=0.18",
        "huggingface_hub>=1.0",
        "pillow>=10",
        "pydantic>=2.10.6",
        "qwen-vl-utils>=0.0.14",  # process_vision_info, which the published model card calls
        "safetensors>=0.4",
        "scipy>=1.11",
        # LLaMA-Factory imports torchaudio. Release 2.11.0 is built for CUDA 13.0, as torch 2.11 to
        # 2.14 are, and says so: it refuses others. 2.11.1 does not load beside torch below 2.13.
        "torch>=2.11,<2.15",
        "torchaudio==2.11.0",
        "torchvision>=0.26,<0.30",
        "transformers>=5.3,!=5.6.0,<6",
    ]
)
