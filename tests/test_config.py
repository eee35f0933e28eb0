"""The configuration: every choice composes, every key is documented, every mistake is one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eagle3.cli import check
from eagle3.config import Config, TrainingConfig, register, result_settings
from eagle3.errors import ConfigError
from eagle3.reference import reference

CONF = Path(__file__).parents[1] / "conf"
CHOICES = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
NEEDS = {
    "baseline=path": ["baseline.path=drafter"],
    "evaluation=large": ["generation=large"],
    "dataset=jsonl": ["dataset.path=prompts.jsonl"],
    "dataset=file": ["dataset.path=prompts.parquet"],
    "dataset=hub": ["dataset.path=org/name"],
    "engine=openai": ["engine.base_urls=[http://host:1/v1]"],
    "target=path": ["target.path=model"],
}

register()


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes(choice: str) -> None:
    assert isinstance(check([choice, *NEEDS.get(choice, [])]), Config)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")))
def test_every_yaml_begins_with_the_command_that_uses_it(path: Path) -> None:
    first = path.read_text().splitlines()[0].replace("# @package _global_", "")
    assert "=" in first or "eagle3" in path.read_text().splitlines()[1] or path.parent == CONF


def test_every_key_is_documented_and_the_reference_page_is_current() -> None:
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(getattr(Config(), section.name)) if section.name != "until" else [section]:
            assert field.metadata["doc"].endswith("."), field.name
    assert (CONF / "REFERENCE.md").read_text() == reference(), "run `make reference`"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.learning_rate=1"], "Key 'learning_rate' not in 'TrainingConfig'"),
        (["trainin.lr=1"], "Did you mean training.lr"),
        (["training.lr=fast"], "Value 'fast' of type 'str' could not be converted to Float"),
        (["generation.num_samples=1.5"], "could not be converted to Integer"),
        (["dataset=parquet"], "choose one of file, hub, jsonl, magpie, open_perfectblend"),
        (["generation.num_samples=0"], r"generation\.num_samples=0 .* at least 1"),
        (["evaluation.k=0"], r"evaluation\.k=0 .* at least 1"),
        (["evaluation.k=9"], r"must not exceed evaluation\.max_k=5"),
        (["training.draft_vocab_size=0"], r"training\.draft_vocab_size=0"),
        (["dataset=jsonl"], r"dataset\.path is missing"),
        (["generation.min_completion_tokens=500"], "no answer can pass it"),
        (["generation.max_completion_tokens=4096"], "leaves no room for a prompt"),
        (["until=training"], "choose one of prompts, generate, capture, train, evaluate"),
        (["training.lr=-1"], "greater than 0"),
        (["training.loss=hinge"], r"training\.loss=hinge .* give one of ce, jsd, kl_div"),
        (["training.betas=[0.9]"], r"training\.betas=\[0\.9\] .* two numbers"),
        (["training.max_minutes=0"], r"training\.max_minutes=0\.0 .* greater than 0"),
        (["training.optimizer=sgd"], "choose one of adamw, muon"),
        (["training.schedule=constant", "training.min_lr_ratio=0.1"], r"means nothing with training\.schedule=constant"),
        (["training.init=folder", "training.pinned_tokens=[3]"], r"pinned_tokens can't be set with training\.init"),
        (["target.path=somewhere"], "set exactly one of them"),
        (["target=path"], r"target\.path is missing"),
        (["+training.foo=1"], r"there is no key training\.foo"),
        (["+foo=1"], "there is no key foo"),
        (["training.max_grad_norm=inf"], r"training\.max_grad_norm=inf .* finite"),
        (["generation.temperature=inf"], r"generation\.temperature=inf .* finite"),
        (["paths.store="], r"paths\.store= .* give a folder"),
        (["baseline=path"], r"baseline\.path is missing"),
        (["baseline.path=drafter"], "choose baseline=path"),
        (["baseline=path", "baseline.path=drafter", "baseline.name=ours"], r"baseline\.name=ours .* our own"),
        (["baseline=path", "baseline.path=drafter", "baseline.published.GSM8K=3.1"], r"baseline\.published_source"),
        (["evaluation.live=true"], r"needs a vLLM server for none, ngram, baseline, ours: set engine=vllm"),
        (["evaluation.live_arms=[ours,theirs]"], r"evaluation\.live_arms=theirs .* choose one of none, ngram, baseline, ours"),
        (["evaluation.live_ks=[1,9]"], r"evaluation\.live_ks=\[1, 9\] .*evaluation\.max_k=5"),
        (["evaluation.concurrencies=[0]"], r"evaluation\.concurrencies=\[0\]"),
        (["evaluation.live_urls.ours=http://host:1/v1", "evaluation.live_ks=[1,3]"], "has one k"),
        (["serve.k=0"], r"serve\.k=0 .* at least 1"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(overrides)
    assert "\n" not in str(caught.value)


def test_speed_and_place_stay_out_of_the_settings_that_name_a_result() -> None:
    assert "device" not in result_settings(TrainingConfig()) and "lr" in result_settings(TrainingConfig())


def test_the_large_runs_keep_their_figures() -> None:
    config = check(["experiment=kimi_k25_25k"])
    generation = config.generation
    assert (generation.num_samples, generation.concurrency, generation.timeout_s) == (25_000, 200, 1800)
    assert (generation.max_completion_tokens, generation.max_seq_len, generation.min_completion_tokens) == (8192, 16384, 50)
    assert config.dataset.path == "mlabonne/open-perfectblend" and config.target.think_tokens == ["163606", "163607"]
    assert check(["experiment=smoke_10"]).generation.num_samples == 10 and check(["experiment=pilot_1k"]).generation.num_samples == 1000


def test_an_experiment_beats_the_primary_configuration_and_the_command_line_beats_both() -> None:
    assert check(["experiment=demo"]).generation.num_samples == 500
    assert check(["experiment=demo", "generation.num_samples=7"]).generation.num_samples == 7
