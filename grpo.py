"""GRPO for vision-language models: sample, score, compare within the group, update. One loop, plain PyTorch.

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4) is PPO without its critic. Each prompt
is answered G times; a completion's advantage is how much better it scored than its own group; the clipped policy
gradient does the rest. Deleted from the paper: the reward model (rewards are functions), the outer loop that renews
the reference (beta defaults to 0, so there is no reference). Deleted from the usual trainers: callbacks, adapters,
vLLM, the repeated prompt.

    bash launch.sh                                          a tiny model on synthetic pictures, on any machine
    bash launch.sh --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --data_file_paths a.jsonl --image_folders dir

Read `train` first: it is the algorithm in time order. The maths stands above it and does no input or output.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import random
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import HfArgumentParser

import data
import model as modeling
import rewards
import rollout

HERE = os.path.dirname(os.path.abspath(__file__))


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
    max_prompt_length: int | None = field(default=None, metadata={"help": "tokens, pictures included; longer: error"})
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
    max_tokens_per_forward: int = field(default=16384, metadata={"help": "how a step is cut; never changes the result"})
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
    stall_timeout: int = field(default=600, metadata={"help": "seconds that a rank waits for another"})
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


def check_arguments(args):
    """Raise ValueError for a flag that cannot be obeyed, naming the value and what would work."""

    def need(holds, message):
        if not holds:
            raise ValueError(message)

    def one_of(name, *choices):
        need(getattr(args, name) in choices, f"--{name} {getattr(args, name)}: use one of {', '.join(choices)}")

    one_of("loss_type", "grpo", "dr_grpo", "dapo", "cispo")
    one_of("importance_sampling_level", "token", "sequence")
    one_of("scale_rewards", "group", "batch", "none")
    one_of("lr_scheduler_type", "linear", "cosine", "constant", "constant_with_warmup")
    one_of("report_to", "none", "wandb")
    one_of("torch_dtype", "bfloat16", "float32")
    need(args.num_generations >= 2, f"--num_generations {args.num_generations}: a group needs 2 to compare")
    need(args.temperature > 0, f"--temperature {args.temperature}: equal completions teach nothing; use 1.0")
    need(args.max_completion_length > 0, f"--max_completion_length {args.max_completion_length}: at least 1")
    need(args.num_iterations > 0, f"--num_iterations {args.num_iterations}: at least 1")
    need(args.logging_steps > 0, f"--logging_steps {args.logging_steps}: at least 1")
    need(args.save_steps > 0, f"--save_steps {args.save_steps}: at least 1")
    need(args.loss_type != "cispo" or args.epsilon_high, "--loss_type cispo needs --epsilon_high, its ratio's bound")
    need(
        len(args.reward_weights) == len(args.reward_funcs),
        f"--reward_weights has {len(args.reward_weights)} numbers for {len(args.reward_funcs)} --reward_funcs",
    )
    need(0 <= args.val_split_ratio < 1, f"--val_split_ratio {args.val_split_ratio}: between 0 and 1")
    need(args.zero_stage in (None, 0, 1, 2, 3), f"--zero_stage {args.zero_stage}: 0, 1, 2 or 3")
    extra = set(json.loads(args.gradient_checkpointing_kwargs or "{}")) - {"use_reentrant"}
    need(not extra, f"--gradient_checkpointing_kwargs: {sorted(extra)} not known; only use_reentrant is")
    prompts_per_rank(args)


def prompts_per_rank(args):
    """B, the prompts a rank answers in a step. per_device_train_batch_size x gradient_accumulation_steps counts
    completions and must hold whole groups, because a group is compared on one rank."""
    b, G, a = args.per_device_train_batch_size, args.num_generations, args.gradient_accumulation_steps
    if a == "auto":  # the smallest that gives at least 8 completions and whole groups
        a = next(a for a in range(1, 8 * G + 1) if b * a >= 8 and b * a % G == 0)
    elif not str(a).isdigit() or int(a) < 1:
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


# --- The maths: no input or output, imported by the tests ----------------------------------------------------------


def group_advantages(rewards, scale="group", eps=1e-4):
    """A = (r - mean of its group) / (std of its group + eps): rewards (B, G) -> (B, G). DeepSeekMath 4.1.2.

    `scale` "batch" divides by the std over all rewards given (pass the whole step's), "none" does not divide (Dr.
    GRPO, arXiv 2503.20783). std has ddof 1. NaN marks a completion on which no reward function had an opinion: it is
    left out of mean and std and gets A = 0. Raises ValueError for G = 1 or an unknown scale.
    """
    if rewards.shape[1] < 2:
        raise ValueError(
            f"a group needs at least 2 completions to compare, got rewards of shape {tuple(rewards.shape)}"
        )
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale!r}: use group, batch or none")
    valid = ~rewards.isnan()
    r = rewards.where(valid, torch.zeros_like(rewards))
    count = valid.sum(1, keepdim=True)
    difference = (r - r.sum(1, keepdim=True) / count.clamp(min=1)) * valid  # (B, G)
    if scale == "none":
        return difference
    if scale == "group":
        std = (difference.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # (B, 1)
    else:
        n = valid.sum()
        spread = (r - r.sum() / n.clamp(min=1)) * valid
        std = (spread.square().sum() / (n - 1).clamp(min=1)).sqrt()
    return difference / (std + eps)


def completion_mask(tokens, eos_ids):
    """Which tokens (N, R) belong to the completion: all up to and including the first of any eos id -> bool (N, R).

    The end itself is trained, or the policy never learns to stop; it is found by position, so it counts also where
    the pad id is the same.
    """
    eos = torch.as_tensor(eos_ids, device=tokens.device).reshape(-1)
    is_eos = torch.isin(tokens, eos).int()
    return (is_eos.cumsum(1) - is_eos) == 0  # no end before this token


def grpo_loss(
    logps,
    old_logps,
    advantages,
    mask,
    *,
    ref_logps=None,
    beta=0.0,
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    loss_type="grpo",
    importance_sampling_level="token",
    max_completion_length=None,
    num_sequences=None,
    num_tokens=None,
):
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
    """Learning rate of 0-based optimizer step `step` of `total`: linear warm-up, then the named decay to 0."""
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return peak * (1 - share)
    if kind == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * share))
    return peak


def cut_rows(prompt_lengths, completion_lengths, budget):
    """Cut a rank's groups into packed rows of at most `budget` tokens: returns a list of rows, a row being a list of
    (prompt index, [completion indices]). Completions of prompt b are b*G ... b*G+G-1. A group that does not fit into
    a row is split over several, each with the prompt; a single completion over the budget gets a row of its own."""
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


# --- DeepSpeed ---------------------------------------------------------------------------------------------------


def deepspeed_config(args, world, hidden_size, device_type):
    """DeepSpeed's configuration from --deepspeed's JSON, with every "auto" filled in and `--zero_stage` applied.

    The flags decide the batch; a number in the file that contradicts them is an error. A micro-batch means a packed
    row here, and `update` marks the accumulation boundary itself, so DeepSpeed is told of one micro-batch a step.
    """
    with open(args.deepspeed) as file:
        config = json.load(file)
    zero = config.setdefault("zero_optimization", {})
    if args.zero_stage is not None:
        zero["stage"] = args.zero_stage
    completions = prompts_per_rank(args) * args.num_generations
    flags = {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": completions // args.per_device_train_batch_size,
        "train_batch_size": completions * world,
        "gradient_clipping": args.max_grad_norm,
    }
    for name, value in flags.items():
        if config.get(name, "auto") not in ("auto", value):
            raise ValueError(f'{args.deepspeed}: {name} is {config[name]}, the flags say {value}; write "auto"')
    config |= {"train_micro_batch_size_per_gpu": completions, "gradient_accumulation_steps": 1}
    config |= {"train_batch_size": completions * world, "gradient_clipping": args.max_grad_norm}
    if config.pop("fp16", {}).get("enabled", False) is True:
        raise ValueError(f"{args.deepspeed}: fp16 is enabled; this code trains in bf16 or float32, so remove it")
    if config.pop("scheduler", None):
        tell(f"{args.deepspeed}: its scheduler is ignored, --lr_scheduler_type {args.lr_scheduler_type} is used")
    config.setdefault("bf16", {})["enabled"] = args.torch_dtype == "bfloat16"
    optimizer = config.setdefault("optimizer", {"type": "AdamW", "params": {}})
    defaults = {"lr": args.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": args.weight_decay}
    params = {name: value for name, value in optimizer.get("params", {}).items() if value != "auto"}
    optimizer["params"] = defaults | params
    offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if optimizer["type"] in ("Adam", "AdamW") and not (offload and device_type == "cuda"):
        # torch's AdamW gives the numbers of DeepSpeed's own, which compiles for a minute at first use
        optimizer["params"] |= {"torch_adam": True} | ({"fused": True} if device_type == "cuda" else {})
        zero["zero_force_ds_cpu_optimizer"] = config["zero_force_ds_cpu_optimizer"] = False
    sizes = {  # what the Hugging Face integration fills in, but for the bucket (see the README)
        "reduce_bucket_size": int(1e8),
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for name, value in sizes.items():
        if zero.get(name) == "auto":
            zero[name] = value
    zero.pop("zero_force_ds_cpu_optimizer", None)
    if zero.get("reduce_bucket_size", 1e8) < 5e7:
        tell(f"warning: reduce_bucket_size {zero['reduce_bucket_size']:g} is under 5e7: many small, slow collectives")
    if zero.get("overlap_comm") and device_type == "cuda" and torch.cuda.nccl.version() < (2, 10):
        tell(f"warning: overlap_comm with NCCL {torch.cuda.nccl.version()}: versions before 2.10 can hang; upgrade")
    return config


def tell(message):
    """Say it once, on rank 0, without breaking the progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(message, file=sys.stderr)


