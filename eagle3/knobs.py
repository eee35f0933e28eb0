"""What every section of the configuration is made of: documented fields, and checks that fail in one sentence naming the key."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import field
from typing import TypeVar

from eagle3.errors import ConfigError

T = TypeVar("T")


def knob(default: T, doc: str, *, affects_result: bool = True) -> T:
    """A field with its documentation; `affects_result=False` keeps it out of signatures."""
    metadata = {"doc": doc, "affects_result": affects_result}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Raise a ConfigError that says which key can't have which value, and why."""
    if not holds:
        raise ConfigError(f"{key}={value} can't work: {rule}.")


def at_least(section: object, name: str, keys: Mapping[str, float]) -> None:
    """Require lower bounds of the fields of one section; null passes."""
    for key, low in keys.items():
        value = getattr(section, key)
        if value is not None:
            require(value >= low, f"{name}.{key}", value, f"it must be at least {low}")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Require one of a few words."""
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")
