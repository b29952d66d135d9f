"""bench/: the arithmetic behind floors and ratios, and each script run on a tiny model."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import data
import model as M

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench"))

import step as bench
import work
import zero


@pytest.fixture(scope="module")
def tiny_work(checkpoints, tmp_path_factory):
    """A folder such as bench/work.py writes, around the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("work")
    os.symlink(checkpoints["qwen2_5_vl"], folder / "model")
    work.write_data(folder, records=4)
    return str(folder)


def run(script, tiny_work, output, *flags):
    command = [sys.executable, os.path.join(bench.HERE, script), "--work", tiny_work, "--output", str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert output.with_suffix(".png").stat().st_size > 5000
    written = json.loads(output.read_text())
    assert {"date", "gpu", "versions", "command"} <= set(written["meta"]) and set(written) == {"meta", "rows"}
    return written["meta"], written["rows"]


@pytest.mark.parametrize("family", M.FAMILIES)
def test_operations_are_those_that_pytorch_counts(checkpoints, tiny_work, family):
    path = checkpoints[family]
    policy, processor = M.load_policy(path, torch_dtype="float32", device="cpu", attn_implementation="eager")
    size = M.weight_counts(policy)
    if family != "qwen2_5_vl":  # whose vision MLP is padded when it is loaded
        assert size.items() <= bench.sizes(path).items()
    prompt = data.encode_prompt(bench.open_work(tiny_work)[1][0], processor)
    prompt["position_ids"] = M.prompt_positions(policy, prompt)
    P, V = len(prompt["input_ids"]), len(prompt["pixel_values"])
    trainer = M.Policy(policy)
    row = M.build_row([(prompt, [torch.arange(3), torch.arange(5)])], "cpu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trainer(row)
    counted = counter.get_flop_counts()["Global"]
    attention = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}  # scores, weighted values, rotary tables: left out
    weights = sum(n for operation, n in counted.items() if operation not in attention)
    assert weights == M.forward_operations(size, tokens=P + 8, head_tokens=8, patches=V)


def test_floors_of_the_reference_work():
    """The docstring's table, and the 1.82 ms a decode step that 6.17 GB of weights and 1.41 GB of KV take."""
    size = bench.config_sizes(work.config(), itemsize=2)
    assert size["parameters"] == 3_754_622_976  # as the hub says of Qwen2.5-VL-3B
    assert size["kv"] == 36 * 2 * 2 * 128 * 2
    classical, shared = bench.decode_bytes(size, rows=64, prompts=8, context=468, own=128)
    assert classical / 4.16e12 == pytest.approx(1.82e-3, rel=0.005)
    assert classical - shared == 56 * 468 * size["kv"]  # 7 of 8 copies of each prompt
    task = {"prompts": 8, "generations": 8, "length": 256, "prompt_tokens": 468, "patches": 1564}
    floor = bench.floors(bench.load_of(size, task), {"bytes_per_s": 4.16e12, "flops": 772e12})
    assert floor["sum"] == pytest.approx(sum(floor[name] for name in ("decode", "prefill", "update", "optimizer")))
    table = {"decode": 0.47, "prefill": 0.05, "update": 0.54, "optimizer": 0.03, "sum": 1.08}
    table |= {"update_recomputed": 0.71, "decode_shared": 0.41}
    assert {name: round(value, 2) for name, value in floor.items()} == table


def test_rows_compare_medians_after_the_first_step_and_keep_what_failed(tmp_path):
    task = {"prompts": 2, "generations": 4, "length": 10}
    load = {"update_flops": 6.0, "update_flops_repeated": 12.0, "decode_bytes_shared": 3.0}
    ceiling, rows = {"flops": 10.0, "bytes_per_s": 10.0}, []
    for name, times in (("stage 0", (9.0, 1.0, 2.0, 8.0)), ("TRL", (9.0, 16.0))):
        steps = [{"step_time": t, "time/rollout": t / 4, "time/update": t / 2, "peak_gb": t} for t in times]
        steps = [step | {"completions/mean_length": 10.0} for step in steps]
        rows.append(bench.make_row(name, steps, None, task, load, ceiling))
    command = [sys.executable, "-c", "print('x'); raise MemoryError('none left')"]
    steps, error = bench.follow("bad", command, str(tmp_path))
    rows.append(bench.make_row("bad", steps, error, task, load, ceiling))
    bench.compare(rows, "TRL", {"sum": 0.5})
    ours, theirs, bad = rows
    assert (ours["step_s"], ours["first_step_s"], ours["completions_per_s"], ours["peak_gb"]) == (2.0, 9.0, 4.0, 9.0)
    assert (ours["peer_completions_per_s"], ours["ratio_to_peer"], ours["ratio_to_floor"]) == (0.5, 8.0, 4.0)
    assert (ours["update_matrix_share"], ours["update_matrix_share_repeated"]) == (0.6, 1.2)
    assert ours["decode_bandwidth_share"] == 0.6 and ours["tokens_per_s"] == 40.0 and theirs["ratio_to_peer"] == 1.0
    assert bad["error"] == "MemoryError: none left" and bad["ratio_to_peer"] is None


def test_step(tiny_work, tmp_path):
    flags = "--prompts 2 --generations 2 --length 8 --steps 2 --only".split()
    meta, [row] = run("step.py", tiny_work, tmp_path / "step.json", *flags, "stage 0")
    assert row["error"] is None and len(row["step_times"]) == 2
    assert row["completions_per_s"] * row["step_s"] == pytest.approx(4)
    assert row["ratio_to_floor"] == pytest.approx(row["step_s"] / meta["floors"]["sum"])
    assert row["step_s"] == pytest.approx(sum(row[f"{phase}_s"] for phase in bench.PHASES))
    assert {"peer_completions_per_s", "ratio_to_peer", "peak_gb"} <= set(row)


def test_decode(tiny_work, tmp_path):
    flags = "--batch 1 16 --context 64 --generate 16x64".split()
    _, rows = run("decode.py", tiny_work, tmp_path / "decode.json", *flags)
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 64), (16, 64)]
    assert all(row["ratio_to_floor"] == row["ms"] / row["floor_ms"] for row in rows)
    assert rows[0]["floor_ms"] == rows[0]["shared_floor_ms"] and rows[1]["floor_ms"] > rows[1]["shared_floor_ms"]
    assert rows[0]["generate_ms"] is None and rows[1]["generate_ms"] > 0


