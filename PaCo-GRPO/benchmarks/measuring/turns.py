"""Settings that take turns in one process: what is compared, building each, measuring them round by round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from ml_collections import ConfigDict

from measuring.epochs import Watched, flops_of
from measuring.generators import register, shared_weights
from measuring.peak import matmul_peak
from measuring.repeats import ratios, summary
from measuring.workload import PUBLISHED_OVERRIDES, Workload, make_config, repeat_published_work
from paco_grpo.training.configuration import ConfigError, config_to_yaml
from paco_grpo.training.setup import build_run

WORK = "work"  # in --compare, beside options: published | ours
AS_IT_IS = "as configured"
Overrides = Sequence[tuple[str, str]]
_SWITCHES = {"on": "true", "off": "false"}


@dataclass(frozen=True)
class Pair:
    """A comparison: setting ``index`` to setting ``base``, with what they are called in it."""

    key: str
    label: str
    base_label: str
    index: int
    base: int


@dataclass(frozen=True)
class Setting:
    """One of those that take turns.

    Attributes:
        label: For tables: KEY=VALUE, or ``AS_IT_IS``.
        overrides: (option, text) pairs, on top of the common ones.
        published: Whether it computes as often as the published implementation.
    """

    label: str
    overrides: Overrides = ()
    published: bool = False


def comparisons(
    given: Sequence[str], work: Workload, is_default: Callable[[Overrides], bool] = lambda overrides: False
) -> tuple[list[Setting], list[Pair]]:
    """What takes turns, and which of them are compared, of texts ``KEY=BASE,OTHER,…``.

    Args:
        given: Values that hold commas are separated by ``|``; ``KEY+KEY`` sets both to the same value. Without any text
            there is one setting and no comparison.
        work: Says whether the published amount of work is done where no text says.
        is_default: Whether overrides change nothing: such a setting is measured once, as ``AS_IT_IS``.

    Raises:
        ConfigError: A text of another form.
    """
    plain = Setting(AS_IT_IS, published=work.name == "published")
    settings: list[Setting] = []
    pairs: list[Pair] = []

    def index_of(keys: str, value: str) -> int:
        if keys == WORK:
            setting = Setting(f"{WORK}=published", published=True) if value == "published" else Setting(AS_IT_IS)
        else:
            overrides = tuple((key, value) for key in keys.split("+"))
            setting = plain if is_default(overrides) else Setting(f"{keys}={value}", overrides, plain.published)
        if setting not in settings:
            settings.append(setting)
        return settings.index(setting)

    for text in given:
        keys, equals, values = text.removeprefix("--config.").removeprefix("config.").partition("=")
        split = values.split("|" if "|" in values else ",")
        if not equals or len(split) < 2:
            raise ConfigError(f"--compare {text!r} is not of the form KEY=BASE,OTHER (or KEY=BASE|OTHER)")
        if keys == WORK and set(split) - {"published", "ours"}:
            raise ConfigError(f"--compare {text!r}: {WORK} is published or ours")
        found = [index_of(keys, value) for value in split]
        pairs += [
            Pair(keys, f"{keys}={value}", f"{keys}={split[0]}", index, found[0])
            for value, index in zip(split[1:], found[1:], strict=True)
        ]
    return settings or [plain], pairs


class Turns:
    """Every setting with a run of its own, on shared weights.

    Args:
        work: Resolved.
        given: Comparisons as texts, see ``comparisons``.
        overrides: (option, text) pairs for all settings.
        folder: Of models, prompt sets and runs; of this process alone.
        epochs: To come, so that every epoch has new prompts.
    """

    def __init__(
        self,
        work: Workload,
        given: Sequence[str],
        overrides: Overrides,
        folder: Path,
        epochs: int,
    ) -> None:
        register()
        base = config_to_yaml(make_config(work, folder / "probe", 1, overrides))

        def own(setting_overrides: Overrides) -> list[tuple[str, str]]:
            return [*overrides, *_switches(work, folder / "probe", overrides, setting_overrides)]

        def is_default(chosen: Overrides) -> bool:
            return config_to_yaml(make_config(work, folder / "probe", 1, own(chosen))) == base

        self.work = work
        self.settings, self.pairs = comparisons(given, work, is_default)
        self.configs: list[ConfigDict] = []
        self.watched: list[Watched] = []
        self._weights = ExitStack()
        if len(self.settings) > 1:
            self._weights.enter_context(shared_weights())
        for number, setting in enumerate(self.settings):
            probe = make_config(work, folder / "probe", 1, own(setting.overrides))
            prompts = 2 * epochs * probe.sample.unique_sample_num_per_epoch  # the plan may raise m
            always = PUBLISHED_OVERRIDES if setting.published else ()
            config = make_config(work, folder / str(number), prompts, [*own(setting.overrides), *always])
            run = build_run(config, "benchmark")
            if setting.published:
                repeat_published_work(run)
            self.configs.append(config)
            self.watched.append(Watched(run))
        self.accelerator = self.watched[0].run.accelerator
        self.device, self.main = self.accelerator.device, self.accelerator.is_main_process

    def close(self) -> None:
        """Let go of the weights and of the other processes."""
        self._weights.close()
        self.watched[0].run.close()

    def measure(self, warmup: int, repeats: int) -> list[dict[str, Any]]:
        """Rounds in which every setting runs one epoch, in another order each; then one detailed epoch of each.

        Returns:
            For each setting its epochs (a list over processes in each) and the detailed one; the same on every process.
        """
        found = [{"epochs": [], "detailed": None} for _ in self.settings]
        rng = np.random.default_rng(0)
        for number in range(warmup + repeats):
            for index in rng.permutation(len(self.settings)).tolist():
                measured = self._epoch(index)
                if number >= warmup:
                    found[index]["epochs"].append(measured)
                what = f"round {number - warmup + 1}/{repeats}" if number >= warmup else "warming up"
                self._say(f"{what}, {self.settings[index].label}: {measured[0]['seconds']['epoch']:.2f} s")
        for index, each in enumerate(found):
            each["detailed"] = self._epoch(index, detailed=True)
        return found

    def _epoch(self, index: int, detailed: bool = False) -> list[dict[str, Any]]:
        return gather_object([self.watched[index].epoch(detailed)])

    def peak(self) -> dict[str, Any]:
        """Of this process's device in the policy's precision."""
        return matmul_peak(self.device, self.watched[0].run.policy.dtype)

    def _say(self, text: str) -> None:
        if self.main:
            print(text, file=sys.stderr, flush=True)

    def result(self, index: int, measured: dict[str, Any], peak: float) -> dict[str, Any]:
        """What is known of setting ``index``: raw epochs, medians, FLOPs, rates and shares of ``peak`` (FLOP/s)."""
        setting, config, run = self.settings[index], self.configs[index], self.watched[index].run
        epochs, detailed = measured["epochs"], measured["detailed"]
        every = [each[0]["seconds"] for each in epochs]
        seconds = {name: summary([row.get(name) for row in every]) for name in every[0]}
        whole = {"forwards": [f for process in detailed for f in process["forwards"]], "calls": _added(detailed)}
        hidden = summary([each[0]["reward_hidden"] for each in epochs])["median"]
        flops = flops_of(
            whole, self.work.architecture(), config.train.resolution, config.train.lora_rank, run.policy.size_multiple
        )
        return {
            "label": setting.label,
            "overrides": dict(setting.overrides),
            "published_work": setting.published,
            "plan": run.plan.as_dict(),
            "config": yaml_values(config),
            "size_multiple": run.policy.size_multiple,
            "seconds": seconds,
            "detailed_seconds": detailed[0]["seconds"],
            "calls": _added(epochs[-1]),
            "forwards": whole["forwards"],
            "flops": flops,
            "rates": rates(seconds, detailed[0]["seconds"], whole["forwards"], flops, peak * len(detailed))
            | {"reward_hidden": hidden},
            "memory": {name: max(p["memory"][name] for e in epochs for p in e) for name in epochs[0][0]["memory"]},
            "epochs": epochs,
        }


def _switches(work: Workload, folder: Path, common: Overrides, own: Overrides) -> list[tuple[str, str]]:
    """``own`` with on and off as true and false where the option is a switch."""
    if not own:
        return []
    config, found = make_config(work, folder, 1, common), []
    for key, value in own:
        node, field = config, key
        while "." in field and not node.allow_dotted_keys:
            head, _, field = field.partition(".")
            node = node.get(head, ConfigDict())
        is_switch = field in node and node.get_type(field) is bool
        found.append((key, _SWITCHES.get(value, value) if is_switch else value))
    return found


def rates(
    seconds: dict[str, Any], detailed: dict[str, float], forwards: list[dict], flops: dict[str, Any], peak: float
) -> dict[str, float | None]:
    """Image tokens a second, and FLOP/s as shares of ``peak``."""
    found: dict[str, float | None] = {}
    for phase in ("sampling", "training"):
        took = seconds.get(phase, {}).get("median")
        tokens = sum(f["images"] * f["image_tokens"] for f in forwards if f["phase"] == phase)
        found[f"{phase}_tokens_per_second"] = tokens / took if took else None
        found[f"{phase}_mfu"] = flops[phase] / took / peak if took and flops[phase] is not None else None
    for part, done in (("denoising", "sampling"), ("encode", "encode"), ("decode", "decode")):
        took, count = detailed.get(part), flops[done]
        found[f"{part}_mfu"] = count / took / peak if took and count is not None else None
    total = [flops[name] for name in ("sampling", "training", "encode", "decode") if flops[name] is not None]
    found["epoch_mfu"] = sum(total) / seconds["epoch"]["median"] / peak if flops["sampling"] is not None else None
    return found


def compared(pairs: Sequence[Pair], measured: list[dict]) -> list[dict]:
    """Ratios to the base within each round, for whole epochs and their halves."""

    def seconds(index: int, name: str) -> list[float]:
        return [each[0]["seconds"].get(name) for each in measured[index]["epochs"]]

    return [
        {
            "key": pair.key, "setting": pair.label, "base": pair.base_label,
            "ratio": {n: ratios(seconds(pair.index, n), seconds(pair.base, n)) for n in ("epoch", "cpu", "sampling", "training")},
        }
        for pair in pairs
    ]  # fmt: skip


def yaml_values(config: ConfigDict) -> dict[str, Any]:
    """The configuration as plain values."""
    import yaml

    return yaml.safe_load(config_to_yaml(config))


def _added(processes: list[dict[str, Any]]) -> dict[str, int]:
    names = {name for each in processes for name in each["calls"]}
    return {name: sum(each["calls"].get(name, 0) for each in processes) for name in sorted(names)}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the accelerator's memory was not enough."""
    return isinstance(error, torch.OutOfMemoryError)
