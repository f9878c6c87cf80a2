"""The same transformer faster: attention backends and compiled blocks.

The numbers are equal up to rounding.
"""

import torch
from diffusers import attention_backend
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from typing_extensions import override

from paco_grpo.names import did_you_mean
from paco_grpo.options import ConfigError
from paco_grpo.policies.base import Policy

# The backends of diffusers that can train. Left out: Sage's, 8-bit and for inference only; _flash_3,
# which registers no gradient (the hub's does); _native_cudnn, whose gradients were not finite on an
# H100; flex, which outside compiled blocks holds all scores. *_hub names download a kernel.
ATTENTION_BACKENDS = (
    "native",
    "_native_flash",
    "_native_efficient",
    "_native_math",
    "flash",
    "flash_varlen",
    "flash_hub",
    "flash_varlen_hub",
    "_flash_3_hub",
    "_flash_3_varlen_hub",
    "xformers",
)

# Compiled variants of one block: adapter (current, old, off, merged) x gradient or not x batch of
# one or more x mask or not. Beyond dynamo's default of 8, variants would run uncompiled with a
# warning that is easily missed.
_MAX_VARIANTS = 64


def attention_problem(name: str) -> str | None:
    """Why the backend ``name`` cannot train, None if it can; needs no device."""
    if name in ATTENTION_BACKENDS:
        return None
    near = did_you_mean(name, ATTENTION_BACKENDS)
    return f"{name!r} is unknown, or cannot train.{near} Known: {', '.join(ATTENTION_BACKENDS)}"


def set_attention(policy: Policy, name: str) -> None:
    """Compute every attention of the transformer with the backend ``name``.

    Raises:
        ConfigError: The backend's package is not installed, or the model ignores it.
    """
    if policy.keeps_attention:
        raise ConfigError(
            f"config.speed.attention={name!r}: {policy.family} would use it in few steps only"
        )
    try:
        # diffusers also changes the default of all other models, which the block restores.
        with attention_backend(name):
            policy.transformer.set_attention_backend(name)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(f"config.speed.attention={name!r}: {error}") from error
    if "native" in name:
        return
    # CUDA's autocast leaves the norms of q and k in float32, and casts the inputs of PyTorch's own
    # attention alone.
    for module in policy.transformer.modules():
        for name_of_norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            norm = getattr(module, name_of_norm, None)
            if isinstance(norm, nn.Module):
                norm.register_forward_hook(_cast_as_autocast)


def _cast_as_autocast(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    device_type = output.device.type
    if not torch.is_autocast_enabled(device_type):
        return output
    return output.to(torch.get_autocast_dtype(device_type))


def share_casts(transformer: nn.Module) -> None:
    """Cast the tokens that several linear layers of a block take once, instead of in each layer.

    Under CUDA's autocast, norms return float32, and every linear layer that takes their tokens, of
    the base or of a LoRA, casts them for itself. A forward pass keeps its bits. In the backward
    pass, the layers' gradients of the tokens are added in autocast's precision.

    Args:
        transformer: Changed in place, when it has its adapters.
    """
    for blocks in transformer.children():
        if isinstance(blocks, nn.ModuleList):
            for name, layer in blocks.named_modules():
                if isinstance(layer, (nn.Linear, BaseTunerLayer)) and "lora_" not in name:
                    layer.register_forward_pre_hook(_take_shared_cast, prepend=True)


def _take_shared_cast(layer: nn.Module, args: tuple) -> tuple | None:
    if torch.compiler.is_compiling():
        return None  # dynamo follows no attributes of some tensors; see ``SharedCasts``
    tokens = args[0]
    device_type = tokens.device.type
    if tokens.dtype != torch.float32 or not torch.is_autocast_enabled(device_type):
        return None
    # The cast lives as long as the tokens, unless a block changes them in place: it is found by the
    # next layer that takes them.
    if getattr(tokens, "cast_version", None) != tokens._version:
        tokens.shared_cast = tokens.to(torch.get_autocast_dtype(device_type))
        tokens.cast_version = tokens._version
    return tokens.shared_cast, *args[1:]


class SharedCasts(CustomGraphPass):
    """Does in Inductor's graphs what ``share_casts`` does without compilation.

    Graphs with a backward pass have each cast once without it.
    """

    @override
    def __call__(self, graph: fx.Graph) -> None:
        first: dict[tuple, fx.Node] = {}  # by tokens and data type
        for cast in graph.find_nodes(
            op="call_function", target=torch.ops.prims.convert_element_type.default
        ):
            shared = first.setdefault(cast.args, cast)
            if shared is not cast:
                cast.replace_all_uses_with(shared)
                graph.erase_node(cast)

    @override
    def uuid(self) -> str:
        """Part of the key of Inductor's cache: another text after a change of this class."""
        return "paco_grpo.SharedCasts 1"


def compile_blocks(policy: Policy, backend: str = "inductor") -> None:
    """``torch.compile`` each repeated block of the transformer in place.

    This is diffusers' regional compilation. Blocks of one class share their code. Sizes are
    symbolic from the start: a new size or batch does not compile again (except a batch of one), and
    a resumed run uses the same kernels. Names of weights do not change.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    if torch.__version__ < (2, 12):
        # Inductor's analysis of memory access fails on symbolic sizes there (pytorch#181563).
        torch._inductor.config.triton.coalesce_tiling_analysis = False
    torch._inductor.config.post_grad_custom_pre_pass = SharedCasts()
    policy.transformer.compile_repeated_blocks(dynamic=True, backend=backend)
