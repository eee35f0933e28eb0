"""Replay against a live server: does the replay of a finished run give the number that vLLM's own counters give, and at what cost?

    .venv/bin/python experiments/benchmarks/acceptance.py outputs/latest                # greedy or sampled, as the run's evaluation was
    .venv/bin/python experiments/benchmarks/acceptance.py outputs/latest --ks 1 3 5 --rows 50 --out acceptance.json

One server per k, one request in flight, the run's own held-out prompts. Three reasons make the two differ, and the table keeps them apart:
a server counts what it accepts past the end of an answer (tokens per step do not), rounding changes some greedy answers (the last columns are over
the rows whose answer is the stored one), and the states of a replay are those of the engine that captured them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3.comparison.results import read_results
from eagle3.config import Config, EngineConfig, read_config
from eagle3.conversation import Row
from eagle3.drafter.model import load_drafter
from eagle3.engines import Sampling
from eagle3.evaluation.drafter import replay_drafter
from eagle3.evaluation.live import LiveReport, measure
from eagle3.evaluation.report import AcceptanceReport
from eagle3.evaluation.statistics import bootstrap_interval
from eagle3.generation import load_rows
from eagle3.hidden_states import StateReader
from eagle3.serving.speculation import Speculation
from eagle3.serving.vllm import VLLMServer, target_settings
from eagle3.store import Store
from eagle3.targets import read_target

COLUMNS = (
    "k",
    "rows",
    "AL replayed [95 %]",
    "AL live [95 %]",
    "off",
    "tokens/step replayed",
    "live",
    "off",
    "same answers",
    "off on those",
    "replay s",
    "live s",
)


def held_out(config: Config, run: Path) -> tuple[list[Row], Path]:
    """The evaluation rows of a run, and the folder of their states."""
    store = Store(config.paths.store)
    found = {stage["stage"]: store.find(stage["stage"], stage["signature"]) for stage in read_results(run)["stages"] if stage["split"] == "evaluation"}
    rows, states = found["generate"], found["capture"]
    assert rows is not None and states is not None, f"the store of {run} is not at {store.root}: run this from where the run was made"
    return list(load_rows(rows.path / "rows.jsonl")), store.pool("states", states.facts["pool"])


def live_pass(config: Config, engine: EngineConfig, target: Path, drafter: Path, k: int, rows: Sequence[Row]) -> LiveReport:
    """All rows' prompts, one by one, by a server with k drafts a step."""
    evaluation = config.evaluation
    sampling = Sampling(evaluation.temperature, evaluation.top_p, evaluation.max_completion_tokens, config.generation.max_seq_len, read_target(target).eos_ids)
    settings = target_settings(config.target, engine, target, config.generation.max_seq_len, 1).with_args(*Speculation(k, drafter).args)
    with tempfile.TemporaryDirectory() as folder, VLLMServer(settings, Path(folder) / "server.log") as server:
        return measure("ours", k, server.base_url, settings.name, rows, sampling, [1], config.generation.timeout_s)[0]


def compared(rows: Sequence[Row], replayed: AcceptanceReport, live: LiveReport) -> dict[str, Any]:
    """One line of the table as numbers."""
    served = live.acceptance(rows)
    assert served is not None
    same = {answer.row_id for row, answer in zip(rows, live.answers, strict=True) if row.input_ids[-sum(row.loss_mask) :] == list(answer.completion_ids)}
    alike = [replace(report, rows=tuple(row for row in report.rows if row.row_id in same)) for report in (replayed, served)]
    return {
        "k": replayed.k,
        "rows": len(rows),
        "replayed": replayed.acceptance_length,
        "replayed_interval": asdict(bootstrap_interval(replayed)),
        "live": served.acceptance_length,
        "live_interval": asdict(bootstrap_interval(served)),
        "tokens_per_step": [replayed.tokens_per_step, served.tokens_per_step],
        "same_answers": len(same) / len(rows),
        "tokens_per_step_same": [report.tokens_per_step for report in alike] if same else None,
        "replay_s": replayed.seconds,
        "live_s": live.seconds,
    }


def line(one: dict[str, Any]) -> str:
    """One line of the table in Markdown."""
    lengths = [f"{one[name]:.3f} [{one[f'{name}_interval']['low'] or 0:.2f}, {one[f'{name}_interval']['high'] or 0:.2f}]" for name in ("replayed", "live")]
    steps, alike = one["tokens_per_step"], one["tokens_per_step_same"]
    cells = [str(one["k"]), str(one["rows"]), *lengths, f"{one['live'] / one['replayed'] - 1:+.2%}"]
    cells += [*(f"{value:.3f}" for value in steps), f"{steps[1] / steps[0] - 1:+.2%}", f"{one['same_answers']:.0%}"]
    cells += [f"{alike[1] / alike[0] - 1:+.2%}" if alike else "", f"{one['replay_s']:.1f}", f"{one['live_s']:.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--rows", type=int, help="only the first so many held-out rows")
    parser.add_argument("--venv", default=".venv-vllm", help="environment with vLLM, if the run's engine is none")
    parser.add_argument("--out", type=Path, help="leave the numbers here as JSON")
    options = parser.parse_args()
    config = read_config(options.run)
    engine = config.engine if config.engine.name in ("vllm", "vllm_cpu") else EngineConfig(name="vllm_cpu", venv=options.venv)
    rows, states = held_out(config, options.run)
    rows = rows[: options.rows]
    drafter = Path(read_results(options.run)["drafter"])
    model: Any = load_drafter(drafter)
    replays = replay_drafter(model, rows, StateReader(states), config.training.dtype, options.ks, "ours", config.evaluation.temperature)
    target = Path(model.config.speculators_config.verifier.name_or_path)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    found = []
    for replayed in replays:
        found.append(compared(rows, replayed, live_pass(config, engine, target, drafter, replayed.k, rows)))
        print(line(found[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