def start_processes(args):
    """Join the process group: returns (rank, world, device). Works without a launcher too, as one process."""
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import deepspeed  # after DS_ACCELERATOR, which it reads on import

    if not gpu:  # decline an optional shared-memory operation that would compile for 50 s
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    deepspeed.init_distributed(
        "nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=args.stall_timeout), verbose=False
    )
    return dist.get_rank(), dist.get_world_size(), device


def start_engine(args, policy, world, device):
    """Hand the policy to DeepSpeed: sharded as the JSON says, with float32 master weights and the optimizer."""
    import deepspeed

    config = deepspeed_config(args, world, policy.model.config.text_config.hidden_size, device.type)
    with modeling.float32_rotary_tables(policy):
        trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=policy, model_parameters=trainable, config=config)
    return engine


def start_reference(args, world, device):
    """The frozen reference of beta > 0: the starting weights, sharded as the policy is under ZeRO-3."""
    import deepspeed

    model, _ = load_policy(args, device)
    reference = modeling.Policy(model.requires_grad_(False), args.temperature)
    config = deepspeed_config(args, world, model.config.text_config.hidden_size, device.type)
    if config["zero_optimization"]["stage"] < 3:
        return reference
    del config["optimizer"]  # nothing to optimize: DeepSpeed then shards for inference
    with modeling.float32_rotary_tables(reference):
        return deepspeed.initialize(model=reference, config=config)[0]


