"""What one GPU will hold, before there is a GPU: from config.json and the flags alone, no weights, no data.

    bash launch.sh --plan --model_name_or_path FOLDER --zero_stage 2 --plan_gpus 8 --plan_gb 80

prints a line for whatever takes memory, a column for each phase of a step, whether it fits and, if not, the cheapest
changes that make it fit. Exit status: 0 fits, 1 does not, 2 a flag is wrong. GB are 1e9 bytes, counted as `peak_gb` in
metrics.jsonl is (torch.cuda.max_memory_allocated); CUDA itself and holes between tensors have a line below that.

Nothing is fitted: activations are the tensors that autograd saves in model.py's layers, one by one, the optimizer's
bytes are read off DeepSpeed 0.19.8's step, and tests/test_plan.py compares both with what is saved and allocated.
Completions are taken to run to their full length. Left out: records (a prompt's length and picture are assumed, and
said), evaluation, compiling, NVMe offload.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import traceback

import torch
import transformers

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import model as modeling
import rollout

TEXT = 80  # tokens of a prompt that are no picture: VLM-R1's question, its template and the chat's frame, rounded up
PICTURE = 480, 640  # height and width, where --max_pixels does not say
WORKSPACES = 4 * 2**25  # cuBLAS's, 32 MiB a stream and thread on Hopper: forward, backward, captured graph, DeepSpeed
LIVE = 1e9  # DeepSpeed's defaults: parameters that ZeRO-3 gathers at once, and those it steps at once (sub_group_size)
CONTEXT, NCCL, HOLES = 0.6e9, 1.0e9, 0.05  # beside PyTorch's tensors, rules of thumb; HOLES is a share of the peak


def meta_model(args):
    """The policy without its weights, as load_policy would prepare it: transformers' class on the meta device."""
    config = transformers.AutoConfig.from_pretrained(
        os.path.expanduser(args.model_name_or_path), trust_remote_code=False
    )
    if config.model_type not in modeling.FAMILIES:
        raise ValueError(f"--model_name_or_path: model_type {config.model_type!r}, known are {[*modeling.FAMILIES]}")
    with torch.device("meta"):
        model = getattr(transformers, modeling.FAMILIES[config.model_type][0])(config)
    modeling.pad_vision_mlp(model)
    return model


