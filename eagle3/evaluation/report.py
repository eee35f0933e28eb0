"""The one shape of an acceptance measurement, the same from replay and from a live server."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle3.errors import DataError


@dataclass(frozen=True)
class RowCounts:
    """What one row's decoding steps drafted and accepted, inside the row only.

    A step is one verification pass of the target. The first answer token comes from the prefill, so it belongs to no step.
    Positions are 0-based: `drafted[i]` steps proposed a token at position i, `accepted[i]` of them had it accepted.
    """

    row_id: str
    prompt_id: str
    category: str
    num_steps: int
    num_tokens: int  # produced by the steps: all answer tokens but the first
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens over all positions."""
        return sum(self.accepted)


@dataclass(frozen=True)
class AcceptanceReport:
    """One arm on one set of rows, with k draft tokens per step.

    The averages raise DataError when not a single step was measured: there is no number to give then.
    """

    arm: str
    k: int
    temperature: float
    source: str  # "replay" or "live"
    rows: tuple[RowCounts, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Decoding steps of all rows."""
        return sum(row.num_steps for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Answer tokens that the steps produced."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all rows."""
        return sum(row.num_accepted for row in self.rows)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / steps, pooled over all decoding steps, also those in which nothing was proposed.

        For a drafter, which always proposes, this is vLLM's 1 + accepted / drafts. vLLM's `ngram` counters leave out the steps without a
        proposal, so they show more (2.2 where all steps give 1.52): compare arms by this number, not by that.
        """
        return 1 + self.num_accepted / self._steps_measured()

    @property
    def acceptance_length_per_prompt(self) -> float:
        """The mean over prompts of each prompt's acceptance length; short answers weigh as much as long ones. Prompts without a step are left out."""
        self._steps_measured()
        steps: defaultdict[str, int] = defaultdict(int)
        accepted: defaultdict[str, int] = defaultdict(int)
        for row in self.rows:
            steps[row.prompt_id] += row.num_steps
            accepted[row.prompt_id] += row.num_accepted
        lengths = [1 + accepted[prompt] / num_steps for prompt, num_steps in steps.items() if num_steps]
        return sum(lengths) / len(lengths)

    @property
    def tokens_per_step(self) -> float:
        """Answer tokens per decoding step; below the acceptance length by the bonus tokens that rows ending inside an accepted draft never got."""
        return self.num_tokens / self._steps_measured()

    @property
    def acceptance_at(self) -> list[float]:
        """For each position, the share of all steps that accepted a draft there (unconditional, falling; 1 + sum = acceptance length).

        vLLM's plots divide by the steps that proposed something: the same for a drafter, more for `ngram`.
        """
        num_steps = self._steps_measured()
        return [sum(row.accepted[position] for row in self.rows) / num_steps for position in range(self.k)]

    def by_category(self) -> dict[str, AcceptanceReport]:
        """The same report for the rows of each category, by name; `seconds` stays that of the whole measurement."""
        groups: defaultdict[str, list[RowCounts]] = defaultdict(list)
        for row in self.rows:
            groups[row.category or "uncategorised"].append(row)
        return {name: replace(self, rows=tuple(rows)) for name, rows in sorted(groups.items())}

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AcceptanceReport:
        """The report that `to_dict` wrote, also after a way through JSON, which turns tuples into lists."""
        rows = tuple(RowCounts(**{**row, "accepted": tuple(row["accepted"]), "drafted": tuple(row["drafted"])}) for row in values["rows"])
        return cls(**{**values, "rows": rows, "notes": tuple(values["notes"])})

    def _steps_measured(self) -> int:
        if not self.num_steps:
            raise DataError(f"No decoding step measured for arm {self.arm!r} (k={self.k}): its {len(self.rows)} answers have at most one token each.")
        return self.num_steps