def load_policy(args, device):
    return modeling.load_policy(
        args.model_name_or_path,
        attn_implementation=args.attn_implementation,
        torch_dtype=args.torch_dtype,
        device=device,
        min_pixels=args.min_pixels,
        max_pixels=args.max_pixels,
        freeze_vision_modules=args.freeze_vision_modules,
    )


# --- The step, phase by phase --------------------------------------------------------------------------------------


def seed_everything(seed, step, rank):
    """All randomness of a step is a function of (seed, step, rank), so a resumed run repeats an undisturbed one."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def add_positions(model, prompts):
    return [prompt | {"position_ids": modeling.prompt_positions(model, prompt)} for prompt in prompts]


def sample_phase(run, engine, prompts):
    """Phase 1. Draw G completions of each of this rank's prompts: the step's batch, N = B*G completions."""
    args = run.args
    with modeling.gathered(engine) as policy:
        tokens, logps = rollout.sample(
            policy, prompts, args.num_generations, args.max_completion_length, args.temperature, run.eos, run.pad
        )
    mask = completion_mask(tokens, run.eos)  # (N, R)
    ended = torch.isin(tokens, torch.tensor(run.eos, device=tokens.device)).any(1)
    return {
        "prompts": prompts,
        "tokens": tokens,
        "sampler_logps": logps,
        "mask": mask,
        "lengths": mask.sum(1).tolist(),  # waits for the GPU
        "truncated": (~ended).tolist(),
    }


def score_phase(run, batch):
    """Phase 2. Decode the completions and ask every reward function: adds texts, questions, columns, scores, rewards."""
    G, tokenizer = run.args.num_generations, run.processor.tokenizer
    rows = zip(batch["tokens"].tolist(), batch["lengths"], strict=True)
    batch["texts"] = tokenizer.batch_decode([row[:length] for row, length in rows], skip_special_tokens=True)
    records = [prompt["columns"] for prompt in batch["prompts"] for _ in range(G)]  # one a completion
    names = sorted({name for record in records for name in record} - {"prompts", "completions"})
    batch["columns"] = {name: [record.get(name) for record in records] for name in names}
    batch["scores"] = rewards.score(run.reward_funcs, batch["columns"]["problem"], batch["texts"], batch["columns"])
    batch["rewards"] = rewards.total(batch["scores"], run.args.reward_weights)


def compare_phase(run, batch):
    """Phase 3. Agree with the other ranks on what the update needs to know of the whole step, and turn rewards into
    advantages. One exchange of small Python objects a step; returns every rank's."""
    args, G = run.args, run.args.num_generations
    if args.mask_truncated_completions:
        batch["mask"] = batch["mask"] & ~torch.tensor(batch["truncated"], device=batch["mask"].device)[:, None]
    trained = batch["mask"].sum(1).tolist()  # tokens that count in the loss, a completion; waits for the GPU
    prompt_lengths = [len(prompt["input_ids"]) for prompt in batch["prompts"]]
    batch["trained"], batch["cuts"] = trained, cut_rows(prompt_lengths, trained, args.max_tokens_per_forward)
    mine = {name: batch[name] for name in ("rewards", "scores", "lengths", "truncated")}
    mine |= {"tokens": sum(trained), "prompt_tokens": sum(prompt_lengths), "rows": len(batch["cuts"])}
    mine["unparsed"] = [rewards.parse_box(text) is None for text in batch["texts"]]
    everyone = [None] * run.world
    dist.all_gather_object(everyone, mine)
    table = torch.tensor([rank["rewards"] for rank in everyone]).view(-1, G)  # (world * B, G)
    advantages = group_advantages(table, args.scale_rewards).view(run.world, -1)[run.rank]  # (N,)
    batch["advantages"] = advantages.to(batch["tokens"].device)
    return everyone


