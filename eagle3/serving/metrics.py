"""What a vLLM server has counted, read from its /metrics page.

Names as in vllm/v1/spec_decode/metrics.py and vllm/v1/metrics/loggers.py (0.32). A server of several engines has a line for each; they are added up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from eagle3.errors import EngineError

GENERATED = "vllm:generation_tokens"
_COUNTERS = {
    "num_generated": GENERATED,
    "num_drafts": "vllm:spec_decode_num_drafts",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "num_accepted": "vllm:spec_decode_num_accepted_tokens",
}
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Counters:
    """What a server counted since it started, or between two readings.

    A draft is a step in which something was proposed: all steps of a drafter but for `ngram`, which often finds nothing. Accepted tokens past the
    end of an answer (the end token, or `max_tokens`) are counted by the server too.
    """

    num_generated: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # by 0-based position; empty when the server does not speculate
    created: float = 0.0  # when counting began, in seconds of the server's clock; 0 if it does not say

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, as vLLM's own log says it; None when nothing was drafted."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else None

    def since(self, before: Counters) -> Counters:
        """What was counted after `before` was read.

        Raises:
            EngineError: the server began to count anew in between.
        """
        width = max(len(self.accepted_at), len(before.accepted_at))
        now, then = (counters.accepted_at + (0,) * (width - len(counters.accepted_at)) for counters in (self, before))
        accepted_at = tuple(late - early for late, early in zip(now, then, strict=True))
        counted = {name: getattr(self, name) - getattr(before, name) for name in _COUNTERS}
        if self.created != before.created or min(*counted.values(), *accepted_at, 0) < 0:
            raise EngineError("the server's counters began anew between two readings, so it was restarted: see its log, and measure again.")
        return Counters(**counted, accepted_at=accepted_at, created=self.created)


def read_counters(page: str) -> Counters:
    """The counters of a /metrics page.

    Raises:
        EngineError: it is no such page, or not a vLLM server's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: defaultdict[str, float] = defaultdict(float)
    accepted_at: defaultdict[int, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"{_ACCEPTED_AT}_total":
                    accepted_at[int(sample.labels["position"])] += sample.value
                elif sample.name == f"{GENERATED}_created":
                    totals["created"] = max(totals["created"], sample.value)
                elif sample.name.endswith("_total"):
                    totals[sample.name.removesuffix("_total")] += sample.value
    except (ValueError, KeyError) as error:
        raise EngineError(f"the server's /metrics page can't be read ({error}): it is not one of vLLM.") from None
    if GENERATED not in totals:
        raise EngineError(f"the server's /metrics page has no {GENERATED}_total: live evaluation needs a vLLM server that counts (no --disable-log-stats).")
    counted = {name: round(totals[metric]) for name, metric in _COUNTERS.items()}
    positions = tuple(round(accepted_at[position]) for position in range(max(accepted_at, default=-1) + 1))
    return Counters(**counted, accepted_at=positions, created=totals["created"])


def metrics_url(base_url: str) -> str:
    """Where the server behind an OpenAI-compatible base URL shows what it has counted."""
    parts = urlsplit(base_url)
    return urlunsplit((parts.scheme, parts.netloc, "/metrics", "", ""))
