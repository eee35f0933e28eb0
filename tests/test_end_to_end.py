"""The installed command on the real embedded target, small: what it makes, what it makes again, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm"
SMALL = [
    "target=path",
    "target.path=model",
    "dataset=jsonl",
    "dataset.path=questions.jsonl",
    "generation.num_samples=12",
    "generation.max_completion_tokens=48",
    "evaluation.num_prompts=4",
    "evaluation.holdout_fraction=0.3",
    "evaluation.max_completion_tokens=48",
    "training.num_epochs=2",
    "training.draft_vocab_size=2048",
    "training.batch_tokens=256",
    "tracking=disabled",
]


def _eagle3(*arguments: str, folder: Path, code: int = 0) -> str:
    """Run the console script in `folder`; returns what it said."""
    command = [str(Path(sys.executable).with_name("eagle3")), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def _results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "outputs" / "latest" / "results.json").read_text())
    return content


def _stages(folder: Path) -> dict[str, str]:
    return {f"{stage['stage']} {stage['split']}".strip(): stage["status"] for stage in _results(folder)["stages"]}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"Tom has {n} apples and buys {n + 3} more. How many apples has he now?"}) + "\n" for n in range(2, 60)))
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, smollm2: Path, questions: Path) -> Path:
    """A folder in which one small run is finished; `model` and `questions.jsonl` in it are the target and the prompts."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").symlink_to(smollm2)
    (folder / "questions.jsonl").symlink_to(questions)
    _eagle3(*SMALL, folder=folder)
    return folder


@pytest.mark.slow
def test_a_run_leaves_its_results_its_picture_and_a_drafter_that_speculators_opens(run_folder: Path) -> None:
    results = _results(run_folder)
    assert {arm["arm"] for arm in results["arms"]} == {"ours", "ngram"}
    for arm in results["arms"]:
        assert arm["acceptance_length"] >= 1 and arm["acceptance_length"] == pytest.approx(1 + sum(arm["acceptance_at"]))
        assert arm["rows"] == 4 and arm["temperature"] == 0 and len(arm["acceptance_at"]) == arm["k"]
    assert set(_stages(run_folder).values()) == {"made"}
    (evaluated,) = [stage for stage in results["stages"] if stage["stage"] == "evaluate"]
    assert evaluated["tokens"] == results["arms"][0]["tokens"]  # not once for each arm and k
    assert (run_folder / "outputs" / "latest" / "results.png").stat().st_size > 10_000
    assert (run_folder / "outputs" / "latest" / "config.yaml").exists()

    from speculators.models.eagle3 import Eagle3DraftModel

    drafter = Eagle3DraftModel.from_pretrained(results["drafter"])
    assert int(drafter.t2d.sum()) == 2048 == len(drafter.d2t)
    for weight in (drafter.embed_tokens.weight, drafter.lm_head.weight):
        assert weight.isfinite().all() and weight.abs().sum() > 0


@pytest.mark.slow
def test_the_same_command_again_makes_nothing_and_says_so(run_folder: Path) -> None:
    before = _results(run_folder)["arms"]
    said = _eagle3(*SMALL, folder=run_folder)
    assert "everything was in the store already" in said
    assert set(_stages(run_folder).values()) == {"cached"}
    assert _results(run_folder)["arms"] == before


@pytest.mark.slow
def test_twice_the_samples_make_the_new_half_and_leave_the_old_rows_as_they_were(run_folder: Path) -> None:
    store = run_folder / "outputs" / "store"
    pools = {path: path.read_bytes() for path in store.glob("pools/*/*/*") if path.is_file() and not path.name.startswith(".")}
    rows = {path: path.read_text() for path in store.glob("generate/*/rows.jsonl")}
    _eagle3(*SMALL, "generation.num_samples=24", "until=capture", folder=run_folder)
    assert all(path.read_bytes().startswith(content) for path, content in pools.items())
    assert all(path.read_text() == content for path, content in rows.items())
    facts = [json.loads(path.read_text())["facts"] for path in store.glob("generate/*/manifest.json")]
    assert sorted((fact["turns"], fact["answered_now"]) for fact in facts) == [(4, 4), (12, 12), (24, 12)]
    longest = max(store.glob("generate/*/rows.jsonl"), key=lambda path: path.stat().st_size).read_text()
    assert any(longest.startswith(content) and longest != content for content in rows.values())