def build_rows(run, engine, batch, count):
    """The rank's packed rows, `count` of them: (row, index of each of its completions in the batch).

    Index N means "no completion of this step": the blank group's, whose mask is all False. With several ranks every
    row must hold a picture, and a rank with fewer rows than another runs blank ones (see modeling.blank_group).
    """
    tokens, G, model = batch["tokens"].cpu(), run.args.num_generations, engine.module.model
    N, rows = len(tokens), []
    for cut in batch["cuts"] + [[]] * (count - len(batch["cuts"])):
        groups = [(batch["prompts"][b], [tokens[i, : batch["trained"][i]] for i in part]) for b, part in cut]
        members = [i for _, part in cut for i in part]
        if not cut or (run.world > 1 and all(prompt["pixel_values"] is None for prompt, _ in groups)):
            groups.append(modeling.blank_group(model))
            members.append(N)
        rows.append((modeling.build_row(groups, run.device), torch.tensor(members, device=run.device)))
    return rows


def update_phase(run, engine, reference, batch, everyone):
    """Phase 4. `num_iterations` optimizer steps on the batch. The gradient is that of the whole step's loss however
    it is cut into rows and spread over ranks, because the denominators are the whole step's."""
    args, device, N = run.args, run.device, len(batch["tokens"])
    num_sequences = sum(len(rank["rewards"]) for rank in everyone)
    num_tokens = sum(rank["tokens"] for rank in everyone)
    rows = build_rows(run, engine, batch, max(rank["rows"] for rank in everyone))
    blank = lambda table: torch.nn.functional.pad(table, (0, 0, 0, 1))  # noqa: E731  line N: False, 0
    mask, sampled, advantages = blank(batch["mask"]), blank(batch["sampler_logps"]), blank(batch["advantages"][:, None])

    def without_gradient(policy):
        with torch.no_grad():
            return [policy(row)[0] for row, _ in rows]

    ref = without_gradient(reference) if args.beta > 0 else [None] * len(rows)
    old = without_gradient(engine) if args.num_iterations > 1 else [None] * len(rows)
    sums = torch.zeros(0, device=device)
    for iteration in range(args.num_iterations):
        done = run.step * args.num_iterations + iteration
        rate = learning_rate_at(
            done, run.total * args.num_iterations, args.learning_rate, args.lr_scheduler_type, args.warmup_ratio
        )
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        sums = 0
        for k, (row, members) in enumerate(rows):
            engine.set_gradient_accumulation_boundary(k == len(rows) - 1)
            logps, entropy = engine(row)  # (n, R) of this row
            width = logps.shape[1]
            loss, metrics = grpo_loss(
                logps,
                logps.detach() if old[k] is None else old[k],
                advantages[members, 0],
                mask[members, :width],
                ref_logps=ref[k],
                beta=args.beta,
                epsilon=args.epsilon,
                epsilon_high=args.epsilon_high,
                delta=args.delta,
                loss_type=args.loss_type,
                importance_sampling_level=args.importance_sampling_level,
                max_completion_length=args.max_completion_length,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
            )
            engine.backward(loss * run.world)  # DeepSpeed averages over ranks, and these denominators are global
            plain = engine.optimizer is engine.basic_optimizer  # stage 0 in float32 keeps no norm: take it before step
            norm = plain and torch.nn.utils.get_total_norm([p.grad for p in engine.parameters() if p.grad is not None])
            engine.step()
            # sums over this row's tokens, so that the step's metrics are those of all its rows and ranks
            where = mask[members, :width]
            gap = ((logps.detach() - sampled[members, :width]) * where).abs()
            parts = [loss.detach(), *[value * where.sum() for value in metrics.values()]]
            sums = sums + torch.stack([*parts, (entropy * where).sum(), gap.sum()])
    names = ["loss", *metrics, "entropy", "sampler_gap"]
    dist.all_reduce(sums)
    values = dict(zip(names, sums.tolist(), strict=True))  # waits for the GPU: the update is over
    result = {name: value / max(num_tokens, 1) for name, value in values.items()} | {"loss": values["loss"]}
    norm = norm if plain else engine.get_global_grad_norm()
    return result | {"grad_norm": float(norm), "learning_rate": rate}


