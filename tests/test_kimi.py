"""The large run, whole, against a server that answers as vLLM does for Kimi-K2.5: its special ids, its thought in `reasoning`, its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loopback import CLOSE, END, THINK, KimiTokenizer, Loopback, Reply

TEMPLATE = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>{% endif %}"
)


@pytest.fixture
def kimi_folder(tmp_path: Path) -> Path:
    """A folder in Kimi-K2.5's shape: the language model's numbers in `text_config`, a real tokenizer with its special ids, no weights."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(32, 127)} | KimiTokenizer.special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in KimiTokenizer.special])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    folder = tmp_path / "kimi"
    fast.save_pretrained(folder)
    shape = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163_840, "max_position_embeddings": 262_144, "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": shape}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_ten_prompts_of_the_large_run_keep_each_thought_between_its_tokens_once(tmp_path: Path, kimi_folder: Path, exact: bool) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(300)))
    tokenizer = KimiTokenizer()

    def reply(body: dict[str, Any]) -> Reply:
        assert body["max_tokens"] == 8192
        thought, said = "so " * 30, "it is " * 10
        ids = [ord(letter) for letter in thought] + [CLOSE] + [ord(letter) for letter in said] + [END]
        prompt = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return Reply(said, thought, prompt_ids=tokenizer(prompt)["input_ids"], token_ids=ids)

    with Loopback(reply, model="kimi-k2.5", exact=exact) as server:
        settings = ["target.trust_remote_code=false", f"target.path={kimi_folder}", "dataset=file", "dataset.path=prompts.jsonl", "tracking=disabled"]
        command = [str(Path(sys.executable).with_name("eagle3")), "experiment=smoke_10", f"engine.base_urls=[{server.url}]", *settings]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (train,) = [path for path in tmp_path.glob("outputs/store/generate/*/rows.jsonl") if path.read_text().count("\n") == 10]
    for row in map(json.loads, train.read_text().splitlines()):
        ids, supervised = row["input_ids"], [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert ids.count(THINK) == 1 and ids.count(CLOSE) == 1 and ids.index(THINK) < ids.index(CLOSE)
        assert THINK not in supervised and supervised.count(CLOSE) == 1 and supervised[-1] == END
        assert row["provenance"]["exact"] is exact


@pytest.mark.slow
def test_the_same_command_tries_again_what_may_pass_and_only_that(tmp_path: Path, kimi_folder: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(300)))
    tokenizer = KimiTokenizer()

    def reply(body: dict[str, Any]) -> Reply:
        prompt = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return Reply("it is " * 20, "so", prompt_ids=tokenizer(prompt)["input_ids"], token_ids=[*map(ord, "so"), CLOSE, *map(ord, "it is " * 20), END])

    settings = ["target.trust_remote_code=false", f"target.path={kimi_folder}", "dataset=file", "dataset.path=prompts.jsonl", "tracking=disabled"]
    numbers = []
    for fault in (lambda n: "503" if n == 3 else None, lambda n: None, lambda n: None):
        with Loopback(reply, model="kimi-k2.5", fault=fault) as server:
            command = [
                str(Path(sys.executable).with_name("eagle3")),
                "experiment=smoke_10",
                f"engine.base_urls=[{server.url}]",
                "engine.max_retries=0",
                *settings,
            ]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            numbers.append(server.num_requests)
    assert numbers == [12, 1, 0]  # 10 prompts and 2 to evaluate on; the one that failed; nothing
    assert "everything was in the store already" in done.stderr
