"""The embedded default: everything that `bash launch.sh` needs when it is given nothing.

It makes, offline and in about a minute on two CPU cores,

1. synthetic referring-expression pictures (VLM-R1's jsonl beside PNG files): one rectangle or ellipse on a colour ramp;
   held out are *boxes* that training never draws, not other pictures of the same boxes. The corners lie on a grid, so
   there are only 784 boxes, and a held-out picture of a training box would measure memory;
2. a tiny random Qwen2.5-VL (1.8 M parameters) with a character-level tokenizer that keeps Qwen's special tokens;
3. a short supervised cold start on training boxes. GRPO needs it, because it can only reinforce what the policy
   already samples: from random weights it learns the format and then one constant box for every picture. The cold
   start's labels are sloppy on purpose, each edge mostly a cell off, as if drawn in a hurry: the policy learns to see
   where things are and stays unsure of the edges. That spread is what GRPO feeds on, and the exact reward mends it;
4. `flags.txt`, the flags that grpo.py is then started with, one token a line: the same flags a user types.

It leaves out whatever makes real data hard: several objects, words that must be understood, photographs.

    python tools/demo.py --output runs/demo --seed 0
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

# Threads that wait without spinning. On cores shared with other work the spinning costs far more than the second core
# brings: with one other busy process on two cores a step of the cold start took 7 s instead of 0.4.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import model as modeling

SIDE = 56  # pixels: 4 x 4 patches of 14, merged 2 x 2 into four picture tokens
CELL = 7
GRID = list(range(0, SIDE + 1, CELL))  # where corners may lie: 0, 7, ..., 56
# Every colour is strong in blue and the background has none: what is shape and what is not can be read off one channel,
# which is what makes the task learnable in seconds.
COLOURS = {
    "blue": (40, 60, 255),
    "white": (255, 255, 255),
    "cyan": (30, 220, 255),
    "violet": (150, 40, 255),
    "pink": (255, 110, 220),
    "lavender": (140, 140, 230),
}
TEMPLATE = "{Question}"  # the tiny model needs no instructions, and a short prompt is a fast one
SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>".split()
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# Qwen2.5-VL's format (role lines, vision marks round one pad a picture) without its default system prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def split_boxes(seed, held_out):
    """(training boxes, held-out boxes): every box on the grid at least two cells wide and high, in one of the two."""
    spans = [(a, b) for a in GRID for b in GRID if b - a >= 2 * CELL]
    boxes = [(x1, y1, x2, y2) for x1, x2 in spans for y1, y2 in spans]
    random.Random(seed).shuffle(boxes)
    return boxes[held_out:], boxes[:held_out]


def draw(box, colour, shape):
    """A picture whose background is red towards the right and green towards the bottom, so colour tells position."""
    ramp = np.linspace(30, 225, SIDE)
    pixels = np.stack(np.broadcast_arrays(ramp[None, :], ramp[:, None], 20.0), axis=-1)  # (SIDE, SIDE, 3)
    picture = Image.fromarray(pixels.astype(np.uint8))
    x1, y1, x2, y2 = box
    paint = ImageDraw.Draw(picture)
    # PIL draws the far edge too: a box that ends at x2 covers pixels x1 .. x2 - 1.
    (paint.rectangle if shape == "box" else paint.ellipse)((x1, y1, x2 - 1, y2 - 1), fill=COLOURS[colour])
    return picture


def write_data(folder, seed, pictures_per_box=4, held_out=96):
    """Writes train.jsonl, val.jsonl, their PNG files and demo.yaml; solutions are in the pixels of the picture."""
    rng = random.Random(seed + 1)
    train, val = split_boxes(seed, held_out)
    for split, boxes in ("train", train * pictures_per_box), ("val", val):
        (folder / split).mkdir(parents=True, exist_ok=True)
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for number, box in enumerate(boxes):
                colour, shape = rng.choice(list(COLOURS)), rng.choice(["box", "ellipse"])
                name = f"{split}/{number:04d}.png"
                draw(box, colour, shape).save(folder / name)
                turns = [
                    {"from": "human", "value": f"<image>{colour} {shape}"},
                    {"from": "gpt", "value": f"<answer>{list(box)}</answer>"},
                ]
                file.write(json.dumps({"id": f"{split}-{number}", "image": name, "conversations": turns}) + "\n")
    sources = [
        {"json_path": str((folder / f"{split}.jsonl").resolve()), "sampling_strategy": "all", "split": split}
        for split in ("train", "val")
    ]
    (folder / "demo.yaml").write_text(json.dumps({"datasets": sources}, indent=2) + "\n")  # JSON is YAML


def build_tokenizer():
    """Byte-level, so any text survives a round trip; the only merges are the grid's two-digit numbers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(str(n)) for n in GRID if n >= 10]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    # Tags are tokens but not special ones: decoding with skip_special_tokens must keep them for the reward.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def build_model(folder, seed, hidden=128, layers=4, depth=3):
    """Saves a random Qwen2.5-VL, its tokenizer and its image processor where from_pretrained finds them."""
    tokenizer = build_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "initializer_range": 0.1,  # about 1 / sqrt(hidden); the usual 0.02 learns several times slower
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "initializer_range": 0.1,
            "depth": depth,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "window_size": SIDE,
            "fullatt_block_indexes": list(range(depth)),
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=token("<|im_end|>"), pad_token_id=token("<|endoftext|>"), do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 64).save_pretrained(folder)


