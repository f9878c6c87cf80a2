"""Only what pyproject.toml cannot say: where paco-judge lies on this machine."""

from pathlib import Path

from setuptools import setup

JUDGE = Path(__file__).resolve().parent.parent / "judge"

setup(
    install_requires=[
        f"paco-judge @ {JUDGE.as_uri()}",
        # Every release that src/paco_reward/overlay.py was tested with; it refuses the others.
        "llamafactory==0.9.5",
        "gradio",  # the range is LLaMA-Factory's
        "imagehash>=4.3",
        "jinja2>=3.1",
        "numpy>=2.0",
        "omegaconf>=2.3",
        "peft>=0.18",
        "huggingface_hub>=1.0",
        "pillow>=10",
        "pydantic>=2",
        "qwen-vl-utils>=0.0.14",  # process_vision_info, which the published model card calls
        "safetensors>=0.4",
        "scipy>=1.11",
        # LLaMA-Factory imports torchaudio, whose newest release (2.11) is built for CUDA 13.0, as
        # torch is up to 2.14.
        # torch 2.15 is built for CUDA 13.2, and torchaudio refuses to be imported beside it.
        "torch>=2.6,<2.15",
        "torchvision>=0.21,<0.30",
        "transformers>=5.2,!=5.6.0,<6",
    ]
)
