"""How the seconds of a step grow with completions a prompt (G), prompt tokens (P) and prompts (B), beside the formula.

    python bench/growth.py --work runs/w1
    python bench/growth.py --work FOLDER --base 2 2 --generations 2 4 --prompt_tokens 64 --prompts 2      a CPU too

From --base (prompts and completions a prompt) one number varies at a time: --generations and --prompts, with the work's
own prompts and pictures, and --prompt_tokens, with prompts of text. A point is rollout.sample to full length, then
forward and backward of the packed rows, cut and checkpointed as grpo.py does it: no optimizer, no reward, no reading.

`paper_s` is bench/step.py's floors, less the optimizer's, in the forms that this program runs (a group's prompt is read
once, the forward is computed twice), and the products inside attention, which long prompts make felt. Per step:

    rollout    R x (weights + kv x B(P + G R/2)) / bandwidth + (2 x weights x BP + attention(BP^2 / 2)) / matrix peak
    update     (8 x weights x B(P + GR) + 4 x attention(B(P^2 / 2 + GR(P + R/2)))) / matrix peak

So G multiplies the completions alone, B everything but the reading of the weights, and P enters with its square only
through attention. attention(pairs) = 4 x layers x heads x head size x pairs of query and key; a head's operations are
charged to completion tokens alone, a vision tower's to patches. meta["measured_over_paper"] holds what the formula
must be multiplied with, the geometric mean over the points. Left out: completion length, optimizer, several GPUs.
Needs the folder that bench/step.py or bench/work.py makes.
"""

import argparse
import os
import statistics

import torch
from decode import text_prompts
from step import HERE, ceilings, floors, load_of, meta, open_work, peak_gb, release, seconds, sizes, write

import data
import grpo
import model as modeling
import rollout

QUICK = 1.2  # a point that takes fewer seconds is timed twice
PARTS = {"step": "paper_s", "rollout": "rollout_paper_s", "update": "update_paper_s"}  # step_s -> its formula's column


def paper(size, width, task, ceiling):
    """The docstring's formula: seconds of rollout and of update. `width`: layers x heads x head size."""
    B, G, R, P = (task[name] for name in ("prompts", "generations", "completion_tokens", "prompt_tokens"))
    load, pairs = load_of(size, task | {"length": R}), B * P * P / 2
    load["prefill_flops"] += 4 * width * pairs
    load["update_flops"] += 3 * 4 * width * (pairs + B * G * R * (P + R / 2))
    floor = floors(load, ceiling)
    return floor["decode_shared"] + floor["prefill"], floor["update_recomputed"]


def measure(policy, prompts, G, R, pad_id):
    """-> (seconds of the rollout, of the update). The warm-up runs both on the same shapes, but few decode steps and
    the first row alone: enough to compile, to capture and to get the memory."""
    model, N = policy.model, len(prompts) * G
    cuts = grpo.cut_rows([len(p["input_ids"]) for p in prompts], [R] * N, grpo.Arguments.max_tokens_per_forward)

    def update(tokens, cuts):
        for cut in cuts:
            groups = [(prompts[b], [tokens[i] for i in part]) for b, part in cut]
            (-policy(modeling.build_row(groups, model.device))[0].sum() / (N * R)).backward()

    def warm_up():
        decoder = rollout.Decoder(model, prompts, G, R, 1.0, [-1], pad_id)  # -1: no completion ends
        for _ in range(min(3, R - 1)):
            decoder.step()
        del decoder  # its copies of the weights must not count in the update's memory
        update(torch.zeros(N, R, dtype=torch.long), cuts[:1])
        model.zero_grad()

    seconds(warm_up)
    times, drawn = [], []
    while not times or (len(times) < 2 and sum(times[0]) < QUICK):
        sampling = seconds(lambda: drawn.append(rollout.sample(model, prompts, G, R, 1.0, [-1], pad_id)[0]))
        times.append((sampling, seconds(lambda: update(drawn[-1].cpu(), cuts))))
        model.zero_grad()
    return tuple(statistics.mean(part) for part in zip(*times, strict=True))


def draw(path, rows, base, ratios):
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained", sharey=True)
    panels = [
        ("generations", "completions a prompt, G", lambda row: row["patches"] and row["prompts"] == base[0]),
        ("prompt_tokens", "tokens of a prompt, P", lambda row: not row["patches"]),
        ("prompts", "prompts a step, B", lambda row: row["patches"] and row["generations"] == base[1]),
    ]
    for axis, (key, label, belongs) in zip(axes, panels, strict=True):
        points = sorted(filter(belongs, rows), key=lambda row: row[key])
        x = [row[key] for row in points]
        for (part, formula), colour in zip(PARTS.items(), ("#222222", "#4477aa", "#ee6677"), strict=True):
            axis.plot(x, [row[f"{part}_s"] for row in points], "o", color=colour, label=part)
            line = [row[formula] * ratios[part] for row in points]
            axis.plot(x, line, color=colour, label=f"formula x {ratios[part]:.3g}")
        axis.set(xlabel=label, xlim=(0, max(x, default=1) * 1.06), xticks=x)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="seconds", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(os.path.splitext(path)[0] + ".png", dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    parser.add_argument("--base", type=int, nargs=2, default=[8, 8], help="prompts, completions a prompt")
    parser.add_argument("--generations", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--prompt_tokens", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--output", default=os.path.join(HERE, "results", "growth.json"))
    args = parser.parse_args()
    path, dataset = open_work(args.work)
    ceiling, size = ceilings(), sizes(path)
    model, processor = modeling.load_policy(path, torch_dtype="bfloat16" if torch.cuda.is_available() else "float32")
    modeling.checkpoint_blocks(model, use_reentrant=True)
    policy, pad_id = modeling.Policy(model), modeling.eos_token_ids(model, processor.tokenizer)[0]
    width = sum(layer.self_attn.o_proj.in_features for layer in model.model.language_model.layers)
    points = [(args.base[0], G, None) for G in args.generations]
    points += [(*args.base, tokens) for tokens in args.prompt_tokens] + [(B, args.base[1], None) for B in args.prompts]
    where, rows = meta(ceilings=ceiling, sizes=size, width=width, attention=model.attention_choice[0]), []
    for B, G, tokens in dict.fromkeys(points):  # the base point once
        release()
        prompts = [data.encode_prompt(dataset[i % len(dataset)], processor) for i in range(B)]
        prompts = grpo.with_positions(model, prompts)
        if tokens:
            prompts = text_prompts(model, dataset[0], processor, B, tokens)
        row = {"prompts": B, "generations": G, "prompt_tokens": len(prompts[0]["input_ids"])}
        row |= {"completion_tokens": args.length, "patches": 0 if tokens else len(prompts[0]["pixel_values"])}
        row["rollout_s"], row["update_s"] = measure(policy, prompts, G, args.length, pad_id)
        row["rollout_paper_s"], row["update_paper_s"] = paper(size, width, row, ceiling)
        row |= {"step_s": row["rollout_s"] + row["update_s"], "paper_s": row["rollout_paper_s"] + row["update_paper_s"]}
        rows.append(row | {"peak_gb": peak_gb()})
        print({key: round(value, 3) if value else value for key, value in rows[-1].items()}, flush=True)
        ratios = {p: statistics.geometric_mean(r[f"{p}_s"] / r[column] for r in rows) for p, column in PARTS.items()}
        write(args.output, where | {"measured_over_paper": ratios}, rows)
    draw(args.output, rows, args.base, ratios)


if __name__ == "__main__":
    main()