def assumed_prompt(args, config):
    """(tokens, patches) of a prompt with one picture, of --max_pixels or as large as PICTURE."""
    merge = config.vision_config.spatial_merge_size
    side = config.vision_config.patch_size * merge  # pixels of a picture token's edge
    tokens = max(1, args.max_pixels // side**2) if args.max_pixels else math.prod(round(x / side) for x in PICTURE)
    return min(tokens + TEXT, args.max_prompt_length or tokens + TEXT), tokens * merge**2


# --- Activations: bytes that autograd saves ------------------------------------------------------------------------
# e: bytes a number; T: tokens of a packed row; n: patches. Norms save their input and float32 statistics, linear layers
# their input, Swiglu gate and up, Rotate only tables that all layers share. A layer's input is counted apart from it,
# because checkpointing keeps it.


def attention_saved(kind, e, heads, width, T, keys, rows, squares):
    """Queries, keys, values and output. `keys`: numbers in the keys and values of all variable-length sequences, whose
    kernels (flash-attn's and PyTorch's own) save the same; `rows` of them; `squares`: entries of the dense masks, a
    sequence at a time. width: heads x D."""
    if kind == "varlen":
        return (2 * T * width + keys) * e + 4 * heads * T  # and the log-sum-exp
    saved = 2 * (T + rows) * width * e  # keys and values repeated for every query head
    if kind == "sdpa":
        return saved + (T * width + squares) * e + 4 * heads * T  # each sequence's own output, its mask as numbers
    return saved + squares * (heads * (4 if e == 4 else 4 + e) + 1)  # the softmax in float32 and cast, the mask


def decoder_saved(model, kind, e, T, keys, squares):
    layer = model.model.language_model.layers[0]
    a, H, inner = layer.self_attn, layer.self_attn.q_proj.in_features, layer.mlp.gate_proj.out_features
    q, kv = a.q_proj.out_features, a.k_proj.out_features
    saved = T * 3 * (H + inner) * e + 2 * 4 * T  # norm, sum, norm; gate, up, product
    saved += T * (q + kv) * (e + 4 / a.head_dim) if hasattr(a, "q_norm") else 0
    return saved + attention_saved(kind, e, q // a.head_dim, q, T, 2 * keys * kv, keys, squares)


def vision_mlp(model):
    """(width, tables saved, float32 numbers that a norm saves of a patch) of the vision tower's blocks."""
    mlp, quick = model.model.visual.blocks[0].mlp, "quick" in model.config.vision_config.hidden_act
    inner = next(layer for layer in mlp.modules() if isinstance(layer, torch.nn.Linear)).out_features
    if hasattr(mlp, "gate_proj"):
        return inner, 3, 1  # gate, up, product; RMS
    return inner, 3 if quick else 2, 2  # x, its sigmoid, product, or x, GELU; mean and deviation


def vision_saved(model, kind, e, n, pictures):
    vision, attn = model.config.vision_config, model.model.visual.blocks[0].attn
    inner, tables, statistics = vision_mlp(model)
    H, window, full = attn.proj.in_features, n // pictures, 1
    if hasattr(vision, "fullatt_block_indexes"):  # Qwen2.5-VL: the other blocks see windows; the average block
        window, full = (vision.window_size // vision.patch_size) ** 2, len(vision.fullatt_block_indexes) / vision.depth
    squares = full * n * (n // pictures) + (1 - full) * n * min(window, n // pictures)
    squares = 0 if kind == "sdpa" else squares  # no mask here
    # the value is a view of all of (q, k, v)
    saved = n * (3 * H + tables * inner) * e + 2 * 4 * statistics * n
    return saved + attention_saved(kind, e, attn.num_heads, H, n, 4 * n * H, n, squares)


def activations(model, kind, e, checkpointed, groups, patches, frozen=False):
    """Of one packed row with `groups` [(P, [R1 ...])], each with a picture of `patches`: bytes {kept, kept_vision} at
    the start of the backward, in all and by the vision tower, and what the backward adds at its worst: in
    TokenLogps, a decoder layer, a vision block {loss, decoder, vision}."""
    text, visual, vision = model.model.language_model, model.model.visual, model.config.vision_config
    H, V, inner = text.embed_tokens.embedding_dim, model.lm_head.out_features, text.layers[0].mlp.gate_proj.out_features
    lengths, layers, wide = [P + sum(R) for P, R in groups], len(text.layers), visual.blocks[0].attn.proj.in_features
    T, M, n = sum(lengths), sum(sum(R) for _, R in groups), patches * len(groups)
    keys = sum(P + sum(P + length for length in R) for P, R in groups)
    masks = [q * k for P, R in groups for q, k in [(P, P), *((length, P + length) for length in R)]]
    layer = decoder_saved(model, kind, e, T, keys, sum(masks))
    # around the layers: rotary tables; the final norm and the pictures' places; hidden states that predict a token
    kept = 2 * T * text.layers[0].self_attn.head_dim * e + T * (H * e + 5) + M * (H * e + 4)
    kept += layers * (T * H * e + (0 if checkpointed else layer))
    block, kept_vision = vision_saved(model, kind, e, n, len(groups)), 0
    if not frozen:
        pixels = 3 * vision.temporal_patch_size * vision.patch_size**2 * (e == 2)  # cast to bf16
        mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))  # three tables each; the last block's output
        kept_vision = (
            n * (pixels + (1 + 3 * mergers) * wide) * e + 8 * n * wide // visual.blocks[0].attn.num_heads
        )  # rotary
        kept_vision += len(visual.blocks) * (n * wide * e + (0 if checkpointed else block))
    # A chunk's logits, their gradient and the last chunk's; the hidden states' gradient; the head's own, which, tied,
    # waits for the embedding's to the end of the backward.
    chunk, head = min(M, modeling.LOGIT_CHUNK), V * H * e
    loss = (2 + (M > chunk)) * chunk * V * e + head + M * H * e
    # Gradients of gate, up and product, less the product, and of three hidden states; attention spelt out: of scores.
    scores = 0 if kind == "varlen" else text.config.num_attention_heads * max(masks) * (8 + e)
    decoder = (layer if checkpointed else 0) + max(2 * T * inner * e, scores) + 3 * T * H * e + head
    work = 0 if frozen else (block if checkpointed else 0) + (2 * vision_mlp(model)[0] + 3 * wide) * n * e
    work += head if model.config.tie_word_embeddings else 0
    return {"kept": kept + kept_vision, "kept_vision": kept_vision, "loss": loss, "decoder": decoder, "vision": work}


def optimizer_bytes(args, zero, world, P, trained):
    """DeepSpeed's part of P parameters: bytes of weights, optimizer states, gradients in the update, gradients before
    the optimizer's step, and what that adds: a float32 copy of the gradients, at stage 0 in their place, under ZeRO
    of a flattened copy."""
    stage, e = zero["stage"], 2 if args.torch_dtype == "bfloat16" else 4
    share = trained / (world if stage else 1)  # numbers that this rank updates
    states = 8 * share + (4 * share if stage or e == 2 else 0)  # moments and master weights
    weights, gradients = e * P / (world if stage == 3 else 1), e * (share if stage > 1 else trained)
    added = 4 * (e == 2) + (e if stage else -e * (e == 2))
    step = added * (min(share, zero.get("sub_group_size", LIVE)) if stage == 3 else share)
    if stage and zero.get("offload_optimizer", {}).get("device", "none") != "none":
        states, gradients, share, step = 0, gradients if stage == 1 else 0, 0, 0  # gradients leave as they come
    if stage == 3 and zero.get("offload_param", {}).get("device", "none") != "none":
        weights = 0
    return weights, states, gradients, e * share, step


def memory(args, model, world, zero):
    """Bytes of one of `world` GPUs: {what: (in the rollout, in the update, in the optimizer's step)}."""
    e, sharded, text = 2 if args.torch_dtype == "bfloat16" else 4, zero["stage"] == 3, model.model.language_model
    P, V, layers = sum(p.numel() for p in model.parameters()), model.lm_head.out_features, len(text.layers)
    frozen = sum(p.numel() for p in model.model.visual.parameters()) if args.freeze_vision_modules else 0
    weights, states, held, ready, step = optimizer_bytes(args, zero, world, P, P - frozen)
    B, G, R = grpo.prompts_per_rank(args), args.num_generations, args.max_completion_length
    tokens, patches = assumed_prompt(args, model.config)
    vision, a, mlp = model.config.vision_config, text.layers[0].self_attn, text.layers[0].mlp
    pixels = 4 * B * patches * 3 * vision.temporal_patch_size * vision.patch_size**2  # with a copy in the rows
    joined = e * layers * sum(f.weight.numel() for f in (a.q_proj, a.k_proj, a.v_proj, mlp.gate_proj, mlp.up_proj))
    key = 2 * layers * a.k_proj.out_features * e  # key and value of a token
    waves = rollout.waves(model, [{"input_ids": range(tokens)}] * B, G, R, args.max_tokens_per_forward)
    n = len(waves[0])  # prompts in the largest
    prompts, own = n * tokens * key, n * G * R * key
    prefill = 2 * prompts + n * tokens * (4 * a.q_proj.in_features + 3 * mlp.gate_proj.out_features) * e
    draw = (n * G + n) * V * e + n * G * V * 4 + rollout.SHRINK_AT * own  # logits, noise; a shrinking cache is copied
    # The row and the place of its backward where most is alive. Of one row, gradients come as activations go; of
    # several, the first rows' are there, under ZeRO-2 beside the new row's. ZeRO-3 keeps a buffer for them.
    kind = "eager" if args.attn_implementation == "eager" else "varlen" if e == 2 else "sdpa"
    rows = grpo.cut_rows([tokens] * B, [R] * (B * G), args.max_tokens_per_forward)
    sizes = [sum(tokens + R * len(part) for _, part in row) for row in rows]
    groups = [(tokens, [R] * len(part)) for _, part in rows[sizes.index(max(sizes))]]
    found = activations(model, kind, e, args.gradient_checkpointing, groups, patches, args.freeze_vision_modules)
    early = held * (len(rows) > 1 or sharded), found["kept"]
    late = held * (2 if zero["stage"] == 2 and len(rows) > 1 else 1), found["kept_vision"]
    places = (*early, max(found["loss"], found["decoder"])), (*late, found["vision"])
    gradients, kept, work = max(places, key=sum)
    buckets = (1 + bool(zero.get("overlap_comm"))) * min(zero.get("reduce_bucket_size", 5e8), P) * e
    live = min(P, zero.get("stage3_max_live_parameters", LIVE)) * sharded * (world > 1)  # alone it lends the shard
    return {
        "parameters": (weights,) * 3,
        "optimizer states": (states,) * 3,
        "reference (--beta)": (e * P / (world if sharded else 1) if args.beta else 0,) * 3,
        "gradients": (held if sharded else 0, gradients, ready + step),
        "weights gathered by ZeRO-3": (e * P if live else 0, e * live, 0),
        "projections side by side": (joined, 0, 0),
        "keys and values": (prompts + own, 0, 0),
        "prefill, or a draw's logits": (max(prefill - own, draw), 0, 0),
        "activations": (0, kept, 0),
        "backward of logits or one layer": (0, work, 0),
        "DeepSpeed's buckets": (0, buckets if sharded or (zero["stage"] and world > 1) else 0, 0),
        "pictures, cuBLAS's workspaces": (pixels + WORKSPACES, 2 * pixels + WORKSPACES, 2 * pixels + WORKSPACES),
    }


def phases(parts):
    return [sum(column) for column in zip(*parts.values(), strict=True)]


def needed(args, model, world, zero):
    """Bytes that the card has to have: the largest phase, and what is not PyTorch's tensors."""
    return max(phases(memory(args, model, world, zero))) * (1 + HOLES) + CONTEXT + NCCL * (world > 1)


def changes(args):
    """(price, flags, ZeRO settings), the cheapest first; many are no change at all, or no help."""
    budgets = [max(1, args.max_tokens_per_forward >> shift) for shift in (1, 2, 3, 4)]
    pixels = (args.max_pixels or PICTURE[0] * PICTURE[1]) // 2
    half = max(2, args.num_generations // 2)
    one = {"num_generations": half, "per_device_train_batch_size": half, "gradient_accumulation_steps": "1"}
    return [
        ("faster, too", {"attn_implementation": "auto"}, {}),
        *(("smaller forwards", {"max_tokens_per_forward": budget}, {}) for budget in budgets),
        ("a third more operations", {"gradient_checkpointing": True}, {}),
        *(("more communication", {"zero_stage": stage}, {"stage": stage}) for stage in (1, 2, 3)),
        ("a slow optimizer step", {}, {"offload_optimizer": {"device": "cpu"}}),
        ("slow forwards", {}, {"offload_param": {"device": "cpu"}}),
        ("coarser pictures", {"max_pixels": pixels}, {}),
        ("the vision tower stays as it is", {"freeze_vision_modules": True}, {}),
        ("one group of half the size", one, {}),
    ]


def cures(args, model, world, zero, limit):
    """The changes that help, each on top of those before it, until it fits: (what to write, its price, bytes then)."""
    best = needed(args, model, world, zero)
    for price, flags, settings in changes(args):
        tried = dataclasses.replace(args, **flags), model, world, zero | settings
        if best > limit and (total := needed(*tried)) < 0.99 * best:
            (args, _, _, zero), best = tried, total
            words = " ".join(f"--{name} {value}" for name, value in flags.items())
            yield words or f"{json.dumps(settings)} in --deepspeed's zero_optimization", price, total


def table(args, model, world, zero):
    parts, (tokens, patches) = memory(args, model, world, zero), assumed_prompt(args, model.config)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    how = f"{args.torch_dtype}, ZeRO stage {zero['stage']}, {world} GPUs"
    yield f"{args.model_name_or_path}: {size:.3f} G parameters, {how}"
    work = grpo.prompts_per_rank(args), args.num_generations, args.max_completion_length
    yield "a GPU's step: {} prompts x {} completions x {} tokens".format(*work)
    picture = f"picture of {'--max_pixels' if args.max_pixels else '640x480 pixels'}, {patches} patches"
    yield f"assumed of a prompt: {tokens} tokens, with one {picture}"
    yield f"\n{'GB':36}" + "".join(f"{name:>10}" for name in ("rollout", "update", "step"))
    for name, columns in (parts | {"allocated; peak_gb is the largest": phases(parts)}).items():
        if any(columns):
            yield f"{name:36}" + "".join(f"{value / 1e9:10.2f}" if value else " " * 10 for value in columns)
    outside = needed(args, model, world, zero) - max(phases(parts))
    yield f"{'CUDA' + ', NCCL' * (world > 1) + ', holes between tensors':36}{outside / 1e9:10.2f}"


def main():
    args, gpus = grpo.parse_arguments(quiet=False), torch.cuda.device_count()
    limit = args.plan_gb * 1e9 if args.plan_gb else torch.cuda.mem_get_info()[1] if gpus else 80e9
    model, world = meta_model(args), args.plan_gpus or gpus or 1
    zero = grpo.deepspeed_config(args, world, model.config.text_config.hidden_size, "cpu")["zero_optimization"]
    print(*table(args, model, world, zero), sep="\n")
    total = needed(args, model, world, zero)
    fits = total <= limit
    assumed = "" if args.plan_gb or gpus else " (assumed, for lack of a GPU; say --plan_gb)"
    print(f"\nA GPU needs {total / 1e9:.1f} GB of {limit / 1e9:.0f}{assumed}: it {'fits' if fits else 'does not fit'}")
    for words, price, total in cures(args, model, world, zero, limit):
        print(f"{total / 1e9:8.1f} GB  with {words} ({price})")
    if total > limit:
        print("That is not enough: more GPUs, larger ones, or a smaller model.")
    return 0 if fits else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:  # 1 would say that it does not fit
        if not isinstance(error, (ValueError, OSError)):
            traceback.print_exc()
        print(f"plan.py: {str(error) or type(error).__name__}", file=sys.stderr)
        sys.exit(2)
