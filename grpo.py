"""GRPO for vision-language models: sample, score, compare within the group, update. One loop, plain PyTorch.

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4) is PPO without its critic. Each prompt
is answered G times; a completion's advantage is how much better it scored than its own group; the clipped policy
gradient does the rest. Deleted from the paper: the reward model (rewards are functions), the outer loop that renews
the reference (beta defaults to 0, so there is no reference). Deleted from the usual trainers: callbacks, adapters,
vLLM, the repeated prompt.

    bash launch.sh                                          a tiny model on synthetic pictures, on any machine
    bash launch.sh --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --data_file_paths a.jsonl --image_folders dir

The file is in time order: `start` and `train`, the phases of a step, their maths (which does no input or output), a
run's files, signals and hangs, DeepSpeed's part, the flags, the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

if __name__ == "__main__" and "RANK" in os.environ and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a rank ends with its launcher; imports take seconds

import argparse
import concurrent.futures
import contextlib
import datetime
import faulthandler
import fcntl
import functools
import importlib.util
import json
import logging
import math
import pathlib
import random
import re
import shutil
import socket
import threading
import time
import traceback
import warnings
import zlib
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch.utils.benchmark import Timer
from tqdm import tqdm
from transformers import HfArgumentParser

import data
import model as modeling
import rewards
import rollout

HERE = os.path.dirname(os.path.abspath(__file__))


# --- The run -------------------------------------------------------------------------------------------------------


def start(args):
    """Processes, model and data: returns (run, model, training records, held-out records)."""
    reward_funcs = [rewards.load_reward(spec) for spec in args.reward_funcs]  # what a typo stops, stops it at once
    sources = data.parse_sources(args.data_file_paths, args.image_folders, args.dataset_name, args.image_root)
    if os.environ.get("RANK", "0") == "0" and not args.eval_only:
        claim_folder(args.output_dir)
    rank, world, device = start_processes(args)
    model, processor = load_policy(args, device)
    name, reason = model.attention_choice
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tell(f"policy: {args.model_name_or_path}, {parameters / 1e6:,.1f} M parameters, {args.torch_dtype}, {device.type}")
    tell(f"attention: {name} ({reason})")
    tokenizer = processor.tokenizer
    eos = modeling.eos_token_ids(model, tokenizer)
    pad = eos[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    run = Run(args, rank, world, device, processor, eos, pad)
    run.sizes = modeling.weight_counts(model)
    run.ceilings = measure_ceilings(device) if device.type == "cuda" else None
    run.reward_funcs = reward_funcs
    options = {"question_template": args.question_template, "max_prompt_length": args.max_prompt_length}
    run.encode = functools.partial(data.encode_prompt, processor=processor, **options)
    # Rank 0 packs the sources and looks for checkpoints: one decision for all. The others wait, which for a large set
    # takes longer than any step may, hence a group with a patience of its own.
    found = [None, None]
    if rank == 0:
        found[0] = os.path.abspath(data.ensure_packed(sources, args.output_dir))
        found[1] = None if args.eval_only else checkpoint_to_resume(args)
    run.patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    dist.broadcast_object_list(found, src=0, group=run.patient)
    run.packed, run.resumed = found
    run.dataset = data.PackedDataset(run.packed)
    train_records, val_records = data.train_val_split(run.dataset, args.val_split_ratio, args.data_seed)
    if args.eval_only:
        compare_template(args)
    what = "not held out" if args.eval_only else "to train on"
    tell(f"data: {len(train_records)} records {what}, {len(val_records)} held out, in {run.packed}")
    return run, model, train_records, val_records


def train(run, model, train_records, val_records):
    """The algorithm. Each phase is followed by what is true then."""
    args, B, G, W = run.args, prompts_per_rank(run.args), run.args.num_generations, run.world
    if not len(train_records):
        raise ValueError("no records to train on: lower --val_split_ratio, or add a source without `split: val`")
    if args.eval_steps and not len(val_records):
        raise ValueError(f"--eval_steps {args.eval_steps}: nothing is held out; give --val_split_ratio or `split: val`")
    per_epoch = len(train_records) / (W * B)
    run.total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    tell(f"batch: {W} ranks x {B} prompts x {G} completions = {W * B * G} completions of {W * B} prompts a step")
    tell(f"{run.total} steps x {args.num_iterations} updates, {run.total / per_epoch:.2f} epochs; {args.output_dir}")
    run.engine = start_engine(args, model, W, run.device)
    if args.beta > 0:
        run.reference = start_engine(args, load_policy(args, run.device)[0], W, run.device, trained=False)
    run.identity = identity(run)
    if run.resumed:
        load_checkpoint(run, run.resumed)
        if run.step >= run.total:
            tell(f"nothing is left to train: step {run.step} of {run.total}; raise --max_steps or --num_train_epochs")
    log, times, began = Log(run), {}, time.perf_counter()

    def begin(phase):
        """A phase ends, the next begins. On a GPU the work is waited for, so that a phase's seconds are its own."""
        nonlocal began
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        began, times[run.phase] = time.perf_counter(), time.perf_counter() - began
        enter(run, phase)
        if phase == "wait_data":
            times.clear()  # a step begins

    def evaluation():
        begin("evaluation")
        with modeling.gathered(run.engine) as whole:
            metrics, lines = evaluate(run, whole, val_records)
        log(metrics, lines)
        shown = ", ".join(f"{name[5:]} {value:.3f}" for name, value in metrics.items() if isinstance(value, float))
        tell(f"step {run.step}: held out: {shown}")

    if len(val_records) and run.step == 0:
        evaluation()
    loader = data.prompt_loader(
        run.dataset, train_records, run.encode, args.data_seed, run.step, run.total, B, run.rank, W, args.num_workers
    )
    loader.worker_init_fn = follow_the_rank
    bar = tqdm(total=run.total, initial=run.step, disable=run.rank != 0, dynamic_ncols=True, unit="step")
    if run.device.type == "cuda":
        bar.set_postfix_str("compiling kernels in the first step")
    begin("wait_data")
    for prompts in loader:
        begin("rollout")
        # B prompts with their pictures are here, B others on every other rank.

        seed_everything(args.seed, run.step, run.rank)
        batch = sample_phase(run, prompts)
        begin("reward")
        # Each prompt has G completions, drawn from the policy as it is now.

        score_phase(run, batch)
        begin("compare")
        # Each completion has a reward, or NaN where no function had an opinion.

        everyone = compare_phase(run, batch)
        begin("update")
        # Each completion has an advantage over its group, and every rank knows the step's sizes.

        learned = update_phase(run, batch, everyone)
        begin("log")
        # The policy has moved, so these completions are no longer its own: they are thrown away.

        run.step += 1
        run.num_tokens += sum(G * sum(rank["prompts"]) + sum(rank["lengths"]) for rank in everyone)
        metrics = step_metrics(run, everyone, learned, times) | {"epoch": run.step / per_epoch}
        show_progress(run, bar, metrics, loader.num_workers)
        last = run.step == run.total
        if last or run.step % args.logging_steps == 0:
            log(metrics, batch_lines(run, batch) if args.log_completions else ())
        number, in_time = run.stop.agreed(run.device)
        # If any rank was sent a signal, all of them know it, and whether a save would be over in time.

        if (last or run.step % args.save_steps == 0 or number) and (in_time or not number):
            begin("save")
            failed = save_checkpoint(run)
            if failed and last:
                raise OSError(f"the last checkpoint could not be written: {failed[0]}")
        if len(val_records) and not number and (last or args.eval_steps and run.step % args.eval_steps == 0):
            evaluation()
        if number and not last:
            raise Stopped(128 + number, f"{signal.Signals(number).name} after step {run.step}; {what_counts(args)}")
        begin("wait_data")
    bar.close()


def show_progress(run, bar, metrics, workers):
    """The progress bar after a step, and what the user should know once: how long compiling took, and whether training
    waits for data."""
    shown = {"reward": metrics["reward"], "IoU": metrics.get("rewards/accuracy/mean")}
    bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items() if value is not None}, refresh=False)
    bar.update()
    if run.waits is None:
        return
    run.waits.append(metrics["time/wait_data"] / metrics["step_time"])
    if len(run.waits) == 1 and run.device.type == "cuda":
        tell(f"the first step took {metrics['step_time']:.0f} s, with compiling and capturing the GPU's kernels")
    if len(run.waits) > 10 and (share := np.mean(run.waits[-10:])) > 0.1:  # not the first: it always waits
        tell(
            f"data: {share:.0%} of the last 10 steps was waiting for it (time/wait_data); raise --num_workers, now "
            f"{workers} a rank, lower --max_pixels, or move {run.packed} to a local disk"
        )
        run.waits = None  # said once


# --- The phases of a step ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What the phases need. The counters, `bad` and, for `watch`, the last four change while training."""

    args: Arguments
    rank: int
    world: int
    device: torch.device
    processor: modeling.Processor
    eos: list  # ids that end a completion
    pad: int
    packed: str | None = None  # the records' file, and its reader
    dataset: data.PackedDataset | None = None
    encode: object = None  # record -> prompt
    reward_funcs: list = field(default_factory=list)  # (name, function)
    resumed: str | None = None  # the checkpoint to go on from
    engine: object = None  # DeepSpeed's: engine.module is the Policy, engine.module.model transformers' model in it
    reference: object = None
    step: int = 0
    total: int = 0
    num_tokens: int = 0
    sizes: dict | None = None  # weights by part, see modeling.weight_counts
    ceilings: dict | None = None  # what the GPU can do at most
    waits: list | None = field(default_factory=list)  # share of each step that was waiting for data
    patient: object = None  # a group of all ranks that waits for a day: what one rank does alone may take long
    stop: Stop = field(default_factory=lambda: Stop())
    identity: dict = field(default_factory=dict)  # what a checkpoint of this run must be resumed with
    bad: list = field(default_factory=list)  # records of the updates left out, since the last that was done
    phase: str = "start"  # see `train`
    idle: int = 0  # seconds since a phase began, see `watch`
    stacks: object = None  # the file for this rank's stacks
    forward: tuple = (0, 0)  # tokens of the largest forward of this phase, and the fewest that a budget could make it


