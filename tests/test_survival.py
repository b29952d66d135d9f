"""What a run of days meets, made for real: killed and frozen processes, signals, flipped bytes, full disks, NaN.

The tiny model on CPU. Runs that need no launcher are forked (see ranks.py); those marked slow add up to some minutes.
"""
# ruff: noqa: F401, F811 (fixtures of test_run.py)

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from test_launch import ROOT, environment, launch, processes_with, until
from test_run import flags, lines, main_with, pictures, reward_file, run_once
from test_update import arguments, fixed_step, rank_batch
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

import grpo
import model as M
from ranks import run_ranks

slow = pytest.mark.slow

# -------------------------------------------------------------------------------------- numbers that are not finite


def train_fixed(folder, out, world, spoilt, steps, **flags):
    """Updates on test_update's fixed steps; in those of `spoilt` one advantage, of the last rank alone, is NaN.
    Returns the weights and each step's metrics."""
    args = arguments(folder, out, per_device_train_batch_size=16 // world, **flags)
    rank, world, device = grpo.start_processes(args)
    model, processor = grpo.load_policy(args, device)
    run = grpo.Run(args, rank, world, device, processor, eos=[0], pad=0, total=9)
    run.engine = grpo.start_engine(args, model, world, device)
    metrics = []
    for run.step in steps:
        prompts, tokens, mask, scores = fixed_step(model, processor, run.step)
        for i, prompt in enumerate(prompts):
            prompt["record"] = 100 + i
        batch = rank_batch(prompts, tokens, mask, scores, rank, world)
        everyone = grpo.compare_phase(run, batch)
        if run.step in spoilt and rank == world - 1:
            batch["advantages"][-1] = math.nan
        metrics.append(grpo.update_phase(run, batch, everyone))
    with M.gathered(run.engine) as whole:
        return {
            name: parameter.detach().float().numpy().copy() for name, parameter in whole.named_parameters()
        }, metrics


STAGES = [(2, 0, False), (1, 3, False), (2, 2, True)]  # (ranks, ZeRO stage, bf16)
STAGES += [pytest.param(2, s, bf16, marks=slow) for s, bf16 in ((1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (3, 1))]


@pytest.mark.parametrize("world, stage, bf16", STAGES)
def test_an_update_that_is_not_finite_is_left_out_on_every_rank(checkpoints, tmp_path, world, stage, bf16):
    """NaN on the last rank alone: all end with the weights of a run in which that update never was."""
    flags = {"zero_stage": stage, "bf16": bool(bf16), "max_tokens_per_forward": 70}
    run = functools.partial(train_fixed, checkpoints["qwen2_5_vl"], tmp_path, world, **flags)
    without = run_ranks(world, functools.partial(run, (), (0, 2)))
    for (weights, metrics), (expected, _) in zip(
        run_ranks(world, functools.partial(run, (1,), (0, 1, 2))), without, strict=True
    ):
        assert [line["skipped_steps"] for line in metrics] == [0, 1, 0]
        assert not math.isfinite(metrics[1]["loss"]) and not math.isfinite(metrics[1]["grad_norm"])
        for name, values in expected.items():
            assert np.isfinite(values).all()
            np.testing.assert_array_equal(weights[name], values, err_msg=name)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=slow)])
def test_five_in_a_row_end_the_run_and_name_the_records(checkpoints, tmp_path, stage):
    run = functools.partial(train_fixed, checkpoints["qwen2_5_vl"], tmp_path, 2, zero_stage=stage)
    _, metrics = run_ranks(2, functools.partial(run, (0, 1, 2, 3, 5), range(6)))[1]
    assert [line["skipped_steps"] for line in metrics] == [1, 1, 1, 1, 0, 1]
    with pytest.raises(AssertionError, match=r"FloatingPointError: 5 updates in a row.*look at records \[102, 103\]"):
        run_ranks(2, functools.partial(run, (1, 2, 3, 4, 5), range(6)))


def test_a_step_of_one_group_all_cut(checkpoints, pictures, tmp_path, reward_file):
    """One prompt, every completion cut at its third token, and those left out of the loss: a loss and norm of 0."""
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], pictures, max_steps=2, reward_funcs=[reward_file])
    make = functools.partial(make, max_completion_length=3, per_device_train_batch_size=4, num_generations=4)
    make = functools.partial(make, gradient_accumulation_steps="1", zero_stage=1)
    run_ranks(1, run_once, make(tmp_path / "cut", mask_truncated_completions=True))
    for line in lines(tmp_path / "cut"):
        assert line["completions/clipped_ratio"] == 1 and (line["loss"], line["grad_norm"]) == (0, 0)
        assert line["skipped_steps"] == 0 and line["entropy"] == 0
    run_ranks(1, run_once, make(tmp_path / "kept"))
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines(tmp_path / "kept"))


# ------------------------------------------------------------------------------------- whole runs, by launch.sh

REWARD = """import os, signal, time
from pathlib import Path

calls = 0


def reward(prompts, completions, **columns):
    global calls
    calls += 1
    step, rank, here = calls, os.environ["RANK"], Path(__file__).parent
    {fault}
    return [c.count("e") / max(1, len(c)) for c in completions]
"""


