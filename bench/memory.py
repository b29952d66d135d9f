"""Peak GPU memory of a step beside tools/plan.py's, and what the usual advice about memory brings.

    python bench/memory.py --work runs/w1
    python bench/memory.py --work FOLDER --prompts 2 --generations 2 --length 8 --steps 2      a CPU too, without peaks

Each row is a process of its own: grpo.py on bench/work.py's work for --steps steps, the first of which compiles.
SETTINGS vary what the plan distinguishes: `planned_gb` is the largest of its phases, `peak_gb` what was allocated at
the most (torch.cuda.max_memory_allocated, 1e9 bytes), `deviation` is planned / peak - 1. ADVICE is what guides
recommend, tried on the setting BASE, in which rows of several sizes without checkpointing leave holes between tensors:
PyTorch's expandable_segments, torch.cuda.empty_cache() between rollout and update, and SDPA's kernels. What may fall
there is `reserved_gb`, the allocator's share of the GPU; `step_s`, the median after the first step, is the price.

Of SDPA's kernels, flash takes no mask; in bf16 `--attn_implementation sdpa` runs it in PyTorch's variable-length form
(model.varlen_attention). The memory-efficient and the math kernel are forced by taking that form away.

A row that fails keeps its error. Left out: several GPUs, offload. Needs the folder that bench/step.py or bench/work.py
makes.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile

import torch
from step import HERE, follow, meta, open_work, our_command, write

import grpo
import model as modeling
from tools import plan

BASE = "stage 0, sdpa, no checkpointing, small rows"
SETTINGS = {  # name -> flags of grpo.py
    "stage 0": "--zero_stage 0",
    "stage 1": "--zero_stage 1",
    "stage 2, small rows": "--zero_stage 2 --max_tokens_per_forward 5200",
    "stage 3, beta": "--zero_stage 3 --beta 0.04",
    "stage 0, eager, one group a row": "--zero_stage 0 --attn_implementation eager --max_tokens_per_forward 2600",
    BASE: "--zero_stage 0 --attn_implementation sdpa --gradient_checkpointing false --max_tokens_per_forward 5200",
}
ADVICE = ["expandable_segments", "empty_cache", "memory-efficient kernel", "math kernel"]


def act(advice):
    """grpo.py with the flags behind `--act ADVICE`, and the memory reserved among its metrics."""
    update, metrics = grpo.update_phase, grpo.step_metrics

    def emptied(*arguments):
        torch.cuda.empty_cache()
        return update(*arguments)

    def with_reserved(*arguments):
        reserved = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else None
        return metrics(*arguments) | {"reserved_gb": reserved}  # in this order: it resets the peaks

    grpo.step_metrics = with_reserved
    if advice == "empty_cache":
        grpo.update_phase = emptied
    kernels = contextlib.nullcontext()
    if advice.endswith("kernel"):
        modeling.has_varlen = lambda attention, q: False
        backend = torch.nn.attention.SDPBackend
        kernels = torch.nn.attention.sdpa_kernel(backend.MATH if "math" in advice else backend.EFFICIENT_ATTENTION)
    with kernels:
        grpo.main()


def measure(name, args, path):
    """A row of the table."""
    advice = name if name in ADVICE else "none"
    flags = SETTINGS.get(name, SETTINGS[BASE]).split()
    row = {"name": name, "flags": " ".join(flags), "on": BASE if name in ADVICE else None}
    with tempfile.TemporaryDirectory() as folder:
        _, script, *words = our_command(args, path, folder, flags)
        more = ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] * (advice == "expandable_segments")
        command = ["env", *more, sys.executable, os.path.abspath(__file__), "--act", advice, *words]
        steps, row["error"] = follow(name, command, folder)
    column = lambda key: [step[key] for step in steps if step.get(key)]  # noqa: E731
    row["step_s"] = statistics.median(column("step_time")[1:] or [0.0]) or None
    row |= {key: max(column(key), default=None) for key in ("peak_gb", "reserved_gb")}
    if name in SETTINGS:
        (given,) = grpo.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(words)
        model = plan.meta_model(given)
        zero = grpo.deepspeed_config(given, 1, model.config.text_config.hidden_size, "cpu")["zero_optimization"]
        row["planned_gb"] = max(plan.phases(plan.memory(given, model, 1, zero))) / 1e9
        row["deviation"] = row["planned_gb"] / row["peak_gb"] - 1 if row["peak_gb"] else None
    return row


def draw(path, rows):
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.6 * len(rows)), layout="constrained")
    for i, (key, colour) in enumerate(
        {"planned_gb": "#bbbbbb", "peak_gb": "#4477aa", "reserved_gb": "#ccbb44"}.items()
    ):
        values = [row.get(key) or 0.0 for row in rows]
        places = [y + 0.27 * (i - 1) for y in range(len(rows))]
        axis.barh(places, values, height=0.25, color=colour, label=key.replace("_gb", ", GB"))
        for y, value, row in zip(places, values, rows, strict=True):
            axis.text(
                value, y, f" {value:.1f}" if value else " failed" if row["error"] else "", va="center", fontsize=8
            )
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(os.path.splitext(path)[0] + ".png", dpi=150)
    plt.close(figure)


def main():
    if sys.argv[1:2] == ["--act"]:
        advice = sys.argv[2]
        del sys.argv[1:3]
        return act(advice)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    names = [*SETTINGS, *ADVICE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="; ".join(names))
    for name, default in (("prompts", 8), ("generations", 8), ("length", 256), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", default=os.path.join(HERE, "results", "memory.json"))
    args = parser.parse_args()
    args.work = os.path.abspath(args.work)  # the commands run in the project's folder
    path, _ = open_work(args.work)
    where, rows = meta(prompts=args.prompts, generations=args.generations, length=args.length, steps=args.steps), []
    for name in args.only:
        rows.append(measure(name, args, path))
        write(args.output, where, rows)
        print(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    draw(args.output, rows)


if __name__ == "__main__":
    main()
