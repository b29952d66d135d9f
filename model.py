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
import inspect
import json
import os

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoTokenizer
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

LOGIT_CHUNK = 2048  # tokens whose logits exist at once: 2048 x 151,936 x 2 bytes = 0.6 GB with Qwen's vocabulary


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
    path, *, attn_implementation="auto", torch_dtype="bfloat16", device=None, min_pixels=None, max_pixels=None,
    freeze_vision_modules=False, sharded=False,
):  # fmt: skip
    """Load a checkpoint folder (or hub name) as (model, processor); the family is the config's `model_type`.

    `torch_dtype` is a name or a torch.dtype; `device` defaults to the GPU if there is one; `sharded` leaves the weights
    in the processor's memory, from where ZeRO-3 brings each rank its part. The returned model is transformers' own,
    with `attention_choice = (name, reason)` on it for the log. Raises ValueError for a folder that does not exist, a
    family that is not in FAMILIES, or an attention that cannot be had.
    """
    path = os.path.expanduser(os.fspath(path))
    if path.startswith(("/", "./", "../")) and not os.path.isdir(path):
        raise ValueError(f"--model_name_or_path {path}: no such folder; give a checkpoint's folder or a hub name")
    try:
        model_type = AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
    except OSError as error:
        where = "no readable config.json in it" if os.path.isdir(path) else "no folder here, nor a model on the hub"
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
    use_own_layers(model, attention)
    pad_vision_mlp(model)
    limits = {name: value for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if value}
    processor = Processor(path, model_type, **limits)
    if freeze_vision_modules:
        model.model.visual.requires_grad_(False)
    return model if sharded else model.to(device), processor


def weight_counts(model):
    """Weights that a token is multiplied with: in the decoder's blocks, the head and, a patch, the vision tower, whose
    mergers run once for merge x merge patches."""
    matrices = lambda module: sum(p.numel() for p in module.parameters() if p.ndim > 1)  # noqa: E731
    tower = model.model.visual
    mergers = [tower.merger, *getattr(tower, "deepstack_merger_list", [])]
    vision = matrices(tower.patch_embed) + matrices(tower.blocks)
    vision += sum(map(matrices, mergers)) / tower.spatial_merge_size**2
    return {"blocks": matrices(model.model.language_model.layers), "head": matrices(model.lm_head), "vision": vision}


def forward_operations(sizes, tokens, head_tokens, patches):
    """2 a weight and token, without the products inside attention. A backward takes twice as many."""
    return 2 * (sizes["blocks"] * tokens + sizes["head"] * head_tokens + sizes["vision"] * patches)


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
        return "flash_attention_2", "as requested" if requested != "auto" else "flash-attn imports, the GPU can run it"
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
    to one hidden state a block, for about a third more arithmetic. Nothing is recomputed where no gradient is asked
    for, so sampling never pays. The wrapper sits on `block.forward`, inside ZeRO-3's hooks on the block, which gather
    its weights before its backward as they do before its forward.

    `use_reentrant` takes `Recompute` below; otherwise PyTorch's form that is not reentrant, which does the same through
    two Python calls for every tensor that autograd saves.
    """
    blocks = [*model.model.visual.blocks, *model.model.language_model.layers]
    wrapped = blocks[::every]
    for block in wrapped:
        block.forward = functools.partial(_checkpointed, block.forward, use_reentrant)
    return len(wrapped)


def _checkpointed(forward, use_reentrant, hidden, **kwargs):
    if not torch.is_grad_enabled():
        return forward(hidden, **kwargs)
    if use_reentrant and hidden.requires_grad:  # else there is nothing before the block to hand a gradient to
        return Recompute.apply(functools.partial(forward, **kwargs), hidden)
    # Nothing here draws random numbers, and the recomputation is the same code, so states need not be saved, nor shapes
    # compared.
    options = {"preserve_rng_state": False, "determinism_check": "none"}
    return checkpoint(forward, hidden, use_reentrant=False, **options, **kwargs)


class Recompute(torch.autograd.Function):
    """Run a block without a graph, and once more with one when its gradient is due. Reentrant: a backward within the
    backward, which leaves the gradients of the block's weights where any backward leaves them."""

    @staticmethod
    def forward(ctx, block, hidden):
        ctx.block = block
        ctx.save_for_backward(hidden)
        return block(hidden)

    @staticmethod
    def backward(ctx, grad):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(hidden)
        torch.autograd.backward(out, grad)
        return None, hidden.grad


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
      groups: (start, end) of each
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
        extents.append((start, at))
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
    row["groups"] = extents
    row["max_q"], row["max_k"] = max(q_lengths), max(k_lengths)
    row["shape"] = (n, max([len(c) for _, completions in groups for c in completions], default=0))
    return row