def seed_everything(seed, step, rank):
    """All randomness of a step is a function of (seed, step, rank): a resumed run repeats an undisturbed one."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


# What the phases hand on is one dict, the batch of this rank's B prompts and N = B*G completions:
#   prompts                     list of B dicts: data.encode_prompt's, and position_ids (3, P)
#   tokens, sampler_logps       (N, R), from the sampler, padded behind each completion's end
#   mask, advantages            (N, R) of bool: tokens in the loss; (N,)
#   lengths, truncated          a completion: its tokens; was it cut at max_completion_length
#   texts, scores, rewards      a completion: its text; {function: its number or None}; their weighted sum or NaN
#   trained, cuts               a completion: its tokens in the loss; the rows of this rank, see cut_rows


def sample_phase(run, prompts):
    """Phase 1: G completions of each of this rank's B prompts. Returns the step's batch, N = B*G completions."""
    args = run.args
    with modeling.gathered(run.engine) as model:
        prompts = with_positions(model, prompts)
        limits = args.num_generations, args.max_completion_length
        tokens, logps, decoding = sample(run, model, prompts, *limits, args.temperature)  # (N, R)
    mask = completion_mask(tokens, run.eos)
    ended = torch.isin(tokens, torch.tensor(run.eos, device=tokens.device)).any(1)
    batch = {"prompts": prompts, "tokens": tokens, "sampler_logps": logps, "mask": mask, "decoding": decoding}
    return batch | {"lengths": mask.sum(1).tolist(), "truncated": (~ended).tolist()}  # waits for the GPU


def sample(run, model, prompts, G, R, temperature):
    """rollout.sample, in waves that --max_tokens_per_forward is enough for."""

    def begin(wave):
        tokens = functools.partial(rollout.wave_tokens, model, G=G, R=R)
        run.idle, run.forward = 0, (tokens(wave), max(tokens([prompt]) for prompt in wave))

    return rollout.sample(
        model, prompts, G, R, temperature, run.eos, run.pad, run.args.max_tokens_per_forward, begin=begin
    )


def with_positions(model, prompts):
    """The prompts with their mRoPE positions, and their pixels on the model's device, for rollout and update."""
    done = []
    for prompt in prompts:
        pixels = prompt["pixel_values"]
        more = {"pixel_values": pixels if pixels is None else pixels.to(model.device)}
        done.append(prompt | more | {"position_ids": modeling.prompt_positions(model, prompt)})
    return done


def decode_texts(run, tokens, lengths):
    rows = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    return run.processor.tokenizer.batch_decode(rows, skip_special_tokens=True)


def score(run, prompts, texts):
    """Every reward function on every completion: {name: one number or None a completion}. The functions get the
    records' own fields as columns, a field that a record lacks being None."""
    copies = len(texts) // len(prompts)
    records = [prompt["columns"] for prompt in prompts for _ in range(copies)]
    names = {name for record in records for name in record} - {"prompts", "completions"}
    columns = {name: [record.get(name) for record in records] for name in sorted(names)}
    return rewards.score(run.reward_funcs, columns["problem"], texts, columns)


def score_phase(run, batch):
    """Phase 2: the completions' texts, every function's scores, and their weighted sum, the reward."""
    batch["texts"] = decode_texts(run, batch["tokens"], batch["lengths"])
    batch["scores"] = score(run, batch["prompts"], batch["texts"])
    batch["rewards"] = rewards.total(batch["scores"], run.args.reward_weights)


def compare_phase(run, batch):
    """Phase 3: rewards become advantages within each group. The ranks exchange rewards, lengths and row counts, which
    "batch" scaling, the update's denominators and the metrics need of the whole step; returns every rank's."""
    args, G = run.args, run.args.num_generations
    if args.mask_truncated_completions:  # they still count as sequences and in their group's mean
        batch["mask"] = batch["mask"] & ~torch.tensor(batch["truncated"], device=run.device)[:, None]
    batch["trained"] = batch["mask"].sum(1).tolist()  # tokens of each completion in the loss; waits for the GPU
    prompt_lengths = [len(prompt["input_ids"]) for prompt in batch["prompts"]]
    batch["cuts"] = cut_rows(prompt_lengths, batch["trained"], args.max_tokens_per_forward)
    mine = {name: batch[name] for name in ("rewards", "scores", "lengths", "truncated", "trained")}
    mine |= {"prompts": prompt_lengths, "rows": len(batch["cuts"])}
    mine["patches"] = [0 if p["pixel_values"] is None else len(p["pixel_values"]) for p in batch["prompts"]]
    mine["decoding"] = batch["decoding"]
    mine["unparsed"] = [rewards.parse_box(text) is None for text in batch["texts"]]
    everyone = [None] * run.world
    dist.all_gather_object(everyone, mine)
    table = torch.tensor([rank["rewards"] for rank in everyone]).view(-1, G)  # (world * B, G)
    advantages = group_advantages(table, args.scale_rewards).view(run.world, -1)[run.rank]  # (N,)
    batch["advantages"] = advantages.to(run.device)
    return everyone


def build_rows(run, batch, count):
    """This rank's packed rows, `count` of them as on every rank: (row, batch index of each of its completions).

    Index N stands for the blank group, which is no completion of the step (see modeling.blank_group): it fills the
    rows that this rank lacks, and gives a picture to a row without one where other ranks' rows may hold some.
    """
    tokens, rows = batch["tokens"].cpu(), []
    for cut in batch["cuts"] + [[]] * (count - len(batch["cuts"])):
        groups = [(batch["prompts"][b], [tokens[i, : batch["trained"][i]] for i in part]) for b, part in cut]
        members = [i for _, part in cut for i in part]
        if not any(prompt["pixel_values"] is not None for prompt, _ in groups) and (run.world > 1 or not groups):
            groups.append(modeling.blank_group(run.engine.module.model))
            members.append(len(tokens))
        rows.append((modeling.build_row(groups, run.device), torch.tensor(members, device=run.device)))
    return rows