def command(checkpoints, pictures, folder, fault="pass", **more):
    """launch.sh's words for a run of six steps with checkpoints at 3 and 6, whose reward function has a fault."""
    (folder / "reward.py").write_text(REWARD.format(fault=fault))
    given = {"model_name_or_path": checkpoints["qwen2_5_vl"], "data_file_paths": pictures / "a.jsonl", "save_steps": 3}
    given |= {"image_folders": pictures, "bf16": "false", "num_generations": 4, "max_completion_length": 8}
    given |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 6, "stall_timeout": 60}
    given |= {"question_template": "{Question}", "reward_funcs": f"{folder}/reward.py:reward", "num_workers": 1}
    given |= {"output_dir": folder / "run", "resume_from_checkpoint": "true"}
    return [str(word) for name, value in (given | more).items() for word in (f"--{name}", value)]


def launched(words, folder, **variables):
    log = open(folder / "log", "wb")  # noqa: SIM115
    variables = {"NPROC": "2", "OMP_NUM_THREADS": "1"} | variables
    arguments = ["bash", ROOT / "launch.sh", *words]
    return subprocess.Popen(arguments, cwd=folder, env=environment(**variables), stdout=log, stderr=log)


def undisturbed(words, out, world=2):
    (args,) = grpo.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(words)
    args.output_dir = str(out)
    run_ranks(world, run_once, args)
    return losses(out)


def losses(folder):
    return [[line.get(key) for key in ("step", "loss", "grad_norm", "reward", "num_tokens")] for line in lines(folder)]


def remains(folder):
    """Processes of a run (a rank's data workers among them) and what lies in shared memory."""
    found = processes_with(f"{folder}/reward.py:reward")
    return found, set(os.listdir("/dev/shm"))


def ended(job, folder, shared, seconds):
    """Wait for the end of a job: (status, what was on the console). Nothing of it may be left."""
    status = job.wait(seconds)
    until(lambda: not remains(folder)[0], seconds=3)
    assert remains(folder)[1] <= shared
    return status, (folder / "log").read_text()


SLEEP = "(here / f'reached{step}').touch(); time.sleep(0.4)"


@slow
def test_a_signal_saves_and_the_same_command_goes_on(checkpoints, pictures, tmp_path):
    """SIGTERM to launch.sh in the second step of six. What is left is what an undisturbed run leaves."""
    words, shared = command(checkpoints, pictures, tmp_path, SLEEP), remains(tmp_path)[1]
    job = launched(words, tmp_path)
    until(lambda: (tmp_path / "reached2").exists() or job.poll() is not None, seconds=100)
    job.terminate()
    began = time.monotonic()
    status, said = ended(job, tmp_path, shared, 40)
    print(f"from SIGTERM to the end of launch.sh: {time.monotonic() - began:.1f} s")
    assert status == 143, said
    step = len(lines(tmp_path / "run"))
    assert 2 <= step < 6 and f"SIGTERM after step {step}; {tmp_path}/run/checkpoint-{step} counts" in said
    assert "checkpoint-" in said.splitlines()[-1]  # below torchrun's own report
    job = launched(words, tmp_path)
    status, said = ended(job, tmp_path, shared, 100)
    assert status == 0 and f"resumed from {tmp_path}/run/checkpoint-{step}" in said, said
    assert losses(tmp_path / "run") == undisturbed(words, tmp_path / "whole")


def signalled(args, number):
    """On each rank: what `train` said of a signal that this process, if it is the last rank, sends itself."""
    run, *rest = grpo.start(args)
    run.stop.listen(run)
    with pytest.raises(grpo.Stopped) as stopped:
        grpo.train(run, *rest)
    return run.step, *stopped.value.args


def test_ranks_stop_after_the_same_step_when_one_was_told(checkpoints, pictures, tmp_path):
    fault = "step == 2 and rank == '1' and os.kill(os.getpid(), signal.SIGINT)"
    words = command(checkpoints, pictures, tmp_path, fault)
    (args,) = grpo.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(words)
    for step, status, message in run_ranks(2, signalled, args, signal.SIGINT):
        assert (step, status) == (2, 130) and "checkpoint-2 counts" in message
    assert grpo.damage(str(tmp_path / "run" / "checkpoint-2")) is None