def varlen_attention(attention, q, k, v, cu_q, cu_k, max_q, max_k, scaling, causal):
    """Attention over S sequences laid end to end: q (Tq, heads, D), k and v (Tk, kv heads, D) -> (Tq, heads, D).

    Sequence s holds the rows cu[s] ... cu[s+1]. Where a sequence has more keys than queries, the causal mask is aligned
    to the bottom right: the last query sees the last key. Without a kernel for it this is a loop over the sequences.
    """
    if attention == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func  # aligns to the bottom right since 2.1

        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scaling, causal=causal)
    if has_varlen(attention, q):
        return _torch_varlen()(q, k, v, cu_q, cu_k, max_q, max_k, scale=scaling, causal=causal)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs, cu_q, cu_k = [], cu_q.tolist(), cu_k.tolist()
    for s in range(len(cu_q) - 1):
        parts = q[cu_q[s] : cu_q[s + 1]], k[cu_k[s] : cu_k[s + 1]], v[cu_k[s] : cu_k[s + 1]]
        sq, sk, sv = (x.transpose(0, 1) for x in parts)  # (T, heads, D) -> (heads, T, D)
        mask = None
        if causal:
            shape = sq.shape[1], sk.shape[1]
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
        outputs.append(masked_attention(attention, sq, sk, sv, mask, scaling).transpose(0, 1))
    return torch.cat(outputs)


@functools.cache
def _torch_varlen():
    """PyTorch's own variable-length attention, whose signature differs between versions, as f(..., scale, causal)."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    grouped = {"enable_gqa": True} if "enable_gqa" in names else {}

    def run(*tensors, scale, causal):
        if "is_causal" in names:  # 2.10; its scale is 1 / sqrt(D), as that of all families
            return varlen_attn(*tensors, is_causal=causal)
        return varlen_attn(*tensors, scale=scale, window_size=(-1, 0) if causal else (-1, -1), **grouped)

    return run


def has_varlen(attention, q):
    """Can this run in one variable-length kernel: flash-attn's, or for sdpa on a GPU the one inside PyTorch."""
    kernel = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability() >= (8, 0)
    return attention == "flash_attention_2" or (attention == "sdpa" and kernel)


def masked_attention(attention, q, k, v, mask, scaling):
    """Attention with a dense mask (True: sees; None: all), by PyTorch's kernel or spelt out: (heads, T, D)."""
    if attention == "sdpa":  # without a batch dimension it would take no kernel
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)[0]
    scores = q @ k.transpose(-1, -2) * scaling
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    return scores.float().softmax(-1).to(q.dtype) @ v


def packed_attention(attention, q, k, v, row, scaling):
    """Attention over a packed row: q (T, heads, D), k and v (T, kv heads, D) -> (T, heads, D). Keys and values are
    gathered so that each completion has [prompt, itself]; queries are not."""
    k, v = k[row["kv_index"]], v[row["kv_index"]]
    lengths = row["cu_q"], row["cu_k"], row["max_q"], row["max_k"]
    return varlen_attention(attention, q, k, v, *lengths, scaling, causal=True)


# --- The layers, by hand --------------------------------------------------------------------------------------------
# transformers' own layers launch some forty small kernels each, which keeps a GPU waiting for Python. These do the same
# sums on the same modules (so that ZeRO-3's hooks on them run), with the small kernels fused. All three families share
# one decoder layer and one vision block.


def fused(rows):
    """torch.compile a function for the GPU; a CPU runs it as it stands. Its first `rows` arguments are tensors whose
    first dimension changes from call to call (tokens): they share one compilation, everything else is a constant."""

    def decorate(function):
        @functools.cache
        def compiled():  # at the first call: a process that never comes to one need not wait for PyTorch's compiler
            # a compilation a shape of heads, dtype and grad mode: more than the 8 before PyTorch gives up on a function
            torch._dynamo.config.recompile_limit = 64
            return torch.compile(function, dynamic=False)

        @functools.wraps(function)
        def run(*args):
            if not args[0].is_cuda:
                return function(*args)
            run_compiled = compiled()
            for tensor in args[:rows]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return run_compiled(*args)

        return run

    return decorate


def rotate(q, k, cos, sin):
    """Rotary embedding (arXiv 2104.09864) in the half-split layout: q and k (T, heads, D), cos and sin (T, D)."""
    cos, sin = cos[:, None].float(), sin[:, None].float()  # (T, 1, D)

    def turn(x):
        a, b = x.float().chunk(2, dim=-1)
        return (torch.cat([a, b], dim=-1) * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)

    return turn(q), turn(k)


