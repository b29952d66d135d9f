"""Seconds a GRPO step on the reference work: this project, TRL beside it, and what the machine allows.

    python bench/step.py --work runs/w1 --tokenizer FOLDER_OF_A_QWEN_TOKENIZER --peer trl
    python bench/step.py --work FOLDER --prompts 2 --generations 2 --length 8 --steps 2    any model, a CPU too

The work is bench/work.py's (made if FOLDER does not exist). First the ceilings, measured here: bandwidth of a copy
(bytes read and written) and arithmetic of a bf16 matrix product. Then every row of ROWS through `python grpo.py`, as a
user runs it, its times read from metrics.jsonl; --peer trl adds TRL's GRPOTrainer after the first row, in a process of
its own too. Medians leave out the first step, which compiles and captures and is reported apart. The results are
written after each row; a row that fails keeps its error.

The floors, for B prompts of P tokens and V patches, G completions of R tokens each, weights and KV in bf16 (a number
on W1, B = 8, P = 468, V = 1564, G = 8, R = 256, at 4.16 TB/s and 772 TFLOP/s):

    decode     R x (2 x (blocks + head) + kv x BG(P + R/2)) bytes / bandwidth             0.47 s
    prefill    2 x (blocks x BP + vision x BV) / matrix peak                              0.05 s
    update     6 x (blocks x B(P + GR) + head x BGR + vision x BV) / matrix peak          0.54 s
               8 x where the forward is computed twice (gradient checkpointing)           0.71 s
    optimizer  30 bytes a parameter / bandwidth: AdamW reads float32 weight, gradient
               and two moments, writes the first and the last two, and the bf16 weight    0.03 s

`blocks`, `head` and `vision` are weights (2.77, 0.31 and 0.63 e9), each of which costs two operations a token, or
patch, forward and four backward; the products inside attention (3 % more here) are left out. `kv` is the bytes of a
token's keys and values. Each completion is charged with reading its own context, as in a cache that shares nothing;
`decode_shared` counts a group's prompt once (0.41 s), as rollout.py reads it. ratio_to_floor divides by
decode + prefill + update + optimizer.

Not measured here: several GPUs (bench/zero.py), vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import work

import data
import grpo
import model as modeling

transformers.utils.logging.disable_progress_bar()

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
ROWS = {  # name -> flags of grpo.py
    "stage 0": ["--zero_stage", "0"],
    "stage 0, sdpa": ["--zero_stage", "0", "--attn_implementation", "sdpa"],
    "stage 0, no checkpointing": "--zero_stage 0 --gradient_checkpointing false --max_tokens_per_forward 10240".split(),
    "stage 3": ["--zero_stage", "3"],
}
PHASES = {"wait_data": "#999999", "rollout": "#4477aa", "reward": "#ccbb44", "compare": "#228833", "update": "#ee6677"}
PEER_BATCH = 16  # completions in one of TRL's forwards: the largest power of two that was tried
ROW_SECONDS = 240  # a row that takes longer is stopped
STOP_SECONDS = 40  # torchrun gives its ranks 30 s


# --- What the scripts share ----------------------------------------------------------------------------------


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function):
    """How long a call takes, the GPU's part included."""
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def peak_gb():
    """Most GPU memory allocated since the last call, in 1e9 bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def release():
    """Give the memory of what was deleted back to the GPU, and start counting its peak anew."""
    gc.collect()  # models hold cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def meta(**more):
    """Where and when: what a table of numbers needs to be repeated."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed", "flash-attn", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return {"date": str(datetime.date.today()), "gpu": name, "versions": versions, "command": command, **more}


def write(path, meta, rows):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".tmp", "w") as file:
        json.dump({"meta": meta, "rows": rows}, file, indent=1)
    os.replace(path + ".tmp", path)


def ceilings():
    """What grpo.py's shares are of, printed; in the dtype that the work runs in, as a CPU may be slow at bf16."""
    on = ("cuda", 8192, torch.bfloat16) if torch.cuda.is_available() else ("cpu", 256, torch.float32)
    found = grpo.measure_ceilings(*on)
    copied, product = found["bytes_per_s"] / 1e12, found["flops"] / 1e12
    print(f"ceilings: copy {copied:.2f} TB/s, matrix {product:.0f} TFLOP/s", flush=True)
    return found


