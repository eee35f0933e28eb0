"""Training a drafter: rows to batches, batches to steps, and a checkpoint to resume from at any time."""

from pathlib import Path

BEST_FILE = "best.pt"
CHECKPOINT_FILE = "checkpoint.pt"


def remove_checkpoints(folder: Path) -> None:
    """Remove what only a resumed run would need, once the stage is finished."""
    for name in (BEST_FILE, CHECKPOINT_FILE):
        for path in (folder / name, folder / f".{name}"):  # a killed run may have left the second, half written
            path.unlink(missing_ok=True)