@slow
def test_a_signal_that_leaves_no_time_for_a_save_says_what_counts(checkpoints, pictures, tmp_path):
    """The fourth step takes longer than torchrun waits, which is set to 5 s here instead of 30."""
    fault = "step == 4 and ((here / 'reached').touch(), time.sleep(60))"
    words, shared = command(checkpoints, pictures, tmp_path, fault), remains(tmp_path)[1]
    job = launched(words, tmp_path, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5")
    until(lambda: (tmp_path / "reached").exists() or job.poll() is not None, seconds=100)
    job.send_signal(signal.SIGINT)
    began = time.monotonic()
    status, said = ended(job, tmp_path, shared, 20)
    print(f"from SIGINT to the end of launch.sh: {time.monotonic() - began:.1f} s")
    assert status == 130 and f"no time to save; {tmp_path}/run/checkpoint-3 counts" in said.splitlines()[-1], said


# ------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    "fault, status, cause",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "rank 1 ended first"),
        pytest.param("1 / 0", 2, "rank 1: reward function reward raised ZeroDivisionError", marks=slow),
    ],
    ids=["killed", "raising"],
)
def test_a_rank_that_is_lost_ends_the_job(checkpoints, pictures, tmp_path, fault, status, cause):
    fault = f"rank == '1' and step == 4 and ((here / 'reached').touch(), {fault})"
    words, shared = command(checkpoints, pictures, tmp_path, fault), remains(tmp_path)[1]
    job = launched(words, tmp_path)
    until(lambda: (tmp_path / "reached").exists() or job.poll() is not None, seconds=100)
    began = time.monotonic()
    got, said = ended(job, tmp_path, shared, 10)
    print(f"from the fault to the end of launch.sh: {time.monotonic() - began:.1f} s")
    assert got == status and cause in said.splitlines()[-1], said
    assert "Traceback" not in said.split("torch/distributed/elastic")[0] and "Connection closed" not in said, said


# ------------------------------------------------------------------------------------------------------------- memory

SHORT = """
import ctypes, resource
ctypes.CDLL(None).mallopt(-3, 1 << 16), ctypes.CDLL(None).mallopt(-1, 0)  # what is freed goes back to the system
done, size = sum(1 for _ in open(here / "run" / "metrics.jsonl")), int(open("/proc/self/statm").read().split()[0])
short = rank == {rank!r} and done == {step}
resource.setrlimit(resource.RLIMIT_AS, (size * resource.getpagesize() + ({mb} << 20) if short else -1, -1))
"""


