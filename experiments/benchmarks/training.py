"""Ours against speculators' own forward and backward: same rows, same drafter, same losses, same number format.

    .venv/bin/python experiments/benchmarks/training.py --run outputs/latest    # rows and states of a finished run; without --run made-up ones of its shape
    .venv/bin/python experiments/benchmarks/training.py --run outputs/latest --curve 200    # and the loss of 200 optimiser steps of either
    .venv/bin/python experiments/benchmarks/training.py --long 16384    # peak memory of one row of that length, and of one of half of it
    .venv/bin/python experiments/benchmarks/training.py --device cuda --hidden 4096 --draft-vocab 32000 --pack 16384    # against its flex and fused path

Both run by turns in one process, so that a machine's moods meet them alike; the ratio is of medians. FLOPs are those of the matmuls that ours really does
(torch's counter; what attention's kernel does on a CPU is not counted), and the peak is the best rate of plain matmuls of the same shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from eagle3.drafter.model import new_drafter
from eagle3.drafter.ttt import TTTBatch, ttt_loss
from eagle3.drafter.vocabulary import build_vocabulary_map
from eagle3.generation import load_rows
from eagle3.hidden_states import StateReader
from eagle3.training.batches import CompactRow, compact, load_batch, micro_batches

TTT_STEPS = 3
LOSS = "kl_div"
SMOLLM2 = {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "head_dim": 64}
LARGE = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128}


class MadeUpStates:
    """Random states of a target's shape, the same whenever they are read."""

    def __init__(self, hidden: int) -> None:
        self.hidden, self.layers = hidden, [2, 15, 27, 30]

    def read(self, row_id: str, input_ids: Sequence[int]) -> Tensor:
        return torch.randn(len(input_ids), 4, self.hidden, generator=torch.Generator().manual_seed(int(row_id)), dtype=torch.float32).bfloat16()


@dataclass
class Case:
    """What both train on: the rows, their states, and how a drafter is made."""

    rows: list[CompactRow]
    reader: Any
    new_drafter: Callable[[], Any]
    device: torch.device

    def batches(self, rows: Sequence[CompactRow]) -> list[TTTBatch]:
        return [load_batch(group, self.reader, self.device, torch.bfloat16) for group in micro_batches(rows)]