def test_attention(tiny_work, tmp_path):
    flags = "--generations 2 --length 8 --repeats 1 --attention eager flash_attention_2".split()
    _, rows = run("attention.py", tiny_work, tmp_path / "attention.json", *flags)
    eager, flash = rows[:4], rows[4:]
    # the same numbers in all four ways, but for the placeholders' probability, which packed rows take away
    assert all(row["loss"] == pytest.approx(eager[0]["loss"], abs=0.05) for row in eager)
    assert eager[0]["loss"] == pytest.approx(eager[2]["loss"]) and eager[1]["loss"] == pytest.approx(eager[3]["loss"])
    assert [row["vlm_r1_gb"] for row in rows] == [72, None, None, None, 58, None, 42, None]
    if not torch.cuda.is_available():
        assert all("flash-attn runs on NVIDIA GPUs" in row["error"] for row in flash)


def test_growth(tiny_work, tmp_path):
    flags = "--base 2 2 --generations 2 4 --prompt_tokens 64 128 --prompts 1 2 --length 8".split()
    meta, rows = run("growth.py", tiny_work, tmp_path / "growth.json", *flags)
    points = [tuple(row[k] for k in ("prompts", "generations", "prompt_tokens", "completion_tokens")) for row in rows]
    P = rows[0]["prompt_tokens"]  # with its picture
    assert points == [(2, 2, P, 8), (2, 4, P, 8), (2, 2, 64, 8), (2, 2, 128, 8), (1, 2, P, 8)]  # the base point once
    base, more, short, long, fewer = rows
    assert [row["patches"] > 0 for row in rows] == [True, True, False, False, True]
    assert all(row["step_s"] == pytest.approx(row["rollout_s"] + row["update_s"]) for row in rows)
    size, flops = meta["sizes"], meta["ceilings"]["flops"]
    # four completions more cost 8 operations a weight and token, and 16 a layer, pair and channel of attention
    completions = 4 * 8 * (8 * (size["blocks"] + size["head"]) + 16 * 2 * 64 * (P + 4))
    assert (more["update_paper_s"] - base["update_paper_s"]) * flops == pytest.approx(completions)
    # and their decoding reads their own tokens, not the prompt again
    read = 8 * 4 * (8 / 2) * size["kv"] / meta["ceilings"]["bytes_per_s"]
    assert more["rollout_paper_s"] - base["rollout_paper_s"] == pytest.approx(read)
    # a longer prompt costs what its tokens cost, and attention with its square and with what its completions read
    prompts = 2 * (8 * size["blocks"] * 64 + 16 * 2 * 64 * ((128**2 - 64**2) / 2 + 2 * 8 * 64))
    assert (long["update_paper_s"] - short["update_paper_s"]) * flops == pytest.approx(prompts)
    # half the prompts: half the update, and a rollout that reads the weights as often
    assert base["update_paper_s"] == pytest.approx(2 * fewer["update_paper_s"])
    weights = 8 * size["itemsize"] * (size["blocks"] + size["head"]) / meta["ceilings"]["bytes_per_s"]
    assert 2 * fewer["rollout_paper_s"] - base["rollout_paper_s"] == pytest.approx(weights)
    ratio = math.prod(row["step_s"] / row["paper_s"] for row in rows) ** (1 / len(rows))
    assert meta["measured_over_paper"]["step"] == pytest.approx(ratio) and ratio > 1


