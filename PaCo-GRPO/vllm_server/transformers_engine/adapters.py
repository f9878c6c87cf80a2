"""LoRA adapters that stay unmerged: the base and each adapter are served under their own names, loaded once."""

from collections.abc import Iterable, Mapping

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from paco_judge.weights import check_adapter


def load_adapters(model: torch.nn.Module, folders: Mapping[str, str]) -> dict[str, str]:
    """Adds adapters to a model in place.

    Returns:
        peft's key of each name (a name may contain dots, a key may not).

    Raises:
        ValueError: For an adapter that is not LoRA, trains whole modules, has other values than finite ones, or does
            not fit the model.
        OSError: With peft's message, for a folder without an adapter.
    """
    keys = {name: f"adapter_{number}" for number, name in enumerate(folders)}
    tensors = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    wrapped: PeftModel | None = None
    for name, folder in folders.items():
        config = PeftConfig.from_pretrained(folder)
        whole_modules = getattr(config, "modules_to_save", None)
        if config.peft_type != "LORA" or whole_modules:
            raise ValueError(
                f"adapter {name} in {folder} is {config.peft_type} with modules_to_save={whole_modules}; the "
                "transformers engine serves plain LoRA. Merge it with `paco-reward export` and serve the result"
            )
        check_adapter(tensors, folder)
        config.inference_mode = True
        wrapped = wrapped or PeftModel(model, config, keys[name])
        result = wrapped.load_adapter(folder, keys[name], is_trainable=False)
        wrong = [*result.missing_keys, *result.unexpected_keys]
        if wrong:
            raise ValueError(
                f"adapter {name} in {folder} does not fit the model: {len(wrong)} weights, first {wrong[0]}"
            )
    return keys


class Adapters:
    """Selects the active adapter of some modules; the rest of the model may use another. For one thread."""

    def __init__(self, modules: Iterable[torch.nn.Module], keys: Mapping[str, str]):
        self._layers = [layer for root in modules for layer in root.modules() if isinstance(layer, BaseTunerLayer)]
        self._keys = keys
        self._active: str | None = None
        for layer in self._layers:
            layer.enable_adapters(False)

    def __bool__(self) -> bool:
        """Whether any adapter changes these modules."""
        return bool(self._layers)

    def use(self, name: str | None) -> None:
        """Activates an adapter; None: the base alone."""
        if name == self._active:
            return
        for layer in self._layers:
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(self._keys[name], inference_mode=True)
        self._active = name
