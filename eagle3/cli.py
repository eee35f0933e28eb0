"""The command line: a verb, then anything Hydra understands."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from eagle3 import config as configuration
from eagle3.errors import ConfigError, Eagle3Error

if TYPE_CHECKING:
    from omegaconf import DictConfig

VERBS = ("run", "serve")
SWEEP_FLAGS = {"-m", "--multirun"}
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
CONFIG_MODULE = "eagle3.conf"
log = logging.getLogger("eagle3")


def main() -> None:
    """Entry point of the console script `eagle3`. Exit code 0: all done; 1: an error the message explains; 2: the command line is wrong."""
    arguments, verb = sys.argv[1:], "run"
    if arguments and arguments[0] in VERBS:
        verb, *arguments = arguments
    elif arguments and arguments[0].isidentifier():
        _fail(f"unknown verb {arguments[0]!r}: choose one of {', '.join(VERBS)}; overrides look like key=value.", code=2)
    sys.argv[1:] = arguments
    # GNU OpenMP spins while it waits; beside another busy process that makes a small model ten times slower. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    configuration.register()
    if verb == "serve" and not any(argument.startswith("-") for argument in arguments):
        _serve(arguments)
    _run_hydra(arguments)


def _run_hydra(arguments: list[str]) -> None:
    import hydra

    failed: list[str] = []

    def job(tree: DictConfig) -> Any:
        try:
            return _run(tree)
        except Eagle3Error as error:
            failed.append(str(error))
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            failed.append(f"{error.filename or 'a file of the run'}: {error.strerror}; free space, change permissions, or set paths.store and paths.outputs.")
        log.error("error: %s", failed[-1])
        return None

    try:
        flags = {argument for argument in arguments if argument.startswith("-")}
        if flags <= SWEEP_FLAGS:
            arms = _arms([argument for argument in arguments if argument not in flags], bool(flags))
            for config in [check(arm) for arm in arms]:
                _make_outputs(config)
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="config")(job)()
    except Eagle3Error as error:
        _fail(str(error), code=2)
    except KeyboardInterrupt:
        _fail("stopped; the same command goes on from here.", code=130)
    if failed:
        sys.exit(1)


def _arms(overrides: list[str], is_sweep: bool) -> list[list[str]]:
    """The overrides of each run of a command line, so that a mistake in the last arm of a sweep is said before the first one starts."""
    if not is_sweep or any(override.startswith("hydra/sweeper") for override in overrides):  # other sweepers choose as they go
        return [] if is_sweep else [overrides]
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (arms,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), max_batch_size=None)
    except HydraException as error:
        raise ConfigError(configuration.sentence(error)) from None
    return [list(arm) for arm in arms]


def _make_outputs(config: configuration.Config) -> None:
    """The folder of all runs, before Hydra makes one in it and fails with a stack trace."""
    try:
        Path(config.paths.outputs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"paths.outputs={config.paths.outputs} can't be made ({error.strerror}): give another folder.") from None


def _serve(arguments: list[str]) -> NoReturn:
    """Serve a finished run; nothing is left behind, so Hydra makes no run folder."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    try:
        config = check(arguments)
        run = configuration.read_config(Path(config.serve.run))

        from eagle3.serving.serve import serve

        serve(config, run)
    except Eagle3Error as error:
        _fail(str(error), code=2 if isinstance(error, ConfigError) else 1)


def check(overrides: list[str]) -> configuration.Config:
    """The configuration of a command line, or one sentence on what is wrong with it, before Hydra makes a run folder.

    Raises:
        ConfigError: an unknown key or option, a wrong type, an impossible combination.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            return configuration.from_tree(compose("config", overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(configuration.sentence(error)) from None


def _run(tree: DictConfig) -> float | None:
    """One job: the pipeline in its run folder. Returns the headline acceptance length, which a sweeper can maximise."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    config = configuration.from_tree(tree)
    folder = Path(HydraConfig.get().runtime.output_dir)
    _log_to(folder / "run.log")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(tree, resolve=True))

    from eagle3.pipeline import run

    acceptance_length = run(config, folder, dataclasses.asdict(config))
    _point_to_latest(Path(config.paths.outputs), folder)
    return acceptance_length


def _log_to(path: Path) -> None:
    """Messages to the terminal as they are, and to the run's log with the time."""
    file, terminal = logging.FileHandler(path), logging.StreamHandler(sys.stderr)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("eagle3").handlers = [file, terminal]
    logging.getLogger("eagle3").setLevel(logging.INFO)
    logging.getLogger("eagle3").propagate = False


def _point_to_latest(outputs: Path, folder: Path) -> None:
    link, new = outputs / "latest", outputs / f".latest.{os.getpid()}"
    try:
        new.symlink_to(os.path.relpath(folder, outputs))
        new.replace(link)
    except OSError as error:  # a folder of that name, or a volume without links: the run is none the worse for it
        new.unlink(missing_ok=True)
        log.warning("%s does not point to this run (%s)", link, error.strerror)


def _fail(message: str, code: int) -> NoReturn:
    print(f"eagle3: error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