def step_metrics(args, everyone):
    """What TRL logs of the rewards and completions, over all ranks' completions."""
    flat = lambda name: [value for rank in everyone for value in rank[name]]  # noqa: E731
    totals = torch.tensor(flat("rewards")).view(-1, args.num_generations)
    lengths, truncated = np.array(flat("lengths")), np.array(flat("truncated"))
    group_std = torch.tensor([row[~row.isnan()].std().nan_to_num(0).item() for row in totals])
    metrics = {
        "reward": totals.nanmean().item(),
        "reward_std": group_std.mean().item(),
        "frac_reward_zero_std": (group_std < 1e-6).float().mean().item(),
    }
    for name in everyone[0]["scores"]:
        given = [v for rank in everyone for v in rank["scores"][name] if v is not None]
        metrics[f"rewards/{name}/mean"] = float(np.mean(given)) if given else None
        metrics[f"rewards/{name}/std"] = float(np.std(given, ddof=1)) if len(given) > 1 else None
    ended = lengths[~truncated]
    for kind, values in (("", lengths), ("terminated_", ended)):
        for label, f in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            metrics[f"completions/{label}_{kind}length"] = float(f(values)) if len(values) else None
    metrics["completions/clipped_ratio"] = float(truncated.mean())
    metrics["parse_failure_rate"] = float(np.mean(flat("unparsed")))
    return metrics


# --- Evaluation ----------------------------------------------------------------------------------------------------


def evaluate(run, model, val):
    """Greedy answers to the held-out records, with training's prompt and parser: mean IoU, accuracy at IoU 0.5 and
    share in the right format. Records are dealt to the ranks in turn; `model` holds whole weights."""
    args, size = run.args, prompts_per_rank(run.args) * run.args.num_generations
    mine, sums, lines = val[run.rank :: run.world], torch.zeros(4, dtype=torch.float64), []
    for start in range(0, len(mine), size):
        records = mine[start : start + size].tolist()
        prompts = add_positions(model, [run.encode(run.dataset[i]) | {"record": i} for i in records])
        tokens, _ = rollout.sample(model, prompts, 1, args.max_completion_length, 0.0, run.eos, run.pad)
        lengths = completion_mask(tokens, run.eos).sum(1).tolist()
        ids = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        texts = run.processor.tokenizer.batch_decode(ids, skip_special_tokens=True)
        columns = {name: [p["columns"].get(name) for p in prompts] for name in prompts[0]["columns"]}
        iou = torch.tensor(rewards.iou_reward(columns["problem"], texts, **{k: columns[k] for k in BOX_COLUMNS}))
        form = torch.tensor(rewards.format_reward(columns["problem"], texts))
        sums += torch.stack([iou.sum(), (iou >= 0.5).sum(), form.sum(), torch.tensor(len(iou))]).double()
        for i, prompt in enumerate(prompts):
            given = {"accuracy": iou[i].item(), "format": form[i].item()}
            lines.append(completion_line(run.step, "eval", prompt, texts[i], given, None, False))
    sums = sums.to(run.device)
    dist.all_reduce(sums)
    count = max(int(sums[3]), 1)
    return dict(zip(("eval/iou", "eval/accuracy", "eval/format"), (sums[:3] / count).tolist(), strict=True)) | {
        "eval/count": int(sums[3])
    }, lines


