"""Where prompts come from: a local file, or the target itself; and which of them are for training, which for evaluation."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import DataError
from eagle3.store import digest

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered: a system turn if any, and the user's turns; the answers are the target's own."""

    id: str
    messages: tuple[dict[str, str], ...]
    category: str = ""

    @property
    def user_turns(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]


def new_prompt(messages: Iterable[Mapping[str, str]], category: str = "") -> Prompt:
    """A prompt named by the hash of its normalised messages, so that the same text has the same id wherever it came from."""
    kept = tuple({"role": message["role"], "content": message["content"]} for message in messages)
    return Prompt(digest([[m["role"], " ".join(unicodedata.normalize("NFKC", m["content"]).split())] for m in kept]), kept, category)


def read_prompts(path: str | Path) -> Iterator[Prompt]:
    """Prompts of a local file: .jsonl (one object a line), .json or .parquet.

    A row's first field of messages, conversations (ShareGPT), turns, question, prompt counts. Answers found in the file are left out: rows hold the
    target's own. `category` is kept.

    Raises:
        DataError: the file is missing or empty, or a row has no text in one of these fields; the row is named.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path}: no such file; give dataset.path (or evaluation.path) the name of a .jsonl, .json or .parquet file.")
    records = _read_lines(file) if file.suffix not in (".json", ".parquet") or not file.stat().st_size else _read_table(file)
    empty = True
    for where, record in records:
        empty = False
        yield _parse(record, f"{path}, {where}")
    if empty:
        raise DataError(f'{path} is empty: it needs rows, like {{"prompt": "..."}} on a line of a .jsonl file.')


def _read_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors mark a file's begin
                if text.strip():
                    yield f"line {number}", json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{file}, line {number}: not UTF-8 ({error.reason}); save the file in UTF-8.") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number}: not JSON ({error}); each line must be one JSON object.") from None


def _read_table(file: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        table = datasets.load_dataset(file.suffix[1:], data_files=str(file), split="train", streaming=True)
        for number, record in enumerate(table, 1):
            yield f"row {number}", record
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{file} can't be read as {file.suffix[1:]}: {_first_line(error)}.") from None


def read_hub(name: str, subset: str | None, split: str, revision: str | None, streaming: bool, shuffle_seed: int | None) -> Iterator[Prompt]:
    """Prompts of a dataset of the Hugging Face hub, in the row shapes of `read_prompts`; the token comes from HF_TOKEN or `hf auth login`.

    Raises:
        DataError: the dataset can't be had, or a row holds no text; the row is named.
    """
    import datasets

    try:
        table = datasets.load_dataset(name, subset, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # the hub's client raises errors of a dozen libraries
        raise DataError(
            f"dataset.path={name} can't be had from the hub ({_first_line(error)}): check the name, dataset.subset, dataset.split, the network and HF_TOKEN."
        ) from None
    if shuffle_seed is not None:
        table = table.shuffle(seed=shuffle_seed)
    for number, record in enumerate(table, 1):
        yield _parse(record, f"{name}, row {number}")


def shuffled(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The same prompts in an order that depends on the seed alone, so that the first N of it lie within the first 2 N."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    return order


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _parse(record: Any, where: str) -> Prompt:
    if not isinstance(record, dict):
        raise DataError(f'{where}: a JSON object is needed, not {type(record).__name__}; write {{"prompt": ...}}.')
    messages = _messages(record, where)
    if not any(message["role"] == "user" for message in messages):
        names = ", ".join(record) or "nothing"
        raise DataError(f"{where}: no text of a user; one of messages, conversations, turns, question or prompt must hold it (found: {names}).")
    return new_prompt(messages, str(record.get("category") or ""))


def _messages(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    turns: list[Any]
    if record.get("messages") or record.get("conversations"):
        listed = record.get("messages") or record.get("conversations")
        if not isinstance(listed, list) or not all(isinstance(turn, dict) for turn in listed):
            raise DataError(f"{where}: messages must be a list of objects with role and content.")
        turns = [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in listed]
    elif record.get("turns"):
        listed = record["turns"]
        turns = [("user", turn) for turn in (listed if isinstance(listed, list) else [listed])]
    else:
        turns = [("user", record[key]) for key in ("question", "prompt") if record.get(key)][:1]
    messages = []
    for role, text in turns:
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"{where}: unknown role {role!r}; roles are {', '.join(sorted(ROLES))}.")
        if ROLES[role] == "assistant":  # left out, so it may be empty, as where the file's author called a tool
            continue
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: the {ROLES[role]}'s turn holds no text; fill it or delete the line.")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"{where}: the {ROLES[role]}'s turn holds half a character (a lone surrogate); fix it or delete the line.")
        messages.append({"role": ROLES[role], "content": text})
    return messages


@dataclass(frozen=True)
class Selection:
    """Prompts for training and for evaluation, and what was left out on the way."""

    train: list[Prompt] = field(default_factory=list)
    evaluation: list[Prompt] = field(default_factory=list)
    num_duplicates: int = 0
    num_decontaminated: int = 0


def select(source: Iterable[Prompt], num_train: int, evaluation: Iterable[Prompt] | None, num_evaluation: int, holdout_fraction: float) -> Selection:
    """The first `num_train` prompts for training and the first `num_evaluation` for evaluation, none in both.

    With evaluation prompts of their own, training prompts that equal any of them are left out and counted, however few are evaluated: so none is trained
    on, and the rows stay when more are. Without, a hash of each conversation says on which side it lies, so the split never moves when more prompts are
    asked for. The source is read no further than needed.
    """
    own = {prompt.id: prompt for prompt in evaluation or ()}
    train: dict[str, Prompt] = {}
    held_out: dict[str, Prompt] = {}
    num_duplicates = num_decontaminated = 0
    iterator = iter(source)
    while len(train) < num_train or (evaluation is None and len(held_out) < num_evaluation):
        prompt = next(iterator, None)
        if prompt is None:
            break
        if prompt.id in own:
            num_decontaminated += 1
        elif prompt.id in train or prompt.id in held_out:
            num_duplicates += 1
        elif evaluation is None and in_fraction(prompt.id, holdout_fraction, "evaluation"):
            held_out[prompt.id] = prompt
        else:
            train[prompt.id] = prompt
    chosen = list((held_out if evaluation is None else own).values())[:num_evaluation]
    return Selection(list(train.values())[:num_train], chosen, num_duplicates, num_decontaminated)


def in_fraction(prompt_id: str, fraction: float, purpose: str) -> bool:
    """Whether a conversation belongs to the `fraction` kept aside for `purpose`: by hash, so it is the same in every run and sample count."""
    return int(digest([purpose, prompt_id])[:8], 16) < fraction * 2**32


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"id": prompt.id, "messages": prompt.messages, "category": prompt.category}, ensure_ascii=False) + "\n")


def load_prompts(path: Path) -> Iterator[Prompt]:
    """Prompts as `write_prompts` left them."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield Prompt(record["id"], tuple(record["messages"]), record["category"])