def swiglu_gradient(grad, gate, up):
    """Gradients of silu(gate) * up, with silu(x) = x s and its derivative s (1 + x (1 - s)), s = sigmoid(x)."""
    g, x, u = grad.float(), gate.float(), up.float()
    s = x.sigmoid()
    return (g * u * s * (1 + x * (1 - s))).to(gate.dtype), (g * x * s).to(up.dtype)


rotate_fused = fused(rows=4)(rotate)  # `rotate` itself is for functions that are fused with more around it
swiglu_fused = fused(rows=2)(lambda gate, up: F.silu(gate) * up)
swiglu_gradient_fused = fused(rows=3)(swiglu_gradient)


# Their backward by hand: letting torch.compile derive it costs twice the processor time a call, and a GPU waits for it.
class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate_fused(q, k, cos, sin)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        cos, sin = ctx.saved_tensors
        return *rotate_fused(grad_q, grad_k, cos, -sin), None, None  # a rotation's transpose turns back


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu_fused(gate, up)

    @staticmethod
    def backward(ctx, grad):
        return swiglu_gradient_fused(grad, *ctx.saved_tensors)


def rms_norm(norm, x):
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def mlp(module, x):
    if hasattr(module, "gate_proj"):  # all decoders, and Qwen2.5-VL's vision tower
        return module.down_proj(Swiglu.apply(module.gate_proj(x), module.up_proj(x)))
    return module(x)


def decoder_layer(layer, attention, hidden_states, position_embeddings=None, packed=None, **kwargs):
    """A decoder layer over a packed row, in the form that transformers calls it: (1, T, H) -> (1, T, H). Without a row
    it is transformers' own.

    Where `packed["kv"]` is a list, the rotated keys and values are also left there: the sampler's prefill.
    """
    if packed is None:
        return type(layer).forward(layer, hidden_states, position_embeddings=position_embeddings, **kwargs)
    x, a, (cos, sin) = hidden_states[0], layer.self_attn, position_embeddings
    h = layer.input_layernorm(x)
    q, k, v = (f(h).view(len(x), -1, a.head_dim) for f in (a.q_proj, a.k_proj, a.v_proj))  # (T, heads, D)
    if hasattr(a, "q_norm"):  # Qwen3-VL
        q, k = a.q_norm(q), a.k_norm(k)
    q, k = Rotate.apply(q, k, cos[0], sin[0])
    if "kv" in packed:
        packed["kv"].append((k, v))
    x = x + a.o_proj(packed_attention(attention, q, k, v, packed, a.scaling).flatten(1))
    return (x + mlp(layer.mlp, layer.post_attention_layernorm(x)))[None]


def vision_block(block, attention, hidden_states, cu_seqlens, position_embeddings, max_seqlen=None, packed=None, **kw):
    """A block of the vision tower, (patches, H) -> (patches, H); patches see those of their window or their picture.
    Without a row it is transformers' own."""
    if packed is None:
        rest = {"position_embeddings": position_embeddings, "max_seqlen": max_seqlen} | kw
        return type(block).forward(block, hidden_states, cu_seqlens=cu_seqlens, **rest)
    x, a = hidden_states, block.attn
    q, k, v = a.qkv(block.norm1(x)).view(len(x), 3, a.num_heads, -1).unbind(1)  # (patches, heads, D)
    q, k = Rotate.apply(q, k, *position_embeddings)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    x = x + a.proj(varlen_attention(attention, q, k, v, *lengths, a.scaling, causal=False).flatten(1))
    return x + mlp(block.mlp, block.norm2(x))


def use_own_layers(model, attention):
    """Put the functions above into the place of transformers' own, module by module."""
    for layer in model.model.language_model.layers:
        layer.forward = functools.partial(decoder_layer, layer, attention)
    for block in model.model.visual.blocks:
        block.forward = functools.partial(vision_block, block, attention)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):  # the RMSNorm of all three families
            module.forward = functools.partial(rms_norm, module)


def pad_vision_mlp(model):
    """Widen the vision tower's MLP to a multiple of 8 with zeros: for Qwen2.5-VL's 3,420 cuBLAS takes matrix kernels of
    half the speed. silu(0) * 0 = 0, so the new weights neither change a result nor ever get a gradient."""
    for linear, along, pad in _padded_linears(model):
        linear.weight = nn.Parameter(F.pad(linear.weight.data, (0, pad) if along == 1 else (0, 0, 0, pad)))
        if along == 0:
            linear.out_features += pad
            linear.bias = linear.bias if linear.bias is None else nn.Parameter(F.pad(linear.bias.data, (0, pad)))
        else:
            linear.in_features += pad