def short_of_memory(checkpoints, pictures, folder, mb, rank="0", step=3, **more):
    """A run whose rank has, in the update after `step` steps, no more than `mb` MB beside what it holds then."""
    fault = SHORT.format(rank=rank, mb=mb, step=step).strip().replace("\n", "\n    ")
    more = {"num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 300} | more
    more["learning_rate"] = 1e-6  # so that completions stay as long as random ones are
    return command(checkpoints, pictures, folder, fault, **more)


ANEW = "--resume_from_checkpoint true"


@pytest.mark.parametrize(
    "forward, changed, saved, flags",
    [
        ((4001, 370), {}, False, f"--max_tokens_per_forward 2000 {ANEW}"),
        ((600, 370), {}, True, f"--max_tokens_per_forward 370 {ANEW}"),  # a row of one completion is the smallest
        ((370, 370), {}, True, None),
        ((0, 0), {}, True, None),  # no forward: loading, the optimizer
        ((4001, 370), {"resume_from_checkpoint": "elsewhere/checkpoint-9"}, False, "--max_tokens_per_forward 2000"),
        ((4001, 370), {"resume_from_checkpoint": "run/checkpoint-1"}, True, f"--max_tokens_per_forward 2000 {ANEW}"),
        ((4001, 370), {"save_only_model": True}, False, f"--max_tokens_per_forward 2000 {ANEW}"),
        ((4001, 370), {"save_only_model": True}, True, None),  # would be refused
        ((4001, 370), {"eval_only": True}, True, "--max_tokens_per_forward 2000"),
    ],
)
def test_what_a_run_without_memory_goes_on_with(tmp_path, monkeypatch, forward, changed, saved, flags):
    monkeypatch.setenv("GRPO_STATUS", str(tmp_path))
    (tmp_path / "run" / ("checkpoint-3" if saved else "")).mkdir(parents=True)
    args = grpo.Arguments(model_name_or_path="m", output_dir=str(tmp_path / "run"), **changed)
    run = grpo.Run(args, 0, 1, torch.device("cpu"), None, [0], 0, phase="update", step=3, forward=forward)
    with pytest.raises(ValueError) as caught:  # the allocator's own error, hidden by another
        try:
            torch.empty(1 << 46, dtype=torch.uint8)
        except RuntimeError:
            raise ValueError("the graph is not whole")  # noqa: B904
    said = grpo.memory_message(run, grpo.out_of_memory(caught.value))
    assert said.startswith("out of memory in update after step 3: ") and "DefaultCPUAllocator" in said
    assert (tmp_path / "retry").exists() == bool(flags)
    if flags:
        assert (tmp_path / "retry").read_text().split() == flags.split() and f"`{flags}`" in said
    else:
        assert ("no --max_tokens_per_forward helps" in said) == (forward[0] == forward[1])
    assert grpo.out_of_memory(ValueError("something else")) is None
    assert "in start after step 0" in grpo.memory_message(None, MemoryError("out of memory"))


@slow
def test_a_run_without_memory_goes_on_with_half_the_budget(checkpoints, pictures, tmp_path):
    """One of two ranks cannot compute its step in one forward (some 60 MB), but can in a few. All steps are done."""
    words = short_of_memory(checkpoints, pictures, tmp_path, 24, rank="1", per_device_train_batch_size=64)
    shared = remains(tmp_path)[1]
    status, said = ended(launched(words, tmp_path), tmp_path, shared, 200)
    assert status == 0 and [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6], said
    told = re.findall("rank 1: out of memory in update after step 3: .*DefaultCPUAllocator.*", said)[1::2]
    starts = re.findall(f"launch.sh: out of memory; starting again, . of 3, with (.* {ANEW})", said)
    assert 1 <= len(starts) == len(told) == said.count(f"resumed from {tmp_path}/run/checkpoint-3")
    size = int(re.search(r"and (\d+) tokens in its largest forward", told[0])[1])
    assert starts[0] == f"--max_tokens_per_forward {size // 2} {ANEW}" and told[0].endswith(f"`{starts[0]}`")
    assert f"--max_tokens_per_forward was 32768, from here on it is {starts[-1].split()[1]}" in said
    assert "A GPU needs" in said  # the plan's table
    assert "Traceback" not in said.split("torch/distributed/elastic")[0]


@slow
def test_three_times_again_and_no_more(checkpoints, pictures, tmp_path):
    words = short_of_memory(checkpoints, pictures, tmp_path, 1, step=0, per_device_train_batch_size=64)
    shared = remains(tmp_path)[1]
    status, said = ended(launched(words, tmp_path, NPROC="1"), tmp_path, shared, 200)
    sizes = [int(size) for size in re.findall(r"and (\d+) tokens in its largest forward", said)[1::2]]
    assert status == 3 and len(sizes) == 4 and all(b <= a // 2 for a, b in itertools.pairwise(sizes)), said
    assert re.findall("starting again, (. of 3)", said) == ["1 of 3", "2 of 3", "3 of 3"]
    assert "rank 0: out of memory in update after step 0: " in said.splitlines()[-1] and "`" in said.splitlines()[-1]


def test_a_budget_given_by_hand_is_advised_about(checkpoints, pictures, tmp_path):
    words = short_of_memory(checkpoints, pictures, tmp_path, 1, step=0, max_tokens_per_forward=32768)
    shared = remains(tmp_path)[1]
    status, said = ended(launched(words, tmp_path, NPROC="1"), tmp_path, shared, 100)
    assert status == 3 and "The gradient is the same with `--max_tokens_per_forward " in said.splitlines()[-1], said
    assert "starting again" not in said and said.count("torch.distributed.run --nnodes") == 1


# ------------------------------------------------------------------------------------------------------- checkpoints


def flip(path):
    """Change one bit in the middle of a file, as a bad disk does."""
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(checkpoints, pictures, tmp_path, reward_file, capfd):
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], pictures, reward_funcs=[reward_file], zero_stage=1)
    make = functools.partial(make, save_only_model=False, save_steps=1, learning_rate=1e-3)
    run_ranks(1, run_once, make(tmp_path / "whole", max_steps=4))
    out = tmp_path / "run"
    run_ranks(1, run_once, make(out, max_steps=3))
    two, three = out / "checkpoint-2", out / "checkpoint-3"
    files = [path for path in three.rglob("*") if path.is_file()]
    assert {"model.safetensors", "mp_rank_00_model_states.pt"} < {path.name for path in files}
    for path in files:  # a flipped bit in any file is found, a missing one and a cut one too
        flip(path)
        assert path.name in grpo.damage(str(three))
        flip(path)
    assert grpo.damage(str(three)) is None
    os.truncate(three / "model.safetensors", 1000)
    (two / "zero" / "state" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(AssertionError, match="checkpoint-3 is damaged: model.safetensors is .*; give the one before"):
        run_ranks(1, run_once, make(out, max_steps=4, resume_from_checkpoint=str(three)))
    capfd.readouterr()
    run_ranks(1, run_once, make(out, max_steps=4, resume_from_checkpoint="true", save_total_limit=2))
    said = capfd.readouterr().err
    assert "checkpoint-3 is damaged: model.safetensors" in said and f"resumed from {out}/checkpoint-1" in said
    assert "checkpoint-2 is damaged: zero/state/zero_pp_rank_0_mp_rank_00_optim_states.pt" in said
    assert "--max_steps was 3, from here on it is 4" in said
    assert losses(out) == losses(tmp_path / "whole")
    assert [os.path.basename(path) for path in grpo.checkpoints(str(out))] == ["checkpoint-3", "checkpoint-4"]
    for path in grpo.checkpoints(str(out)):
        flip(Path(path) / "state.json")
    with pytest.raises(AssertionError, match="every checkpoint is damaged"):
        run_ranks(1, run_once, make(out, max_steps=5, resume_from_checkpoint="true"))


def refused(data, again):
    alone = r"or go on from its weights alone: bash launch.sh --model_name_or_path .*/run/checkpoint-1"
    for more, message in (
        ({"per_device_train_batch_size": 16}, "prompts a rank 2, now it is 4"),
        ({"seed": 7}, "--data_seed 42, now it is 7"),
        ({"val_split_ratio": 0.3}, "--val_split_ratio 0.0, now it is 0.3"),
        ({"freeze_vision_modules": True}, "--freeze_vision_modules False, now it is True"),
        ({}, "records 12 .*, now it is 12 "),
    ):
        if not more:
            (data / "a.jsonl").write_text((data / "a.jsonl").read_text().replace("box 7", "box 8"))
        with pytest.raises(ValueError, match=f"{message}.*{alone}"):
            run_once(again(**more))


def test_what_would_be_a_wrong_resume_is_refused(checkpoints, pictures, tmp_path, reward_file):
    """Other records under the same name, another order of them, other optimizer states; but moved data are the same."""
    data = tmp_path / "data"
    shutil.copytree(pictures, data)
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], data, tmp_path / "run", reward_funcs=[reward_file])
    run_ranks(1, run_once, make(max_steps=1, save_only_model=False, zero_stage=1))
    again = functools.partial(make, max_steps=2, resume_from_checkpoint="true", save_only_model=False)
    run_ranks(1, refused, data, functools.partial(again, zero_stage=1))
    shutil.rmtree(data)
    shutil.copytree(pictures, tmp_path / "moved")
    moved = {"data_file_paths": str(tmp_path / "moved" / "a.jsonl"), "image_folders": str(tmp_path / "moved")}
    run_ranks(
        1,
        run_once,
        again(
            zero_stage=1,
            learning_rate=1e-4,
            num_generations=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps="1",
            **moved,
        ),
    )
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]


