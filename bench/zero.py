"""GRPO on several GPUs: DDP, ZeRO-2 and ZeRO-3, TRL beside them, and what more GPUs would do, on paper.

    python bench/zero.py --work runs/w1 --tokenizer FOLDER_OF_A_QWEN_TOKENIZER --peer trl
    python bench/zero.py --work FOLDER --prompts 4 --generations 2 --length 8 --steps 4    two CPU processes, any model
    python bench/zero.py --paper                                                           the table on paper alone

Every row of MODES is a torchrun of its own on --world GPUs that share --prompts x --generations completions a step; two
more, on one and on --world GPUs, keep that many on each GPU. A rank is `grpo.py` with three looks inside: what
gathering the weights for sampling takes, the peak of every rank, and the last step's update under PyTorch's profiler,
which gives the time in collectives and the share of it during which other kernels ran. That step is left out of the
medians, as is the first, which compiles. A collective's time includes waiting for the slowest rank. --peer trl runs
TRL's GRPOTrainer in the same modes (DDP without DeepSpeed), two steps of which the second counts.
--resume keeps the rows that --output already has, where a machine is lent for less time than all rows take.

On paper, for W GPUs in nodes of 8 and n completions on each GPU (bytes and operations are bench/step.py's floors, for
bf16; shares of what the GPU allows are those measured on one):

    ring(S, c)   S (W - 1) / W / min(NVLink, 8 x network) + c x (hops in nodes x 1.9 us + hops between nodes x 4 us)
    rollout      decode / share of bandwidth + prefill / share of matrix peak
    update       update / share of matrix peak
    gather       ring(weights, a call a parameter): in the open, matrices before the rollout, norms and biases, which
                 DeepSpeed keeps whole, after the optimizer
    traffic      2 ring(weights, a call a block) + ring(gradients, a call a bucket), for every packed row
    step         rollout + gather + max(update, traffic) where all traffic hides, or their sum where none does

Latencies are those NCCL's own tuning assumes for a ring with LL128 (hwLat in src/graph/tuning.cc), NVLink's bandwidth
was measured with an all-gather of two H200s, the network's is assumed: 400 Gb/s a GPU. The traffic's calls and bytes
are the most there can be: DeepSpeed prefetches several small blocks in one call, and keeps 1e9 parameters between
forward and backward. Left out: the optimizer, whose share of the update shrinks with W; stragglers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time

import step as bench
import torch
import torch.distributed as dist
import transformers
import work
from torch.profiler import ProfilerActivity, profile

import data
import grpo
import model as modeling

with open(os.path.join(bench.ROOT, "ds_zero3.json")) as file:
    TUNED = json.load(file)["zero_optimization"]
MODES = {  # name -> DeepSpeed's zero_optimization
    "DDP": {"stage": 0},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3 default": {"stage": 3},
    "ZeRO-3 tuned": TUNED,
}
WEAK = "ZeRO-3 tuned"  # the mode that is also run with --prompts on each GPU
PEER_STEPS = 2
NODE = 8  # GPUs
NVLINK, NETWORK = 280e9, 50e9  # bytes a second and GPU
HOP, NETWORK_HOP = 1.9e-6, 4e-6  # seconds


# --- One rank ------------------------------------------------------------------------------------------------------


def run_rank(flags):
    """grpo.py's command as this rank, with the three looks inside; nothing is saved at the end."""
    seen, gather, update, measure = {}, modeling.gathered, grpo.update_phase, grpo.step_metrics
    gpu = torch.cuda.is_available()

    @contextlib.contextmanager
    def gathered(engine):
        bench.synchronize()
        began = time.perf_counter()
        with gather(engine) as model:
            bench.synchronize()
            seen["time/gather"] = time.perf_counter() - began
            yield model

    def update_phase(run, *step):
        if run.step + 1 < run.total:
            return update(run, *step)
        dist.barrier()  # or the wait for a rank whose profiler starts later would count as communication
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
            learned = update(run, *step)
            bench.synchronize()
        seen.update(communication(profiler.events(), gpu))
        return learned

    def step_metrics(run, *step):
        peaks = [torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0] * run.world
        dist.all_gather_object(peaks, peaks[0])
        return measure(run, *step) | seen | ({"peak_gb": max(peaks), "peaks_gb": peaks} if gpu else {})

    modeling.gathered, grpo.update_phase, grpo.step_metrics = gathered, update_phase, step_metrics
    grpo.save_checkpoint = lambda run: None
    sys.argv = ["grpo.py", *flags]
    grpo.main()