def update_phase(run, batch, everyone):
    """Phase 4: num_iterations optimizer steps on the batch. The gradient is that of the whole step's loss however the
    step is cut into rows and spread over ranks, because the denominators are the whole step's."""
    args, engine = run.args, run.engine
    num_tokens = sum(sum(rank["trained"]) for rank in everyone)
    names = "beta epsilon epsilon_high delta loss_type importance_sampling_level max_completion_length".split()
    options = {name: getattr(args, name) for name in names}
    options |= {"num_sequences": sum(len(rank["rewards"]) for rank in everyone), "num_tokens": num_tokens}
    rows = build_rows(run, batch, max(rank["rows"] for rank in everyone))
    of_one = [len(batch["prompts"][i // args.num_generations]["input_ids"]) + n for i, n in enumerate(batch["trained"])]
    sizes = max(len(row["input_ids"]) for row, _ in rows), max(of_one)
    pad = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, 1))  # line N, the blank group's: False and 0
    mask, sampled, advantages = pad(batch["mask"]), pad(batch["sampler_logps"]), pad(batch["advantages"][:, None])[:, 0]

    def without_gradient(policy):
        with torch.no_grad():
            return [policy(row)[0] for row, _ in rows]

    ref = without_gradient(run.reference) if args.beta > 0 else [None] * len(rows)
    old = without_gradient(engine) if args.num_iterations > 1 else [None] * len(rows)
    sums, skipped = 0, 0
    for iteration in range(args.num_iterations):
        schedule = run.step * args.num_iterations + iteration, run.total * args.num_iterations
        rate = learning_rate_at(*schedule, args.learning_rate, args.lr_scheduler_type, args.warmup_ratio)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        losses, norm = [], torch.ones(())
        for k, (row, members) in enumerate(rows):
            last, run.idle, run.forward = k == len(rows) - 1, 0, sizes
            engine.set_gradient_accumulation_boundary(last)
            logps, entropy = engine(row)  # (n, R) of this row
            live = mask[members, : logps.shape[1]]
            # on-policy the ratio is exactly 1 and only its gradient matters
            before = logps.detach() if old[k] is None else old[k]
            loss, metrics = grpo_loss(logps, before, advantages[members], live, ref_logps=ref[k], **options)
            losses.append(loss.detach())
            # DeepSpeed averages over ranks, and the denominators are global. 0 x NaN is NaN: a loss that is not finite
            # makes the gradient's norm so on every rank, and then DeepSpeed leaves the update out, on every rank.
            engine.backward(loss * (1 + 0 * losses[-1]) * run.world)
            if last:
                run.forward = 0, 0  # the optimizer's memory depends on no budget
            if last and engine.optimizer is engine.basic_optimizer:  # stage 0 in float32 does neither: do it here
                norm = torch.nn.utils.get_total_norm([p.grad for p in engine.parameters() if p.grad is not None])
            engine.step() if norm.isfinite() else engine.zero_grad()
            # sums over the row's tokens, so that the metrics are those of the whole step, not of its last row
            gap = (before - sampled[members, : logps.shape[1]]).abs()
            means = [value * live.sum() for value in metrics.values()]
            sums = sums + torch.stack([losses[-1], *means, (entropy * live).sum(), (gap * live).sum()])
        norm = float(norm if engine.optimizer is engine.basic_optimizer else engine.get_global_grad_norm())
        if math.isfinite(norm):
            run.bad.clear()
        else:
            skipped += 1
            note_bad_records(run, batch, rows, losses)
    dist.all_reduce(sums)
    loss, *sums = (sums / args.num_iterations).tolist()  # waits for the GPU: the update is over
    names = [*metrics, "entropy", "sampler_gap"]
    learned = {name: value / max(num_tokens, 1) for name, value in zip(names, sums, strict=True)}
    return learned | {"loss": loss, "grad_norm": norm, "learning_rate": rate, "skipped_steps": skipped}


def note_bad_records(run, batch, rows, losses):
    """An update was left out: say which records were in it, if a loss was not finite in its row, and end the run after
    five in a row."""
    mine, everyone = [], [None] * run.world
    for (_, members), loss in zip(rows, losses, strict=True):
        prompts = {i // run.args.num_generations for i in members.tolist() if i < len(batch["tokens"])}
        mine += [(batch["prompts"][b].get("record"), bool(loss.isfinite())) for b in prompts]
    dist.all_gather_object(everyone, mine)
    seen = sum(everyone, [])
    run.bad.append({record for record, finite in seen if not finite} or {record for record, _ in seen})
    what = "loss or gradient norm is not finite"
    tell(f"warning: step {run.step + 1}: {what}, its update is left out; records {sorted(run.bad[-1])}")
    if len(run.bad) == 5:
        raise FloatingPointError(
            f"5 updates in a row: {what}; look at records {sorted(set().union(*run.bad))}, "
            "or at the weights given and --learning_rate if these are all there are"
        )


def step_metrics(run, everyone, learned, times):
    """One line of metrics.jsonl, over all ranks' completions, under TRL's names where TRL has the metric."""
    flat = lambda name: [value for rank in everyone for value in rank[name]]  # noqa: E731
    totals = torch.tensor(flat("rewards")).view(-1, run.args.num_generations)  # (world * B, G)
    groups = [group[~group.isnan()] for group in totals]  # NaN: no function had an opinion
    spread = torch.tensor([group.std().item() if len(group) > 1 else 0.0 for group in groups])
    reward = None if totals.isnan().all() else totals.nanmean().item()
    metrics = {"step": run.step, "reward": reward, "reward_std": spread.mean().item()}
    metrics["frac_reward_zero_std"] = (spread < 1e-6).float().mean().item()
    for name in everyone[0]["scores"]:
        given = [value for rank in everyone for value in rank["scores"][name] if value is not None]
        metrics[f"rewards/{name}/mean"] = float(np.mean(given)) if given else None
        metrics[f"rewards/{name}/std"] = float(np.std(given, ddof=1)) if len(given) > 1 else None
    lengths, cut = np.array(flat("lengths")), np.array(flat("truncated"))
    for label, values in (("", lengths), ("terminated_", lengths[~cut])):
        for kind, of in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            metrics[f"completions/{kind}_{label}length"] = float(of(values)) if len(values) else None
    metrics |= {"completions/clipped_ratio": float(cut.mean()), "parse_failure_rate": float(np.mean(flat("unparsed")))}
    metrics |= learned | {"num_tokens": run.num_tokens, "step_time": sum(times.values())}
    metrics |= {f"time/{name}": seconds for name, seconds in times.items()}
    trained, prompts, mu = sum(flat("trained")), sum(flat("prompts")), run.args.num_iterations
    metrics["tokens_per_second/generated"] = int(lengths.sum()) / times["rollout"]
    metrics["tokens_per_second/trained"] = mu * (trained + prompts) / times["update"]
    if run.device.type == "cuda":
        read = sum(rank["decoding"]["bytes"] / rank["decoding"]["seconds"] for rank in everyone) / run.world
        metrics["decode/bandwidth_share"] = read / run.ceilings["bytes_per_s"]
        forward = modeling.forward_operations(run.sizes, trained + prompts, trained, sum(flat("patches")))
        operations = mu * 3 * forward / run.world  # recomputing activations is no progress: not counted
        metrics["update/matrix_share"] = operations / times["update"] / run.ceilings["flops"]
        metrics["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return metrics


def measure_ceilings(device, side=8192, dtype=torch.bfloat16):
    """Bytes a second of a copy (read and written) and operations a second of a matrix product of `side`, best of 5:
    what the shares in the metrics are of. On a GPU 0.1 s and 1.2 GB, given back."""
    a, b = torch.empty(2, side * side * 4, device=device, dtype=dtype)
    square = a[: side * side].view(side, side).normal_()

    best = lambda f: min(Timer("f()", globals={"f": f}).timeit(1).mean for _ in range(6))  # noqa: E731  waits for the GPU
    copied, product = best(functools.partial(b.copy_, a)), best(functools.partial(torch.mm, square, square))
    found = {"bytes_per_s": 2 * a.nbytes / copied, "flops": 2 * side**3 / product}
    del a, b, square
    torch.cuda.empty_cache()
    return found


def evaluate(run, model, records):
    """Greedy answers to held-out records, with training's prompt, parser and reward functions. Returns (metrics, lines
    of completions.jsonl). eval/iou is the mean IoU, eval/accuracy the share at 0.5 and above."""
    size, mine = prompts_per_rank(run.args) * run.args.num_generations, records[run.rank :: run.world].tolist()
    scores, lines = {name: [] for name, _ in run.reward_funcs}, []
    for start in range(0, len(mine), size):
        enter(run, "evaluation")
        encoded = []
        for i in mine[start : start + size]:
            try:
                encoded.append(run.encode(run.dataset[i]) | {"record": i})
            except data.DataError as error:
                tqdm.write(f"held-out record {i} is left out: {error}", file=sys.stderr)
        if not encoded:
            continue
        prompts = with_positions(model, encoded)
        tokens, _, _ = sample(run, model, prompts, 1, run.args.max_completion_length, 0.0)
        texts = decode_texts(run, tokens, completion_mask(tokens, run.eos).sum(1).tolist())
        part = score(run, prompts, texts)
        for name, values in part.items():
            scores[name] += values
        for i, prompt in enumerate(prompts):
            given = {name: values[i] for name, values in part.items()}
            lines.append(completion_line(run.step, "eval", prompt, texts[i], given))
    everyone = [None] * run.world
    dist.all_gather_object(everyone, scores)
    metrics = {"step": run.step, "eval/count": len(records)}
    for name in scores:
        values = np.array([value for rank in everyone for value in rank[name] if value is not None])
        metrics["eval/iou" if name == "accuracy" else f"eval/{name}"] = float(values.mean()) if len(values) else None
        if name == "accuracy":
            metrics["eval/accuracy"] = float((values >= 0.5).mean()) if len(values) else None
    return metrics, lines


# --- The maths: no input or output, imported by the tests ----------------------------------------------------------


def group_advantages(rewards, scale="group", eps=1e-4):
    """A = (r - mean of its group) / (std of its group + eps): rewards (B, G) -> (B, G). DeepSeekMath 4.1.2.

    `scale` "batch" divides by the std over all rewards given (pass the whole step's), "none" does not divide (Dr.
    GRPO, arXiv 2503.20783). std has ddof 1. NaN marks a completion on which no reward function had an opinion: it is
    left out of mean and std and gets A = 0. Raises ValueError for G = 1 or an unknown scale.
    """
    if rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 completions, the rewards are of shape {tuple(rewards.shape)}")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale!r}: use group, batch or none")
    valid, r = ~rewards.isnan(), rewards.double()  # float64: the mean of equal float32 numbers is that number
    A = r - r.nanmean(1, keepdim=True)  # (B, G)
    if scale != "none":
        spread, over = (A, 1) if scale == "group" else (r - r.nanmean(), (0, 1))
        variance = spread.square().nansum(over, keepdim=True) / (valid.sum(over, keepdim=True) - 1).clamp(min=1)
        A = A / (variance.sqrt() + eps)
    return A.where(valid, 0.0).to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def completion_mask(tokens, eos_ids):
    """Which tokens (N, R) belong to the completion: all up to and including the first of any eos id -> bool (N, R).

    The end itself is trained, or the policy never learns to stop; it is found by position, so it counts also where
    the pad id is the same.
    """
    eos = torch.as_tensor(eos_ids, device=tokens.device).reshape(-1)
    is_eos = torch.isin(tokens, eos).int()
    return (is_eos.cumsum(1) - is_eos) == 0  # no end before this token


def grpo_loss(
    logps, old_logps, advantages, mask, *, ref_logps=None, beta=0.0, epsilon=0.2, epsilon_high=None, delta=None,
    loss_type="grpo", importance_sampling_level="token",
    max_completion_length=None, num_sequences=None, num_tokens=None,
):  # fmt: skip
    """The loss of a batch of completions and its metrics: logps, old_logps, ref_logps, mask (N, R), advantages (N,).

    With rho = exp(logp - old) and d = ref - logp, k = e^d - d - 1 (the k3 estimator of KL, non-negative):
      grpo, dr_grpo, dapo   -min(min(rho, delta) A, clip(rho, 1 - eps, 1 + eps_high) A) + beta k
                            (DeepSeekMath eq. 3; eps_high: DAPO, arXiv 2503.14476; delta: INTELLECT-2, 2505.07291)
      cispo                 -sg[min(rho, eps_high)] A logp + beta k                  (MiniMax-M1, arXiv 2506.13585)
    "sequence": one rho a completion, exp of its mean log-difference (GSPO, arXiv 2507.18071).
    Reduction: grpo, mean over each completion's tokens, then over sequences; dapo, cispo, over all tokens; dr_grpo,
    sum / (sequences x max_completion_length). `num_sequences` and `num_tokens` are the whole optimizer step's, so
    that parts of a step add up to it. What the mask leaves out may be -inf or NaN; its gradient is exactly 0.
    Returns (loss, metrics); the metrics are means over this call's tokens.
    """
    # Padding goes before any arithmetic: inf - inf is NaN, and NaN x 0 is NaN, in the gradient too.
    mask = mask.bool()
    zero = torch.zeros((), dtype=logps.dtype, device=logps.device)
    logp, old = torch.where(mask, logps, zero), torch.where(mask, old_logps, zero)
    A = advantages[:, None]  # (N, 1)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1)
    log_ratio = logp - old  # (N, R)
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / lengths  # (N, 1), broadcast over the tokens below
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r}: use token or sequence")
    ratio = log_ratio.clamp(-20, 20).exp()  # e^20 is finite in float32 with room to multiply
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        if epsilon_high is None:
            raise ValueError("cispo needs epsilon_high: it is the bound on the ratio, not a distance from 1")
        low_clipped, high_clipped = torch.zeros_like(ratio, dtype=torch.bool), (ratio > high) & (A > 0)
        loss = -ratio.clamp(max=high).detach() * A * logp
    elif loss_type in ("grpo", "dr_grpo", "dapo"):
        low_clipped, high_clipped = (ratio < 1 - epsilon) & (A < 0), (ratio > 1 + high) & (A > 0)
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.min(bounded * A, ratio.clamp(1 - epsilon, 1 + high) * A)
    else:
        raise ValueError(f"loss_type {loss_type!r}: use grpo, dr_grpo, dapo or cispo")
    loss = loss.expand_as(logp)
    metrics = {}
    count = mask.sum().clamp(min=1)
    mean = lambda x: (x.detach().expand_as(mask) * mask).sum() / count  # noqa: E731
    if beta > 0:
        d = (torch.where(mask, ref_logps, zero) - logp).clamp(-20, 20)
        kl = d.exp() - d - 1
        loss = loss + beta * kl
        metrics["kl"] = mean(kl)
    loss = torch.where(mask, loss, zero)
    metrics["clip_ratio/low_mean"] = mean(low_clipped.float())
    metrics["clip_ratio/high_mean"] = mean(high_clipped.float())
    metrics["clip_ratio/region_mean"] = mean((low_clipped | high_clipped).float())
    num_sequences = len(logps) if num_sequences is None else num_sequences
    num_tokens = count if num_tokens is None else max(num_tokens, 1)
    if loss_type == "grpo":
        return (loss / lengths).sum() / num_sequences, metrics
    if loss_type == "dr_grpo":
        width = logps.shape[1] if max_completion_length is None else max_completion_length
        return loss.sum() / (num_sequences * width), metrics
    return loss.sum() / num_tokens, metrics


def learning_rate_at(step, total, peak, kind, warmup_ratio):
    """Learning rate of 0-based optimizer step `step` of `total`: linear warm-up from 0, then decay to 0, as in
    transformers.get_scheduler."""
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * step / warmup
    share = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return peak * (1 - share)
    if kind == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * share))
    return peak