def test_a_checkpoint_cannot_run_code(checkpoints, pictures, tmp_path, reward_file):
    """An optimizer file is a pickle; one that calls a function when it is read is refused, checksums made to fit."""
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], pictures, tmp_path, reward_funcs=[reward_file])
    run_ranks(1, run_once, make(max_steps=1, save_only_model=False))
    folder = tmp_path / "checkpoint-1"
    torch.save(Evil(str(tmp_path / "evil")), next(folder.rglob("*optim_states.pt")))
    state = json.loads((folder / "state.json").read_text())
    state = {name: value for name, value in state.items() if name != "crc"} | {"files": grpo.checksums(str(folder))}
    (folder / "state.json").write_text(json.dumps(state | {"crc": zlib.crc32(json.dumps(state).encode())}))
    with pytest.raises(AssertionError, match="Weights only load failed"):
        run_ranks(1, run_once, make(max_steps=2, resume_from_checkpoint="true"))
    assert not (tmp_path / "evil").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


# -------------------------------------------------------------------------------------------------------------- disk


def run_with_a_limit(args, bytes_a_file):
    """The last rank may not write files larger than that, which is what a full disk or a quota does to it."""
    run, *rest = grpo.start(args)
    if run.rank == run.world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, bytes_a_file))
    grpo.train(run, *rest)


@pytest.mark.parametrize("world, stage", [(2, 1), pytest.param(1, 3, marks=slow), pytest.param(2, 3, marks=slow)])
def test_a_checkpoint_that_one_rank_cannot_write(checkpoints, pictures, tmp_path, reward_file, capfd, world, stage):
    """All ranks go on, what was saved before is kept whole although one checkpoint is the limit; at the end it is an
    error, for then the weights would be lost."""
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], pictures, tmp_path, reward_funcs=[reward_file])
    make = functools.partial(make, save_only_model=False, save_steps=1, save_total_limit=1, zero_stage=stage)
    run_ranks(world, run_once, make(max_steps=1))
    capfd.readouterr()
    with pytest.raises(AssertionError, match=f"the last checkpoint could not be written: rank {world - 1}: "):
        run_ranks(world, run_with_a_limit, make(max_steps=3, resume_from_checkpoint="true"), 200_000)
    said = capfd.readouterr().err
    assert f"warning: checkpoint-2 could not be written (rank {world - 1}: " in said
    assert f"{tmp_path}/checkpoint-1 counts" in said
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert [os.path.basename(path) for path in grpo.checkpoints(str(tmp_path))] == ["checkpoint-1"]
    assert grpo.damage(f"{tmp_path}/checkpoint-1") is None


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 12 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


FILL = """
if step == 2 and rank == "0":
    with open({ballast!r}, "wb", buffering=0) as file:
        try:
            while file.write(bytes(1000)):
                pass
        except OSError:
            pass
if step == 4 and rank == "0":
    os.remove({ballast!r})
"""


def test_a_full_disk_costs_what_it_could_not_hold_and_no_more(checkpoints, pictures, tmp_path, small_disk, capfd):
    """Full from step 2 to step 4: steps are missing in the logs, whole lines all of them, and training goes on."""
    fault = FILL.format(ballast=str(small_disk / "ballast")).strip().replace("\n", "\n    ")
    words = command(checkpoints, pictures, tmp_path, fault, output_dir=small_disk / "run", save_steps=1, zero_stage=1)
    (args,) = grpo.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(words)
    args.save_total_limit = 1
    run_ranks(1, run_once, args)
    said = capfd.readouterr().err
    assert all(f"warning: checkpoint-{step} could not be written" in said for step in (2, 3))
    gaps = 0
    for name in ("metrics.jsonl", "completions.jsonl"):
        missing = {int(step) for step in re.findall(rf"step (\d) is missing in {small_disk}/run/{name}", said)}
        assert {line["step"] for line in lines(small_disk / "run", name)} == {1, 2, 3, 4, 5, 6} - missing
        gaps += len(missing)
    assert gaps
    assert [os.path.basename(path) for path in grpo.checkpoints(str(small_disk / "run"))] == ["checkpoint-6"]
    assert grpo.damage(f"{small_disk}/run/checkpoint-6") is None