@pytest.mark.slow
def test_more_samples_than_there_are_is_said_and_another_content_of_the_file_is_read(run_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "changing.jsonl"
    said = []
    for word in ("apples", "pears"):
        path.write_text("".join(json.dumps({"prompt": f"{number} {word}?"}) + "\n" for number in range(30)))
        said.append(_eagle3(*SMALL, f"dataset.path={path}", "generation.num_samples=1000", "until=prompts", folder=run_folder))
    assert all("there are only" in text and "not the 1000 asked for" in text for text in said)
    assert "prompts: cached" not in said[1]


@pytest.mark.slow
def test_another_learning_rate_trains_on_the_same_rows_and_states(run_folder: Path) -> None:
    _eagle3(*SMALL, "training.lr=5e-4", folder=run_folder)
    made = {stage for stage, status in _stages(run_folder).items() if status == "made"}
    assert made == {"train", "evaluate"}


@pytest.mark.slow
def test_fine_tuning_goes_on_from_a_drafter_wherever_it_lies(run_folder: Path, tmp_path: Path) -> None:
    source = Path(_results(run_folder)["drafter"])
    settings = [argument for argument in SMALL if "draft_vocab_size" not in argument]
    for place in (source, Path(shutil.copytree(source, tmp_path / "copy"))):
        _eagle3(*settings, f"training.init={place}", folder=run_folder)
    assert set(_stages(run_folder).values()) == {"cached"}
    assert _results(run_folder)["drafter"] != str(source)


@pytest.mark.slow
def test_states_that_were_deleted_are_captured_again(run_folder: Path) -> None:
    store = run_folder / "outputs" / "store"
    before = {path.parent.name: path.stat().st_size for path in store.glob("pools/states/*/shard-*")}
    for path in store.glob("pools/states/*/shard-*"):
        path.unlink()
    said = _eagle3(*SMALL, "training.lr=4e-4", folder=run_folder)
    assert len(re.findall(r"the states of \d+ rows are no longer there", said)) == 2
    assert {path.parent.name for path in store.glob("pools/states/*/shard-*")} == set(before)


@pytest.mark.slow
def test_rows_that_lost_one_are_refused_and_not_trained_on(run_folder: Path) -> None:
    for path in (run_folder / "outputs" / "store").glob("generate/*/rows.jsonl"):
        content = path.read_text()
        path.write_text("".join(content.splitlines(keepends=True)[:-1]))
        path.with_name("whole").write_text(content)
    try:
        said = _eagle3(*SMALL, "training.lr=3e-4", folder=run_folder, code=1)
        assert "rows.jsonl is not what was written there" in said and "Traceback" not in said
    finally:
        for path in (run_folder / "outputs" / "store").glob("generate/*/whole"):
            path.rename(path.with_name("rows.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dataset=jsonl", "dataset.path=nothing.jsonl"], "dataset.path=nothing.jsonl: no such file"),
        (["dataset=jsonl", "dataset.path=empty.jsonl"], "empty.jsonl is empty"),
        (["dataset=jsonl", "dataset.path=notext.jsonl"], "notext.jsonl, line 2: no text of a user"),
        (["training.draft_vocab_size=60000"], "training.draft_vocab_size=60000 exceeds the target's vocabulary of 49152"),
        (["evaluation.k=0"], "evaluation.k=0 can't work"),
        (["generation.num_samples=0"], "generation.num_samples=0 can't work"),
        (["training.warmup=1"], "Key 'warmup' not in 'TrainingConfig'"),
        (["training.init=nowhere"], "training.init=nowhere holds no config.json with weights in .safetensors"),
        (["capture.aux_layers=[2,2,5]"], "capture.aux_layers=[2, 2, 5] must be distinct"),
        (["generation.max_seq_len=9000"], "exceeds the target's context of 8192"),
        (["paths.store=/proc/store"], "paths.store=/proc/store can't be written"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_that_a_later_run_would_trust(run_folder: Path, arguments: list[str], message: str) -> None:
    (run_folder / "empty.jsonl").touch()
    (run_folder / "notext.jsonl").write_text('{"prompt": "fine"}\n{"answer": "no question"}\n')
    manifests = sorted((run_folder / "outputs" / "store").rglob("manifest.json"))
    command = [str(Path(sys.executable).with_name("eagle3")), "target=path", "target.path=model", "tracking=disabled", *arguments]
    done = subprocess.run(command, cwd=run_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2)
    said = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(said) == 1 and message in said[0]
    assert "Traceback" not in done.stderr
    assert sorted((run_folder / "outputs" / "store").rglob("manifest.json")) == manifests


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_of_ours_answers_is_stopped_and_its_rows_train_a_drafter(tmp_path: Path, smollm2: Path, questions: Path) -> None:
    if not VLLM.exists():
        pytest.skip(f"{VLLM} is missing: run `make vllm`")
    (tmp_path / "model").symlink_to(smollm2)
    (tmp_path / "questions.jsonl").symlink_to(questions)
    server = ["engine=vllm_cpu", f"engine.venv={VLLM}", "engine.server_args=[--enforce-eager]"]
    said = _eagle3(*SMALL, *server, folder=tmp_path)
    assert "the server is ready" in said
    assert {arm["arm"] for arm in _results(tmp_path)["arms"]} == {"ours", "ngram"}
    rows = [json.loads(line) for path in tmp_path.glob("outputs/store/generate/*/rows.jsonl") for line in path.read_text().splitlines()]
    assert rows and all(row["provenance"]["exact"] and row["provenance"]["server"].startswith("vllm") for row in rows)
    log = (tmp_path / "outputs" / "latest" / "vllm.log").read_text()
    assert log and not _is_serving(log), "the server is gone when the run is over"
    again = _eagle3(*SMALL, *server, folder=tmp_path)
    assert "the server is ready" not in again and "everything was in the store already" in again


def _is_serving(log: str) -> bool:
    port = re.findall(r"127\.0\.0\.1:(\d+)", log)
    with socket.socket() as probe:
        return bool(port) and probe.connect_ex(("127.0.0.1", int(port[-1]))) == 0


@pytest.mark.slow
def test_the_wheel_holds_the_configuration_and_runs_from_another_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("eagle3-*.whl")
    assert "eagle3/conf/config.yaml" in zipfile.ZipFile(wheel).namelist()
    # A new environment that sees this one's libraries but not the checkout, so that what runs is the wheel.
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    libraries = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run([str(tmp_path / "venv/bin/pip"), "install", "--quiet", "--no-deps", str(wheel)], check=True)
    done = subprocess.run(
        [str(tmp_path / "venv/bin/eagle3"), "--cfg", "job", "experiment=demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": libraries},
    )
    assert "num_samples: 500" in done.stdout, done.stderr