def sizes(path):
    """Weights of a checkpoint by what runs through them, and the bytes of one weight and of one token's KV."""
    # these scripts run in float32 on a CPU
    return config_sizes(transformers.AutoConfig.from_pretrained(path), 2 if torch.cuda.is_available() else 4)


def config_sizes(config, itemsize):
    with torch.device("meta"):
        model = getattr(transformers, modeling.FAMILIES[config.model_type][0])(config)
    model.tie_weights()
    layers, matrices = model.model.language_model.layers, lambda module: sum(p.ndim > 1 for p in module.parameters())
    blocks = [*layers, *model.model.visual.blocks]
    return modeling.weight_counts(model) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "matrices": matrices(model),
        "units": len(blocks) + matrices(model) - sum(map(matrices, blocks)),  # that ZeRO-3 gathers: a block together
        "vectors": sum(p.ndim == 1 for p in model.parameters()),
        "itemsize": itemsize,
        "kv": 2 * itemsize * sum(layer.self_attn.k_proj.out_features for layer in layers),
    }


def decode_bytes(size, rows, prompts, context, own):
    """What one decode step must read: every weight once, and `own` tokens of each row beside a context that each row
    reads for itself, or (shared) its group once. -> (classical, shared)"""
    weights = size["itemsize"] * (size["blocks"] + size["head"])
    return tuple(weights + size["kv"] * (readers * context + rows * own) for readers in (rows, prompts))


def open_work(folder, tokenizer=None):
    """(checkpoint folder, PackedDataset) of a folder that bench/work.py wrote; it is written here if it is missing."""
    if not os.path.isdir(folder):
        if tokenizer is None:
            raise SystemExit(f"--work {folder}: no such folder; give --tokenizer, with which it can be made")
        work.write_model(os.path.join(folder, "model"), tokenizer)
        work.write_data(folder)
    path = data.ensure_packed([(os.path.join(folder, "data.jsonl"), folder)], folder)
    return os.path.join(folder, "model"), data.PackedDataset(path)


# --- Floors and rows -----------------------------------------------------------------------------------------------


def load_of(size, task):
    """Operations of the update, on packed rows and on rows that repeat the prompt, of the prefill, and bytes of all
    decode steps. `task`: prompts, generations, length, prompt_tokens and patches (of one prompt)."""
    B, G, R, P, V = (task[name] for name in ("prompts", "generations", "length", "prompt_tokens", "patches"))
    classical, shared = decode_bytes(size, B * G, B, P, R / 2)
    return {
        "update_flops": 3 * modeling.forward_operations(size, B * (P + G * R), B * G * R, B * V),
        "update_flops_repeated": 3 * modeling.forward_operations(size, B * G * (P + R), B * G * R, B * G * V),
        "prefill_flops": modeling.forward_operations(size, B * P, 0, B * V),
        "decode_bytes": R * classical,
        "decode_bytes_shared": R * shared,
        "optimizer_bytes": 30 * size["parameters"],
    }


def floors(load, ceiling):
    """The docstring's table, in seconds."""
    flops, bandwidth = ceiling["flops"], ceiling["bytes_per_s"]
    found = {
        "decode": load["decode_bytes"] / bandwidth,
        "prefill": load["prefill_flops"] / flops,
        "update": load["update_flops"] / flops,
        "optimizer": load["optimizer_bytes"] / bandwidth,
    }
    apart = {"update_recomputed": found["update"] * 4 / 3, "decode_shared": load["decode_bytes_shared"] / bandwidth}
    return found | {"sum": sum(found.values())} | apart


def launcher(world):
    """What starts a script on `world` GPUs: Python, or torchrun's command."""
    if world == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
    return [*torchrun, "--nproc_per_node", f"{world}"]