@slow
def test_a_frozen_rank_ends_the_job(checkpoints, pictures, tmp_path):
    """SIGSTOP, the worst case: it cannot say anything, and torchrun waits 30 s before it kills."""
    fault = "rank == '1' and step == 4 and ((here / 'reached').touch(), os.kill(os.getpid(), signal.SIGSTOP))"
    fault = fault.replace(".touch()", ".write_text(str(os.getpid()))")
    words = command(checkpoints, pictures, tmp_path, fault, stall_timeout=10)
    shared = remains(tmp_path)[1]
    job = launched(words, tmp_path)
    until(lambda: (tmp_path / "reached").exists() or job.poll() is not None, seconds=100)
    began = time.monotonic()
    status, said = ended(job, tmp_path, shared, 10 + 60)
    print(f"from SIGSTOP to the end of launch.sh, --stall_timeout 10: {time.monotonic() - began:.1f} s")
    assert status == 4, said
    told = said.splitlines()[-1]
    assert "missing: rank 1 (rank 0: compare after step 3; rank 1: frozen, or stuck in C)" in told, said
    assert f"py-spy dump --pid {(tmp_path / 'reached').read_text()}` on" in told, said


def test_a_rank_that_sleeps_ends_the_job_and_is_named(checkpoints, pictures, tmp_path):
    """Two slow steps, which are none of its business, then one rank sleeps. The verdict comes last and once, with the
    stacks of both ranks in their files."""
    fault = "time.sleep(3) if step < 3 else rank == '1' and time.sleep(99)"
    words, shared = command(checkpoints, pictures, tmp_path, fault, stall_timeout=5), remains(tmp_path)[1]
    job = launched(words, tmp_path)
    status, said = ended(job, tmp_path, shared, 100)
    assert status == 4 and [line["step"] for line in lines(tmp_path / "run")] == [1, 2], said
    assert (tmp_path / "run" / "exit_status").read_text() == "4\n"
    cause, told = said.splitlines()[-2:]
    assert re.search("rank .: no progress for 5 s .*; nothing is saved in", cause)
    assert said.count("no progress") == 2  # where it is met, and below torchrun's report
    assert said.count("missing: rank 1 (rank 0: compare after step 2; rank 1: reward after step 2)") == 1, said
    assert "py-spy dump --pid" in told and "NCCL_DEBUG=INFO" in told
    stacks = [(tmp_path / "run" / "ranks" / f"stacks_{rank}.txt").read_text() for rank in (0, 1)]
    assert "in compare_phase" in stacks[0] and "all_gather_object" in stacks[0]
    assert "reward.py" in stacks[1] and "in score_phase" in stacks[1] and "all_gather" not in stacks[1]


@slow
@pytest.mark.parametrize("who", ["all processes, as SLURM does", "torchrun alone, killed"])
def test_signals_from_elsewhere(checkpoints, pictures, tmp_path, who):
    """Each process is sent SIGTERM by SLURM, data workers too: saved all the same. Ranks never outlive torchrun."""
    words, shared = command(checkpoints, pictures, tmp_path, SLEEP), remains(tmp_path)[1]
    job = launched(words, tmp_path)
    until(lambda: (tmp_path / "reached2").exists() or job.poll() is not None, seconds=100)
    for number, line in found_processes(tmp_path):
        if "torch.distributed.run" in line if "torchrun" in who else True:
            os.kill(number, signal.SIGKILL if "torchrun" in who else signal.SIGTERM)
    began = time.monotonic()
    status = job.wait(40)
    until(lambda: not remains(tmp_path)[0], seconds=10)
    print(f"{who}: {time.monotonic() - began:.1f} s to the last process's end")
    said = (tmp_path / "log").read_text()
    assert status == (137 if "torchrun" in who else 143) and re.search(
        r"SIGTERM after step (\d); \S*checkpoint-\1 counts", said
    ), said
    assert remains(tmp_path)[1] <= shared


@slow
def test_interrupted_at_any_moment_of_its_start(checkpoints, pictures, tmp_path):
    """Ctrl-C while launch.sh, torchrun and the ranks begin: 130, and nothing of them is left."""
    moments = np.random.default_rng(0).uniform(0.5, 12, 12)
    for moment in sorted(moments):
        words, shared = command(checkpoints, pictures, tmp_path, SLEEP, max_steps=40), remains(tmp_path)[1]
        job = launched(words, tmp_path)
        time.sleep(moment)
        job.send_signal(signal.SIGINT)
        status, said = ended(job, tmp_path, shared, 45)
        assert status == 130, (moment, said)


# ---------------------------------------------------------------------------------------------- kill -9 at any moment


