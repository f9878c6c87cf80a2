"""Reports as Markdown tables: medians, and in brackets the quartiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

NOTHING = "–"
_CALLS = {
    "transformer": "transformer, forward", "text_encoder": "first text encoder", "text_encoder_2": "second text encoder",
    "decoder": "VAE decoder", "backward": "transformer, backward",
}  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None, form: str = ".3g") -> str:
    """``value`` in ``form``, or a dash; large ones without an exponent."""
    if value is None:
        return NOTHING
    text = format(value, form)
    return f"{value:.0f}" if "e+" in text else text


def spread(of: Mapping[str, Any] | None, form: str = ".3g") -> str:
    """Median and quartiles."""
    if not of or of["median"] is None:
        return NOTHING
    return f"{number(of['median'], form)} ({number(of['low'], form)}–{number(of['high'], form)})"


def seconds(value: float | None) -> str:
    """Seconds; what is less than a millisecond is no waiting."""
    return "0" if value is not None and value < 1e-3 else number(value)


def spread_of_seconds(of: Mapping[str, Any] | None) -> str:
    """Median and quartiles of seconds."""
    return "0" if of and of["high"] is not None and of["high"] < 1e-3 else spread(of)


def share(value: float | None) -> str:
    """A share as a percentage."""
    return NOTHING if value is None else f"{100 * value:.3g} %"


def flops(value: float | None) -> str:
    """FLOPs with the unit that fits."""
    if value is None:
        return NOTHING
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} M"


def head(report: Mapping[str, Any]) -> str:
    """What was run, on what, and when."""
    machine, git = report["machine"], report["git"]
    gpus = machine["gpus"]
    on = f"{len(gpus)}x {gpus[0]['name']}" if gpus else f"{machine['processor']}, {machine['cores']} cores"
    changed = f" with {git['changed_files']} changed files" if git.get("changed_files") else ""
    return (
        f"`{report['command']}` on {on}; torch {report['versions']['torch']}; commit "
        f"`{git.get('commit', 'unknown')[:10]}`{changed}; load before {machine['load'][0]:.2g}; {report['time']}.\n"
    )


def epoch(report: Mapping[str, Any]) -> str:
    """Of epoch.py."""
    results, settings = report["results"], report["settings"]
    work = ", ".join(f"{key} {settings[key]}" for key in ("resolution", "k", "m", "steps", "train_steps", "batch"))
    parts = [f"{settings['preset']}: {work}; {settings['repeats']} rounds. Seconds of an epoch, median (quartiles).\n"]
    rows = [
        [f"`{r['label']}`", *(spread_of_seconds(r["seconds"].get(name)) for name in ("epoch", "sampling", "reward_wait", "training", "cpu"))]
        for r in results
    ]  # fmt: skip
    parts.append(table(["setting", "epoch", "sampling", "reward wait", "training", "CPU time"], rows))
    if report["compared"]:
        rows = [
            [f"`{c['setting']}` to `{c['base']}`", *(spread(c["ratio"][n], ".3f") for n in ("epoch", "sampling", "training", "cpu"))]
            for c in report["compared"]
        ]  # fmt: skip
        parts.append("Ratios within a round (below 1: faster).\n")
        parts.append(table(["compared", "epoch", "sampling", "training", "CPU time"], rows))
    parts += [_phases(results), _calls(results), _rates(report)]
    if report.get("profile"):
        parts.append(profile(report["profile"]))
    return "\n".join(parts)


def _phases(results: Sequence[Mapping]) -> str:
    names = ("encode", "denoising", "decode", "reward_wait", "training", "optimizer")
    rows = [[f"`{r['label']}`", *(seconds(r["detailed_seconds"].get(name)) for name in names)] for r in results]
    text = "Seconds of the phases, in one further epoch that waits after each (training includes the optimizer).\n\n"
    return text + table(["setting", *(name.replace("_", " ") for name in names)], rows)


def _calls(results: Sequence[Mapping]) -> str:
    rows = [[f"`{r['label']}`", *(str(r["calls"].get(name, 0)) for name in _CALLS)] for r in results]
    return "Images (texts) through each part.\n\n" + table(["setting", *_CALLS.values()], rows)


def _rates(report: Mapping[str, Any]) -> str:
    peak = report["peak"]
    rows = []
    for r in report["results"]:
        rate, memory = r["rates"], r["memory"]
        gigabytes = memory.get("peak_gpu_mib", memory["peak_rss_mib"]) / 1024
        row = [number(rate["sampling_tokens_per_second"]), flops(r["flops"]["sampling"]), flops(r["flops"]["training"])]
        row += [share(rate[name]) for name in ("denoising_mfu", "sampling_mfu", "training_mfu", "epoch_mfu")]
        rows.append([f"`{r['label']}`", *row, share(rate["reward_hidden"]), f"{gigabytes:.3g}"])
    kind = "GPU memory" if report["device"] == "cuda" else "process"
    text = (
        f"Shares are of the measured {peak['dtype']} matrix-product peak, {flops(peak['flops_per_second'])}FLOP/s"
        f"{'' if not peak['threads'] else ' on ' + str(peak['threads']) + ' thread(s)'}; the rewards' time is hidden where "
        "nobody waits for it.\n\n"
    )
    columns = ["setting", "image tokens/s", "sampling FLOPs", "training FLOPs", "denoising MFU", "sampling MFU",
               "training MFU", "epoch MFU", "reward hidden", f"peak GiB ({kind})"]  # fmt: skip
    return text + table(columns, rows)


def profile(found: Mapping[str, Any], most: int = 12) -> str:
    """The operations of one small epoch."""
    rows = [
        [f"`{o['name'][:70]}`", str(o["calls"]), number(o["ms"]), share(o["share"])] for o in found["operations"][:most]
    ]
    text = (
        f"Where {found['total_ms'] / 1000:.3g} s on {found['on']} go in a profiled epoch of one batch and 3 steps.\n\n"
    )
    return text + table(["operation", "calls", "ms", "share"], rows)


def resolution_sweep(report: Mapping[str, Any]) -> str:
    """Of resolution_sweep.py."""
    parts = []
    if report["measured"]:
        settings = report["settings"]
        steps = report["measured"][0]["steps"]
        parts.append(f"Measured: {settings['preset']}, {steps} steps, one of them trained; seconds an image.\n")
        rows = [
            [str(r["resolution"]), str(r["image_tokens"]), str(r["text_tokens"]), share(r["text_share"]),
             spread(r["sampling_seconds"]), spread(r["training_seconds"]), number(r["decode_seconds"]),
             flops(r["sampling_flops"]), flops(r["training_flops"]), share(r["sampling_mfu"]), share(r["training_mfu"])]
            for r in report["measured"]
        ]  # fmt: skip
        columns = ["pixels", "image tokens", "text tokens", "text share", "sampling s", "training s", "of it decoding s",
                   "sampling FLOPs", "training FLOPs", "sampling MFU", "training MFU"]  # fmt: skip
        columns[6] = "decoding s (in sampling)"
        parts.append(table(columns, rows))
    for preset in dict.fromkeys(row["preset"] for row in report["counted"]):
        rows = [
            [str(r["resolution"]), str(r["image_tokens"] + r["reference_tokens"]), str(r["text_tokens"]),
             share(r["text_share"]), flops(r["forward"]), flops(r["sampling"]), flops(r["training"]), flops(r["decode"])]
            for r in report["counted"] if r["preset"] == preset
        ]  # fmt: skip
        columns = [
            "pixels",
            "image tokens",
            "text tokens",
            "text share",
            "one forward",
            "10 steps",
            "training step",
            "decode",
        ]
        parts.append(f"Counted, not timed: FLOPs of an image with {preset}'s real architecture.\n")
        parts.append(table(columns, rows))
    return "\n".join(parts)


def scaling(report: Mapping[str, Any]) -> str:
    """Of scaling.py."""
    rows = [
        [str(r["processes"]), spread(r["seconds"]), spread(r["speedup"]), share(r["efficiency"]),
         share(r["waiting_share"]["median"])]
        for r in report["rows"]
    ]  # fmt: skip
    text = f"{report['rows'][0]['images']} images an epoch, {report['settings']['threads']} thread(s) a process.\n\n"
    return text + table(["processes", "epoch, s", "speed-up", "efficiency", "waiting share"], rows)


def environment(report: Mapping[str, Any]) -> str:
    """Of environment.py."""
    gpu = "peak_gpu_reserved_mib" if report["device"] == "cuda" else "peak_rss_mib"
    rows = [
        [f"`{r['setting']}`", spread(r["seconds"]["epoch"]), spread(r["ratio"]["epoch"], ".3f"),
         spread(r["ratio"]["cpu"], ".3f"), f"{r['memory'][gpu] / 1024:.3g}"]
        for r in report["rows"]
    ]  # fmt: skip
    text = f"`epoch.py {' '.join(report['settings']['epoch'])}`; ratios to the first line's.\n\n"
    return text + table(["environment", "epoch, s", "epoch, ratio", "CPU time, ratio", "peak GiB"], rows)


def effects(report: Mapping[str, Any]) -> str:
    """Of effects.py."""
    rows = [
        [f"`{r['setting']}`", number(r["time_ratio"], ".2f"), f"{r['time_ratio_min']:.2f}–{r['time_ratio_max']:.2f}",
         number(r["pixel_rms"], ".4f"), number(r["pixel_max"], ".2f"), number(r["ratio_deviation"], ".2g")]
        for r in report["rows"]
    ]  # fmt: skip
    settings = report["settings"]
    text = (
        f"A sampling batch of {settings['images']} images, {settings['rounds']} rounds: time (denoising and decoding), "
        "pixels (of 0 to 1) and first ratio against `plain`.\n\n"
    )
    columns = ["setting", "time, ratio", "over rounds", "pixels, root mean square", "largest", "first ratio off by"]
    return text + table(columns, rows)


PERCENTILES = (50, 90, 99)  # of latencies


def judge_load(report: Mapping[str, Any]) -> str:
    """Of judge_load.py."""
    rows = [
        [row["target"], str(row["concurrency"]), number(row["pairs_per_second"], ".1f"),
         *(number(row[f"p{p}_ms"], ".1f") for p in PERCENTILES), str(row["errors"])]
        for row in report["targets"]
    ]  # fmt: skip
    text = table(["server", "in flight", "pairs/s", *(f"p{p} ms" for p in PERCENTILES), "errors"], rows)
    if not report["compared"]:
        return text
    names = (("throughput_ratio", ".3f"), ("p50_ratio", ".3f"), ("added_p50_ms", "+.1f"))
    rows = [
        [f"{row['target']} to {row['base']}", str(row["concurrency"]), *(number(row[name], form) for name, form in names)]
        for row in report["compared"]
    ]
    return f"{text}\n{table(['compared', 'in flight', 'pairs/s, ratio', 'p50, ratio', 'p50 added, ms'], rows)}"


def compare_engines(report: Mapping[str, Any]) -> str:
    """Of compare_engines.py."""
    tolerances = report["settings"]["tolerances"]
    rows = []
    for row in report["rows"]:
        cells, said = [NOTHING] * len(tolerances), row.get("not_run", "")
        if row["ran"]:
            cells = [f"{row['differences'][name]:.1e}" for name in tolerances]
            said = "agrees" if row["agrees"] else "**differs**"
        elif "failed" in row:
            said = f"**failed**: {row['failed'].splitlines()[-1]}"
        rows.append([row["objective"], row["engine"], *cells, said])
    limits = ", ".join(f"{name} {limit:g}" for name, limit in tolerances.items())
    text = f"Largest differences to one process; they agree within {limits}.\n\n"
    return text + table(["objective", "engine", *tolerances, ""], rows)


KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "epoch": epoch,
    "resolution_sweep": resolution_sweep,
    "scaling": scaling,
    "environment": environment,
    "effects": effects,
    "compare_engines": compare_engines,
    "judge_load": judge_load,
}
