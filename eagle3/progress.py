"""How long work shows that it moves: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console

log = logging.getLogger(__name__)
console = Console(stderr=True)
LINE_EVERY_S = 15.0


@contextlib.contextmanager
def progress(description: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Yields `update(done, note)`: how much of `total` is done, and a word on how it goes."""
    if console.is_terminal:
        with _bar(description, total) as update:
            yield update
        return
    began = last = time.monotonic()

    def update_line(done: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_EVERY_S and 0 < done < total:
            last = now
            left = (now - began) / done * (total - done)
            log.info("%s: %d of %d %s, about %s left%s", description, done, total, unit, duration(left), f", {note}" if note else "")

    yield update_line


@contextlib.contextmanager
def _bar(description: str, total: int) -> Iterator[Callable[[int, str], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, note="")

        def update(done: int, note: str) -> None:
            bar.update(task, completed=done, note=note)

        yield update


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