@slow
def test_killed_at_forty_moments_a_run_ends_as_if_undisturbed(checkpoints, pictures, tmp_path):
    """kill -9 of all processes at random moments of a run that saves every step, then the same command, 40 times. No
    half checkpoint is ever taken for one, and the losses are those of a quiet run."""
    words = command(checkpoints, pictures, tmp_path, save_steps=1, max_steps=140, save_total_limit=2, num_workers=0)
    (args,) = grpo.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(words)
    generator, out, halves, resumed = np.random.default_rng(0), tmp_path / "run", 0, set()

    def grown(child, step):
        return newest_step(out) > step or not child.is_alive()

    for _ in range(40):
        child = multiprocessing.get_context("fork").Process(target=in_a_group, args=(args,))
        child.start()
        until(functools.partial(grown, child, newest_step(out)), seconds=100)
        time.sleep(generator.uniform(0, 1))
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        halves += any(name.endswith(".tmp") for name in os.listdir(out))
        resumed.add(newest_step(out))
        for path in grpo.checkpoints(str(out)):
            assert grpo.damage(path) is None
    print(f"40 kills, {halves} of them in a save, resumed from {len(resumed)} checkpoints, the last {max(resumed)}")
    assert halves >= 5 and len(resumed) >= 30
    run_ranks(2, run_once, args)
    assert losses(out) == undisturbed(words, tmp_path / "whole")


def newest_step(folder):
    found = grpo.checkpoints(str(folder)) if folder.exists() else []
    return int(found[-1].rsplit("-", 1)[1]) if found else 0


def in_a_group(args):
    os.setpgid(0, 0)
    run_ranks(2, run_once, args)
    os._exit(0)


def found_processes(folder):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().decode(errors="replace")
            if f"{folder}/reward.py:reward" in line:
                yield int(path.parent.name), line


# -------------------------------------------------------------------------------------------------- safe by default


def load_alone(folder):
    """Load a folder, with Hugging Face's hub allowed and every use of the network an error."""

    def forbid(event, arguments):
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
            raise RuntimeError(f"{event} {arguments}")

    huggingface_hub.constants.HF_HUB_OFFLINE = False
    sys.addaudithook(forbid)
    M.load_policy(folder, torch_dtype="float32")


def test_a_folder_is_loaded_without_network_and_without_its_code(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'evil')!r})\nclass Evil: pass\n")
    for name, key in (("config", "AutoConfig"), ("tokenizer_config", "AutoTokenizer"), ("config", "AutoModel")):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {key: "evil.Evil"}}))
    run_ranks(1, load_alone, str(folder))
    assert not (tmp_path / "evil").exists()


# ------------------------------------------------------------------------------- consoles, statuses, changed flags


def command_line(args, *more):
    names = "model_name_or_path output_dir data_file_paths image_folders num_generations per_device_train_batch_size"
    names += " max_completion_length question_template num_workers save_only_model bf16 max_steps"
    words = [word for name in names.split() for word in (f"--{name}", str(getattr(args, name)))]
    return [*words, "--reward_funcs", *args.reward_funcs, *more]


def test_a_run_outlives_its_console(checkpoints, pictures, tmp_path, reward_file):
    """Whoever reads the output ends first, as `tee` does at Ctrl-C: the run is finished all the same."""
    args = flags(checkpoints["qwen2_vl"], pictures, tmp_path / "run", reward_funcs=[reward_file], max_steps=3)
    command = [sys.executable, str(ROOT / "grpo.py"), *command_line(args)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env=environment(), cwd=tmp_path) as process:
        process.stdout.close(), process.stderr.close()
        assert process.wait(timeout=100) == 0
    assert len(lines(tmp_path / "run")) == 3 and (tmp_path / "run" / "exit_status").read_text() == "0\n"


def without_a_console():
    sys.stdout = sys.stderr = None  # what Python makes of >&- 2>&-
    status = main_with("--model_name_or_path", "m", "--output_dir", "run", "--plan")
    print("a line", flush=True)
    return status, (Path("run") / "exit_message").read_text()


def test_a_console_that_was_closed_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((status, message),) = run_ranks(1, without_a_console)
    assert status == 2 and "--plan needs no training process" in message


