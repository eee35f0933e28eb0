"""The page that explains every key, made from the configuration itself: `python -m eagle3.reference > conf/REFERENCE.md`."""

from __future__ import annotations

import dataclasses
import json

from eagle3.config import Config


def reference() -> str:
    """`conf/REFERENCE.md` as Markdown. A test compares it with the file."""
    lines = [
        "# Every key",
        "",
        "Override any of them on the command line: `eagle3 training.lr=2e-3 generation.num_samples=400`.",
        "Defaults here are the schema's; the chosen group's YAML may set others (`eagle3 --cfg job` shows what a run would get).",
        "A key marked * can't change a result, only its speed or place: changing it re-uses everything in the store.",
        "",
        "Made by `make reference`; do not edit.",
    ]
    for section in dataclasses.fields(Config):
        if section.default_factory is dataclasses.MISSING:
            lines += ["", "## the run", "", *_table("", [section])]
        else:
            made = section.default_factory()
            assert dataclasses.is_dataclass(made)
            lines += ["", f"## {section.name}", "", (type(made).__doc__ or "").strip(), "", *_table(f"{section.name}.", list(dataclasses.fields(made)))]
    return "\n".join(lines) + "\n"


def _table(prefix: str, fields: list[dataclasses.Field[object]]) -> list[str]:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[operator]
        star = "" if field.metadata["affects_result"] else " *"
        kind = str(field.type).replace("|", "or")
        rows.append(f"| `{prefix}{field.name}`{star} | {kind} | `{json.dumps(default)}` | {field.metadata['doc']} |")
    return rows


if __name__ == "__main__":
    print(reference(), end="")
