"""Several training processes: torchrun starts them on a job written to a file, and they report through their standard output.

A worker watches its standard input: that ends when we close it or die, and asks the worker to leave a checkpoint and stop. So none stays behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import Eagle3Error, TrainingError
from eagle3.progress import progress
from eagle3.store import write_text
from eagle3.targets import TargetInfo
from eagle3.tracking import StageTracker
from eagle3.training.ranks import Ranks, on_sigterm
from eagle3.training.settings import TrainingConfig
from eagle3.training.train import Job, pick_device, prepare

_JOB_FILE, _LOG_FILE = "workers.json", "workers.log"
_LOG_TAIL_LINES = 15
# Marks our lines among whatever libraries print.
_MARK = "eagle3-event "


def launch(job: Job, track: StageTracker) -> dict[str, Any]:
    """Run a job in `training.num_gpus` processes; returns what the first of them found.

    Raises:
        TrainingError: there are fewer GPUs, SIGTERM came, or a worker met an error; all workers have ended then.
    """
    num, device = job.config.num_gpus, pick_device(job.config.device)
    if device.type == "cuda" and num > torch.cuda.device_count():
        raise TrainingError(f"training.num_gpus={num}, but torch sees {torch.cuda.device_count()}: lower it.")
    job_path, log_path = job.folder / _JOB_FILE, job.folder / _LOG_FILE
    write_text(job_path, json.dumps(dataclasses.asdict(job), default=str))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m", __name__, str(job_path)]
    env = os.environ | ({"OMP_NUM_THREADS": str(max(torch.get_num_threads() // num, 1))} if device.type == "cpu" else {})
    with log_path.open("w") as log:
        # In a session of its own, so that Ctrl-C reaches the workers through us alone.
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with on_sigterm(process.stdin.close):
                facts = _follow(_events(process.stdout), track)
        finally:
            process.stdin.close()
            process.wait()
    if facts is None:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise TrainingError(f"the training processes ended with status {process.returncode} and no result. The end of {log_path}:\n{tail}")
    job_path.unlink()
    log_path.unlink()
    return facts


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(_MARK):
            yield json.loads(line.removeprefix(_MARK))


def _follow(events: Iterator[dict[str, Any]], track: StageTracker) -> dict[str, Any] | None:
    """Pass on what the workers report until they end; None if they ended without a result."""
    first = next(events, {})
    facts, errors = None, []
    with progress("train", first.get("total", 0), "steps") as update:
        for event in itertools.chain([first], events):
            if "metrics" in event:
                track.log(event["metrics"])
            elif "done" in event:
                update(event["done"], event["note"])
            elif "error" in event:
                errors.append(event["error"])
            facts = event.get("facts", facts)
    if errors:
        raise TrainingError(errors[0])
    return facts


def _say(**event: Any) -> None:
    os.write(sys.stdout.fileno(), f"{_MARK}{json.dumps(event)}\n".encode())


def _stop_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _read_job(path: Path) -> Job:
    read = json.loads(path.read_text(encoding="utf-8"))
    target = TargetInfo(**read["target"] | {"path": Path(read["target"]["path"]), "eos_ids": tuple(read["target"]["eos_ids"])})
    return Job(TrainingConfig(**read["config"]), target, Path(read["rows"]), Path(read["states"]), Path(read["folder"]))


def _work(path: Path) -> None:
    """What each process runs."""
    job = _read_job(path)
    device = pick_device(job.config.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = Ranks.join(device)
    trainer, facts = prepare(job, ranks, device)
    if not ranks.is_first:
        trainer.run(lambda metrics: None, lambda done: None)
    else:
        _say(total=trainer.num_steps)
        facts |= trainer.run(lambda metrics: _say(metrics=metrics), lambda done: _say(done=done, note=trainer.note()))
        _say(facts=facts)
    ranks.leave()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            _work(Path(sys.argv[1]))
        except Eagle3Error as error:
            _say(error=str(error))
            sys.exit(1)