BOX_COLUMNS = ("solution", "image_size", "model_size")


# --- Files of a run ------------------------------------------------------------------------------------------------


def completion_line(step, split, prompt, text, scores, advantage, truncated):
    columns = prompt["columns"]
    line = {"step": step, "split": split, "record": prompt["record"], "prompt": columns["problem"], "completion": text}
    line |= {"rewards": scores, "advantage": advantage, "truncated": truncated}
    return line | {name: columns.get(name) for name in BOX_COLUMNS}


def append_lines(path, lines):
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def keep_lines_until(path, step):
    """Drop what a run that died wrote after the checkpoint from which it now goes on."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        kept = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= step]
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(kept)


def save_weights(engine, processor, folder):
    """Gathered weights as transformers writes them, with config and processor. Called on every rank."""
    if engine.zero_optimization_stage() == 3:
        state = engine._zero3_consolidated_16bit_state_dict()  # gathers on all ranks, returns it on rank 0
    else:
        state = engine.module.state_dict()
    if dist.get_rank() == 0:
        state = {name.removeprefix("model."): t for name, t in state.items() if not name.startswith("head.")}
        empty = [name for name, tensor in state.items() if tensor.numel() == 0]
        if empty:
            raise RuntimeError(f"{folder}: {len(empty)} tensors to save are empty ({empty[0]}): weights not gathered")
        engine.module.model.save_pretrained(folder, state_dict=state)
        processor.save_pretrained(folder)


def save_checkpoint(run, engine, state):
    """Write checkpoint-<step> under a temporary name, then rename: a folder with the final name is whole."""
    final = os.path.join(run.args.output_dir, f"checkpoint-{state['step']}")
    folder = final + ".tmp"
    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()
    save_weights(engine, run.processor, folder)
    if not run.args.save_only_model:
        engine.save_checkpoint(os.path.join(folder, "zero"), tag="state", save_latest=False)
    if run.rank == 0:
        with open(os.path.join(folder, "state.json"), "w") as file:
            json.dump(state | {"world": run.world, "args": asdict(run.args)}, file, indent=2)
    dist.barrier()
    if run.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(folder, final)
        limit = run.args.save_total_limit
        for old in checkpoints(run.args.output_dir)[:-limit] if limit else []:
            shutil.rmtree(old)
    dist.barrier()


def checkpoints(folder):
    """Whole checkpoints in a run's folder, oldest first."""
    names = [name for name in os.listdir(folder) if name.startswith("checkpoint-") and name[11:].isdigit()]
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name[11:]))]


def resume_folder(args):
    """The checkpoint to go on from, or None. Refuses to start afresh among another run's checkpoints."""
    found = checkpoints(args.output_dir)
    asked = args.resume_from_checkpoint
    if asked is None or asked.lower() == "false":
        if found:
            raise ValueError(
                f"--output_dir {args.output_dir} holds {os.path.basename(found[-1])} of an earlier run; go on from it with "
                "--resume_from_checkpoint true, or give another --run_name"
            )
        return None
    if asked.lower() == "true":
        if not found:
            tell(f"no checkpoint in {args.output_dir} yet: starting at step 0")
        return found[-1] if found else None
    if not os.path.isfile(os.path.join(asked, "state.json")):
        raise ValueError(
            f"--resume_from_checkpoint {asked}: no state.json there; give a checkpoint-<step> folder, or true"
        )
    return asked


