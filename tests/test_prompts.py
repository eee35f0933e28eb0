"""Prompts: the shapes people have, bad rows named, and a split that never moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import DataError
from eagle3.prompts import Prompt, in_fraction, load_prompts, new_prompt, read_hub, read_prompts, select, shuffled, write_prompts


def _write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _prompts(num: int) -> list[Prompt]:
    return [new_prompt([{"role": "user", "content": f"question {number}"}]) for number in range(num)]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Why?", "answer": "left out"},
        {"prompt": "Why?"},
        {"turns": ["Why?"]},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "left out"}]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "left out"}]},
    ],
)
def test_every_shape_gives_the_same_prompt(tmp_path: Path, record: dict[str, object]) -> None:
    (prompt,) = read_prompts(_write(tmp_path / "p.jsonl", record))
    assert prompt == new_prompt([{"role": "user", "content": "Why?"}])


def test_system_turns_categories_and_all_user_turns_are_kept(tmp_path: Path) -> None:
    record = {"category": "math", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A"}, {"role": "user", "content": "B"}]}
    (prompt,) = read_prompts(_write(tmp_path / "p.jsonl", record))
    assert prompt.category == "math" and prompt.user_turns == ["A", "B"] and prompt.messages[0]["role"] == "system"


def test_white_space_does_not_make_another_prompt() -> None:
    assert new_prompt([{"role": "user", "content": "a  b\n"}]).id == new_prompt([{"role": "user", "content": "a b"}]).id


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"prompt": "a"}\n[1]\n', "line 2: a JSON object is needed"),
        ('{"text": "a"}\n', "line 1: no text of a user.*found: text"),
        ('{"prompt": "  "}\n', "line 1: the user's turn holds no text"),
        ('{"messages": [{"role": "robot", "content": "x"}]}\n', "line 1: unknown role 'robot'"),
        ('{"messages": "hello"}\n', "line 1: messages must be a list"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}\n', "line 1: unknown role"),
        ('{"prompt": "half a \\ud800 character"}\n', "line 1: the user's turn holds half a character"),
        ('{"prompt": "a"}\n' + "[" * 100_000 + "\n", "line 2: not JSON"),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', "line 2: not UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "line 1: not UTF-8"),
    ],
)
def test_bad_files_are_one_sentence_that_names_the_row(tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        list(read_prompts(tmp_path / "p.jsonl"))


def test_files_of_windows_are_read_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "question 0"}\r\n{"prompt": "question 1"}\r\n')
    assert list(read_prompts(tmp_path / "p.jsonl")) == _prompts(2)


@pytest.mark.parametrize("content", [None, "", [{"type": "tool_call"}]])
def test_an_assistants_turn_is_left_out_whatever_it_holds(tmp_path: Path, content: object) -> None:
    record = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": content}]}
    assert list(read_prompts(_write(tmp_path / "p.jsonl", record))) == [new_prompt([{"role": "user", "content": "Why?"}])]


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_an_empty_table_is_one_sentence(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"p.{suffix}").touch()
    with pytest.raises(DataError, match="is empty"):
        list(read_prompts(tmp_path / f"p.{suffix}"))


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_tables_are_read_like_lines(tmp_path: Path, suffix: str) -> None:
    import datasets

    rows = [{"conversations": [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": "left out"}]} for number in range(3)]
    path = tmp_path / f"p.{suffix}"
    table = datasets.Dataset.from_list(rows)
    if suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        table.to_parquet(path)
    assert list(read_prompts(path)) == _prompts(3)


def test_a_table_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("not a table")
    with pytest.raises(DataError, match=r"p\.parquet can't be read as parquet"):
        list(read_prompts(tmp_path / "p.parquet"))


def test_a_dataset_of_the_hub_is_shuffled_by_seed_and_its_counts_nest(tmp_path: Path) -> None:
    import datasets

    # The hub's client reads a folder in the same way as a repository; nothing is fetched.
    datasets.Dataset.from_list([{"prompt": f"question {number}"} for number in range(50)]).to_parquet(tmp_path / "data.parquet")
    read = [list(read_hub(str(tmp_path), None, "train", None, streaming=False, shuffle_seed=seed)) for seed in (1, 1, 2, None)]
    assert read[0] == read[1] != read[2] and read[3] == _prompts(50)
    assert {prompt.id for prompt in read[0]} == {prompt.id for prompt in read[3]}


def test_a_dataset_that_the_hub_has_not_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"dataset\.path=nobody/nothing can't be had from the hub"):
        list(read_hub("nobody/nothing", None, "train", None, streaming=False, shuffle_seed=None))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        list(read_prompts(tmp_path / "nothing.jsonl"))


@given(small=st.integers(1, 40), more=st.integers(0, 40), fraction=st.floats(0.05, 0.5))
def test_more_samples_contain_the_fewer_and_no_prompt_changes_sides(small: int, more: int, fraction: float) -> None:
    first = select(_prompts(200), small, None, 5, fraction)
    second = select(_prompts(200), small + more, None, 5, fraction)
    assert second.train[: len(first.train)] == first.train
    assert second.evaluation == first.evaluation
    assert not {p.id for p in second.train} & {p.id for p in second.evaluation}
    assert all(in_fraction(p.id, fraction, "evaluation") for p in second.evaluation)


def test_duplicates_and_prompts_that_are_evaluated_on_are_left_out_and_counted() -> None:
    prompts = _prompts(10)
    selection = select([*prompts[:5], prompts[0], *prompts[5:]], 100, prompts[8:], 2, 0.1)
    assert [p.id for p in selection.train] == [p.id for p in prompts[:8]]
    assert (selection.num_duplicates, selection.num_decontaminated) == (1, 2)


def test_no_prompt_of_an_evaluation_file_is_trained_on_however_few_are_evaluated() -> None:
    prompts = _prompts(10)
    few, all_of_them = (select(prompts, 100, prompts[5:], num, 0.1) for num in (1, 5))
    assert few.train == all_of_them.train == prompts[:5]
    assert few.evaluation == prompts[5:6] and all_of_them.evaluation == prompts[5:]


def test_a_shuffle_depends_on_its_seed_alone() -> None:
    prompts = _prompts(20)
    assert shuffled(iter(prompts), 3) == shuffled(prompts, 3) != shuffled(prompts, 4)


def test_selection_reads_no_further_than_it_must() -> None:
    source = iter(_prompts(100))
    select(source, 3, _prompts(0), 1, 0.1)
    assert len(list(source)) == 97


def test_prompts_survive_the_disk(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", _prompts(3))
    assert list(load_prompts(tmp_path / "p.jsonl")) == _prompts(3)
