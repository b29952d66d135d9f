"""Milliseconds a decode step over batch and context, beside what reading the memory takes and transformers' generate.

    python bench/decode.py --work runs/w1
    python bench/decode.py --work FOLDER --batch 1 4 --context 64 --generate none      any model, a CPU too

A batch of n completions is n / 8 prompts x 8 (n < 8: one prompt x n), the prompts text of `context` tokens. `ms` is
the median over blocks of steps after a warm-up that compiles and captures. `floor_ms` is the time to read, at the
measured bandwidth of a copy, the language model's weights and head once and for each completion its own whole context,
as a cache that shares nothing does; `shared_floor_ms` counts a group's prompt once, as rollout.py reads it.
`generate_ms`, for the pairs of --generate alone: transformers' generate on the same model before it is switched to
packed attention, prompts repeated, the time for 17 tokens less that for one.

Needs the folder that bench/step.py or bench/work.py makes. Left out: pictures, which change nothing after the prefill.
"""

import argparse
import os
import statistics
import time

import torch
from step import HERE, ceilings, decode_bytes, meta, open_work, peak_gb, release, seconds, sizes, write

import data
import model as modeling
import rollout

BLOCK, BLOCKS, WARM_UP = 8, 4, 24  # steps timed together, how often, and steps before
GENERATED = 16


def text_prompts(model, record, processor, count, context):
    """`count` prompts of `context` tokens: a record's own text over and over, its picture's placeholders left out."""
    ids = data.encode_prompt(record, processor)["input_ids"]
    ids = ids[~torch.isin(ids, torch.tensor(modeling.placeholder_ids(model.config)))]
    prompt = {"input_ids": ids.repeat(-(-context // len(ids)))[:context], "pixel_values": None, "image_grid_thw": None}
    return [prompt | {"position_ids": modeling.prompt_positions(model, prompt)}] * count


def generate_ms(model, prompts, G):
    """transformers' generate, a token: the prompts repeated G times, sampling from the whole distribution."""
    ids = torch.stack([prompt["input_ids"] for prompt in prompts]).repeat_interleave(G, dim=0).to(model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}

    def generate(count):
        model.generate(**inputs, **plain, min_new_tokens=count, max_new_tokens=count)

    generate(2)  # warms up
    one, all = seconds(lambda: generate(1)), seconds(lambda: generate(1 + GENERATED))
    return (all - one) / GENERATED * 1000


def decode_ms(model, prompts, G, pad_id):
    """(median ms a step, the spread of its blocks, seconds from the prompts to the end of the warm-up)"""
    began = time.perf_counter()
    decoder = rollout.Decoder(model, prompts, G, WARM_UP + BLOCK * BLOCKS + 1, 1.0, [-1], pad_id)  # -1: none ends
    seconds(lambda: [decoder.step() for _ in range(WARM_UP)])
    ready = time.perf_counter() - began
    blocks = [seconds(lambda: [decoder.step() for _ in range(BLOCK)]) / BLOCK * 1000 for _ in range(BLOCKS)]
    return statistics.median(blocks), [min(blocks), max(blocks)], ready


def draw(path, rows):
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 5.5), layout="constrained")
    colours = dict(
        zip(sorted({row["context"] for row in rows}), ("#4477aa", "#ee6677", "#228833", "#ccbb44"), strict=False)
    )
    for context, colour in colours.items():
        part = sorted((row for row in rows if row["context"] == context and row["ms"]), key=lambda row: row["batch"])
        batches = [row["batch"] for row in part]
        axis.plot(batches, [row["ms"] for row in part], "o-", color=colour, label=f"context {context}")
        axis.plot(batches, [row["floor_ms"] for row in part], "--", color=colour)
        axis.plot(batches, [row["shared_floor_ms"] for row in part], ":", color=colour)
    slow = [row for row in rows if row.get("generate_ms")]
    axis.plot(
        [row["batch"] for row in slow], [row["generate_ms"] for row in slow], "kx", label="transformers' generate"
    )
    axis.plot([], [], "k--", label="floor, every row reads its own context")
    axis.plot([], [], "k:", label="floor, a group shares its prompt")
    batches = sorted({row["batch"] for row in rows})
    axis.set(xscale="log", yscale="log", xlabel="completions decoded together", ylabel="ms a step")
    axis.set_xticks(batches, batches)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    ticks = [t for k in range(-3, 5) for t in (10.0**k, 2 * 10.0**k, 5 * 10.0**k)]
    low, high = axis.get_ylim()
    axis.set_yticks([t for t in ticks if low <= t <= high])
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(os.path.splitext(path)[0] + ".png", dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--generate", nargs="*", default=["8x512", "64x512"], help="batch x context, or none")
    parser.add_argument("--output", default=os.path.join(HERE, "results", "decode.json"))
    args = parser.parse_args()
    path, dataset = open_work(args.work)
    ceiling, size = ceilings(), sizes(path)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    model, processor = modeling.load_policy(path, torch_dtype=dtype)
    pad_id, record = modeling.eos_token_ids(model, processor.tokenizer)[0], dataset[0]
    pairs = [(batch, context) for context in args.context for batch in args.batch]
    make = lambda batch, context: text_prompts(model, record, processor, max(1, batch // 8), context)  # noqa: E731
    theirs = {}
    for module in model.modules():
        vars(module).pop("forward", None)  # transformers' own layers and norms, for its generate
    for batch, context in pairs:
        if f"{batch}x{context}" in args.generate:
            theirs[batch, context] = generate_ms(model, make(batch, context), min(8, batch))
            print(f"generate: batch {batch}, context {context}: {theirs[batch, context]:.2f} ms", flush=True)
    modeling.use_own_layers(model, model.attention_choice[0])
    modeling.Policy(model)
    release()
    where, rows = meta(ceilings=ceiling, sizes=size, attention=model.attention_choice[0]), []
    for batch, context in pairs:
        prompts, G = make(batch, context), min(8, batch)
        own = WARM_UP + BLOCK * BLOCKS / 2  # own tokens in the middle of what is timed
        floors = [n / ceiling["bytes_per_s"] * 1000 for n in decode_bytes(size, batch, len(prompts), context, own)]
        row = {
            "batch": batch,
            "context": context,
            "ms": None,
            "error": None,
            "floor_ms": floors[0],
            "shared_floor_ms": floors[1],
        }
        try:
            row["ms"], row["spread_ms"], row["warm_up_s"] = decode_ms(model, prompts, G, pad_id)
            row |= {f"ratio_to_{name}": row["ms"] / row[f"{name}_ms"] for name in ("floor", "shared_floor")}
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        row |= {"generate_ms": theirs.get((batch, context)), "peak_gb": peak_gb()}
        rows.append(row)
        write(args.output, where, rows)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        release()  # or blocks of the last shape keep the next one from fitting
    draw(args.output, rows)


if __name__ == "__main__":
    main()
