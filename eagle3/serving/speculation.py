"""How a vLLM server is told to speculate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Speculation:
    """One way to draft, with `k` tokens per verification.

    Args:
        drafter: folder of an EAGLE-3 drafter, in speculators' form or in EAGLE's; None is prompt lookup, vLLM's `ngram`.
        min_n, max_n: shortest and longest n-gram that prompt lookup looks up.
    """

    k: int
    drafter: Path | None = None
    min_n: int = 2
    max_n: int = 4

    @property
    def config(self) -> dict[str, Any]:
        """vLLM's speculative config."""
        if self.drafter is not None:
            return {"method": "eagle3", "model": str(self.drafter.absolute()), "num_speculative_tokens": self.k}
        return {"method": "ngram", "num_speculative_tokens": self.k, "prompt_lookup_max": self.max_n, "prompt_lookup_min": self.min_n}

    @property
    def args(self) -> tuple[str, str]:
        """The same as arguments of the server."""
        return "--speculative-config", json.dumps(self.config, separators=(",", ":"))
