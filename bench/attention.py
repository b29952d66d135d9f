"""Seconds and memory of one group's update: attention backend x checkpointing x repeated or packed rows.

    python bench/attention.py --work runs/w1
    python bench/attention.py --work FOLDER --generations 2 --length 8 --attention eager sdpa      a CPU too

One forward and backward of a 640x480 picture's prompt with G = 8 completions of 256 random tokens, loss
-mean(log-prob), on a model loaded anew for every row: no optimizer, so the memory is weights, gradients and
activations. `repeated` is how VLM-R1 does it, prompt and pixels G times through transformers' own forward, logits of
every token, then the log-softmax of each completion; `packed` is model.Policy, the prompt once. `vlm_r1_gb` marks the
three settings for which VLM-R1's guide publishes the memory of a GPU (a whole training step's): 72, 58 and 42 GB.

Needs the folder that bench/step.py or bench/work.py makes. A row that runs out of memory keeps its error.
"""

import argparse
import itertools
import os
import statistics

import torch
from step import HERE, meta, open_work, peak_gb, release, seconds, write

import data
import model as modeling

VLM_R1_GB = {  # (attention, checkpointing, form) -> the guide's GB a GPU
    ("eager", False, "repeated"): 72,
    ("flash_attention_2", False, "repeated"): 58,
    ("flash_attention_2", True, "repeated"): 42,
}


def repeated_logps(model, prompt, completions):
    """(G, R) log-probs from rows that repeat prompt and pictures, batched."""
    G, P = len(completions), len(prompt["input_ids"])
    ids = torch.cat([prompt["input_ids"].expand(G, -1), completions], dim=1).to(model.device)  # (G, T)
    kinds = (ids == model.config.image_token_id).int()
    kinds[:, P:] = 0
    pixels = prompt["pixel_values"].repeat(G, 1).to(model.device)
    grid = prompt["image_grid_thw"].repeat(G, 1).to(model.device)
    pictures = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **pictures).logits  # (G, T, V)
    rows = [row[P - 1 : -1].log_softmax(-1) for row in logits]  # in the model's dtype, a row at a time, as there
    return torch.stack([row.gather(1, own[P:, None])[:, 0] for row, own in zip(rows, ids, strict=True)])


def measure(path, attention, checkpointing, form, G, R, repeats, record):
    """-> {seconds, peak_gb, loss} of one forward and backward on a fresh model."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    model, processor = modeling.load_policy(path, attn_implementation=attention, torch_dtype=dtype)
    prompt = data.encode_prompt(record, processor)
    generator = torch.Generator().manual_seed(0)
    ordinary = min(modeling.placeholder_ids(model.config))  # ids below it are text
    completions = torch.randint(ordinary - 8, (G, R), generator=generator)
    model.train()  # transformers checkpoints in training mode alone; these families have no dropout
    if form == "packed":
        if checkpointing:
            modeling.checkpoint_blocks(model, use_reentrant=True)
        policy = modeling.Policy(model)
        prompt["position_ids"] = modeling.prompt_positions(model, prompt)
        row = modeling.build_row([(prompt, list(completions))], model.device)
        logps = lambda: policy(row)[0]  # noqa: E731
    else:
        for module in model.modules():
            vars(module).pop("forward", None)  # transformers' own layers and norms again
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logps = lambda: repeated_logps(model, prompt, completions)  # noqa: E731
    losses = []

    def update():
        loss = -logps().mean()
        loss.backward()
        losses.append(loss.detach())
        model.zero_grad()

    first = seconds(update)  # compiles and warms up
    times = [seconds(update) for _ in range(repeats)]
    return {"seconds": statistics.median(times), "first_s": first, "peak_gb": peak_gb(), "loss": losses[-1].item()}


def draw(path, rows):
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 0.8 + 0.36 * len(rows)), layout="constrained", sharey=True)
    names = [f"{r['attention']}, {'' if r['checkpointing'] else 'no '}checkpointing, {r['form']}" for r in rows]
    colours = ["#4477aa" if row["form"] == "packed" else "#bbbbbb" for row in rows]
    for axis, key in zip(axes, ("seconds", "peak_gb"), strict=True):
        values = [row.get(key) or 0.0 for row in rows]
        axis.barh(range(len(rows)), values, color=colours)
        for y, (row, value) in enumerate(zip(rows, values, strict=True)):
            text = "failed" if row["error"] else f"{value:.3g}" if row[key] is not None else "not measured"
            if key == "peak_gb" and row["vlm_r1_gb"]:
                text += f"   (VLM-R1's guide: {row['vlm_r1_gb']})"
            axis.text(value, y, f" {text}", va="center")
        axis.margins(x=0.8 if key == "peak_gb" else 0.15)
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), names)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("seconds, one group")
    axes[1].set_xlabel("peak GB")
    figure.savefig(os.path.splitext(path)[0] + ".png", dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    parser.add_argument("--attention", nargs="+", default=["eager", "sdpa", "flash_attention_2"])
    for name, default in (("generations", 8), ("length", 256), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", default=os.path.join(HERE, "results", "attention.json"))
    args = parser.parse_args()
    path, dataset = open_work(args.work)
    where, rows = meta(generations=args.generations, length=args.length), []
    for setting in itertools.product(args.attention, (False, True), ("repeated", "packed")):
        attention, checkpointing, form = setting
        row = {"attention": attention, "checkpointing": checkpointing, "form": form, "error": None}
        try:
            row |= measure(path, *setting, args.generations, args.length, args.repeats, dataset[0])
        except (torch.OutOfMemoryError, ValueError, ImportError) as error:  # ValueError: no flash-attn here
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        row["vlm_r1_gb"] = VLM_R1_GB.get(setting)
        rows.append(row)
        write(args.output, where, rows)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        release()  # the next row starts from an empty GPU
    draw(args.output, rows)


if __name__ == "__main__":
    main()
