"""Which arms are measured live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.config import BaselineConfig, Config, EvaluationConfig, PathsConfig
from eagle3.conversation import Row
from eagle3.engines import Sampling
from eagle3.evaluation.arms import Arm, live_arms, measure_arms
from eagle3.serving.speculation import Speculation
from eagle3.workspace import Workspace

OURS, THEIRS = Path("/ours"), Path("/theirs")


def names(evaluation: EvaluationConfig, baseline: BaselineConfig, theirs: Path | None = None) -> list[str]:
    return [f"{arm.name}:{arm.k}" for arm in live_arms(evaluation, baseline, OURS, theirs)]


def test_the_four_arms_at_each_k_with_the_target_alone_first() -> None:
    baseline = BaselineConfig("aq_medai_k2", path="somewhere")
    assert names(EvaluationConfig(live_ks=[1, 3]), baseline, THEIRS) == ["none:0", "ngram:1", "ngram:3", "aq_medai_k2:1", "aq_medai_k2:3", "ours:1", "ours:3"]


def test_prompt_lookup_is_one_arm_also_when_it_is_the_baseline() -> None:
    assert names(EvaluationConfig(), BaselineConfig()) == ["none:0", "ngram:3", "ours:3"]
    assert names(EvaluationConfig(live_arms=["baseline", "ours"]), BaselineConfig()) == ["ngram:3", "ours:3"]
    assert names(EvaluationConfig(live_arms=["none", "baseline", "ours"]), BaselineConfig("none")) == ["none:0", "ours:3"]


def test_a_server_is_told_how_to_draft() -> None:
    assert Speculation(3, OURS).args == ("--speculative-config", '{"method":"eagle3","model":"/ours","num_speculative_tokens":3}')
    assert Speculation(2, min_n=2, max_n=5).config == {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


def test_one_server_after_another_is_asked_the_same_prompts(speculating_server: Any, asked_rows: list[Row]) -> None:
    running: list[str] = []

    @contextmanager
    def serve(arm: Arm) -> Iterator[str]:
        assert not running
        running.append(arm.name)
        with speculating_server() as server:
            yield server.url
        running.remove(arm.name)

    arms = [Arm("ngram", "ngram", Speculation(3)), Arm("ours", "ours", Speculation(3, OURS))]
    reports = measure_arms(arms, serve, "target", asked_rows, Sampling(0.0, 1.0, 64, 256, (2,)), [1, 2], 10)
    assert [(report.arm, report.k, report.concurrency) for report in reports] == [("ngram", 3, 1), ("ngram", 3, 2), ("ours", 3, 1), ("ours", 3, 2)]
    assert len({tuple(answer.row_id for answer in report.answers) for report in reports}) == 1


def test_a_server_that_runs_already_is_asked_and_not_started(tmp_path: Path) -> None:
    paths = PathsConfig(str(tmp_path), str(tmp_path / "store"))
    evaluation = EvaluationConfig(live=True, max_completion_tokens=64, live_arms=["none"], live_urls={"none": "http://host:1/v1"})
    workspace = Workspace(Config(evaluation=evaluation, paths=paths), tmp_path, {})
    with workspace.live_server(Arm("none", "none", None)) as url:
        assert url == "http://host:1/v1"
    assert not list(tmp_path.glob("*.log"))
