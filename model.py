"""The policy: loading it, choosing its attention, and running a whole group of completions as one packed row.

Read it in this order: `load_policy` (weights and processor of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL checkpoint),
`select_attention` (which kernel and why), `checkpoint_blocks` (recompute activations instead of keeping them),
`build_row` and `packed_attention` (a group pays for its prompt once), `Policy` (token log-probs of a row), and
`repeated_logps`, the slow path that every VLM trainer takes and that the tests compare with.

transformers supplies layers and weights; what GRPO adds to them stands here. Left out: video inputs, LoRA,
quantisation, any family whose `model_type` is not in FAMILIES.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

# model_type -> (model class, processor class named in its checkpoints, scale of the boxes that it answers with).
# Scale None: pixels of the resized picture. 1000: both axes run 0-1000 whatever the picture's size.
FAMILIES = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLProcessor", 1000),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor", None),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor", 1000),
}

# The three families' chat format, for a checkpoint whose own template does not know pictures.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LOGIT_CHUNK = 1024  # tokens whose logits exist at once: 1024 x 151,936 x 4 bytes = 0.6 GB with Qwen's vocabulary


# --- Loading -----------------------------------------------------------------------------------------------------


class Processor:
    """A checkpoint's tokenizer and image processor.

    Not transformers' own processor class, because that one insists on a video processor, which needs torchvision.
    Naming the PIL image processor gives CPU and GPU machines the same preprocessing code, hence the same pixels.
    """

    image_token = "<|image_pad|>"

    def __init__(self, path, model_type, **pixel_limits):
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(path, **pixel_limits)
        _, self.class_name, self.box_scale = FAMILIES[model_type]
        template = self.tokenizer.chat_template or ""
        json_template = os.path.join(path, "chat_template.json")  # where Qwen2-VL and Qwen2.5-VL keep theirs
        if os.path.exists(json_template):
            with open(json_template) as file:
                template = json.load(file)["chat_template"]
        self.chat_template = template if "vision_start" in template else CHAT_TEMPLATE

    def apply_chat_template(self, messages, **kwargs):
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **kwargs)

    def save_pretrained(self, folder):
        """Write the files from which transformers' AutoProcessor, or this class, reads the same thing back."""
        self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(folder)
        settings = self.image_processor.to_dict()
        settings |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": self.class_name}
        with open(os.path.join(folder, "preprocessor_config.json"), "w") as file:
            json.dump(settings, file, indent=2, sort_keys=True, default=str)


def load_policy(
    path,
    *,
    attn_implementation="auto",
    torch_dtype="bfloat16",
    device=None,
    min_pixels=None,
    max_pixels=None,
    freeze_vision_modules=False,
):
    """Load a checkpoint folder (or hub name) as (model, processor); the family is the config's `model_type`.

    `torch_dtype` is a name or a torch.dtype; `device` defaults to the GPU if there is one. The returned model is
    transformers' own, with `attention_choice = (name, reason)` on it for the log. Raises ValueError for a folder
    that does not exist, a family that is not in FAMILIES, or an attention that cannot be had.
    """
    path = os.path.expanduser(os.fspath(path))
    if path.startswith(("/", "./", "../")) and not os.path.isdir(path):
        raise ValueError(f"--model_name_or_path {path}: no such folder; give a checkpoint's folder or a hub name")
    try:
        model_type = AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
    except OSError as error:
        where = (
            "the folder has no readable config.json"
            if os.path.isdir(path)
            else "no folder here, nor a model on the hub"
        )
        raise ValueError(f"--model_name_or_path {path}: {where} ({str(error).splitlines()[0]})") from error
    if model_type not in FAMILIES:
        raise ValueError(
            f"--model_name_or_path {path}: its config.json says model_type {model_type!r}, and this code knows "
            f"{', '.join(FAMILIES)}; another family needs an entry in model.FAMILIES and the tests to pass for it"
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch_dtype if isinstance(torch_dtype, torch.dtype) else getattr(torch, str(torch_dtype), None)
    if dtype not in (torch.bfloat16, torch.float32):
        # float16 overflows in Qwen's activations and would need a loss scale; nothing here provides one
        raise ValueError(f"--torch_dtype {torch_dtype}: use bfloat16 or float32")
    attention, reason = select_attention(attn_implementation, device, dtype)
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.isfile(index):  # use_safetensors below does not look at what an index names
        with open(index) as file:
            shards = set(json.load(file)["weight_map"].values())
        if not all(name.endswith(".safetensors") for name in shards):
            raise ValueError(f"{index} names files that are no safetensors, which could run code when they are read")
    model, report = getattr(transformers, FAMILIES[model_type][0]).from_pretrained(
        path, dtype=dtype, attn_implementation=attention, use_safetensors=True, output_loading_info=True
    )
    if report["missing_keys"]:  # transformers fills them with random numbers
        raise ValueError(f"{path} lacks {len(report['missing_keys'])} tensors, {min(report['missing_keys'])} for one")
    model.attention_choice = (attention, reason)
    limits = {name: value for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if value}
    processor = Processor(path, model_type, **limits)
    if freeze_vision_modules:
        model.model.visual.requires_grad_(False)
    return model.to(device), processor


def eos_token_ids(model, tokenizer):
    """Every id that ends a completion: the generation config's (often a list) and the tokenizer's own."""
    ids = model.generation_config.eos_token_id
    ids = list(ids) if isinstance(ids, (list, tuple)) else [ids]
    ids = sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})
    if not ids:
        raise ValueError("neither generation_config.json nor the tokenizer has an eos token: no completion could end")
    return ids