def open_run(run: Path, num_rows: int, draft_vocab: int, device: torch.device) -> Case:
    """The first rows of a finished run's training, found through its manifests."""
    drafter = Path(json.loads((run / "results.json").read_text())["drafter"])
    manifest = json.loads((drafter.parent / "manifest.json").read_text())
    store = drafter.parents[2]
    reader = StateReader(store / "pools" / "states" / manifest["inputs"]["states"])
    (rows_path,) = [
        path.parent / "rows.jsonl"
        for path in store.glob("generate/*/manifest.json")
        if json.loads(path.read_text())["facts"].get("rows_digest") == manifest["inputs"]["rows"]
    ]
    rows = [row for row in map(compact, load_rows(rows_path)) if row.num_supervised][:num_rows]
    target = json.loads((drafter / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
    return Case(rows, reader, _maker(target, reader.layers[:-1], rows, draft_vocab, device), device)


def make_up(hidden: int, shape: dict[str, int], num_rows: int, draft_vocab: int, device: torch.device, lengths: tuple[int, int], folder: Path) -> Case:
    """Random rows of (prompt, answer) lengths around `lengths` for a random target of this shape in `folder`."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=hidden, num_hidden_layers=30, tie_word_embeddings=True, architectures=["LlamaForCausalLM"], **shape).save_pretrained(folder)
    embeddings = 0.05 * torch.randn(shape["vocab_size"], hidden, generator=torch.Generator().manual_seed(0))
    save_file({"model.embed_tokens.weight": embeddings, "model.norm.weight": torch.ones(hidden)}, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(num_rows):
        prompt = lengths[0] + int(torch.randint(-(lengths[0] // 4), lengths[0] // 4 + 1, (), generator=generator)) if num_rows > 1 else lengths[0]
        ids = torch.randint(0, draft_vocab, (prompt + lengths[1],), generator=generator, dtype=torch.int32)
        rows.append(CompactRow(str(number), ids, torch.arange(len(ids)) >= prompt))
    reader = MadeUpStates(hidden)
    return Case(rows, reader, _maker(str(folder), reader.layers[:-1], rows, draft_vocab, device), device)


def _maker(target: str, layers: list[int], rows: Sequence[CompactRow], draft_vocab: int, device: torch.device) -> Callable[[], Any]:
    tokens, counts = torch.cat([row.input_ids[row.loss_mask] for row in rows]).unique(return_counts=True)
    target_vocab = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
    vocabulary = build_vocabulary_map(dict(zip(tokens.tolist(), counts.tolist())), draft_vocab, target_vocab)
    return lambda: new_drafter(target, layers, vocabulary).to(device)


class Theirs:
    """speculators' forward over the same rows, packed to at most `pack` tokens as its collate function does; eager SDPA on a CPU, flex and fused on CUDA."""

    def __init__(self, case: Case, pack: int) -> None:
        from speculators.losses import resolve_loss_config

        self.case, self.pack = case, pack
        self.loss = resolve_loss_config(LOSS, "fused" if case.device.type == "cuda" else "eager")

    def prepare(self, drafter: Any) -> None:
        """On CUDA, the attention that its trainer uses."""
        if self.case.device.type == "cuda":
            from torch.nn.attention.flex_attention import create_block_mask

            drafter.config.transformer_layer_config._attn_implementation = drafter._attn_impl = "simple_flex_attention"
            drafter._create_mask_fn = create_block_mask

    def packs(self, rows: Sequence[CompactRow]) -> list[dict[str, Tensor]]:
        groups: list[list[CompactRow]] = [[]]
        for row in rows:
            if groups[-1] and sum(len(other.input_ids) for other in groups[-1]) + len(row.input_ids) > self.pack:
                groups.append([])
            groups[-1].append(row)
        return [self._pack(group) for group in groups]

    def _pack(self, rows: Sequence[CompactRow]) -> dict[str, Tensor]:
        from speculators.models.eagle3 import shift_batch

        parts = []
        for number, row in enumerate(rows):
            states, ids = self.case.reader.read(row.id, row.input_ids.tolist()).bfloat16(), row.input_ids.long()
            # Its mask is by teacher position: ours, by predicted token, one to the left.
            mask = torch.cat([row.loss_mask[1:], torch.zeros(1, dtype=torch.bool)])
            sample = {"input_ids": ids, "hidden_states": states[:, :-1].flatten(1), "verifier_last_hidden_states": states[:, -1], "loss_mask": mask}
            part = shift_batch(sample | {"lengths": torch.tensor([len(ids)]), "position_ids": torch.arange(len(ids))})
            parts.append(part | {"document_ids": torch.full((len(ids) - 1,), number)})
        return {key: torch.cat([part[key] for part in parts])[None].to(self.case.device) for key in parts[0] if key != "lengths"}

    def step(self, drafter: Any, packs: Sequence[dict[str, Tensor]]) -> Tensor:
        losses = []
        for pack in packs:
            with torch.autocast(self.case.device.type, torch.bfloat16):
                _, loss, _ = drafter(**pack, ttt_steps=TTT_STEPS, loss_config=self.loss)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def our_step(drafter: Any, batches: Sequence[TTTBatch]) -> Tensor:
    """Forward and backward over all of them; the loss has the unit of theirs, the sum over steps of the mean per supervised token."""
    device, denominator = batches[0].input_ids_BL.device, sum(batch.count("supervised") for batch in batches)
    total = torch.zeros((), device=device)
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16):
            loss = ttt_loss(drafter, batch, num_steps=TTT_STEPS, loss=LOSS, denominator=denominator).loss
        loss.backward()
        total += loss.detach()
    return total


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def compare_speed(case: Case, pack: int, rounds: int) -> None:
    """Tokens per second of both by turns, and ours as a share of the machine's matmul peak."""
    drafter, theirs = case.new_drafter(), Theirs(case, pack)
    theirs.prepare(drafter)
    batches, packs = case.batches(case.rows), theirs.packs(case.rows)
    tokens, supervised = sum(len(row.input_ids) for row in case.rows), sum(row.num_supervised for row in case.rows)
    print(f"{len(case.rows)} rows, {tokens} tokens, {supervised} supervised, {len(batches)} batches of ours, {len(packs)} packs of theirs")
    with FlopCounterMode(display=False) as counter:
        our_step(drafter, batches)
    theirs.step(drafter, packs)
    taken: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        taken["ours"].append(seconds(lambda: our_step(drafter, batches), case.device))
        taken["theirs"].append(seconds(lambda: theirs.step(drafter, packs), case.device))
        drafter.zero_grad()
    ours, other = (statistics.median(times) for times in taken.values())
    print(f"ours        {tokens / ours:10.0f} tokens/s ({', '.join(f'{t:.3f}' for t in taken['ours'])} s)")
    print(f"speculators {tokens / other:10.0f} tokens/s ({', '.join(f'{t:.3f}' for t in taken['theirs'])} s)")
    print(f"ratio       {other / ours:10.2f}")
    peak = matmul_peak(drafter, sum(batch.count("supervised") for batch in batches) // len(batches), case.device)
    rate = counter.get_total_flops() / ours
    print(
        f"ours does {counter.get_total_flops() / 1e9:.1f} GFLOP of matmuls at {rate / 1e9:.0f} GFLOP/s: {rate / peak:.0%} of the peak, {peak / 1e9:.0f} GFLOP/s"
    )


def matmul_peak(drafter: Any, num_rows: int, device: torch.device) -> float:
    """The best rate, over the drafter's own shapes, of plain bf16 matmuls [rows, in] x [in, out]: of each the median."""
    shapes = {tuple(module.weight.shape) for module in drafter.modules() if isinstance(module, torch.nn.Linear)}
    rates = []
    for num_out, num_in in shapes:
        left, right = (torch.randn(shape, device=device).bfloat16() for shape in ((num_rows, num_in), (num_in, num_out)))
        times = [seconds(lambda left=left, right=right: left @ right, device) for _ in range(15)]
        rates.append(2 * num_rows * num_in * num_out / statistics.median(times))
    return max(rates)


def compare_curves(case: Case, pack: int, num_steps: int, lr: float) -> None:
    """The loss of optimiser steps on the same packs of rows, from the same weights; their means over the last tenth should agree within 1 %."""
    theirs, curves = Theirs(case, pack), {}
    for name in ("ours", "speculators"):
        drafter = case.new_drafter()
        theirs.prepare(drafter)
        optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        curves[name] = []
        for rows in _steps(case.rows, pack, num_steps):
            loss = our_step(drafter, case.batches(rows)) if name == "ours" else theirs.step(drafter, theirs.packs(rows))
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            curves[name].append(float(loss))
    every = max(num_steps // 10, 1)
    for start in range(0, num_steps, every):
        ours, other = (statistics.mean(curve[start : start + every]) for curve in curves.values())
        print(f"steps {start:4d} to {min(start + every, num_steps) - 1:4d}: ours {ours:.4f}, speculators {other:.4f}, {ours / other - 1:+.2%}")


def _steps(rows: Sequence[CompactRow], pack: int, num_steps: int) -> Iterator[list[CompactRow]]:
    """Rows of one pack each, in an order drawn anew for each pass."""
    generator = torch.Generator().manual_seed(0)
    chosen: list[CompactRow] = []
    while True:
        for index in torch.randperm(len(rows), generator=generator).tolist():
            if chosen and sum(len(row.input_ids) for row in chosen) + len(rows[index].input_ids) > pack:
                yield chosen
                num_steps, chosen = num_steps - 1, []
                if not num_steps:
                    return
            chosen.append(rows[index])


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.what = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.num_bytes:
                self.num_bytes, self.what = tensor.untyped_storage().nbytes(), f"{list(tensor.shape)} of {func}"
        return made


def measure_long(case: Case) -> None:
    """Peak memory of one forward and backward over the case's single row, above what model and row take."""
    drafter, batches = case.new_drafter(), case.batches(case.rows)
    base = _reset_peak(case.device)
    with LargestTensor() as largest:
        our_step(drafter, batches)
    length = len(case.rows[0].input_ids)
    print(
        f"one row of {length} tokens: {(_peak_bytes(case.device) - base) / 2**20:.0f} MiB above the model and the row; largest tensor "
        f"{largest.num_bytes / 2**20:.0f} MiB ({largest.what}); a [T, T] mask in bf16 would be {2 * length**2 / 2**20:.0f} MiB"
    )


def _reset_peak(device: torch.device) -> int:
    """Forget the peak so far; returns the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes(device)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder with results.json")
    parser.add_argument("--rows", type=int, default=64, help="rows of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--curve", type=int, default=0, metavar="STEPS")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--long", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--pack", type=int, default=2048, help="tokens of a pack of speculators'")
    parser.add_argument("--lengths", type=int, nargs=2, default=(100, 128), metavar=("PROMPT", "ANSWER"), help="of rows that are made up")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.long and not arguments.single:  # the peak of a process never falls, so each length has one of its own
        for length in (arguments.long // 2, arguments.long):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--single", "--long", str(length)], check=True)
        return
    device = torch.device(arguments.device)
    with contextlib.ExitStack() as stack:
        if arguments.run is not None:
            case = open_run(arguments.run, arguments.rows, arguments.draft_vocab, device)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            num_rows, lengths = (1, (arguments.long // 2, arguments.long // 2)) if arguments.long else (arguments.rows, tuple(arguments.lengths))
            case = make_up(arguments.hidden, SMOLLM2 if arguments.hidden == 576 else LARGE, num_rows, arguments.draft_vocab, device, lengths, folder)
        if arguments.long:
            measure_long(case)
        elif arguments.curve:
            compare_curves(case, arguments.pack, arguments.curve, arguments.lr)
        else:
            compare_speed(case, arguments.pack, arguments.rounds)


if __name__ == "__main__":
    main()