def cut_rows(prompt_lengths, completion_lengths, budget):
    """Cut a rank's groups into the fewest packed rows of at most `budget` tokens, as equal as that allows: a small row
    leaves the GPU waiting for Python. Returns a list of rows, a row being a list of (prompt index, [completion
    indices]); completions of prompt b are b*G ... b*G+G-1. A group that does not fit into a row is split over several,
    each with the prompt; a single completion over the budget gets a row of its own."""
    G = len(completion_lengths) // len(prompt_lengths)
    groups = [P + sum(completion_lengths[b * G : b * G + G]) for b, P in enumerate(prompt_lengths)]
    fewest = len(fill_rows(prompt_lengths, completion_lengths, budget))
    low = max((size for size in groups if size <= budget), default=1)  # below it a group that fits would be split
    while low < budget:  # the smallest budget that still does with as few rows
        middle = (low + budget) // 2
        if len(fill_rows(prompt_lengths, completion_lengths, middle)) > fewest:
            low = middle + 1
        else:
            budget = middle
    return fill_rows(prompt_lengths, completion_lengths, budget)


def fill_rows(prompt_lengths, completion_lengths, budget):
    """Rows filled one after the other, each up to the budget."""
    G = len(completion_lengths) // len(prompt_lengths)
    rows, row, used = [], [], 0
    for b, P in enumerate(prompt_lengths):
        members = list(range(b * G, b * G + G))
        if used + P + sum(completion_lengths[i] for i in members) > budget and row:
            rows.append(row)
            row, used = [], 0
        part, size = [], P
        for i in members:
            if part and used + size + completion_lengths[i] > budget:
                rows.append(row + [(b, part)])
                row, used, part, size = [], 0, [], P
            part.append(i)
            size += completion_lengths[i]
        row.append((b, part))
        used += size
    return rows + [row]


# --- Files of a run ------------------------------------------------------------------------------------------------


def completion_line(step, split, prompt, text, scores, advantage=None, truncated=None):
    columns = prompt["columns"]
    line = {"step": step, "split": split, "record": prompt["record"], "prompt": columns["problem"], "completion": text}
    line |= {"rewards": scores, "advantage": advantage, "truncated": truncated}
    return line | {name: columns.get(name) for name in ("solution", "image_size", "model_size")}


def batch_lines(run, batch):
    for i, text in enumerate(batch["texts"]):
        scores, prompt = {name: values[i] for name, values in batch["scores"].items()}, i // run.args.num_generations
        numbers = batch["advantages"][i].item(), batch["truncated"][i]
        yield completion_line(run.step, "train", batch["prompts"][prompt], text, scores, *numbers)


class Log:
    """run.json, metrics.jsonl (of all ranks) and completions.jsonl (rank 0's), and wandb if asked for."""

    def __init__(self, run):
        self.writes, self.wandb = run.rank == 0, None
        self.paths = [os.path.join(run.args.output_dir, name) for name in ("metrics.jsonl", "completions.jsonl")]
        try:
            self.begin(run)
        except (OSError, ValueError) as error:  # ValueError: a line that is not ours
            raise ValueError(f"--output_dir {run.args.output_dir}: its logs cannot be written on ({error})") from error
        if self.writes and run.args.report_to == "wandb":
            import wandb

            self.wandb = wandb
            wandb.init(project="grpo", name=run.args.run_name, dir=run.args.output_dir, config=asdict(run.args))

    def begin(self, run):
        for path in self.paths if self.writes else ():
            kept = []
            if run.resumed and os.path.exists(path):  # drop what a run that died wrote after its last checkpoint
                with open(path, encoding="utf-8") as file:
                    kept = [line for line in file if line.endswith("\n") and logged_until(run.step, line, path)]
            with open(path + ".tmp", "w", encoding="utf-8") as file:
                file.writelines(kept)
            os.replace(path + ".tmp", path)
        if self.writes:
            with open(os.path.join(run.args.output_dir, "run.json"), "w") as file:
                json.dump({"args": asdict(run.args), "packed": run.packed, "world": run.world}, file, indent=2)

    def __call__(self, metrics, lines=()):
        if not self.writes:
            return
        for path, entries in zip(self.paths, ([metrics], lines), strict=True):
            text = "".join(json.dumps(entry, ensure_ascii=False, default=str) + "\n" for entry in entries)
            text = text.encode("utf-8", "replace")
            try:
                with open(path, "ab", buffering=0) as file:
                    whole = file.tell()
                    if file.write(text) < len(text):  # the disk became full on the way
                        file.truncate(whole)
                        raise OSError("no space left")
            except OSError as error:
                tell(f"warning: step {metrics['step']} is missing in {path} ({error}); training goes on")
        if self.wandb:
            self.wandb.log(metrics | gpu_samples(os.path.dirname(self.paths[0])), step=metrics["step"])


def logged_until(step, line, path):
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, LookupError, TypeError) as error:  # no JSON, or JSON of something else
        raise ValueError(f"{path}: {line[:80]!r} is no line of a run; take it out, or the file away") from error


def gpu_samples(folder):
    """The last minute's newest sample of each GPU, {"gpu/0/utilisation": 97, ...}, where tools/monitor.py samples."""
    path, rows = os.path.join(folder, "gpus.jsonl"), []
    if os.path.exists(path):
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 16384))
            rows = [json.loads(line) for line in file.read().split(b"\n")[1:-1]]  # the first may lack its beginning
    rows = [row for row in rows if time.time() - row["time"] < 60]
    names = "utilisation", "memory_gb", "temperature", "power_w"
    return {f"gpu/{row['gpu']}/{name}": row[name] for row in rows for name in names}


def claim_folder(folder):
    """Make the run's folder and lock it against a second run; clear what a killed save left. The lock ends with the
    process, however that ends."""
    if folder != folder.encode("utf-8", "replace").decode():  # safetensors wants UTF-8, and would say so at the save
        raise ValueError(
            f"--output_dir {folder!r} is no text in this locale: set LC_ALL=C.UTF-8, or give plain letters"
        )
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(os.path.join(folder, ".lock"), os.O_CREAT | os.O_WRONLY)  # left open for the life of the process
        until = time.monotonic() + 5  # a run that was just killed lets go of it a moment later
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process's alone: not inherited by data workers
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        for name in os.listdir(folder):
            if re.fullmatch("checkpoint-[0-9]+[.]tmp", name):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
            elif name in ("exit_status", "exit_message"):
                os.remove(os.path.join(folder, name))
        ranks = os.path.join(folder, "ranks")  # for what each rank has to say when it hangs, and NCCL's output
        os.makedirs(ranks, exist_ok=True)
        for name in os.listdir(ranks):
            if re.fullmatch("(stacks|nccl)_[0-9]+[.]txt|stalled", name):  # the rest is not ours
                os.remove(os.path.join(ranks, name))
    except BlockingIOError as error:
        raise ValueError(
            f"--output_dir {folder}: another run is writing there; wait for it, or give another"
        ) from error
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written ({error}); give another") from error


def whole_weights(engine):
    """Every rank must call it; rank 0 gets all weights under transformers' names."""
    if engine.zero_optimization_stage() == 3:
        state = engine._zero3_consolidated_16bit_state_dict()  # gathers on all ranks, returns on rank 0
    else:
        state = engine.module.state_dict()
    state = {name.removeprefix("model."): t for name, t in (state or {}).items() if not name.startswith("head.")}
    state = modeling.unpadded(engine.module.model, state)
    empty = [name for name, tensor in state.items() if tensor.numel() == 0]
    if empty:
        raise RuntimeError(f"{len(empty)} weights are empty, {empty[0]} for one: they were not gathered")
    return state