def communication(events, gpu):
    """Of a profile: seconds in which collectives ran, and in which other work ran beside them."""
    collectives, compute = [], []
    for event in events:
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if event.name.startswith("nccl" if gpu else "gloo:") and on_gpu == gpu:
            collectives.append(span)
        elif gpu and on_gpu and not event.is_user_annotation and not event.name.startswith("Mem"):  # copies are none
            compute.append(span)
        elif not gpu and event.name.startswith("aten::"):
            compute.append(span)
    return dict(zip(("collectives_s", "hidden_s"), overlap(collectives, compute), strict=True))


def merged(spans):
    """Intervals (start, end) -> those of their union, in order."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(these, those):
    """The length of the union of `these` intervals, and of its part that `those` cover."""
    these, those = merged(these), merged(those)
    total, common, i, j = sum(end - start for start, end in these), 0.0, 0, 0
    while i < len(these) and j < len(those):
        common += max(0.0, min(these[i][1], those[j][1]) - max(these[i][0], those[j][0]))
        if these[i][1] < those[j][1]:
            i += 1
        else:
            j += 1
    return total, common


# --- On paper ------------------------------------------------------------------------------------------------------


def ring(size, calls, world):
    """Seconds that `calls` all-gathers, or reduce-scatters, of `size` bytes in all take: every rank receives all but
    its own part, and each call passes every link but one."""
    if world == 1:
        return 0.0
    nodes = math.ceil(world / NODE)
    between = nodes if nodes > 1 else 0
    bandwidth = min(NVLINK, NODE * NETWORK) if nodes > 1 else NVLINK
    return size * (world - 1) / world / bandwidth + calls * ((world - 1 - between) * HOP + between * NETWORK_HOP)


def on_paper(size, task, ceiling, shares, world, rows=1):
    """The docstring's table, in seconds. `size`: step.config_sizes; `task`: of one GPU, as step.load_of takes it;
    `shares`: {"decode", "update"} of the ceilings that a single GPU reached."""
    floor, weights = bench.floors(bench.load_of(size, task), ceiling), size["itemsize"] * size["parameters"]
    found = {
        "rollout": floor["decode_shared"] / shares["decode"] + floor["prefill"] / shares["update"],
        "gather": ring(weights, size["matrices"] + size["vectors"], world),
        "update": floor["update"] / shares["update"],
    }
    buckets = math.ceil(size["parameters"] / TUNED["reduce_bucket_size"])
    found["traffic"] = rows * (2 * ring(weights, size["units"], world) + ring(weights, buckets, world))
    found["step"] = found["rollout"] + found["gather"] + max(found["update"], found["traffic"])
    found["step_exposed"] = found["rollout"] + found["gather"] + found["update"] + found["traffic"]
    tokens = task["prompts"] * (task["prompt_tokens"] + task["generations"] * task["length"]) / rows
    return found | {"break_even": tokens * found["traffic"] / found["update"]}


def paper_rows(results):
    """on_paper for three models and four sizes of machine, from what one GPU gave in step.json."""
    with open(os.path.join(results, "step.json")) as file:
        measured = json.load(file)
    task, ceiling = measured["meta"]["task"], measured["meta"]["ceilings"]
    one = next(row for row in measured["rows"] if row["name"] == "stage 3")
    shares = {"decode": one["decode/bandwidth_share"], "update": one["update/matrix_share"]}
    rows = []
    for name in work.SHAPES:
        size = bench.config_sizes(work.config(name), itemsize=2)
        for world in (1, 2, 8, 64, 512):
            row = {"model": name, "world": world, "weights_gb": 2 * size["parameters"] / 1e9, "measured": None}
            rows.append(row | on_paper(size, task, ceiling, shares, world))
    rows[0]["measured"] = one["step_s"]
    path = os.path.join(results, "zero.json")
    if os.path.exists(path):
        with open(path) as file:
            found = json.load(file)
        n = task["prompts"] * task["generations"]
        for row in found["rows"] if found["meta"]["gpu"] else ():
            if row["mode"] == WEAK and row["world"] == 2 and row["completions"] == 2 * n:
                rows[1]["measured"] = row.get("step_s")
    return rows


# --- The command ---------------------------------------------------------------------------------------------------


def settings(mode, folder):
    """A DeepSpeed JSON of the mode, the same for both programs; each chooses its optimizer, AdamW of torch."""
    names = "gradient_clipping train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps".split()
    path = os.path.join(folder, "deepspeed.json")
    with open(path, "w") as file:
        config = dict.fromkeys(names, "auto") | {"bf16": {"enabled": "auto"}, "steps_per_print": 10**9}
        json.dump(config | {"zero_optimization": MODES[mode]}, file)
    return path


def measure(args, path, row, task, load, ceiling, peer):
    """Run one row of ours or of the peer's and put what it gave into the row."""
    mode, world = row["mode"], row["world"]
    mine = argparse.Namespace(**vars(args) | {"prompts": task["prompts"]})
    name = f"{'TRL' if peer else 'ours'}, {mode}, {world} x {task['prompts'] * task['generations']}"
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--deepspeed", settings(mode, folder)]
        if peer:
            mine.steps = PEER_STEPS
            command = bench.peer_command(mine, folder, world, [] if mode == "DDP" else flags)
        else:
            ours = bench.our_command(mine, path, folder, flags)[2:]  # its flags, behind Python and grpo.py
            command = [*bench.launcher(world), os.path.abspath(__file__), "--rank", *ours]
        steps, error = bench.follow(name, command, folder, world)
    found = bench.make_row(name, steps if peer else steps[:-1], error, task, load, ceiling)
    if not found["error"]:
        for key in ("completions_per_s", "tokens_per_s"):
            found[key] *= world
        if not peer:
            found["gather_s"] = statistics.median(step["time/gather"] for step in steps[1:-1])
            found |= {key: steps[-1][key] for key in ("collectives_s", "hidden_s")}
            found["hidden_share"] = found["hidden_s"] / found["collectives_s"] if found["collectives_s"] else None
    print(f"{name}: {found['error'] or 'done'}", flush=True)
    row |= {f"peer_{key}" if peer else key: value for key, value in found.items() if key != "name"}