def test_overlap_is_that_of_a_ruler():
    """Against marking every tenth of a unit."""
    random = np.random.default_rng(0)
    for _ in range(200):
        marks, spans = np.zeros((2, 300), bool), ([], [])
        for k in range(random.integers(0, 12)):
            start, length = random.integers(0, 250), random.integers(0, 40)
            marks[k % 2, start : start + length] = True
            spans[k % 2].append((start / 10, (start + length) / 10))
        total, common = zero.overlap(*spans)
        assert total == pytest.approx(marks[0].sum() / 10) and common == pytest.approx(marks.all(0).sum() / 10)


def test_collectives_are_told_from_compute():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name, start, end, device=cuda, note=False):
        times = SimpleNamespace(start=start * 1e6, end=end * 1e6)
        return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=note)

    events = [event("ncclDevKernel_AllGather_RING_LL", 0, 4), event("ncclDevKernel_ReduceScatter_Sum_bf16", 3, 6)]
    events += [event("gemm", 1, 2), event("gemm", 5, 9), event("Memcpy DtoD", 0, 6), event("aten::mm", 0, 6, cpu)]
    events.append(event("Optimizer.step#AdamW.step", 0, 6, note=True))
    assert zero.communication(events, gpu=True) == {"collectives_s": 6, "hidden_s": 2}
    events = [event("gloo:all_reduce", 0, 3, cpu), event("c10d::allreduce_", 0, 3, cpu), event("aten::mm", 2, 4, cpu)]
    assert zero.communication(events, gpu=False) == {"collectives_s": 3, "hidden_s": 1}


