"""LoRA adapters that stay beside their base: the base and each adapter are models of their own name, loaded once."""

from collections.abc import Iterable, Mapping

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer


def load_adapters(model: torch.nn.Module, folders: Mapping[str, str]) -> dict[str, str]:
    """Put adapters into a model in place; returns peft's key of each name (a name may hold dots, a key may not).

    Raises ValueError for one that is no LoRA, trains whole modules or does not fit the model; OSError or ValueError
    with peft's message where there is none.
    """
    keys = {name: f"adapter_{number}" for number, name in enumerate(folders)}
    wrapped: PeftModel | None = None
    for name, folder in folders.items():
        config = PeftConfig.from_pretrained(folder)
        if config.peft_type != "LORA" or getattr(config, "modules_to_save", None):
            raise ValueError(
                f"adapter {name} in {folder} is {config.peft_type} with modules_to_save="
                f"{getattr(config, 'modules_to_save', None)}; the transformers engine serves plain LoRA. Merge it with "
                "`paco-reward export` and serve the result"
            )
        config.inference_mode = True
        if wrapped is None:
            wrapped = PeftModel(model, config, keys[name])
        result = wrapped.load_adapter(folder, keys[name], is_trainable=False)
        wrong = [*result.missing_keys, *result.unexpected_keys]
        if wrong:
            raise ValueError(
                f"adapter {name} in {folder} does not fit the model: {len(wrong)} weights, first {wrong[0]}"
            )
    return keys


class Adapters:
    """Which adapter is active in some modules. Used on one thread; other modules of the model may differ."""

    def __init__(self, modules: Iterable[torch.nn.Module], keys: Mapping[str, str]):
        self._layers = [layer for root in modules for layer in root.modules() if isinstance(layer, BaseTunerLayer)]
        self._keys = dict(keys)
        self._active: str | None = None
        for layer in self._layers:
            layer.enable_adapters(False)

    def __bool__(self) -> bool:
        """Whether an adapter changes these modules at all."""
        return bool(self._layers)

    def use(self, name: str | None) -> None:
        """Activate the adapter of that name; None: the base alone."""
        if name == self._active:
            return
        for layer in self._layers:
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(self._keys[name], inference_mode=True)
        self._active = name