def save_checkpoint(run):
    """Write checkpoint-<step> whole or not at all, under a temporary name until it is on the disk -> what failed.

    A rank that cannot write goes on with the others and tells them, or they would wait for it. What was saved before
    is not touched until the new checkpoint is whole.
    """
    engine, failed, began = run.engine, [], time.monotonic()
    folder = os.path.join(run.args.output_dir, f"checkpoint-{run.step}.tmp")

    def attempt(function, *arguments, **named):
        try:
            function(*arguments, **named)
        # RuntimeError: torch.save's, of a full disk too; ValueError: a path that the locale cannot encode
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            failed.append(f"rank {run.rank}: {error}")

    def agreed():
        everyone = [None] * run.world
        dist.all_gather_object(everyone, failed, group=run.patient)  # checksums and fsync of a large model take minutes
        failed[:] = sorted(set(sum(everyone, [])))
        return not failed

    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        attempt(os.makedirs, os.path.join(folder, "zero", "state"))
    if agreed():
        weights = whole_weights(engine)
        if run.rank == 0:
            attempt(engine.module.model.save_pretrained, folder, state_dict=weights)
            attempt(run.processor.save_pretrained, folder)
        if not run.args.save_only_model:
            write = engine.checkpoint_engine.save
            engine.checkpoint_engine.save = lambda state_dict, path: attempt(write, state_dict, path)
            engine._copy_recovery_script = lambda folder: None  # it joins ZeRO's parts, and the weights are whole here
            engine.save_checkpoint(os.path.join(folder, "zero"), tag="state", save_latest=False)
            engine.checkpoint_engine.save = write
    if agreed() and run.rank == 0:
        attempt(finish_checkpoint, run, folder)
    if not agreed() and run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # gives a full disk its room back
        tell(f"warning: checkpoint-{run.step} could not be written ({failed[0]}); {what_counts(run.args)}")
    run.stop.save_seconds = time.monotonic() - began
    return failed


def finish_checkpoint(run, folder):
    """state.json with every file's checksum, all of it to the disk, the final name; only then old ones are deleted."""
    state = {"step": run.step, "num_tokens": run.num_tokens, "identity": run.identity, "args": asdict(run.args)}
    state["files"] = checksums(folder)
    with open(os.path.join(folder, "state.json"), "w") as file:
        json.dump(state | {"crc": zlib.crc32(json.dumps(state).encode())}, file)
    for path in [*pathlib.Path(folder).rglob("*"), folder]:
        to_disk(path)
    final, limit = folder.removesuffix(".tmp"), run.args.save_total_limit
    shutil.rmtree(final, ignore_errors=True)
    os.replace(folder, final)
    to_disk(run.args.output_dir)
    for old in checkpoints(run.args.output_dir)[:-limit] if limit else ():
        os.replace(old, old + ".tmp")  # half deleted it would be no checkpoint
        shutil.rmtree(old + ".tmp", ignore_errors=True)


def to_disk(path):
    """fsync a file, or a folder's list of names where its file system can: it survives a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError) if os.path.isdir(path) else contextlib.nullcontext():
        os.fsync(handle)
    os.close(handle)


def checksums(folder):
    """{path in the folder: CRC-32} of its files but state.json. zlib lets go of the GIL, so threads share the work."""

    def crc(path):
        with open(path, "rb") as file:
            return functools.reduce(lambda crc, block: zlib.crc32(block, crc), iter(lambda: file.read(1 << 24), b""), 0)

    paths = sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file() and path.name != "state.json")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return {str(path.relative_to(folder)): crc for path, crc in zip(paths, pool.map(crc, paths), strict=True)}


def damage(folder):
    """What is not as it was saved in a checkpoint, or None."""
    try:
        with open(os.path.join(folder, "state.json")) as file:
            state = json.load(file)
        wrong = [] if state.pop("crc") == zlib.crc32(json.dumps(state).encode()) else ["state.json"]
        now = checksums(folder)
        wrong += [name for name, crc in state["files"].items() if now.get(name) != crc]
        return f"{wrong[0]} is missing or not as it was saved" if wrong else None
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:  # JSON, but of something else
        return f"state.json cannot be read: {error!r}"


def checkpoints(folder):
    """Whole checkpoints in a run's folder, oldest first."""
    names = [name for name in os.listdir(folder) if re.fullmatch("checkpoint-[0-9]+", name)]
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name[11:]))]


def what_counts(args):
    """For messages: what a later run goes on from."""
    try:
        found = checkpoints(args.output_dir)
    except OSError as error:
        return f"{args.output_dir} cannot be read ({error})"
    if not found:
        return f"nothing is saved in {args.output_dir} yet"
    return f"{found[-1]} counts, the same command with --resume_from_checkpoint true goes on from it"


def checkpoint_to_resume(args):
    """The folder to go on from, or None. Refuses to mix one run's checkpoints with another's; of the run's own, takes
    the newest that is as it was saved and sets damaged ones aside."""
    found, asked = checkpoints(args.output_dir), (args.resume_from_checkpoint or "false")
    newest, other = os.path.basename(found[-1]) if found else None, "or give another --run_name"
    if asked.lower() == "false":
        if found:
            raise ValueError(f"{args.output_dir} holds {newest}: go on with --resume_from_checkpoint true, {other}")
        return None
    if asked.lower() == "true":
        for i, folder in reversed(list(enumerate(found))):
            if wrong := damage(folder):
                tell(f"warning: {folder} is damaged: {wrong}")
                continue
            for later in found[i + 1 :]:  # set aside, or --save_total_limit would keep it for the newest
                shutil.rmtree(later + ".damaged", ignore_errors=True)
                os.replace(later, later + ".damaged")
            return folder
        if found:
            raise ValueError(f"{args.output_dir}: every checkpoint is damaged, see above; give another --run_name")
        tell(f"no checkpoint in {args.output_dir} yet: starting at step 0")
        return None
    if not os.path.isfile(os.path.join(asked, "state.json")):
        raise ValueError(f"--resume_from_checkpoint {asked}: no state.json there; give a checkpoint's folder, or true")
    if found and not os.path.samefile(asked, found[-1]):
        raise ValueError(f"--resume_from_checkpoint {asked}: {args.output_dir} holds {newest}; move it away, {other}")
    if wrong := damage(asked):
        raise ValueError(f"--resume_from_checkpoint {asked} is damaged: {wrong}; give the one before it")
    return asked


def identity(run):
    """What must be the same when a run goes on: that on which the optimizer's states and the records' order depend.
    The records are compared by content, which may have moved."""
    same = {"number of ranks": run.world, "--zero_stage": run.engine.zero_optimization_stage()}
    same |= {"prompts a rank": prompts_per_rank(run.args)}
    same["records"] = f"{len(run.dataset)} (checksum {run.dataset.checksum()})"
    names = ("torch_dtype", "freeze_vision_modules", "val_split_ratio", "data_seed")
    return same | {f"--{name}": getattr(run.args, name) for name in names}


def compare_template(args):
    """Of a checkpoint of ours that is evaluated: with another prompt than in training the numbers mean little."""
    path = os.path.join(args.model_name_or_path, "state.json")
    if os.path.isfile(path):
        try:
            with open(path) as file:
                trained = json.load(file)["args"]["question_template"]
        except (OSError, ValueError, LookupError, TypeError) as error:  # another program's, or damaged
            tell(f"warning: {path} does not say which --question_template was trained with ({error!r})")
            return
        if trained != args.question_template:
            tell(f"warning: this checkpoint was trained with --question_template {trained!r}, not what is given now")


def load_checkpoint(run, folder):
    """Restore weights, optimizer and counters: with `seed_everything` and the records' order, all that a run is."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with open(os.path.join(folder, "state.json")) as file:
        state = json.load(file)
    out, was, now = run.args.output_dir, state["args"], json.loads(json.dumps(asdict(run.args)))
    alone = f"go on from its weights alone: bash launch.sh --model_name_or_path {folder} --output_dir {out}_2 …"
    for name, value in run.identity.items():
        old = state["identity"][name]
        if old != value:
            raise ValueError(f"{folder} was saved with {name} {old}, now it is {value}: use {old} again, or {alone}")
    if was["save_only_model"]:
        raise ValueError(f"{folder} was saved with --save_only_model: {alone}")
    for name in now:
        if now[name] != was.get(name) and name != "resume_from_checkpoint":
            tell(f"--{name} was {was.get(name)}, from here on it is {now[name]}")
    groups = run.engine.optimizer.param_groups
    flags = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    # DeepSpeed 0.19.8 reads its files with weights_only=False, which would run code that somebody put there. These
    # three classes are all that they hold beside tensors and plain values.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        path, _ = run.engine.load_checkpoint(os.path.join(folder, "zero"), tag="state")
    del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]  # a reward function may read what it trusts
    if path is None:
        raise ValueError(f"{folder}/zero could not be read: {alone}")
    for group, values in zip(run.engine.optimizer.param_groups, flags, strict=True):
        group.update(values)  # weight decay and betas are this run's
    run.step, run.num_tokens = state["step"], state["num_tokens"]
    tell(f"resumed from {folder}")


# --- Signals, lost ranks, hangs, memory ----------------------------------------------------------------------------

NEIGHBOURS = {}  # process id -> rank, of the other ranks on this node


class Stopped(Exception):
    """Ends `train` after a signal: (exit status, message)."""


class Stop:
    """SIGTERM (pre-emption) and SIGINT: training ends between two steps, after a save if torchrun leaves time for it.

    A thread hears the signals (signal.set_wakeup_fd), because the main one may be waiting in NCCL for a rank that is
    gone: torchrun ends what is left of a failed job with the same SIGTERM.
    """

    number, deadline, save_seconds = 0, math.inf, 0.0  # the signal; when torchrun kills; what the last save took
    leaving = False  # all ranks have agreed to end: one that is gone has done its part

    def listen(self, run):
        pipe, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # only a signal with a handler is written to `end`
        threading.Thread(target=self.hear, args=(pipe, run), daemon=True).start()

    def hear(self, pipe, run):
        number = 0
        while number not in (signal.SIGTERM, signal.SIGINT):  # SIGCHLD comes by as well
            number = os.read(pipe, 1)[0]
        patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) - 3  # torchrun's, less a way out
        self.number, self.deadline = number, time.monotonic() + patience
        while (
            not (lost := not self.leaving and lost_rank())
            and self.save_seconds < patience
            and time.monotonic() < self.deadline
        ):
            time.sleep(0.1)
        why = lost or f"{signal.Signals(number).name}, no time to save"
        leave_status(run.args.output_dir, 1 if lost else 128 + number, run.rank, f"{why}; {what_counts(run.args)}")
        os._exit(1 if lost else 128 + number)

    def agreed(self, device):
        """(the number of a signal that some rank was sent, or 0; is there time for a save), the same on all ranks."""
        table = torch.tensor([self.deadline - time.monotonic() - self.save_seconds, -self.number], device=device)
        dist.all_reduce(table, dist.ReduceOp.MIN)
        self.leaving = bool(table[1] < 0)
        return -int(table[1]), bool(table[0] > 0)


def lost_rank(patience=0.0):
    """A message about a rank of this node that has ended before this one, or None after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        for process, rank in NEIGHBOURS.items():
            try:
                os.kill(process, 0)  # sends nothing; fails once torchrun has collected a process that ended
            except ProcessLookupError:
                return f"rank {rank} ended first, by its own message above or killed (the kernel, for memory: dmesg)"
        if time.monotonic() >= until:
            return None
        time.sleep(0.05)


