"""The drafter that ours is compared with: found, and refused with the reason before any hour is spent on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.config import BaselineConfig
from eagle3.drafter.pretrained import aux_layers, drafter_digest, fetch_drafter, load_initial
from eagle3.errors import DrafterError
from eagle3.targets import HUB_NAME, TargetInfo


class Baseline:
    """The drafter at `baseline.path`. One of the hub is fetched by a thread, while the target is busy with other things.

    Args:
        captured: the layers whose states there are, or will be.
    """

    def __init__(self, config: BaselineConfig, target: TargetInfo, captured: Sequence[int]) -> None:
        assert config.path is not None
        self.name, self.path, self.target, self.captured = config.name, config.path, target, list(captured)
        self._fetching: threading.Thread | None = None

    def check(self) -> None:
        """See that it fits the target: one that is here wholly, weights included; of one on the hub its config, and begin to fetch the rest.

        Raises:
            DrafterError: it is another target's, reads other layers, or is damaged.
        """
        if Path(self.path).expanduser().exists() or not HUB_NAME.fullmatch(self.path):
            self.load()
            return
        self._check_config(_hub_config(self.path))
        self._fetching = threading.Thread(target=_fetch_quietly, args=(self.path,), name="baseline", daemon=True)
        self._fetching.start()

    @property
    def folder(self) -> Path:
        """Where it is, once it is there.

        Raises:
            DrafterError: it can't be had.
        """
        if self._fetching is not None:
            self._fetching.join()
        with _named():
            return fetch_drafter(self.path)

    @property
    def digest(self) -> str:
        """Hash of its content."""
        return drafter_digest(self.folder)

    def load(self) -> Any:
        """The drafter in fp32.

        Raises:
            DrafterError: it does not fit the target, or its weights are missing, of a wrong shape or not finite.
        """
        folder = self.folder
        self._check_config(folder)
        with _named():
            return load_initial(str(folder), self.target, self.captured, {})

    def _check_config(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = config.get("transformer_layer_config", config)
        made_for = (shape.get("hidden_size"), shape.get("vocab_size"))
        if made_for != (self.target.hidden_size, self.target.vocab_size):
            raise DrafterError(
                f"baseline.path={self.path} was made for a target of hidden size {made_for[0]} and {made_for[1]} tokens, "
                f"but {self.target.path} has {self.target.hidden_size} and {self.target.vocab_size}: choose a drafter of this target."
            )
        read = aux_layers(folder, self.target.num_layers)
        if read != self.captured:
            raise DrafterError(f"baseline.path={self.path} reads the target's layers {read}, but {self.captured} are captured: set capture.aux_layers={read}.")


def _hub_config(name: str) -> Path:
    """The folder that holds the config.json of a drafter on the hub."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DrafterError(f"baseline.path={name} is no folder, and can't be had from the hub ({reason}): check the name, the network and HF_TOKEN.") from None


def _fetch_quietly(name: str) -> None:
    """Fetch into the hub client's cache; what goes wrong is said when the drafter is needed."""
    try:
        fetch_drafter(name)
    except DrafterError:
        return


@contextmanager
def _named() -> Iterator[None]:
    """Errors of the loader speak of the key that this drafter was given by."""
    try:
        yield
    except DrafterError as error:
        raise DrafterError(str(error).replace("training.init=", "baseline.path=")) from error.__cause__
