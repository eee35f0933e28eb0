"""Replay against a live server: does the replay of a finished run give the number that vLLM's own counters give, and at what cost?

    .venv/bin/python experiments/benchmarks/acceptance.py outputs/latest                # greedy or sampled, as the run's evaluation was
    .venv/bin/python experiments/benchmarks/acceptance.py outputs/latest --ks 1 3 5 --rows 50 --out acceptance.json

One server per k, one request in flight, the run's own held-out prompts. Greedy answers change with how many tokens are computed together (ties in
bfloat16), so the stored rows and the server's answers are not always the same text: each k is replayed on both, and on the server's own answers
what is left is the replay's error. There, tokens per step leave out what the server accepts past the end of an answer, and acceptance does not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3.capture import capture_rows
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
from eagle3.targets import load_model, read_target

COLUMNS = (
    *("k", "rows", "AL, stored rows replayed [95 %]", "AL live [95 %]", "off", "AL, its own answers replayed", "off"),
    *("tokens/step, own answers replayed", "tokens/step live", "off", "same answers", "replay s", "live s"),
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


def replay_answers(config: Config, model: Any, target: Any, rows: Sequence[Row], live: LiveReport) -> AcceptanceReport:
    """The replay of what the server itself answered, on states captured here."""
    answered = []
    for row, answer in zip(rows, live.answers, strict=True):
        prompt_ids = row.input_ids[: len(row.input_ids) - sum(row.loss_mask)]
        ids, mask = [*prompt_ids, *answer.completion_ids], [0] * len(prompt_ids) + [1] * answer.num_tokens
        answered.append(replace(row, input_ids=ids, loss_mask=mask))
    with tempfile.TemporaryDirectory() as folder:
        layers = model.config.eagle_aux_hidden_state_layer_ids
        capture_rows(answered, lambda: target, Path(folder), config.capture, layers, live.temperature, "capture")
        return replay_drafter(model, answered, StateReader(Path(folder)), config.training.dtype, [live.k], "ours", live.temperature)[0]


def compared(rows: Sequence[Row], stored: AcceptanceReport, own: AcceptanceReport, live: LiveReport) -> dict[str, Any]:
    """One line of the table as numbers."""
    served = live.acceptance(rows)
    assert served is not None
    same = [row.input_ids[-sum(row.loss_mask) :] == list(answer.completion_ids) for row, answer in zip(rows, live.answers, strict=True)]
    return {
        "k": live.k,
        "rows": len(rows),
        "stored": stored.acceptance_length,
        "stored_interval": asdict(bootstrap_interval(stored)),
        "live": served.acceptance_length,
        "live_interval": asdict(bootstrap_interval(served)),
        "own": own.acceptance_length,
        "tokens_per_step": [own.tokens_per_step, served.tokens_per_step],
        "same_answers": sum(same) / len(same),
        "replay_s": stored.seconds,
        "live_s": live.seconds,
    }


def line(one: dict[str, Any]) -> str:
    """One line of the table in Markdown."""
    lengths = [f"{one[name]:.3f} [{one[f'{name}_interval']['low'] or 0:.2f}, {one[f'{name}_interval']['high'] or 0:.2f}]" for name in ("stored", "live")]
    replayed, served = one["tokens_per_step"]
    cells = [str(one["k"]), str(one["rows"]), *lengths, f"{one['stored'] / one['live'] - 1:+.2%}", f"{one['own']:.3f}", f"{one['own'] / one['live'] - 1:+.2%}"]
    cells += [f"{replayed:.3f}", f"{served:.3f}", f"{replayed / served - 1:+.2%}", f"{one['same_answers']:.0%}"]
    cells += [f"{one['replay_s']:.1f}", f"{one['live_s']:.1f}"]
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
    path = Path(model.config.speculators_config.verifier.name_or_path)
    target = load_model(path, config.engine.dtype, config.training.device)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    found = []
    for stored in replays:
        live = live_pass(config, engine, path, drafter, stored.k, rows)
        found.append(compared(rows, stored, replay_answers(config, model, target, rows, live), live))
        print(line(found[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
