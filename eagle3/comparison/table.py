"""A run's results in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eagle3.comparison.results import ArmSummary, Results

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
    shows_speed = any(arm["source"] == "live" for arm in results["arms"])
    if shows_speed:  # the seconds of a replay say nothing about a server
        table.add_column("tok/s", justify="right", no_wrap=True)
    for arm in results["arms"]:
        asked = arm["k"] == results["k"]
        speed = [f"{arm['tokens'] / arm['seconds']:.0f}" if arm["source"] == "live" else ""] if shows_speed else []
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
            *speed,
            style="bold" if asked else None,
        )
    return table


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
            reason = f"; {difference['reason']}" if difference["reason"] else ""
            lines.append(
                f"{difference['ours']} - {difference['baseline']} ({difference['source']}, k={difference['k']}, T={difference['temperature']:g}): "
                f"{difference['estimate']:+.2f}{interval}, {difference['verdict']} on {difference['num_prompts']} prompts{reason}"
            )
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