def unpadded(model, state):
    """A state dict of the model (names as its own) in the checkpoint's shapes again: `pad_vision_mlp` undone."""
    modules = {module: name for name, module in model.named_modules()}
    for linear, along, _ in _padded_linears(model):
        for name in (f"{modules[linear]}.weight", f"{modules[linear]}.bias")[: 2 - along]:
            if name in state:
                state[name] = state[name].narrow(along, 0, model.config.vision_config.intermediate_size).contiguous()
    return state


def _padded_linears(model):
    """(linear, its padded dimension, by how much) of each vision MLP that has gates."""
    for block in model.model.visual.blocks:
        if hasattr(block.mlp, "gate_proj"):
            pad = -model.config.vision_config.intermediate_size % 8
            yield from ((block.mlp.gate_proj, 0, pad), (block.mlp.up_proj, 0, pad), (block.mlp.down_proj, 1, pad))


# --- Log-probs ---------------------------------------------------------------------------------------------------


@fused(rows=2)
def logit_statistics(logits, targets, penalty, temperature):
    """Float32 log-softmax of logits / temperature + penalty, without the (M, V) table of it: the log-prob of each
    target, the entropy and the log-sum-exp, (M,) each."""
    z = logits.float() / temperature + penalty  # (M, V)
    lse = z.logsumexp(-1)
    logps = z - lse[:, None]
    entropy = -(logps.exp() * logps.clamp(min=-1e30)).sum(-1)  # a placeholder has p = 0, and 0 x -inf is NaN
    return logps.gather(1, targets[:, None])[:, 0], entropy, lse


@fused(rows=4)
def logit_gradient(logits, targets, lse, grad, penalty, temperature):
    """Gradient of sum(grad * log-prob of the target) by the logits: (one-hot - p) * grad / temperature, (M, V)."""
    p = (logits.float() / temperature + penalty - lse[:, None]).exp()
    hot = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((hot.float() - p) * (grad / temperature)[:, None]).to(logits.dtype)


class TokenLogps(torch.autograd.Function):
    """Log-prob of each target and the entropy of its distribution: hidden (M, H), weight (V, H), targets (M,), penalty
    (V,) -> (M,), (M,). The entropy is a metric, without a gradient.

    LOGIT_CHUNK tokens at a time, and a chunk's logits are computed again in the backward, so that no (M, V) tensor
    exists. By hand, because autograd would keep and pass over some ten tables of that size.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, penalty, temperature):
        chunks = zip(hidden.split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK), strict=True)
        parts = [logit_statistics(h @ weight.T, t, penalty, temperature) for h, t in chunks]
        logps, entropy, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, penalty, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, penalty, lse = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), None
        chunks = (x.split(LOGIT_CHUNK) for x in (hidden, targets, lse, grad, d_hidden))
        for h, t, lse_part, g, out in zip(*chunks, strict=True):
            d_logits = logit_gradient(h @ weight.T, t, lse_part, g, penalty, ctx.temperature)
            torch.mm(d_logits, weight, out=out)
            if ctx.needs_input_grad[1]:  # summed in the weight's dtype, as autograd sums
                d_weight = d_logits.T @ h if d_weight is None else d_weight.addmm_(d_logits.T, h)
        return d_hidden, d_weight, None, None, None


class LogProbs(nn.Module):
    """The language-model head, reduced to what GRPO needs of it. It shares the head's parameter and is a module of
    its own so that ZeRO-3 gathers the weight once for all chunks."""

    def __init__(self, weight, banned, temperature):
        super().__init__()
        self.weight, self.temperature = weight, temperature
        self.register_buffer("penalty", token_penalty(len(weight), banned, weight.device), persistent=False)

    def forward(self, hidden, targets):
        """hidden (M, H), targets (M,) -> log-probs (M,), entropies (M,)."""
        return TokenLogps.apply(hidden, self.weight, targets, self.penalty, self.temperature)


def token_penalty(vocabulary, banned, device):
    """What is added to the logits (V,): -inf for the banned ids, which gives them probability 0."""
    return torch.zeros(vocabulary, device=device).index_fill(0, torch.tensor(banned, device=device), float("-inf"))


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
        # transformers asks these names only whether to build masks, and whether the vision tower wants max_seqlen
        model.model.language_model.config._attn_implementation = "packed"
        model.model.visual.config._attn_implementation = "packed_flash"

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