def follow(name, command, folder, world=1):
    """Run a command that writes folder/metrics.jsonl, saying each step as it comes: (a dict a step, error or None)."""
    metrics, log = os.path.join(folder, "metrics.jsonl"), os.path.join(folder, "log")
    steps, began = [], time.monotonic()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world)))).split(",")
    # One process that sees several GPUs would spread TRL's batch over them. NVLink's multicast is off: it can put a
    # host's GPUs, which others may share, out of service.
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible[:world]), "NCCL_NVLS_ENABLE": "0"}
    options = {"stderr": subprocess.STDOUT, "cwd": ROOT, "env": settings}
    with open(log, "w") as out, subprocess.Popen(command, stdout=out, **options) as process:
        try:
            running = True
            while running:
                running, late = process.poll() is None, time.monotonic() - began > ROW_SECONDS
                if os.path.exists(metrics):
                    with open(metrics) as file:
                        fresh = [json.loads(line) for line in file if line.endswith("\n")][len(steps) :]
                    for step in fresh:
                        shown = {key: step.get(key) for key in ("step_time", "time/rollout", "time/update", "peak_gb")}
                        print(f"{name}: step {step['step']}: {shown}", flush=True)
                    steps += fresh
                if late:
                    return steps, f"stopped after {ROW_SECONDS} s"
                time.sleep(0.2 if running else 0)
        finally:
            process.terminate()  # torchrun ends its ranks, which it would leave behind if it was killed
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
    if process.returncode:
        with open(log, errors="replace") as file:
            lines = [line.strip() for line in file.read().replace("\r", "\n").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]  # not torchrun's own
        return steps, (errors or lines or ["no output"])[-1]
    return steps, None


def make_row(name, steps, error, task, load, ceiling):
    """A row of the table: medians over the steps after the first, and what follows from them."""
    row = {"name": name, "step_times": [step["step_time"] for step in steps], "error": error}
    if error or len(steps) < 2:
        row["error"] = error or f"{len(steps)} steps: at least 2 are needed, the first is not counted"
        return row
    counted = steps[1:]
    median = lambda key: statistics.median(step.get(key, 0.0) for step in counted)  # noqa: E731
    row |= {"step_s": median("step_time"), "first_step_s": steps[0]["step_time"]}
    row |= {f"{phase}_s": median(f"time/{phase}") for phase in PHASES}
    completions, length = task["prompts"] * task["generations"], median("completions/mean_length")
    row |= {"completions_per_s": completions / row["step_s"], "tokens_per_s": completions * length / row["step_s"]}
    # of the whole rollout and the whole update, with the prefill and the optimizer that are in them
    row["decode_bandwidth_share"] = load["decode_bytes_shared"] / row["rollout_s"] / ceiling["bytes_per_s"]
    for kind in ("", "_repeated"):
        row[f"update_matrix_share{kind}"] = load[f"update_flops{kind}"] / row["update_s"] / ceiling["flops"]
    row["peak_gb"] = max((step["peak_gb"] for step in steps if step.get("peak_gb")), default=None)
    for key in ("sampler_gap", "decode/bandwidth_share", "update/matrix_share", "completions/mean_length"):
        if any(key in step for step in counted):
            row[key] = median(key)
    return row


def compare(rows, peer, floor):
    """Fill in the ratios, as far as both sides are there."""
    theirs = next((row.get("completions_per_s") for row in rows if row["name"] == peer), None)
    for row in rows:
        mine = row.get("completions_per_s")
        row["peer_completions_per_s"] = theirs
        row["ratio_to_peer"] = mine / theirs if mine and theirs else None
        row["ratio_to_floor"] = row["step_s"] / floor["sum"] if mine else None


def our_command(args, model, folder, flags):
    total = args.prompts * args.generations
    command = [sys.executable, os.path.join(ROOT, "grpo.py"), "--model_name_or_path", model, "--output_dir", folder]
    command += ["--data_file_paths", os.path.join(args.work, "data.jsonl"), "--image_folders", args.work]
    command += ["--reward_funcs", os.path.join(HERE, "work.py") + ":distinct", "--save_only_model", "true"]
    command += ["--per_device_train_batch_size", f"{total}", "--num_generations", f"{args.generations}"]
    command += ["--max_completion_length", f"{args.length}", "--max_steps", f"{args.steps}"]
    command += ["--bf16", str(torch.cuda.is_available()).lower()]
    return command + flags


def peer_command(args, folder, world=1, deepspeed=()):
    command = [*launcher(world), os.path.abspath(__file__), "--run-peer", "--work", args.work]
    for name in ("prompts", "generations", "length"):
        command += [f"--{name}", f"{getattr(args, name)}"]
    command += ["--steps", f"{min(args.steps, 3)}", "--output", os.path.join(folder, "metrics.jsonl")]
    return [*command, *deepspeed]


