"""A run's results in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eagle3.comparison.results import ArmSummary, Results, published_line

SIGNATURE_LENGTH = 12
POOLED, POSITIONS = "AL pooled\n[95 %]", "accepted\nat i, %"  # the columns that give way in a narrow terminal


def results_table(results: Results) -> Table:
    """One line per arm and k; the k that the run was asked for is bold and marked.

    "accepted at i" is the share of steps that accepted their draft at position 1, 2, ...; the lines below the table are the paired differences.
    """
    title = "Acceptance length (AL) in tokens per step, bonus included"
    table = Table(title=title, caption=_caption(results), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("arm", no_wrap=True)
    for heading in ("k", "T", POOLED, "AL per\nprompt", "tokens\n/step", POSITIONS, "rows", "tokens"):
        table.add_column(heading, justify="right", no_wrap=heading not in (POOLED, POSITIONS))
    for arm in results["arms"]:
        asked = arm["k"] == results["k"]
        table.add_row(
            arm["arm"] if arm["source"] == "replay" else f"{arm['arm']} ({arm['source']})",
            f"{'→ ' if asked else ''}{arm['k']}",
            f"{arm['temperature']:g}",
            _length_with_interval(arm),
            f"{arm['acceptance_length_per_prompt']:.2f}",
            f"{arm['tokens_per_step']:.2f}",
            " ".join(f"{100 * share:.0f}" for share in arm["acceptance_at"]),
            f"{arm['rows']:,}",
            f"{arm['tokens']:,}",
            style="bold" if asked else None,
        )
    return table


def live_table(results: Results) -> Table:
    """One line per arm, k and number in flight; the lines below the table say in words what resolved and what is to be expected."""
    title = "Live servers; TTFT is the time to the first token, TPOT that per token behind it"
    table = Table(title=title, caption=_live_caption(results), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("arm", no_wrap=True)
    for heading in ("k", "in\nflight", "tok/s", "speed-up\n[95 %]", "TTFT\nms", "TPOT\nms", "AL by\ncounters", "tokens\n/step", "same\nanswers"):
        table.add_column(heading, justify="right", no_wrap=not heading.startswith("speed-up"))
    for line in results["live"]:
        gain = line["speed_up"]
        table.add_row(
            "no speculation" if not line["k"] else line["arm"],
            str(line["k"] or ""),
            str(line["concurrency"]),
            f"{line['tokens_per_s']:.1f}",
            "" if gain is None else f"{gain['estimate']:.2f}" + ("" if gain["low"] is None else f" [{gain['low']:.2f}, {gain['high']:.2f}]"),
            f"{1000 * line['first_s']:.0f}",
            _shown(line["token_s"], ".1f", 1000),
            _shown(line["acceptance_length"], ".2f"),
            _shown(line["tokens_per_step"], ".2f"),
            _shown(line["identical"], ".0%"),
        )
    return table


def _shown(value: float | None, form: str, scale: float = 1) -> str:
    return "" if value is None else f"{scale * value:{form}}"


def _live_caption(results: Results) -> str:
    lines = ["same answers: as without speculation; on the lines without it, as with the fewest in flight: what differs there is rounding alone."]
    for line in results["live"]:
        if gain := line["speed_up"]:
            words = {"better": "faster than no speculation", "worse": "slower than no speculation", "not resolved": "not resolved"}[gain["verdict"]]
            lines.append(f"{line['arm']} (k={line['k']}, {line['concurrency']} in flight): {words} on {gain['num_prompts']} prompts{_and_then(gain)}")
    for concurrency, k in results["best_k"].items():
        one = next(e for e in results["expected"] if (e["arm"], str(e["concurrency"]), e["k"]) == ("ours", concurrency, k))
        measured = f", measured {one['measured']:.2f}" if one["measured"] is not None else ", not measured"
        pays = "" if one["expected"] > 1 else "; speculation does not pay there"
        lines.append(f"best k for {concurrency} in flight: {k}, expected speed-up {one['expected']:.2f}{measured}{pays}")
    return "\n".join(lines)


def _and_then(verdict: Mapping[str, Any]) -> str:
    """What else is to be said of a verdict: the reason for it, and how many prompts would resolve it."""
    reason = f"; {verdict['reason']}" if verdict["reason"] else ""
    needed = verdict.get("prompts_needed")
    return reason + (f"; about {needed:,} prompts would resolve it" if needed else "")


def stages_table(results: Results) -> Table:
    """One line per stage: made or cached, and what it cost when it was made."""
    table = Table(title="Stages", box=SIMPLE_HEAD)
    table.add_column("stage")
    table.add_column("status")
    for heading in ("seconds", "tokens", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("signature", no_wrap=True)
    for stage in results["stages"]:
        table.add_row(
            f"{stage['stage']} ({stage['split']})" if stage["split"] else stage["stage"],
            stage["status"],
            f"{stage['seconds']:,.1f}",
            f"{stage['tokens']:,}",
            _readable_bytes(stage["bytes"]),
            stage["signature"][:SIGNATURE_LENGTH],
            style="dim" if stage["status"] == "cached" else None,
        )
    return table


def _caption(results: Results) -> str:
    lines = [f"→ the k asked for; replayed unless marked live. Draft vocabulary covers {results['vocabulary_coverage']:.1%} of the answer tokens."]
    for difference in results["differences"]:
        if difference["k"] == results["k"]:
            interval = "" if difference["low"] is None else f" [{difference['low']:+.2f}, {difference['high']:+.2f}]"
            lines.append(
                f"{difference['ours']} - {difference['baseline']} ({difference['source']}, k={difference['k']}, T={difference['temperature']:g}): "
                f"{difference['estimate']:+.2f}{interval}, {difference['verdict']} on {difference['num_prompts']} prompts{_and_then(difference)}"
            )
    if results["published"]:
        lines.append(published_line(results["published"]))
    lines += dict.fromkeys(f"note: {note}" for arm in results["arms"] for note in arm["notes"])
    return "\n".join(lines)


def _length_with_interval(arm: ArmSummary) -> str:
    low, high = arm["interval"]
    interval = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    return f"{arm['acceptance_length']:.2f}{interval}"


def _readable_bytes(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
