"""What a run of days meets, made for real: killed and frozen processes, signals, flipped bytes, full disks, NaN.

The tiny model on CPU. Runs that need no launcher are forked (see ranks.py); those marked slow add up to some minutes.
"""

import functools
import json
import math
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo
import model as M
from ranks import run_ranks
from test_launch import ROOT, environment, processes_with, training, until
from test_run import flags, lines, pictures, reward_file, run_once  # noqa: F401
from test_update import G, arguments, fixed_step

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
        B = len(prompts) // world
        mine = slice(rank * B * G, (rank + 1) * B * G)
        batch = {"prompts": prompts[rank * B : (rank + 1) * B], "tokens": tokens[mine], "mask": mask[mine]}
        batch |= {"lengths": mask[mine].sum(1).tolist(), "truncated": [False] * (B * G), "texts": [""] * (B * G)}
        batch |= {"rewards": scores[mine].tolist(), "scores": {"r": scores[mine].tolist()}}
        batch["sampler_logps"] = torch.zeros(B * G, 10)
        everyone = grpo.compare_phase(run, batch)
        if run.step in spoilt and rank == world - 1:
            batch["advantages"][-1] = math.nan
        metrics.append(grpo.update_phase(run, batch, everyone))
    with M.gathered(run.engine) as whole:
        return {
            name: parameter.detach().float().numpy().copy() for name, parameter in whole.named_parameters()
        }, metrics


STAGES = [(0, False), (2, False), (3, False), (2, True)] + [
    pytest.param(stage, bf16, marks=slow) for stage, bf16 in ((1, False), (0, True), (1, True), (3, True))
]


@pytest.mark.parametrize("stage, bf16", STAGES)
def test_an_update_that_is_not_finite_is_left_out_on_every_rank(checkpoints, tmp_path, stage, bf16):
    """NaN on one rank of two: both end with the weights of a run in which that update never was."""
    flags = {"zero_stage": stage, "bf16": bf16, "max_tokens_per_forward": 70}
    run = functools.partial(train_fixed, checkpoints["qwen2_5_vl"], tmp_path, 2, **flags)
    without = run_ranks(2, functools.partial(run, (), (0, 2)))
    for (weights, metrics), (expected, _) in zip(
        run_ranks(2, functools.partial(run, (1,), (0, 1, 2))), without, strict=True
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