def test_a_reward_function_that_changes_the_working_directory(checkpoints, pictures, tmp_path, monkeypatch):
    """The run stays in the folder that its relative --output_dir named when it began."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moves.py").write_text(
        f"import os\ndef moves(prompts, completions, **columns):\n    os.chdir({str(tmp_path / 'elsewhere')!r})\n"
        "    return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    more = {"reward_funcs": [f"{tmp_path}/moves.py:moves"], "max_steps": 2}
    assert run_ranks(1, main_with, *command_line(flags(checkpoints["qwen2_vl"], pictures, "run", **more))) == [0]
    assert os.listdir(tmp_path / "elsewhere") == [] and len(lines(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "checkpoint-2").is_dir() and (tmp_path / "run" / "exit_status").read_text() == "0\n"


@pytest.mark.parametrize("line", ['{"loss": 1}', "[]", "5", '{"step": "1"}', "no JSON"])
def test_a_log_with_a_line_that_is_not_ours_is_named_on_resuming(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    args = grpo.Arguments(model_name_or_path="m", output_dir=str(tmp_path))
    run = grpo.Run(args, 0, 1, torch.device("cpu"), None, [0], 0, step=3, resumed="checkpoint-3")
    with pytest.raises(ValueError, match=f"--output_dir {tmp_path}: .*metrics.jsonl: '{re.escape(line)}"):
        grpo.Log(run)
    assert (tmp_path / "metrics.jsonl").read_text().endswith(f"{line}\n")  # nothing is lost


@pytest.mark.parametrize("state", ["[]", "{}", '{"args": []}', "no JSON"])
def test_a_state_json_that_is_not_ours_does_not_stop_an_evaluation(tmp_path, capsys, state):
    (tmp_path / "state.json").write_text(state)
    grpo.compare_template(grpo.Arguments(model_name_or_path=str(tmp_path), eval_only=True))
    assert f"{tmp_path}/state.json does not say" in capsys.readouterr().err


def save_where_names_cannot_be_encoded(args):
    run, *rest = grpo.start(args)

    def save_pretrained(folder, **named):
        "é".encode("ascii")

    run.processor.save_pretrained = save_pretrained  # what LC_ALL=C makes of a path
    grpo.train(run, *rest)


def test_a_name_that_the_locale_cannot_encode_costs_the_checkpoint_alone(
    checkpoints, pictures, tmp_path, reward_file, capfd, monkeypatch
):
    args = flags(checkpoints["qwen2_vl"], pictures, tmp_path / "run", reward_funcs=[reward_file], max_steps=2)
    args.save_steps = 1
    with pytest.raises(AssertionError, match="the last checkpoint could not be written: rank 0: 'ascii' codec"):
        run_ranks(1, save_where_names_cannot_be_encoded, args)
    assert "warning: checkpoint-1 could not be written (rank 0: 'ascii' codec" in capfd.readouterr().err
    assert len(lines(tmp_path / "run")) == 2
    monkeypatch.setenv("GRPO_STATUS", str(tmp_path))
    grpo.leave_status("unused", 1, 0, "\udcc3")  # a byte of a path as Python holds it there
    assert (tmp_path / "exit_message").read_text() == "grpo.py, rank 0: \\udcc3\n"


def run_with_tqdms_own_lock(args):
    tqdm.set_lock(TqdmDefaultWriteLock())
    run_once(args)


def test_a_process_killed_while_it_writes_holds_nobody_up(checkpoints, pictures, tmp_path):
    """tqdm's lock is shared with forked processes, data workers for one, and stays with one that is killed."""
    (tmp_path / "reward.py").write_text(
        "import os\nfrom tqdm import tqdm\n"
        "def reward(prompts, completions, **columns):\n"
        "    if (process := os.fork()) == 0:\n"
        "        tqdm.get_lock().acquire()\n"
        "        os._exit(0)\n"
        "    os.waitpid(process, 0)\n"
        "    return [0.0] * len(completions)\n"
    )
    more = {"reward_funcs": [f"{tmp_path}/reward.py:reward"], "max_steps": 2}
    args = flags(checkpoints["qwen2_vl"], pictures, tmp_path / "run", **more)
    run_ranks(1, run_with_tqdms_own_lock, args, timeout=30)
    assert len(lines(tmp_path / "run")) == 2


def test_leaving_python_is_no_success(checkpoints, pictures, tmp_path):
    """os._exit(0) in a reward function, and an earlier command's 0 in the same folder."""
    path = tmp_path / "leaves.py"
    path.write_text("import os\ndef leaves(prompts, completions, **columns):\n    os._exit(0)\n")
    args = flags(checkpoints["qwen2_vl"], pictures, tmp_path / "run", reward_funcs=[f"{path}:leaves"], max_steps=3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit_status").write_text("0\n")
    done = launch(*command_line(args), cwd=tmp_path)
    assert done.returncode == 1 and "ended without saying how" in done.stdout, done.stdout


def resumed_groups(args):
    run, model, *_ = grpo.start(args)
    run.engine = grpo.start_engine(args, model, run.world, run.device)
    run.identity = grpo.identity(run)
    grpo.load_checkpoint(run, run.resumed)
    return [group["weight_decay"] for group in run.engine.optimizer.param_groups]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_changed_weight_decay_holds_after_a_resume(checkpoints, pictures, tmp_path, reward_file, stage):
    make = functools.partial(flags, checkpoints["qwen2_vl"], pictures, tmp_path, reward_funcs=[reward_file])
    make = functools.partial(make, save_only_model=False, zero_stage=stage)
    run_ranks(1, run_once, make(max_steps=1))
    again = make(max_steps=2, weight_decay=0.5, resume_from_checkpoint="true")
    assert run_ranks(1, resumed_groups, again) == [[0.5]]


def test_an_output_folder_that_is_no_text_is_refused_before_training(tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), b"\xc3\xb6").decode("ascii", "surrogateescape")  # as with LC_ALL=C
    with pytest.raises(ValueError, match="--output_dir .* LC_ALL=C.UTF-8"):
        grpo.claim_folder(folder)