def enter(run, phase):
    """A phase begins, which is progress (see `watch`), and what a message names when memory runs out in it."""
    run.phase, run.idle, run.forward = phase, 0, (0, 0)


def watch(run):
    """A thread of every rank: where no phase, row or wave has begun for --stall_timeout seconds, here or on another
    rank, it leaves this rank's stacks in <output_dir>/ranks, of which tools/monitor.py tells who is missing, and ends
    it with status 4.

    Seconds count while the process runs, but not in the start, where models are read, nor in a save, where one rank
    writes while the others wait."""
    alarm = os.path.join(os.path.dirname(run.stacks.name), "stalled")
    while run.idle < run.args.stall_timeout and not os.path.exists(alarm):
        time.sleep(1)
        run.idle += run.phase not in ("start", "save")
    message = ""
    with contextlib.suppress(OSError):  # of the alarm, where another rank was first; of a full disk
        print(json.dumps({"step": run.step, "phase": run.phase}), file=run.stacks, flush=True)
        faulthandler.dump_traceback(run.stacks)
        open(alarm, "x").close()
        message = f"no progress for {run.args.stall_timeout} s (--stall_timeout); see tools/monitor.py --hang"
    time.sleep(5)  # the other ranks see the alarm and write theirs
    leave_status(run.args.output_dir, 4, run.rank, message and f"{message}; {what_counts(run.args)}")
    time.sleep(0 if message else 10)  # torchrun ends the others as soon as the first has left
    os._exit(4)


def out_of_memory(error):
    """The allocator's own error behind an exception (a CUDA graph whose capture fails hides it), or None."""
    while error and not re.search("out of memory|can't allocate memory|ALLOC_FAILED|MemoryError", repr(error)):
        error = error.__context__
    return error