def load_state(run, engine, folder):
    """Restore weights, optimizer and counters from a checkpoint; returns its state."""
    with open(os.path.join(folder, "state.json")) as file:
        state = json.load(file)
    if state["world"] != run.world:
        raise ValueError(
            f"{folder} was saved by {state['world']} ranks and this run has {run.world}: the optimizer's shards do not fit. "
            f"Go on from the weights alone with --model_name_or_path {folder} and another --run_name"
        )
    if not os.path.isdir(os.path.join(folder, "zero")):
        raise ValueError(
            f"{folder} holds weights alone (--save_only_model): start from them with --model_name_or_path {folder}"
        )
    with modeling.float32_rotary_tables(engine.module):
        engine.load_checkpoint(os.path.join(folder, "zero"), tag="state")
    return state


# --- The run -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What every phase needs and nothing changes but `step`."""

    args: Arguments
    rank: int
    world: int
    device: torch.device
    processor: modeling.Processor
    dataset: data.PackedDataset
    encode: object  # record -> prompt
    reward_funcs: list  # (name, function)
    eos: list
    pad: int
    step: int = 0
    total: int = 0


def open_dataset(args, rank):
    """The packed file of the sources, made by rank 0 while the others wait."""
    sources = data.parse_sources(args.data_file_paths, args.image_folders, args.dataset_name, args.image_root)
    path = [data.ensure_packed(sources, args.output_dir) if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    return data.PackedDataset(path[0]), path[0]


def announce(run, policy, train, val):
    """Say what runs, and the arithmetic of the batch."""
    args, B, G, W = run.args, prompts_per_rank(run.args), run.args.num_generations, run.world
    name, reason = policy.model.attention_choice
    parameters = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in policy.model.parameters())
    tell(
        f"policy: {args.model_name_or_path}, {parameters / 1e6:,.1f} M parameters, {args.torch_dtype} on {run.device.type}"
    )
    tell(f"attention: {name} ({reason})")
    tell(f"data: {len(train)} records to train on, {len(val)} held out")
    tell(f"batch: {W} ranks x {B} prompts x {G} completions = {W * B * G} completions a step ({W * B} prompts)")
    tell(f"run: {run.total} steps x {args.num_iterations} updates, loss {args.loss_type}, into {args.output_dir}")