def placeholder_ids(config):
    """Ids that stand for pictures. A sampled one would ask the next forward for a picture that does not exist, so
    sampler and trainer both give them probability 0."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return sorted({getattr(config, name) for name in names if getattr(config, name, None) is not None})


# --- Attention backend -------------------------------------------------------------------------------------------


def select_attention(requested, device, dtype):
    """Choose the attention kernel: returns (name, reason), name one of flash_attention_2, sdpa, eager.

    `auto` takes flash-attn where it can run and sdpa elsewhere. A request that cannot be met raises ValueError with
    the reason: running something else than asked would make every later measurement a lie.
    """
    device = torch.device(device)
    if requested in ("sdpa", "eager"):
        return requested, "as requested"
    if requested not in ("auto", "flash_attention_2"):
        raise ValueError(f"--attn_implementation {requested}: use auto, flash_attention_2, sdpa or eager")
    obstacle = _flash_attention_obstacle(device, dtype)
    if obstacle is None:
        return (
            "flash_attention_2",
            "as requested" if requested != "auto" else "flash-attn imports and the GPU can run it",
        )
    if requested == "auto":
        return "sdpa", f"no flash_attention_2: {obstacle}"
    raise ValueError(f"--attn_implementation flash_attention_2 cannot run: {obstacle}; use --attn_implementation auto")


def _flash_attention_obstacle(device, dtype):
    if device.type != "cuda":
        return f"the device is {device.type}, flash-attn runs on NVIDIA GPUs"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return f"the dtype is {dtype}, flash-attn computes in bfloat16 or float16"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the GPU's compute capability is {major}.{minor}, flash-attn 2 needs 8.0 (A100) or newer"
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        return f"the package flash_attn does not import ({error})"
    return None


# --- Checkpoint wrapping -----------------------------------------------------------------------------------------


def checkpoint_blocks(model, *, use_reentrant=False, every=1):
    """Recompute the activations of every `every`-th decoder layer and vision block; returns how many were wrapped.

    Only a block's input is kept from the forward (Chen et al., arXiv 1604.06174): memory falls from all activations
    to one hidden state a block, for about a third more time. Nothing is recomputed where no gradient is asked for,
    so sampling never pays. The wrapper sits on `block.forward`, inside ZeRO-3's hooks on the block and outside those
    on its layers, so that the recomputation gathers their weights again.
    """
    blocks = [*model.model.visual.blocks, *model.model.language_model.layers]
    wrapped = blocks[::every]
    for block in wrapped:
        block.forward = functools.partial(_checkpointed, block.forward, use_reentrant)
    return len(wrapped)


def _checkpointed(forward, use_reentrant, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # the reentrant form takes no keyword arguments, so they travel in a partial
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=use_reentrant)


# --- The packed row: [prompt, completion 1 ... completion G], several groups one after the other --------------------


def prompt_positions(model, prompt):
    """mRoPE positions of a prompt on its three axes (time, height, width): (3, P), on the CPU.

    Text counts on all three alike; a picture's tokens take their row and column (Qwen2-VL, arXiv 2409.12191, 2.1).
    """
    ids = prompt["input_ids"]
    if prompt["image_grid_thw"] is None:
        return torch.arange(len(ids)).expand(3, -1)
    kinds = (ids == model.config.image_token_id).int()  # 1 at picture tokens; transformers 5 skips mRoPE without it
    positions, _ = model.model.get_rope_index(
        input_ids=ids[None], mm_token_type_ids=kinds[None], image_grid_thw=prompt["image_grid_thw"]
    )
    return positions[:, 0]  # (3, 1, P) -> (3, P)


def blank_group(model):
    """A one-picture, one-token group for a row that must run every module and teach nothing (mask it out).

    ZeRO-3 gathers weights module by module on all ranks together, so a rank whose row lacks a picture, or that has
    no row left, must still pass through the vision tower, forward and backward.
    """
    config, vision = model.config, model.config.vision_config
    merge = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    patch = channels * vision.temporal_patch_size * vision.patch_size**2
    prompt = {
        "input_ids": torch.tensor([config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]),
        "pixel_values": torch.zeros(merge * merge, patch),
        "image_grid_thw": torch.tensor([[1, merge, merge]]),
    }
    return prompt | {"position_ids": prompt_positions(model, prompt)}, [torch.tensor([0])]


def build_row(groups, device="cpu"):
    """Pack groups into one row. `groups`: list of (prompt, completions), a completion being its token ids (R,).

    A prompt is data.encode_prompt's dict plus `position_ids` (3, P). A completion's positions go on from its
    prompt's last one, on all axes. The row is a dict; with T tokens in it and M of them completion tokens:
      input_ids (T,), position_ids (3, T), pixel_values and image_grid_thw of the pictures, once a prompt
      cu_q, cu_k (S+1,), max_q, max_k, kv_index: the S variable-length sequences of `packed_attention`
      blocks: (start, end, mask) a group, the same pattern as a dense mask, for kernels without variable lengths
      predict_from (M,), targets (M,): hidden state `predict_from[m]` predicts token `targets[m]`
      place (M, 2): where token m stands in the (N, R) table of completions; shape = (N, R)
    """
    ids, positions, kv_index, predict_from, targets, place = [], [], [], [], [], []
    q_lengths, k_lengths, extents, start, n = [], [], [], 0, 0
    for prompt, completions in groups:
        P = len(prompt["input_ids"])
        own = torch.arange(start, start + P)
        ids.append(prompt["input_ids"])
        positions.append(prompt["position_ids"])
        kv_index.append(own)
        q_lengths.append(P), k_lengths.append(P)
        next_position = int(prompt["position_ids"].max()) + 1
        at = start + P
        for completion in completions:
            R = len(completion)
            if R > 0:  # an empty completion has a line in the (N, R) table and no tokens in the row
                ids.append(completion)
                positions.append(torch.arange(next_position, next_position + R).expand(3, -1))
                tokens = torch.arange(at, at + R)
                kv_index += [own, tokens]  # this completion's keys: [prompt, itself]
                q_lengths.append(R), k_lengths.append(P + R)
                # The one-token shift: the prompt's last hidden state predicts the first token, token t predicts t+1.
                predict_from += [own[-1:], tokens[:-1]]
                targets.append(completion)
                place.append(torch.stack([torch.full((R,), n), torch.arange(R)], dim=1))
            at, n = at + R, n + 1
        extents.append((start, at, [P] + [len(c) for c in completions]))
        start = at
    pictures = [prompt for prompt, _ in groups if prompt["pixel_values"] is not None]
    row = {
        "input_ids": torch.cat(ids),
        "position_ids": torch.cat(positions, dim=1),
        "pixel_values": torch.cat([p["pixel_values"] for p in pictures]) if pictures else None,
        "image_grid_thw": torch.cat([p["image_grid_thw"] for p in pictures]) if pictures else None,
        "cu_q": F.pad(torch.tensor(q_lengths).cumsum(0), (1, 0)).int(),
        "cu_k": F.pad(torch.tensor(k_lengths).cumsum(0), (1, 0)).int(),
        "kv_index": torch.cat(kv_index),
        "predict_from": torch.cat(predict_from) if targets else torch.zeros(0, dtype=torch.long),
        "targets": torch.cat(targets) if targets else torch.zeros(0, dtype=torch.long),
        "place": torch.cat(place) if targets else torch.zeros(0, 2, dtype=torch.long),
    }
    # One copy to the GPU a tensor, from pageable memory: it waits for the copy, not for the GPU's queue.
    row = {name: value if value is None else value.to(device) for name, value in row.items()}
    row["blocks"] = [(s, e, _group_mask(lengths, device)) for s, e, lengths in extents]
    row["max_q"], row["max_k"] = max(q_lengths), max(k_lengths)
    row["shape"] = (n, max([len(c) for _, completions in groups for c in completions], default=0))
    return row


def _group_mask(lengths, device):
    """(T_g, T_g) of bool: who sees whom in [prompt, completion 1, ...], given their lengths. A prompt sees itself
    causally; a completion sees its prompt and, causally, itself."""
    part = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)  # 0 = the prompt
    same = (part[:, None] == part[None, :]) | (part[None, :] == 0)
    return same & torch.ones_like(same).tril()


def packed_attention(backend, module, query, key, value, attention_mask, scaling=None, packed=None, **kwargs):
    """Attention over a packed row, in the form of a transformers attention function: (1, heads, T, D) in, (1, T,
    heads, D) out. `packed` is the row; every transformers layer hands it through.

    Where `packed["kv"]` is a dict, the rotated keys and values are also left there by layer: the sampler's prefill.
    """
    if packed is None:
        raise RuntimeError("packed attention was called without a row; call Policy(row), not the model")
    if "kv" in packed:
        packed["kv"][module.layer_idx] = (key[0], value[0])  # (heads_kv, T, D)
    if backend == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func

        # (1, heads, T, D) -> (T, heads, D). Keys and values are gathered so that each completion has [prompt,
        # itself]; queries are not. flash-attn >= 2.1 aligns the causal mask to the bottom right, as this needs.
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        k, v = k[packed["kv_index"]], v[packed["kv_index"]]
        lengths = packed["cu_q"], packed["cu_k"], packed["max_q"], packed["max_k"]
        return flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=scaling, causal=True)[None], None
    # Without variable-length kernels: one dense mask a group (groups do not see each other, so no T x T matrix).
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    outputs = []
    for start, end, mask in packed["blocks"]:
        q, k, v = query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]
        if backend == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~mask, float("-inf"))
            out = scores.float().softmax(-1).to(q.dtype) @ v
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2), None  # (1, heads, T, D) -> (1, T, heads, D)


# Names for transformers' registry; one with "flash" in it would make some models look for kernels of their own.
PACKED = {"flash_attention_2": "packed_varlen", "sdpa": "packed_sdpa", "eager": "packed_eager"}
for _backend, _name in PACKED.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, functools.partial(packed_attention, _backend))


# --- Log-probs ---------------------------------------------------------------------------------------------------


def token_logps(hidden, weight, targets, banned, temperature):
    """Log-prob of each target and the entropy of its distribution: hidden (M, H), weight (V, H), targets (M,) ->
    (M,), (M,). Float32 log-softmax of logits / temperature, placeholders at probability 0."""
    logits = (hidden @ weight.T).float() / temperature  # (M, V)
    logits = logits.index_fill(1, banned, float("-inf"))
    logps = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps.masked_fill(logps.isneginf(), 0)).sum(-1)
    return logps.gather(1, targets[:, None])[:, 0], entropy


class LogProbs(nn.Module):
    """The language-model head, reduced to what GRPO needs of it. It shares the head's parameter and is a module of
    its own so that ZeRO-3 gathers the weight once for all chunks."""

    def __init__(self, weight, banned, temperature):
        super().__init__()
        self.weight, self.temperature = weight, temperature
        self.register_buffer("banned", torch.tensor(banned, device=weight.device), persistent=False)

    def forward(self, hidden, targets):
        """hidden (M, H), targets (M,) -> log-probs (M,), entropies (M,), LOGIT_CHUNK tokens at a time. A chunk's
        logits are recomputed in the backward, so no (M, V) tensor outlives its chunk."""
        chunks = zip(hidden.split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK), strict=True)
        run = functools.partial(checkpoint, token_logps, use_reentrant=False)
        parts = [run(h, self.weight, t, self.banned, self.temperature) for h, t in chunks]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def hidden_states(model, row):
    """A row through vision tower and decoder: (T, H)."""
    ids, positions = row["input_ids"][None], row["position_ids"][:, None]  # (1, T), (3, T) -> (3, 1, T)
    pictures = {name: row[name] for name in ("pixel_values", "image_grid_thw")}
    return model.model(input_ids=ids, position_ids=positions, use_cache=False, packed=row, **pictures)[0][0]


class Policy(nn.Module):
    """What the DeepSpeed engine wraps: a row in, log-probs of its completions out. Everything with weights runs in
    here, because a module called from outside the engine's forward skips ZeRO-3's hooks."""

    def __init__(self, model, temperature=1.0):
        super().__init__()
        self.model = model
        self.head = LogProbs(model.lm_head.weight, placeholder_ids(model.config), temperature)
        # The text model alone: setting it on the top config would reach the vision tower too.
        attention = model.config._attn_implementation
        model.set_attn_implementation({"text_config": PACKED[attention], "vision_config": attention})

    def forward(self, row):
        """A row of build_row -> log-probs (N, R) and entropies (N, R), float32, 0 where there is no token."""
        hidden = hidden_states(self.model, row)  # (T, H)
        logps, entropy = self.head(hidden[row["predict_from"]], row["targets"])  # (M,)
        table = logps.new_zeros(row["shape"])  # (N, R)
        place = tuple(row["place"].T)
        return table.index_put(place, logps), table.index_put(place, entropy)


def repeated_logps(model, prompt, completions, temperature=1.0):
    """The slow path, oracle of the packed one: every completion in a forward of its own behind its own copy of the
    prompt and the pictures, through transformers' ordinary attention. Returns a list of (R,) log-probs."""
    banned = torch.tensor(placeholder_ids(model.config))
    result = []
    for completion in completions:
        ids = torch.cat([prompt["input_ids"], completion])[None]
        kinds = (ids == model.config.image_token_id).int()
        pictures = {name: prompt[name] for name in ("pixel_values", "image_grid_thw") if prompt[name] is not None}
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **pictures).logits[0].float()
        logits = (logits / temperature).index_fill(1, banned, float("-inf"))
        # the shift: the logits at position t are about the token at t+1
        about = logits[len(prompt["input_ids"]) - 1 : -1].log_softmax(-1)  # (R, V)
        result.append(about.gather(1, completion[:, None])[:, 0])
    return result


# --- ZeRO-3 and sampling -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def gathered(engine):
    """Whole weights on every rank, for sampling: one gather a rollout instead of one a layer a token.

    ZeRO-3 keeps 1/world of every parameter on a rank and gathers each layer in a hook before it runs. Sampling runs
    the layers thousands of times and not equally often on all ranks, so the weights are gathered once and the hooks
    are lifted off meanwhile. The same hook objects are put back: registering new ones would make DeepSpeed forget the
    recorded order of modules, and with it the prefetching of the next layer's weights.
    """
    if engine.zero_optimization_stage() < 3:
        yield engine.module.model
        return
    import deepspeed

    modules, names = list(engine.module.modules()), ("_forward_pre_hooks", "_forward_hooks")
    hooks = [{name: getattr(module, name) for name in names} for module in modules]
    try:
        for module in modules:
            vars(module).update({name: collections.OrderedDict() for name in names})
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            yield engine.module.model
    finally:
        for module, own in zip(modules, hooks, strict=True):
            vars(module).update(own)