def memory_message(run, error):
    """What ran out where, and the cure. Where a smaller budget is one, launch.sh finds the flags to go on with in the
    file `retry`: the gradient is the same under any. `run` is None while it is being started."""
    phase, step, size, least = (run.phase, run.step, *run.forward) if run else ("start", 0, 0, 0)
    said = f"out of memory in {phase} after step {step}: {(str(error) or 'MemoryError').splitlines()[0]}"
    if torch.cuda.is_available():
        numbers = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
        said += "; {:.1f} GB allocated, {:.1f} reserved, of {:.1f}".format(*(number / 1e9 for number in numbers))
    if least == size:
        return f"{said}; no --max_tokens_per_forward helps here, --plan with the same flags says what does"
    args, flags = run.args, ["--max_tokens_per_forward", str(max(least, size // 2))]
    saved = [] if args.eval_only else checkpoints(args.output_dir)
    if saved or not args.eval_only and args.resume_from_checkpoint in (None, "true", "false"):  # else of that folder
        flags += ["--resume_from_checkpoint", "true"]
    if "GRPO_STATUS" in os.environ and not (saved and args.save_only_model):
        replace_file(os.path.join(os.environ["GRPO_STATUS"], "retry"), "\n".join(flags) + "\n")
    budget = f"--max_tokens_per_forward {args.max_tokens_per_forward}, and {size} tokens in its largest forward"
    return f"{said}; {budget}. The gradient is the same with `{' '.join(flags)}`"


def replace_file(path, text):
    """Whole or not at all, also where several ranks write the same file."""
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    os.replace(file.name, path)


def follow_the_rank(_):
    """A data worker begins: it ends with its rank, whose business signals are (torchrun sends them to both)."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# --- DeepSpeed ---------------------------------------------------------------------------------------------------


def read_deepspeed(args):
    """--deepspeed's JSON with --zero_stage applied."""
    try:
        with open(args.deepspeed) as file:
            config = json.load(file)
        zero, optimizer = (config.setdefault(name, {}) for name in ("zero_optimization", "optimizer"))
        zero["stage"] = zero.get("stage", 0) if args.zero_stage is None else args.zero_stage
        parts = [optimizer, optimizer.get("params", {}), zero.get("offload_optimizer", {})]
        if not all(isinstance(part, dict) for part in parts + [config.get(name, {}) for name in ("bf16", "fp16")]):
            raise ValueError("optimizer, its params, offload_optimizer, bf16 and fp16 must be objects, {...}")
        if zero["stage"] not in (0, 1, 2, 3):
            raise ValueError(f"stage {zero['stage']!r}, must be 0, 1, 2 or 3")
    except (ValueError, TypeError, AttributeError) as error:  # no JSON, or JSON of something else
        raise ValueError(f"--deepspeed {args.deepspeed} is no DeepSpeed configuration: {error}") from error
    return config


def deepspeed_config(args, world, hidden_size, device_type):
    """DeepSpeed's configuration: --deepspeed's JSON with every "auto" filled in and --zero_stage applied.

    The flags decide; a number in the file that contradicts them is an error. `update_phase` marks the accumulation
    boundary itself, however many rows a step has, so DeepSpeed is told of one micro-batch a step.
    """
    config = read_deepspeed(args)
    completions = prompts_per_rank(args) * args.num_generations
    batch, accumulation = args.per_device_train_batch_size, completions // args.per_device_train_batch_size
    # (name in the file, what the flags say it is, what DeepSpeed is told)
    for name, flags, told in (
        ("train_micro_batch_size_per_gpu", batch, completions),
        ("gradient_accumulation_steps", accumulation, 1),
        ("train_batch_size", completions * world, completions * world),
        ("gradient_clipping", args.max_grad_norm, args.max_grad_norm),
    ):
        if config.get(name, "auto") not in ("auto", flags):
            raise ValueError(f'{args.deepspeed}: {name} is {config[name]}, the flags say {flags}; write "auto" there')
        config[name] = told
    if config.pop("fp16", {}).get("enabled") is True:
        raise ValueError(f"{args.deepspeed}: fp16 is enabled, this code trains in bf16 or float32; set it to false")
    if config.pop("scheduler", None):
        tell(f"{args.deepspeed}: its scheduler is left out, --lr_scheduler_type {args.lr_scheduler_type} holds")
    own = {"enabled": args.torch_dtype == "bfloat16", "check_grad_overflow": True}
    config["bf16"] = config.get("bf16", {}) | own
    zero = config["zero_optimization"]
    sizes = {
        "reduce_bucket_size": int(1e8),
        # a decoder layer (13 to 19 H^2 numbers in Qwen's): the next one's weights come while one computes
        "stage3_prefetch_bucket_size": 20 * hidden_size**2,
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero.update({name: value for name, value in sizes.items() if zero.get(name) == "auto"})
    # room for two layers, or nothing is gathered ahead (72B); plain linear layers, because checkpointing lets go of the
    # weights that autograd holds, and DeepSpeed's form of them costs the processor 50 us each
    zero.setdefault("stage3_max_live_parameters", max(10**9, 40 * hidden_size**2))
    zero.setdefault("memory_efficient_linear", not args.gradient_checkpointing)
    config["optimizer"] = optimizer = {"type": "AdamW"} | config["optimizer"]
    given = {name: value for name, value in optimizer.get("params", {}).items() if value != "auto"}
    flags = {"lr": args.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": args.weight_decay}
    for name in ("lr", "weight_decay"):
        if given.get(name, flags[name]) != flags[name]:
            raise ValueError(f'{args.deepspeed}: {name} is {given[name]}, not the flag\'s {flags[name]}; write "auto"')
    optimizer["params"] = flags | given
    on_cpu = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if optimizer["type"] in ("Adam", "AdamW") and not (on_cpu and device_type == "cuda"):
        # torch's AdamW: the numbers of DeepSpeed's own, which spends a minute compiling at its first use
        optimizer["params"] |= {"torch_adam": True, "fused": device_type == "cuda"}
        config["zero_force_ds_cpu_optimizer"] = False
    if zero.get("reduce_bucket_size", 1e8) < 5e7:
        tell(f"warning: reduce_bucket_size {zero['reduce_bucket_size']:g} is under 5e7: many small, slow collectives")
    return config


def tell(message):
    """Say it once, on rank 0, above the progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(message, file=sys.stderr)


def start_processes(args):
    """Join the process group: returns (rank, world, device). Without a launcher this is one process of its own."""
    # tqdm's own lock is a semaphore shared with whatever is forked: a data worker killed while it writes would keep it
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0  # and no thread may hold this one while a worker is forked
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import, which looks for an accelerator
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    import deepspeed

    if not gpu:  # decline an optional shared-memory operation, which would compile for 50 s
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_DEBUG", "WARN")
        log = os.path.join(args.output_dir, "ranks", f"nccl_{os.environ['RANK']}.txt")
        os.environ.setdefault("NCCL_DEBUG_FILE", log)
    patience = datetime.timedelta(seconds=args.stall_timeout + 60)  # `watch` speaks first
    deepspeed.init_distributed("nccl" if gpu else "gloo", timeout=patience, verbose=False)
    rank, world, mine = dist.get_rank(), dist.get_world_size(), (socket.gethostname(), os.getpid())
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    NEIGHBOURS.clear()
    NEIGHBOURS.update({pid: other for other, (host, pid) in enumerate(everyone) if host == mine[0] and other != rank})
    return rank, world, device


def load_policy(args, device):
    names = ("attn_implementation", "torch_dtype", "min_pixels", "max_pixels", "freeze_vision_modules")
    flags = {name: getattr(args, name) for name in names}
    sharded = read_deepspeed(args)["zero_optimization"]["stage"] == 3 and not args.eval_only
    return modeling.load_policy(args.model_name_or_path, device=device, sharded=sharded, **flags)


def start_engine(args, model, world, device, trained=True):
    """Hand a policy to DeepSpeed: sharded as the JSON says, with float32 master weights and the optimizer.

    Not `trained`: the frozen reference of beta > 0, sharded too under ZeRO-3 and a plain module otherwise.
    """
    import deepspeed

    if trained and args.gradient_checkpointing:
        # reentrant unless told otherwise: the processor has a fifth less to do in an update, and the GPU waits for it
        kwargs = {"use_reentrant": True} | json.loads(args.gradient_checkpointing_kwargs or "{}")
        modeling.checkpoint_blocks(model, **kwargs)
    policy = modeling.Policy(model.requires_grad_(False) if not trained else model, args.temperature)
    config = deepspeed_config(args, world, model.config.text_config.hidden_size, device.type)
    stage = config["zero_optimization"]["stage"]
    if not trained and stage < 3:
        return policy
    if not trained:
        del config["optimizer"]  # without one, DeepSpeed shards for inference
    if stage == 3:
        # a block's weights are gathered together, not one linear layer's after the other
        blocks = model.model.language_model.layers[0], model.model.visual.blocks[0]
        deepspeed.utils.set_z3_leaf_modules(policy, [type(block) for block in blocks])
        # cut the parameters up one by one: a GPU need not hold all of a model of which it keeps 1/world
        deepspeed.zero.Init(module=policy, config_dict_or_path=config)
        policy.to(device)  # the buffers
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    # DeepSpeed 0.19.8 casts parameters to bf16 and leaves the rotary tables in float32, as they must be
    engine = deepspeed.initialize(model=policy, model_parameters=parameters or None, config=config)[0]
    if stage == 0:
        engine.enable_backward_allreduce = world > 1  # alone it would still copy all gradients together and back
        if hasattr(engine.optimizer, "fp32_groups") and not engine.optimizer.fused_lamb_legacy:
            engine.optimizer.step = functools.partial(step_at_once, engine.optimizer)
    return engine


def step_at_once(optimizer):
    """The optimizer step of stage 0 in bf16. DeepSpeed 0.19.8's own (FP16_UnfusedOptimizer.step) does the same tensor
    by tensor, and waits for the GPU at each of them (825 in 3B) to see whether its gradient is finite."""
    low, high = sum(optimizer.fp16_groups, []), sum(optimizer.fp32_groups, [])
    for weight, master in zip(low, high, strict=True):
        master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
        weight.grad = None  # its memory is the next one's
    norm = torch.nn.utils.get_total_norm([master.grad for master in high])
    optimizer._global_grad_norm = norm.item()  # waits for the GPU, once
    optimizer.overflow = not math.isfinite(optimizer._global_grad_norm)
    optimizer._update_scale(optimizer.overflow)  # there is no loss scale in bf16: this counts steps
    if not optimizer.overflow:
        if optimizer.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(high, optimizer.clip_grad, norm)
        optimizer.optimizer.step()
        for weight, master in zip(low, high, strict=True):
            weight.data.copy_(master)
    for master in high:
        master.grad = None


# --- Flags -------------------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    """Every flag, with VLM-R1's and TRL's names and meanings. `bash launch.sh --help` prints this list."""

    # model
    model_name_or_path: str = field(metadata={"help": "checkpoint folder or hub name: Qwen2-VL, Qwen2.5-VL, Qwen3-VL"})
    torch_dtype: str = field(default="auto", metadata={"help": "bfloat16 or float32; auto: as --bf16 says"})
    bf16: bool = field(default=True, metadata={"help": "train in bfloat16 with float32 master weights"})
    attn_implementation: str = field(default="auto", metadata={"help": "auto, flash_attention_2, sdpa or eager"})
    freeze_vision_modules: bool = field(default=False, metadata={"help": "train the language model alone"})
    gradient_checkpointing: bool = field(default=True, metadata={"help": "recompute activations: less memory, slower"})
    gradient_checkpointing_kwargs: str | None = field(default=None, metadata={"help": "'{\"use_reentrant\": false}'"})
    min_pixels: int | None = field(default=None, metadata={"help": "smaller pictures are enlarged to this area"})
    max_pixels: int | None = field(default=None, metadata={"help": "larger pictures are shrunk to this area"})
    # data
    data_file_paths: str | None = field(default=None, metadata={"help": "jsonl or json files, joined by ':'"})
    image_folders: str | None = field(default=None, metadata={"help": "one folder a data file, joined by ':'"})
    dataset_name: str | None = field(default=None, metadata={"help": "a yaml of datasets (rec.yaml) instead"})
    image_root: str | None = field(default=None, metadata={"help": "image folder of --dataset_name"})
    question_template: str = field(default=data.QUESTION_TEMPLATE, metadata={"help": "must hold {Question}"})
    val_split_ratio: float = field(default=0.0, metadata={"help": "share of the records held out for evaluation"})
    num_workers: int = field(default=-1, metadata={"help": "data workers a rank; -1: two, at most the cores there are"})
    # algorithm
    num_generations: int = field(default=8, metadata={"help": "G, completions a prompt"})
    max_completion_length: int = field(default=256, metadata={"help": "tokens"})
    max_prompt_length: int | None = field(default=None, metadata={"help": "tokens, pictures included; longer: skipped"})
    temperature: float = field(default=1.0, metadata={"help": "of sampling, and of the policy that is trained"})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy", "format"], metadata={"help": "accuracy, format, file.py:function"}
    )
    reward_weights: list[float] | None = field(default=None, metadata={"help": "one a reward function; default 1"})
    beta: float = field(default=0.0, metadata={"help": "KL coefficient; above 0 a frozen reference is kept"})
    epsilon: float = field(default=0.2, metadata={"help": "clip range of the ratio"})
    epsilon_high: float | None = field(default=None, metadata={"help": "upper clip range; cispo: the bound itself"})
    delta: float | None = field(default=None, metadata={"help": "two-sided clipping: upper bound of the ratio"})
    num_iterations: int = field(default=1, metadata={"help": "mu, updates a rollout"})
    loss_type: str = field(default="grpo", metadata={"help": "grpo, dr_grpo, dapo or cispo"})
    importance_sampling_level: str = field(default="token", metadata={"help": "token, or sequence (GSPO)"})
    scale_rewards: str = field(default="group", metadata={"help": "group, batch or none (true, false: group, none)"})
    mask_truncated_completions: bool = field(default=False, metadata={"help": "no loss on completions cut short"})
    # batch and optimizer
    per_device_train_batch_size: int = field(default=8, metadata={"help": "completions a GPU, with the next flag"})
    gradient_accumulation_steps: str = field(default="auto", metadata={"help": "a number, or auto: whole groups"})
    max_tokens_per_forward: int = field(default=32768, metadata={"help": "how a step is cut: memory, not the gradient"})
    learning_rate: float = field(default=1e-6, metadata={"help": "peak"})
    lr_scheduler_type: str = field(default="linear", metadata={"help": "linear, cosine, constant(_with_warmup)"})
    warmup_ratio: float = field(default=0.0, metadata={"help": "share of the steps"})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    num_train_epochs: float = field(default=1.0, metadata={"help": "ignored when --max_steps is given"})
    max_steps: int = field(default=-1, metadata={"help": "rollouts; -1: as many as the epochs hold"})
    seed: int = field(default=42, metadata={"help": "of sampling"})
    data_seed: int | None = field(default=None, metadata={"help": "of the records' order; default --seed"})
    # machine
    deepspeed: str = field(default=os.path.join(HERE, "ds_zero3.json"), metadata={"help": "DeepSpeed's JSON"})
    zero_stage: int | None = field(default=None, metadata={"help": "0-3, overrides the JSON's"})
    stall_timeout: int = field(default=600, metadata={"help": "seconds without progress after which a run hangs"})
    plan: bool = field(default=False, metadata={"help": "print what one GPU would hold, and stop (tools/plan.py)"})
    plan_gpus: int | None = field(default=None, metadata={"help": "of the machine planned for; default: this one's"})
    plan_gb: float | None = field(default=None, metadata={"help": "memory of a GPU planned for; default: this one's"})
    # output
    output_dir: str | None = field(default=None, metadata={"help": "default runs/<run_name>"})
    run_name: str = field(default="grpo", metadata={"help": "names the output folder"})
    report_to: str = field(default="none", metadata={"help": "none or wandb, beside metrics.jsonl"})
    logging_steps: int = field(default=1, metadata={"help": "a line of metrics.jsonl every this many steps"})
    log_completions: bool = field(default=True, metadata={"help": "write completions.jsonl on those steps"})
    save_steps: int = field(default=500, metadata={"help": "a checkpoint every this many steps, and at the end"})
    save_total_limit: int | None = field(default=None, metadata={"help": "keep the newest this many checkpoints"})
    save_only_model: bool = field(default=False, metadata={"help": "weights alone: small, and cannot be resumed"})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "true (the newest), or a folder"})
    eval_steps: int = field(default=0, metadata={"help": "evaluate every this many steps; 0: first and last only"})
    eval_only: bool = field(default=False, metadata={"help": "evaluate the model and stop"})

    def __post_init__(self):
        self.output_dir = self.output_dir or os.path.join("runs", self.run_name)
        self.data_seed = self.seed if self.data_seed is None else self.data_seed
        if self.torch_dtype == "auto":
            self.torch_dtype = "bfloat16" if self.bf16 else "float32"
        self.scale_rewards = {"true": "group", "false": "none"}.get(self.scale_rewards.lower(), self.scale_rewards)
        self.reward_weights = self.reward_weights or [1.0] * len(self.reward_funcs)
        check_arguments(self)


LEAST = {  # the smallest value of a flag; None, where that is the default, passes
    2: "num_generations",
    1: "max_completion_length max_prompt_length min_pixels max_pixels num_iterations per_device_train_batch_size "
    "max_tokens_per_forward logging_steps save_steps save_total_limit stall_timeout plan_gpus plan_gb delta",
    1e-6: "temperature num_train_epochs",
    0: "beta epsilon epsilon_high learning_rate weight_decay max_grad_norm warmup_ratio val_split_ratio "
    "eval_steps seed data_seed",
    -1: "num_workers max_steps",
}
MOST = {  # the largest, far beyond any use: what is above it is a slip, on which numbers overflow
    10**6: "num_generations per_device_train_batch_size num_train_epochs",
    10**9: "stall_timeout max_steps",
}
CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "cispo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "report_to": ("none", "wandb"),
    "torch_dtype": ("bfloat16", "float32"),
    "zero_stage": (None, 0, 1, 2, 3),
}


def check_arguments(args):
    """Raise ValueError for a flag that cannot be obeyed, naming it, its value and what would do."""

    def need(holds, name, cure):
        if not holds:
            raise ValueError(f"--{name} {getattr(args, name)}: {cure}")

    for least, names in LEAST.items():
        for name in names.split():
            need(getattr(args, name) is None or getattr(args, name) >= least, name, f"must be at least {least}")
    for most, names in MOST.items():
        for name in names.split():
            need(getattr(args, name) <= most, name, f"must be at most {most}")
    for name, choices in CHOICES.items():
        need(getattr(args, name) in choices, name, f"use one of {', '.join(str(c) for c in choices if c is not None)}")
    for name, value in vars(args).items():
        numbers = value if name == "reward_weights" else [value]
        need(all(math.isfinite(number) for number in numbers if isinstance(number, float)), name, "must be finite")
    need(args.max_steps != 0, "max_steps", "must be above 0, or -1 for as many as the epochs hold")
    need(args.val_split_ratio < 1, "val_split_ratio", "must be below 1")
    need(args.warmup_ratio <= 1, "warmup_ratio", "must be at most 1")
    need((args.min_pixels or 0) <= (args.max_pixels or math.inf), "min_pixels", f"is over {args.max_pixels}, the most")
    need("{Question}" in args.question_template, "question_template", "must say where the {Question} goes")
    need(args.bf16 or args.torch_dtype == "float32", "torch_dtype", "contradicts --bf16 false; leave one of them out")
    cispo, resumed = args.loss_type == "cispo", args.resume_from_checkpoint
    need(not cispo or args.epsilon_high, "epsilon_high", "--loss_type cispo needs it: it is the ratio's bound")
    need(not cispo or args.delta is None, "delta", "--loss_type cispo has no such bound; leave it out")
    need(not (args.eval_only and resumed), "eval_only", "evaluates --model_name_or_path; name the checkpoint there")
    need(os.path.isfile(args.deepspeed), "deepspeed", "no such file; leave the flag out for ds_zero3.json")
    need(args.reward_funcs, "reward_funcs", "name at least one, such as accuracy")
    count = len(args.reward_funcs)
    need(len(args.reward_weights) == count, "reward_weights", f"give {count} numbers, one for each of --reward_funcs")
    wandb = args.report_to != "wandb" or importlib.util.find_spec("wandb")
    need(wandb, "report_to", "the package is not installed: pip install wandb, or leave the flag out")
    try:
        options = json.loads(args.gradient_checkpointing_kwargs or "{}")
    except ValueError:
        options = None
    known = isinstance(options, dict) and set(options) <= {"use_reentrant"}
    known = known and all(isinstance(value, bool) for value in options.values())
    need(known, "gradient_checkpointing_kwargs", "write '{\"use_reentrant\": false}', no other key is known")
    prompts_per_rank(args)


def prompts_per_rank(args):
    """B, the prompts a rank answers in a step. per_device_train_batch_size x gradient_accumulation_steps counts
    completions and must hold whole groups, because a group is compared on one rank."""
    b, G, a = args.per_device_train_batch_size, args.num_generations, args.gradient_accumulation_steps
    if a == "auto":  # the smallest that gives at least 8 completions and whole groups
        whole = G // math.gcd(b, G)
        a = whole * -(-8 // (b * whole))
    elif not str(a).isdecimal() or int(a) < 1:
        raise ValueError(f"--gradient_accumulation_steps {a}: a number, or auto")
    completions = b * int(a)
    if completions % G:
        low, high = completions // G * G, -(-completions // G) * G
        near = " or ".join(str(c) for c in (low, high) if c)
        raise ValueError(
            f"--per_device_train_batch_size {b} x --gradient_accumulation_steps {a} = {completions} completions a GPU, "
            f"not a multiple of --num_generations {G}; make the product {near}, or use accumulation auto"
        )
    return completions // G


# --- The command -------------------------------------------------------------------------------------------------


def main():
    """Parse, train, and leave the status where launch.sh finds it: 0, 2 for what the user can mend, 3 without memory, 4
    in a hang, 1 for the rest."""
    status, message, rank, run = 1, "", os.environ.get("RANK", "0"), None
    for said in ("`torch.distributed", "barrier"):  # of DeepSpeed's calls, which we cannot change
        warnings.filterwarnings("ignore", message=said)
    transformers.utils.logging.disable_progress_bar()
    # a stream that was closed before Python started (>&-) is None
    sys.stdout, sys.stderr = (Console(stream or open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr))
    folder = os.path.abspath(output_folder(sys.argv[1:]))
    try:
        args = parse_arguments(quiet=rank != "0")
        args.output_dir = os.path.abspath(args.output_dir)  # a reward function may change the working directory
        if args.plan:
            raise ValueError("--plan needs no training process: bash launch.sh --plan ..., or python tools/plan.py ...")
        run, model, train_records, val_records = start(args)
        if args.eval_only:
            records = val_records if len(val_records) else np.arange(len(run.dataset))
            modeling.Policy(model)  # switches the model to packed attention, which the sampler wants
            metrics, _ = evaluate(run, model, records)
            if rank == "0":
                print(json.dumps(metrics))
        else:
            run.stop.listen(run)
            if not os.path.isdir(ranks := os.path.join(args.output_dir, "ranks")):
                raise ValueError(f"{ranks} is not there: --output_dir must be on a disk that all nodes share")
            run.stacks = open(os.path.join(ranks, f"stacks_{rank}.txt"), "w")
            print(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), file=run.stacks, flush=True)
            threading.Thread(target=watch, args=(run,), daemon=True).start()
            train(run, model, train_records, val_records)
        status = 0
    except Stopped as stopped:
        status, message = stopped.args
    except (ValueError, data.DataError) as error:  # RewardError is a ValueError
        status, message = 2, str(error)
    except KeyboardInterrupt:
        status, message = 130, f"interrupted; --resume_from_checkpoint true goes on from {folder}"
    except Exception as error:
        if memory := out_of_memory(error):
            status, message = 3, memory_message(run, memory)
        # a rank that is gone makes the others fail in their next exchange: its message is the cause
        elif isinstance(error, RuntimeError) and NEIGHBOURS:
            message = lost_rank(patience=3)
        if not message:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
    leave_status(folder, status, int(rank), message)
    if status == 3 or status and NEIGHBOURS:
        os._exit(status)  # at once: a clean exit needs memory, or might wait for the others
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


class Console:
    """stdout or stderr, which may go away before the run does: the reader of a pipe ends, a log fills the disk."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


def parse_arguments(quiet):
    """The flags, or the end of the process: argparse prints its help or the fault, once and not on every rank."""
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        parser = HfArgumentParser(Arguments, allow_abbrev=False)
        try:
            args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
        except SystemExit as stop:  # 0 after --help, 2 for a value that does not parse
            leave_status(output_folder(sys.argv[1:]), stop.code, int(quiet), "")
            raise
    if unknown:
        raise ValueError(f"unknown: {' '.join(unknown)}; --help lists the flags, the README VLM-R1's that are missing")
    return args


def leave_status(folder, status, rank, message):
    """Say why a rank ends and leave that for launch.sh, which says it again below torchrun's report, with the status.
    Rank 0 speaks for all, but for what another rank may have met alone: a fault that the user can mend (2), too little
    memory (3), a hang (4). launch.sh gives a folder of its own: two commands may name the same output folder."""
    folder = os.environ.get("GRPO_STATUS", folder)
    if rank and status not in (2, 3, 4) or status == 0 and not os.path.isdir(folder):
        return
    message = message and f"grpo.py, rank {rank}: {message}\n"
    print(message and f"\n{message}", end="", file=sys.stderr, flush=True)  # not behind the progress bar
    try:
        os.makedirs(folder, exist_ok=True)
        if status == 1 and NEIGHBOURS and os.path.exists(os.path.join(folder, "exit_status")):
            return  # by a rank that failed first
        for name, text in (("exit_status", f"{status}\n"), ("exit_message", message)):
            if text:
                replace_file(os.path.join(folder, name), text)
    except OSError as error:
        print(f"grpo.py: exit_status {status} cannot be written to {folder}: {error}", file=sys.stderr)


def output_folder(words):
    """--output_dir, or runs/<run_name>: wanted for exit_status even where the other flags do not parse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir", "--output-dir")
    parser.add_argument("--run_name", "--run-name", default="grpo")
    known, _ = parser.parse_known_args(words)
    return known.output_dir or os.path.join("runs", known.run_name)


if __name__ == "__main__":
    main()
