from pathlib import Path

import numpy as np
import pytest

from eagle3.comparison.plots import plot_run
from eagle3.comparison.results import Results


def training_metrics() -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    lines = [{"step": step, "train/loss": 1.5 + 7 * np.exp(-step / 250) + rng.normal(0, 0.25)} for step in range(1, 1201)]
    return lines + [{"step": 150 * (epoch + 1), "val/acceptance_length": 2.56 - 0.75 * 0.6**epoch} for epoch in range(8)]


@pytest.mark.parametrize(
    "metrics", [training_metrics(), training_metrics()[:3], training_metrics()[-2:], []], ids=["full", "few steps", "validation only", "none"]
)
def test_a_png_is_drawn_from_whatever_was_logged(results: Results, metrics: list[dict[str, float]], tmp_path: Path) -> None:
    plot_run(results, metrics, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_arms_is_still_drawn(results: Results, tmp_path: Path) -> None:
    results["arms"] = []
    plot_run(results, [], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 0


def test_published_figures_stand_below_the_picture(live_results: Results, tmp_path: Path) -> None:
    plot_run(live_results, [], tmp_path / "run.png")
    live_results["published"] = {}
    plot_run(live_results, [], tmp_path / "without.png")
    assert (tmp_path / "run.png").read_bytes() != (tmp_path / "without.png").read_bytes()
