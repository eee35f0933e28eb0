"""A run at a glance: how training went, and where drafts are rejected."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.comparison.results import Results, published_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which stay apart for colour-blind readers; a marker per arm for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#555555"


def plot_run(results: Results, training_metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One PNG with two panels: training curves, and acceptance by position for each arm at the k asked for.

    `training_metrics` are the logged lines in order: `step`, with `train/loss`, `val/acceptance_length` or both. May be empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    training, positions = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    _plot_training(training, training_metrics)
    _plot_positions(positions, results)
    for axes in (training, positions):
        axes.spines["top"].set_visible(False)
    figure.savefig(path)


def plot_generation(facts: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One PNG on how one split was answered: answers' lengths, how they finished, where the turns ended, and tokens/s over time.

    `facts` are those of the generate stage (`generation.collect_rows`), `metrics` its logged lines; none if every answer was there before.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    lengths, finishes, ends, rate = figure.subplots(1, 4)
    _bars(lengths, "Answers by length, tokens", {f"{edge}-{2 * int(edge) - 1}": number for edge, number in facts["answer_lengths"].items()})
    _bars(finishes, "How answers finished", facts["finish_reasons"])
    names = {"kept": "kept", "too_short": "too short", "truncated_dropped": "truncated, dropped", "failed": "failed"}
    _bars(ends, "Where turns ended", {name: facts[key] for key, name in names.items()} | {f"{kind} (now)": n for kind, n in facts["failures_now"].items()})
    points = [(line["generate/seconds"], line["generate/tokens"]) for line in metrics if "generate/seconds" in line]
    rate.set_title("Tokens/s over time", loc="left", fontweight="bold")
    rate.set_xlabel("seconds")
    pairs = [(later[0], (later[1] - earlier[1]) / (later[0] - earlier[0])) for earlier, later in itertools.pairwise(points) if later[0] > earlier[0]]
    if pairs:
        seconds, values = zip(*pairs, strict=True)
        rate.plot(seconds, values, color=COLOURS[0], alpha=0.3, linewidth=0.8)
        rate.plot(seconds, _smooth(values), color=COLOURS[0], linewidth=2)
        rate.set_ylim(bottom=0)
    else:
        rate.text(0.5, 0.5, "all answers were there", ha="center", va="center", color=GREY, transform=rate.transAxes)
    for axes in (lengths, finishes, ends, rate):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _bars(axes: Axes, title: str, counts: Mapping[str, int]) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    bars = axes.barh(list(counts), list(counts.values()), color=COLOURS[0])
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.2)


def _plot_training(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Loss on the left axis, thin per step and thick smoothed; validation acceptance length on the right one."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title("Training", loc="left", fontweight="bold")
    axes.set_xlabel("step")
    losses = [(line["step"], line["train/loss"]) for line in metrics if "train/loss" in line]
    lengths = [(line["step"], line["val/acceptance_length"]) for line in metrics if "val/acceptance_length" in line]
    if not losses and not lengths:
        axes.text(0.5, 0.5, "no training in this run", ha="center", va="center", color=GREY, transform=axes.transAxes)
        axes.set(xticks=[], yticks=[], xlabel="")
        axes.spines[:].set_visible(False)
        return
    if losses:
        steps, values = zip(*losses, strict=True)
        axes.plot(steps, values, color=COLOURS[0], alpha=0.3, linewidth=0.8)
        axes.plot(steps, _smooth(values), color=COLOURS[0], linewidth=2)
        axes.set_ylabel("loss", color=COLOURS[0])
        axes.tick_params(axis="y", colors=COLOURS[0])
    else:
        axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    if lengths:
        steps, values = zip(*lengths, strict=True)
        right = axes.twinx()
        right.plot(steps, values, color=COLOURS[1], marker=MARKERS[0], linewidth=2)
        right.set_ylabel("validation acceptance length", color=COLOURS[1])
        right.tick_params(axis="y", colors=COLOURS[1])
        right.spines["top"].set_visible(False)


def _plot_positions(axes: Axes, results: Results) -> None:
    """The share of steps that accept a draft at each position, one line per arm."""
    from matplotlib.ticker import PercentFormatter

    axes.set_title(f"Accepted drafts by position, k={results['k']}", loc="left", fontweight="bold")
    axes.set(xlabel="draft position", ylabel="share of decoding steps", ylim=(0, 1), xticks=range(1, results["k"] + 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    arms = [arm for arm in results["arms"] if arm["k"] == results["k"]]
    names = list(dict.fromkeys(arm["arm"] for arm in arms))
    for arm in arms:  # an arm keeps its colour, replayed (solid) or measured live (dashed)
        style = names.index(arm["arm"]) % len(COLOURS)
        axes.plot(
            range(1, arm["k"] + 1),
            arm["acceptance_at"],
            color=COLOURS[style],
            marker=MARKERS[style],
            linestyle="--" if arm["source"] == "live" else "-",
            linewidth=2,
            label=f"{arm['arm']} ({arm['source']}, T={arm['temperature']:g}): AL {arm['acceptance_length']:.2f}",
        )
    if arms:
        axes.legend(frameon=False, handlelength=3)
    if results["published"]:
        axes.text(0, -0.2, published_line(results["published"]), color=GREY, fontsize=7, wrap=True, transform=axes.transAxes)


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of the values around each one, over about a fiftieth of the curve: centred, so that a falling loss is not drawn late."""
    reach = len(values) // 100
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]
