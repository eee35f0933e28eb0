"""Ids of answers: what a server gave as text becomes one open and one close think token around the thought, and nothing is invented."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.conversation import Answer, AnswerForm, answer_message, encode_turn, read_answer_form, rebuild_completion, render
from eagle3.errors import TargetError

OPEN, CLOSE, END = 8, 10, 2  # unused special tokens of SmolLM2 stand for <think> and </think>
THINK = ["<issue_start>", "<issue_closed>"]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="session")
def form(smollm2_tokenizer: Any) -> AnswerForm:
    return read_answer_form(smollm2_tokenizer, THINK)


@pytest.fixture(scope="session")
def prompt(smollm2_tokenizer: Any) -> list[int]:
    return encode_turn(smollm2_tokenizer, MESSAGES)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_the_form_of_an_answer_is_read_from_the_template(smollm2_tokenizer: Any, form: AnswerForm) -> None:
    assert smollm2_tokenizer.decode(form.header) == "<|im_start|>assistant\n"
    assert (form.end_id, form.think, form.think_text) == (END, (OPEN, CLOSE), ("<issue_start>", "<issue_closed>"))
    assert read_answer_form(smollm2_tokenizer, [OPEN, CLOSE]) == form  # by id, as one writes Kimi's 163606 and 163607
    assert read_answer_form(smollm2_tokenizer, [str(OPEN), str(CLOSE)]) == form  # on a command line, ids are text
    assert read_answer_form(smollm2_tokenizer).think is None  # SmolLM2 has no <think>


@pytest.mark.parametrize("tokens", [["<think>", "</think>"], [OPEN, 49_152], [OPEN], ["-1", CLOSE]])
def test_think_tokens_outside_the_vocabulary_are_refused(smollm2_tokenizer: Any, tokens: list[str | int]) -> None:
    with pytest.raises(TargetError, match="are not two tokens of the target's vocabulary"):
        read_answer_form(smollm2_tokenizer, tokens)


def test_a_thought_gets_one_open_and_one_close(smollm2_tokenizer: Any, form: AnswerForm, prompt: list[int]) -> None:
    t = smollm2_tokenizer
    expected = [OPEN, *_ids(t, "why not"), CLOSE, *_ids(t, "Hi!"), END]
    assert rebuild_completion(t, form, prompt, "why not", "Hi!", "stop") == expected
    # The server has no reasoning parser, and leaves all in the content; or ate the open token only (huggingface/trl#6363).
    assert rebuild_completion(t, form, prompt, None, "<issue_start>why not<issue_closed>Hi!", "stop") == expected
    assert rebuild_completion(t, form, prompt, None, "why not<issue_closed>Hi!", "stop") == expected


def test_a_thought_that_the_template_opened_is_not_opened_again(smollm2_tokenizer: Any, form: AnswerForm, prompt: list[int]) -> None:
    t = smollm2_tokenizer
    opened = AnswerForm((*form.header, OPEN, *_ids(t, "Okay, ")), END, form.think, form.think_text)
    prompt = [*prompt, OPEN, *_ids(t, "Okay, ")]
    assert rebuild_completion(t, opened, prompt, "so", "Hi!", "stop") == [*_ids(t, "so"), CLOSE, *_ids(t, "Hi!"), END]
    assert rebuild_completion(t, opened, prompt, None, "so<issue_closed>Hi!", "stop") == [*_ids(t, "so"), CLOSE, *_ids(t, "Hi!"), END]
    assert rebuild_completion(t, opened, prompt, None, "so and so", "length") == _ids(t, "so and so")
    assert opened.expects_thought(prompt)
    assert not opened.expects_thought([*prompt, CLOSE])


@pytest.mark.parametrize("content", [None, ""])
def test_a_thought_cut_at_the_limit_is_kept_without_a_close(smollm2_tokenizer: Any, form: AnswerForm, prompt: list[int], content: str | None) -> None:
    assert rebuild_completion(smollm2_tokenizer, form, prompt, "let me think", content, "length") == [OPEN, *_ids(smollm2_tokenizer, "let me think")]
    assert rebuild_completion(smollm2_tokenizer, form, prompt, None, "<issue_start>let me", "length") == [OPEN, *_ids(smollm2_tokenizer, "let me")]


def test_an_answer_without_a_thought_stays_without(smollm2_tokenizer: Any, form: AnswerForm, prompt: list[int]) -> None:
    assert rebuild_completion(smollm2_tokenizer, form, prompt, None, "Hi!", "stop") == [*_ids(smollm2_tokenizer, "Hi!"), END]
    assert rebuild_completion(smollm2_tokenizer, form, prompt, None, "Hi!", "length") == _ids(smollm2_tokenizer, "Hi!")


def test_a_users_think_token_opens_no_thought(smollm2_tokenizer: Any, form: AnswerForm) -> None:
    prompt = encode_turn(smollm2_tokenizer, [{"role": "user", "content": "what does <issue_start> mean?<issue_start>"}])
    assert OPEN in prompt and not form.opens_thought(prompt)


def test_a_thought_without_known_think_tokens_is_an_error_with_the_fix(smollm2_tokenizer: Any, prompt: list[int]) -> None:
    with pytest.raises(TargetError, match=r"name the two tokens in target\.think_tokens"):
        rebuild_completion(smollm2_tokenizer, read_answer_form(smollm2_tokenizer), prompt, "hm", "Hi!", "stop")


@given(
    reasoning=st.none() | st.lists(st.sampled_from(["<issue_start>", "<issue_closed>", "<|im_end|>", "a b", "<issue", "\0"])).map("".join),
    content=st.none() | st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "<issue_start>", "text"])).map("".join),
    finish=st.sampled_from(["stop", "length"]),
)
def test_text_never_becomes_a_special_token(
    smollm2_tokenizer: Any, form: AnswerForm, prompt: list[int], reasoning: str | None, content: str | None, finish: str
) -> None:
    ids = rebuild_completion(smollm2_tokenizer, form, prompt, reasoning, content, finish)
    assert ids.count(OPEN) <= 1 and ids.count(CLOSE) <= 1 and 1 not in ids
    assert ids.count(END) == (finish == "stop") and (finish == "length" or ids[-1] == END)
    if reasoning:
        assert ids[0] == OPEN
        assert smollm2_tokenizer.decode([token for token in ids if token not in (OPEN, CLOSE, END)]) == reasoning + (content or "")


def test_a_finished_answer_is_said_again_with_its_thought_apart(smollm2_tokenizer: Any, form: AnswerForm, prompt: list[int]) -> None:
    t = smollm2_tokenizer

    def said(ids: list[int]) -> dict[str, str]:
        return answer_message(t, Answer("p", 0, prompt, ids, "stop"), form)

    assert said([OPEN, *_ids(t, "hm"), CLOSE, *_ids(t, "Hi!"), END]) == {"role": "assistant", "content": "Hi!", "reasoning_content": "hm"}
    assert said([*_ids(t, "Hi!"), END]) == {"role": "assistant", "content": "Hi!"}
    assert said([OPEN, *_ids(t, "cut")]) == {"role": "assistant", "content": "", "reasoning_content": "cut"}


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "chat_template is not set"), ("{% if %}", "Expected an expression"), ("{{ raise_exception('no system turns') }}", "no system turns")],
)
def test_a_template_that_fails_is_one_sentence_with_its_reason(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, reason: str
) -> None:
    monkeypatch.setattr(smollm2_tokenizer, "chat_template", template)
    with pytest.raises(TargetError, match=f"can't write a conversation of user .*{reason}"):
        render(smollm2_tokenizer, MESSAGES)