def sloppy(box, rng):
    """The box with each edge a cell too low, a cell too high (2 in 5 each) or right; still a box in the picture."""
    while True:
        x1, y1, x2, y2 = moved = [value + rng.choice([-CELL, -CELL, 0, CELL, CELL]) for value in box]
        if min(moved) >= 0 and max(moved) <= SIDE and x1 < x2 and y1 < y2:
            return moved


def cold_start(folder, dataset, seed, steps=120, batch=32, peak=1e-3):
    """Trains the model in `folder` on sloppy answers to training records, by maximum likelihood, and saves it there."""
    # On the CPU also where there is a GPU: the kernels of so small a model take no time there, but their launches do.
    model, processor = modeling.load_policy(
        str(folder), attn_implementation="sdpa", torch_dtype="float32", device="cpu"
    )
    policy = modeling.Policy(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, weight_decay=0.0)
    rng, train, began = random.Random(seed), dataset.splits()[0], time.perf_counter()

    def group(i):
        prompt = data.encode_prompt(dataset[i], processor, TEMPLATE)
        box = sloppy(json.loads(prompt["columns"]["solution"][len("<answer>") : -len("</answer>")]), rng)
        answer = f"<think></think><answer>[{','.join(map(str, box))}]</answer><|im_end|>"
        prompt["position_ids"] = modeling.prompt_positions(model, prompt)
        return prompt, [torch.tensor(processor.tokenizer(answer)["input_ids"])]

    for step in range(1, steps + 1):
        row = modeling.build_row([group(i) for i in rng.sample(train, batch)])
        logps, _ = policy(row)
        loss = -logps.sum() / len(row["targets"])  # no token, log-prob 0
        optimizer.param_groups[0]["lr"] = peak * min(1, step / 10)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(
                f"cold start, step {step} of {steps}: {loss:.3f} nats a token, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    model.save_pretrained(folder)


def grpo_flags(output, seed, processes):
    """The words a user would type. 128 completions a step over all processes: 8 prompts, 16 completions each."""
    flags = {
        "model_name_or_path": output / "model",
        "torch_dtype": "float32",
        "bf16": "false",
        "gradient_checkpointing": "false",
        "dataset_name": output / "data" / "demo.yaml",
        "image_root": output / "data",
        "question_template": TEMPLATE,
        "output_dir": output,
        "run_name": "demo",
        "reward_funcs": ["accuracy", "format"],
        "num_generations": 16,
        "per_device_train_batch_size": 16 * max(1, 8 // processes),
        "gradient_accumulation_steps": 1,
        "max_completion_length": 24,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "max_steps": 300,
        "eval_steps": 50,
        "seed": seed,
    }
    words = []
    for flag, value in flags.items():
        words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return words


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if (args.output / "flags.txt").exists():  # an earlier demo: keep one, whole
        kept = args.output.with_name(args.output.name + ".old")
        shutil.rmtree(kept, ignore_errors=True)
        args.output.rename(kept)
        print(f"{args.output}: the earlier demo is now {kept}")
    write_data(args.output / "data", args.seed)
    build_model(args.output / "model", args.seed)
    sources = data.parse_sources(dataset_name=args.output / "data" / "demo.yaml", image_root=args.output / "data")
    dataset = data.PackedDataset(data.ensure_packed(sources, args.output))  # grpo.py finds it ready
    cold_start(args.output / "model", dataset, args.seed)
    # launch.sh's own default: one process a GPU, else one
    processes = int(os.environ.get("NPROC") or torch.cuda.device_count() or 1)
    (args.output / "flags.txt").write_text("\n".join(grpo_flags(args.output, args.seed, processes)) + "\n")


if __name__ == "__main__":
    main()
