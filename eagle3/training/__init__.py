"""Training a drafter: rows to batches, batches to steps, and a checkpoint to resume from at any time."""
