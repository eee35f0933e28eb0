"""The store: names that mean something, files that are whole, and one maker at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import StoreError
from eagle3.store import KeyedLog, Store, digest, signature, write_json

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), JSON))
def test_a_digest_does_not_depend_on_the_order_of_keys(value: dict[str, object]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


def test_each_part_of_a_signature_counts() -> None:
    base = signature("train", 1, {"lr": 1e-3}, {"rows": "a"})
    assert (
        len(
            {
                base,
                signature("train", 2, {"lr": 1e-3}, {"rows": "a"}),
                signature("train", 1, {"lr": 2e-3}, {"rows": "a"}),
                signature("train", 1, {"lr": 1e-3}, {"rows": "b"}),
            }
        )
        == 4
    )


def test_an_artifact_is_there_only_with_its_manifest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock(store.folder("train", "abc")):
        (store.folder("train", "abc") / "half").write_text("x")
        assert store.find("train", "abc") is None
        store.finish("train", "abc", {"facts": {"rows": 3}})
    artifact = store.find("train", "abc")
    assert artifact is not None and artifact.facts == {"rows": 3}


def test_a_damaged_manifest_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "train" / "abc").mkdir(parents=True)
    (tmp_path / "train" / "abc" / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        store.find("train", "abc")


def test_a_store_that_can_not_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"paths\.store=.*can't be written"):
        Store(tmp_path / "file" / "store")


def _hold(root: Path, started: multiprocessing.synchronize.Event, die: bool) -> None:
    store = Store(root)
    with store.lock(root / "x"):
        started.set()
        time.sleep(0.5)
        if die:
            os._exit(9)


@pytest.mark.parametrize("die", [False, True])
def test_a_second_process_waits_and_names_the_holder_and_a_dead_one_leaves_no_lock(tmp_path: Path, die: bool) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, started, die))
    process.start()
    assert started.wait(60)
    waited: list[str] = []
    with Store(tmp_path).lock(tmp_path / "x", waited.append):
        pass
    process.join(60)
    assert len(waited) == 1 and str(process.pid) in waited[0]


@given(records=st.lists(st.tuples(st.text(min_size=1), st.text())), cut=st.integers(min_value=0, max_value=400))
def test_a_log_cut_anywhere_keeps_all_whole_lines_and_takes_the_rest_again(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, str]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    with KeyedLog(path) as log:
        for key, text in records:
            log.append(key, {"text": text})
    content = path.read_bytes()
    cut = min(cut, len(content))
    os.truncate(path, cut)
    whole = content[:cut].count(b"\n")
    with KeyedLog(path) as log:
        assert len(log) == len({key for key, _ in records[:whole]})
        for key, text in records[whole:]:
            log.append(key, {"text": text})
        assert {key: log.read(key)["text"] for key, _ in records} == dict(records)


def test_a_broken_line_in_the_middle_is_an_error_not_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"key": "a"}\n{"ke\n{"key": "b"}\n')
    with pytest.raises(StoreError, match="line 2 is damaged"):
        KeyedLog(path)


def test_json_that_replaces_a_file_is_never_half_there(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