def train(args):
    """The algorithm. Each phase ends with a line that says what is true then."""
    rank, world, device = start_processes(args)
    os.makedirs(args.output_dir, exist_ok=True)
    reward_funcs = [rewards.load_reward(spec) for spec in args.reward_funcs]
    model, processor = load_policy(args, device)
    dataset, packed = open_dataset(args, rank)
    train_records, val_records = data.train_val_split(dataset, args.val_split_ratio, args.data_seed)
    encode = functools.partial(
        data.encode_prompt,
        processor=processor,
        question_template=args.question_template,
        max_prompt_length=args.max_prompt_length,
    )
    tokenizer = processor.tokenizer
    eos = modeling.eos_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    run = Run(args, rank, world, device, processor, dataset, encode, reward_funcs, eos, pad)
    files = {name: os.path.join(args.output_dir, name) for name in ("metrics.jsonl", "completions.jsonl", "run.json")}
    if args.eval_only:
        policy = modeling.Policy(model, args.temperature)
        records = val_records if len(val_records) else np.arange(len(dataset))
        result, _ = evaluate(run, policy.model, records)
        if rank == 0:
            print(json.dumps(result))
        return
    B = prompts_per_rank(args)
    run.total = (
        args.max_steps if args.max_steps > 0 else math.ceil(len(train_records) * args.num_train_epochs / (B * world))
    )
    folder = resume_folder(args)

    if args.gradient_checkpointing:
        modeling.checkpoint_blocks(model, **json.loads(args.gradient_checkpointing_kwargs or "{}"))
    policy = modeling.Policy(model, args.temperature)
    announce(run, policy, train_records, val_records)
    engine = start_engine(args, policy, world, device)
    reference = start_reference(args, world, device) if args.beta > 0 else None
    state = {"step": 0, "num_tokens": 0}
    if folder:
        state = load_state(run, engine, folder)
        tell(f"resumed from {folder}")
    run.step = state["step"]
    if rank == 0:
        for name in ("metrics.jsonl", "completions.jsonl"):
            keep_lines_until(files[name], run.step) if folder else open(files[name], "w").close()
        with open(files["run.json"], "w") as file:
            json.dump({"args": asdict(args), "packed": os.path.abspath(packed), "world": world}, file, indent=2)
    wandb = start_wandb(args) if args.report_to == "wandb" and rank == 0 else None

    def log(metrics, lines=()):
        if rank == 0:
            append_lines(files["metrics.jsonl"], [metrics])
            append_lines(files["completions.jsonl"], lines)
            if wandb:
                wandb.log(metrics, step=metrics["step"])

    def run_evaluation():
        if not len(val_records):
            return
        with modeling.gathered(engine) as whole:
            result, lines = evaluate(run, whole, val_records)
        log({"step": run.step} | result, lines)
        tell(
            f"step {run.step}: held-out mean IoU {result['eval/iou']:.3f}, accuracy at 0.5 {result['eval/accuracy']:.3f} "
            f"({result['eval/count']} records)"
        )

    loader = data.prompt_loader(
        dataset, train_records, encode, args.data_seed, run.step, run.total, B, rank, world, args.num_workers
    )
    if run.step == 0:
        run_evaluation()
    bar = tqdm(total=run.total, initial=run.step, disable=rank != 0, dynamic_ncols=True, unit="step", smoothing=0.05)
    times, began = {}, time.perf_counter()

    def lap(name):
        """Seconds since the last lap go to this phase; on a GPU its work is waited for, so they are really its own."""
        nonlocal began
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        times[f"time/{name}"], began = now - began, now

    for prompts in loader:
        seed_everything(args.seed, run.step, rank)
        prompts = add_positions(model, prompts)
        lap("wait_data")
        # B prompts with their pictures are here, another B on every other rank.

        batch = sample_phase(run, engine, prompts)
        lap("rollout")
        # Each prompt has G completions, drawn from the policy as it is now.

        score_phase(run, batch)
        lap("reward")
        # Each completion has a reward, or NaN where no function had an opinion.

        everyone = compare_phase(run, batch)
        lap("compare")
        # Each completion has an advantage over its own group; all ranks know the step's sizes.

        learned = update_phase(run, engine, reference, batch, everyone)
        lap("update")
        # The policy has moved; the completions are now off-policy and are thrown away.

        run.step += 1
        state["step"] = run.step
        state["num_tokens"] += sum(r["prompt_tokens"] * args.num_generations + sum(r["lengths"]) for r in everyone)
        metrics = step_metrics(args, everyone) | learned
        metrics |= {"num_tokens": state["num_tokens"], "step_time": sum(times.values())} | times
        generated = sum(sum(r["lengths"]) for r in everyone)
        metrics["tokens_per_second/generated"] = generated / times["time/rollout"]
        metrics["tokens_per_second/trained"] = (
            sum(r["tokens"] + r["prompt_tokens"] for r in everyone) * args.num_iterations / times["time/update"]
        )
        if device.type == "cuda":
            metrics["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        bar.update()
        shown = {"reward": metrics["reward"], "IoU": metrics.get("rewards/accuracy/mean")}
        bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items() if value is not None})
        if run.step % args.logging_steps == 0 or run.step == run.total:
            epoch = run.step * B * world / len(train_records)
            lines = batch_lines(args, batch, run.step) if args.log_completions else ()
            log({"step": run.step, "epoch": epoch} | metrics, lines)
        if run.step == run.total or (args.eval_steps and run.step % args.eval_steps == 0):
            run_evaluation()
        if run.step == run.total or run.step % args.save_steps == 0:
            save_checkpoint(run, engine, state)
        began = time.perf_counter()
    bar.close()


def batch_lines(args, batch, step):
    lines = []
    for i, text in enumerate(batch["texts"]):
        scores = {name: values[i] for name, values in batch["scores"].items()}
        advantage, prompt = batch["advantages"][i].item(), batch["prompts"][i // args.num_generations]
        lines.append(completion_line(step, "train", prompt, text, scores, advantage, batch["truncated"][i]))
    return lines


def start_wandb(args):
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "--report_to wandb: the package is not installed; pip install wandb, or leave it out"
        ) from error
    return wandb.init(project="grpo", name=args.run_name, dir=args.output_dir, config=asdict(args))


def main():
    """Parse, train, and leave the status where launch.sh finds it: 0, 2 for what the user can mend, 1 for the rest."""
    status, folder = 1, None
    try:
        (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
        folder = args.output_dir
        train(args)
        status = 0
    except (ValueError, data.DataError, rewards.RewardError) as error:
        status = 2
        print(f"grpo.py: {error}", file=sys.stderr)
    finally:
        if folder and int(os.environ.get("RANK", 0)) == 0:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, "exit_status"), "w") as file:
                file.write(f"{status}\n")
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