def compare(rows):
    """Fill in the ratios, as far as both sides are there."""
    by = {(row["mode"], row["world"], row["completions"]): row.get("completions_per_s") for row in rows}
    for row in rows:
        mine, world = row.get("completions_per_s"), row["world"]
        for name, other in (
            ("peer", row.get("peer_completions_per_s")),
            ("ddp", by.get(("DDP", world, row["completions"]))),
            ("one_gpu", by.get((row["mode"], 1, row["completions"] / world))),
        ):
            row[f"ratio_to_{name}"] = mine / other if mine and other else None


def print_table(rows, columns):
    print("| " + " | ".join(name.replace("_", " ") for name in columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        cells = [
            f"{v:.3g}" if isinstance(v := row.get(name), float) else "" if v is None else f"{v}" for name in columns
        ]
        print("| " + " | ".join(cells) + " |")


def draw(path, rows):
    """Completions a second, seconds in collectives and peak memory; a row that failed keeps its place."""
    from matplotlib import pyplot as plt

    size = {"figsize": (11, 1.5 + 0.5 * len(rows)), "layout": "constrained", "sharey": True}
    figure, axes = plt.subplots(1, 3, **size)
    for y, row in enumerate(rows):
        for axis, key in ((axes[0], "completions_per_s"), (axes[2], "peak_gb")):
            for shift, prefix, colour, label in (
                (-0.2, "", "#4477aa", "this project"),
                (0.2, "peer_", "#bbbbbb", "TRL"),
            ):
                value = row.get(prefix + key)
                if value:
                    axis.barh(y + shift, value, height=0.38, color=colour, label=label)
                    axis.text(value, y + shift, f" {value:.3g}", va="center", fontsize="small")
        hidden, total = row.get("hidden_s") or 0.0, row.get("collectives_s") or 0.0
        axes[1].barh(y, hidden, height=0.5, color="#228833", label="other work beside them")
        axes[1].barh(y, total - hidden, left=hidden, height=0.5, color="#ee6677", label="nothing beside them")
        axes[1].text(total, y, f" {total:.2g}", va="center", fontsize="small")
    titles = ("completions a second", "seconds in collectives, one update", "peak GB, the fullest GPU")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel(title)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        entries = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
        if entries:
            axis.legend(entries.values(), entries.keys(), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    names = [f"{row['mode']}, {row['world']} GPU, {row['completions']} completions" for row in rows]
    axes[0].set_yticks(range(len(rows)), names)
    axes[0].invert_yaxis()
    figure.savefig(os.path.splitext(path)[0] + ".png", dpi=150)
    plt.close(figure)


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", help="folder of bench/work.py")
    parser.add_argument("--tokenizer", help="makes --work if it does not exist")
    parser.add_argument("--peer", choices=["trl"])
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES))
    for name, default in (("world", 2), ("prompts", 8), ("generations", 8), ("length", 256), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--resume", action="store_true", help="keep the rows that --output has")
    parser.add_argument("--paper", action="store_true", help="print the table on paper, and stop")
    parser.add_argument("--output", default=os.path.join(bench.HERE, "results", "zero.json"))
    args = parser.parse_args()
    if args.paper:
        columns = "model world weights_gb rollout gather update traffic step step_exposed break_even measured".split()
        return print_table(paper_rows(os.path.dirname(args.output)), columns)
    if not args.work or args.prompts % args.world or args.steps < 4:
        parser.error(
            "give --work, --prompts that --world divides, and at least 4 --steps: the first and last do not count"
        )
    args.work = os.path.abspath(args.work)
    path, dataset = bench.open_work(args.work, args.tokenizer)
    processor = modeling.Processor(path, transformers.AutoConfig.from_pretrained(path).model_type)
    prompt = data.encode_prompt(dataset[0], processor)
    task = {name: getattr(args, name) for name in ("prompts", "generations", "length")}
    task |= {"prompt_tokens": len(prompt["input_ids"]), "patches": len(prompt["pixel_values"])}
    ceiling, size, rows = bench.ceilings(), bench.sizes(path), []
    if args.resume and os.path.exists(args.output):
        with open(args.output) as file:
            rows = json.load(file)["rows"]
    n, where = args.prompts * args.generations, bench.meta(task=task, ceilings=ceiling, sizes=size)
    wanted = [(mode, args.world, n) for mode in args.only]
    wanted += [(WEAK, world, world * n) for world in (1, args.world) if WEAK in args.only]
    for mode, world, completions in wanted:
        if not any((row["mode"], row["world"], row["completions"]) == (mode, world, completions) for row in rows):
            blank = dict.fromkeys(("completions_per_s", "peer_completions_per_s", "peak_gb", "peer_peak_gb"))
            rows.append({"mode": mode, "world": world, "completions": completions} | blank)
    theirs = [row for row in rows if args.peer and (row["world"], row["completions"]) == (args.world, n)]
    jobs = [(row, False) for row in rows] + [(row, True) for row in reversed(theirs)]
    for row, peer in jobs:
        if row.get("peer_completions_per_s" if peer else "completions_per_s"):
            continue
        share = task | {"prompts": row["completions"] // args.generations // row["world"]}
        measure(args, path, row, share, bench.load_of(size, share), ceiling, peer)
        compare(rows)
        bench.write(args.output, where, rows)
    draw(args.output, rows)
    columns = (
        "mode world completions completions_per_s peer_completions_per_s ratio_to_peer ratio_to_ddp ratio_to_one_gpu "
    )
    columns += "step_s rollout_s update_s gather_s collectives_s hidden_share peak_gb peer_peak_gb error peer_error"
    print_table(rows, columns.split())


if __name__ == "__main__":
    main()