# --- The peer ------------------------------------------------------------------------------------------------------


def run_peer(args):
    """TRL's GRPOTrainer on the same work, as its user sets it up: transformers' generate, flash-attn if it is there,
    gradient checkpointing; under torchrun DDP or --deepspeed's JSON, with --prompts a rank. The weights are loaded in
    bf16 and, but for DeepSpeed, AdamW runs on them in bf16, without float32 masters as this project keeps them: less
    memory and traffic, so an advantage in this comparison. Its step is timed from on_step_begin to on_step_end, which
    leaves out reading the data."""
    import datasets
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    path, dataset = open_work(args.work)
    gpu, total, world = torch.cuda.is_available(), args.prompts * args.generations, int(os.environ.get("WORLD_SIZE", 1))
    if args.deepspeed and not gpu:  # accelerate would leave DeepSpeed's own group at one process
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # which would compile for 50 s
        deepspeed.init_distributed("gloo")
    dtype = "bfloat16" if gpu else "float32"
    attention, _ = modeling.select_attention("auto", "cuda" if gpu else "cpu", getattr(torch, dtype))
    # From parts, because the folder names no processor class; the video processor, never used, is asked for.
    parts = modeling.Processor(path, "qwen2_5_vl")
    parts.tokenizer.padding_side = "left"
    images = parts.image_processor
    processor = Qwen2_5_VLProcessor(images, parts.tokenizer, Qwen2VLVideoProcessor(), chat_template=parts.chat_template)
    records = []
    for i in range(min(len(dataset), args.steps * args.prompts * world)):
        question = data.QUESTION_TEMPLATE.replace("{Question}", dataset[i]["problem"])
        picture = data.decode_image(dataset[i]["images"][0])
        records.append({"prompt": [{"role": "user", "content": question}], "image": picture})

    def distinct(prompts, completions, **columns):
        return work.distinct(prompts, [completion[0]["content"] for completion in completions])

    batch = min(PEER_BATCH, total)
    config = GRPOConfig(
        output_dir=os.path.dirname(os.path.abspath(args.output)),
        model_init_kwargs={"dtype": dtype, "attn_implementation": attention, "device_map": None},
        bf16=gpu,
        use_cpu=not gpu,
        deepspeed=args.deepspeed,
        gradient_checkpointing=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=total // batch,
        num_generations=args.generations,
        max_completion_length=args.length,
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="grpo",
        num_iterations=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # Exactly `length` tokens, and no picture placeholder among them: TRL would fail on one (this project never
        # samples it, see model.placeholder_ids), and random weights draw one every few steps.
        generation_kwargs={
            "min_new_tokens": args.length,
            "suppress_tokens": modeling.placeholder_ids(transformers.AutoConfig.from_pretrained(path)),
        },
        use_vllm=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    class Timer(TrainerCallback):
        def on_step_begin(self, *_, **__):
            synchronize()
            self.began, self.rollout = time.perf_counter(), 0.0

        def on_step_end(self, _, state, *__, **___):
            synchronize()
            step, peaks = time.perf_counter() - self.began, [peak_gb()] * world
            if world > 1:
                torch.distributed.all_gather_object(peaks, peaks[0])
            line = {"step": state.global_step, "step_time": step, "peak_gb": max(peaks) if gpu else None}
            line |= {"time/rollout": self.rollout, "time/update": step - self.rollout}
            line["completions/mean_length"] = lengths[-1]
            if state.is_world_process_zero:
                with open(args.output, "a") as file:
                    file.write(json.dumps(line) + "\n")

    timer, lengths = Timer(), []
    trainer = GRPOTrainer(
        path, distinct, config, datasets.Dataset.from_list(records), processing_class=processor, callbacks=[timer]
    )
    generate = trainer._generate_and_score_completions

    def timed(inputs):
        batch = {}
        timer.rollout += seconds(lambda: batch.update(generate(inputs)))
        lengths.append(batch["completion_mask"].sum(1).float().mean().item())
        return batch

    trainer._generate_and_score_completions = timed
    trainer.train()


# --- The command ---------------------------------------------------------------------------------------------------


def draw(path, rows, floor):
    """Stacked phases a row: the peer beside our first row above, ours with the floors below."""
    from matplotlib import pyplot as plt

    done = [row for row in rows if not row["error"]]
    peers = [row for row in done if row["name"].startswith("TRL")]
    ours = [row for row in done if row not in peers]
    parts = [part for part in (peers + ours[:1] if peers else [], ours) if part]
    if not parts:
        return print("no row succeeded: no picture")
    heights = [len(part) + (part is ours) for part in parts]
    size = {"figsize": (9, 1.4 + 0.45 * sum(heights)), "layout": "constrained", "height_ratios": heights}
    figure, axes = plt.subplots(len(parts), 1, squeeze=False, **size)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        for y, row in enumerate(part):
            left = 0.0
            for phase, colour in PHASES.items():
                axis.barh(y, row[f"{phase}_s"], left=left, color=colour, label=phase if y == 0 else None)
                left += row[f"{phase}_s"]
            axis.text(left, y, f" {row['step_s']:.2f} s", va="center")
        names = [row["name"] for row in part]
        if part is ours:
            left = 0.0
            for name, like in (
                ("prefill", "rollout"),
                ("decode", "rollout"),
                ("update", "update"),
                ("optimizer", "update"),
            ):
                axis.barh(len(part), floor[name], left=left, color=PHASES[like], edgecolor="white", alpha=0.55)
                left += floor[name]
            axis.text(left, len(part), f" {left:.2f} s: prefill and decode, update and optimizer", va="center")
            names.append("floors")
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes[-1, 0].set_xlabel("seconds a step")
    figure.savefig(os.path.splitext(path)[0] + ".png", dpi=150)
    plt.close(figure)


def print_table(rows):
    columns = "step_s first_step_s rollout_s update_s completions_per_s tokens_per_s decode_bandwidth_share "
    columns += "update_matrix_share update_matrix_share_repeated peak_gb ratio_to_peer ratio_to_floor"
    print("| row | " + " | ".join(name.replace("_", " ") for name in columns.split()) + " |")
    print("|---" * (1 + len(columns.split())) + "|")
    for row in rows:
        cells = [f"{row[name]:.4g}" if row.get(name) is not None else "" for name in columns.split()]
        print(f"| {row['name']} | " + " | ".join(cells) + f" |{' ' + row['error'] if row['error'] else ''}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder of bench/work.py")
    parser.add_argument("--tokenizer", help="makes --work if it does not exist")
    parser.add_argument("--peer", choices=["trl"])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    for name, default in (("prompts", 8), ("generations", 8), ("length", 256), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", default=os.path.join(HERE, "results", "step.json"))
    parser.add_argument("--run-peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", help=argparse.SUPPRESS)  # of --run-peer
    args = parser.parse_args()
    args.work = os.path.abspath(args.work)  # the commands run in the project's folder
    if args.run_peer:
        return run_peer(args)
    path, dataset = open_work(args.work, args.tokenizer)
    processor = modeling.Processor(path, transformers.AutoConfig.from_pretrained(path).model_type)
    prompt = data.encode_prompt(dataset[0], processor)
    task = {name: getattr(args, name) for name in ("prompts", "generations", "length")}
    task |= {"prompt_tokens": len(prompt["input_ids"]), "patches": len(prompt["pixel_values"])}
    ceiling, size = ceilings(), sizes(path)
    release()
    load = load_of(size, task)
    floor = floors(load, ceiling)
    print("floors, s: " + ", ".join(f"{name} {value:.3g}" for name, value in floor.items()), flush=True)
    where, rows = meta(task=task, ceilings=ceiling, floors=floor, sizes=size), []
    peer = f"TRL {where['versions'].get('trl', '')}"
    order = [*args.only[:1], peer, *args.only[1:]] if args.peer else args.only
    for name in order:
        with tempfile.TemporaryDirectory() as folder:
            theirs = name == peer
            command = peer_command(args, folder) if theirs else our_command(args, path, folder, ROWS[name])
            steps, error = follow(name, command, folder)
        flags = {} if theirs else {"flags": " ".join(ROWS[name])}
        rows.append(make_row(name, steps, error, task, load, ceiling) | flags)
        compare(rows, peer, floor)
        write(args.output, where, rows)
        print(f"{name}: {rows[-1]['error'] or 'done'}", flush=True)
    draw(args.output, rows, floor)
    print_table(rows)


if __name__ == "__main__":
    main()