def test_on_paper():
    """By hand: 280 GB over NVLink, 1.9 us a hop; two nodes of 8 have 14 hops of a ring's 15 but one inside, and their
    16 cards' 400 GB/s do not hold back NVLink's 280."""
    assert zero.ring(280e9, 10, world=1) == 0
    assert zero.ring(280e9, 10, world=2) == pytest.approx(0.5 + 10 * 1.9e-6)
    assert zero.ring(280e9, 0, world=8) == pytest.approx(7 / 8)
    assert zero.ring(280e9, 10, world=16) == pytest.approx(15 / 16 + 10 * (13 * 1.9e-6 + 2 * 4e-6))
    size, task = bench.config_sizes(work.config(), itemsize=2), {"prompts": 8, "generations": 8, "length": 256}
    task |= {"prompt_tokens": 468, "patches": 1564}
    ceiling, shares = {"bytes_per_s": 4.16e12, "flops": 772e12}, {"decode": 0.5, "update": 0.4}
    one = zero.on_paper(size, task, ceiling, shares, world=1)
    assert one["gather"] == one["traffic"] == 0 and one["step"] == one["step_exposed"]
    assert one["rollout"] == pytest.approx(0.41 / 0.5 + 0.047 / 0.4, rel=0.01)  # step.py's table
    assert one["update"] == pytest.approx(0.54 / 0.4, rel=0.01)
    many = zero.on_paper(size, task, ceiling, shares, world=8)
    assert size["matrices"] == 36 * 7 + 1 + 32 * 5 + 1 + 2  # decoder, embedding, vision blocks, patches, merger
    assert size["units"] == 36 + 1 + 32 + 1 + 2
    # 2 norms and 3 biases a layer, and a norm; 2 norms and 5 biases a vision block; the merger's norm and 2 biases
    assert size["vectors"] == 36 * 5 + 1 + 32 * 7 + 3
    assert many["gather"] == pytest.approx(7.509e9 * 7 / 8 / 280e9 + (416 + 408) * 7 * 1.9e-6, rel=1e-3)
    assert many["traffic"] == pytest.approx(3 * 7.509e9 * 7 / 8 / 280e9 + (2 * 72 + 38) * 7 * 1.9e-6, rel=1e-3)
    assert many["step_exposed"] - many["step"] == pytest.approx(many["traffic"])
    few = task | {"prompts": task["prompts"] * many["break_even"] / (8 * (468 + 8 * 256))}
    even = zero.on_paper(size, few, ceiling, shares, world=8)
    assert even["traffic"] == pytest.approx(even["update"]) and even["break_even"] == pytest.approx(many["break_even"])
    for row in zero.paper_rows(os.path.join(bench.HERE, "results")):
        if row["measured"]:
            assert row["step"] == pytest.approx(row["measured"], rel=0.1)


@pytest.mark.slow  # with the next: every script of bench/ here trains as a user does, the others above in one process
@pytest.mark.parametrize("modes", [["ZeRO-3 default"], ["DDP", "ZeRO-3 tuned"]])
def test_zero(tiny_work, tmp_path, modes):
    flags = "--prompts 2 --generations 2 --length 8 --steps 4".split()
    meta, rows = run("zero.py", tiny_work, tmp_path / "zero.json", *flags, "--only", *modes)
    assert [row["mode"] for row in rows[: len(modes)]] == modes
    for row in rows:
        assert row["error"] is None and len(row["step_times"]) == 3  # the profiled one apart
        assert row["completions_per_s"] * row["step_s"] == pytest.approx(row["completions"])
        assert row["step_s"] == pytest.approx(sum(row[f"{phase}_s"] for phase in bench.PHASES), rel=0.2)
        assert 0 <= row["hidden_s"] <= row["collectives_s"] and row["gather_s"] < row["rollout_s"]
        assert {"mode", "world", "peer_completions_per_s", "peak_gb", "ratio_to_peer"} <= set(row)
    if len(modes) == 2:
        ddp, tuned, one, two = rows
        assert tuned["ratio_to_ddp"] == tuned["completions_per_s"] / ddp["completions_per_s"]
        assert (one["world"], one["completions"], two["world"], two["completions"]) == (1, 4, 2, 8)
        assert two["ratio_to_one_gpu"] == two["completions_per_s"] / one["completions_per_s"]
        again = run("zero.py", tiny_work, tmp_path / "zero.json", *flags, "--only", *modes, "--resume")[1]
        assert again == rows


@pytest.mark.slow
def test_memory(tiny_work, tmp_path):
    flags = "--prompts 2 --generations 2 --length 8 --steps 2 --only".split()
    _, rows = run("memory.py", tiny_work, tmp_path / "memory.json", *flags, "stage 1", "math kernel")
    setting, advice = rows
    assert setting["error"] is None and advice["error"] is None and advice["on"].startswith("stage 0, sdpa")
    assert setting["step_s"] > 0 and advice["step_s"] > 0
    parameters = bench.sizes(os.path.join(tiny_work, "model"))["parameters"]
    assert setting["planned_gb"] > 16 * parameters / 1e9 and "planned_gb" not in advice
    if torch.cuda.is_available():
        assert setting["reserved_gb"] >= setting["peak_gb"] > 0 and setting["deviation"] is not None
