"""The sampler: G completions of each prompt, drawn from exactly the distribution that the trainer differentiates.

One prefill a prompt, packed like a training row (the vision tower and the prompt run once, not G times); its keys and
values are shared by the prompt's G completions. Then one token a step for all completions at once, written as a plain
function over static buffers: what changes from step to step lives in tensors that are written in place.

On a GPU that step is captured as a CUDA graph and replayed, its small kernels fused (model.fused), its attention one
kernel a layer: launched one by one from Python, they cost 50 ms of processor time a token and 5 ms of GPU time. On a
CPU, and as the graph's oracle in the tests, the same functions run as they stand.

By hand rather than through transformers' `generate`, which repeats the prompt G times, spends some 70 ms a token on
launching kernels, and obeys the top_k and repetition_penalty of the checkpoint's generation config: then the log-probs
that it sampled from are not the policy's, and GRPO's ratio is wrong before training starts.

Left out: top-p, top-k, beams (GRPO wants the policy's own distribution), paged caches, continuous batching.
"""

from __future__ import annotations

import math
import time
from collections import namedtuple

import torch
import torch.nn.functional as F

from model import build_row, fused, hidden_states, placeholder_ids, rotate, token_penalty

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without; only a GPU wants it
    triton = None

CHECK_EVERY = 16  # decode steps between two looks at which completions have ended: a look waits for the GPU
CAPTURE = True  # False: run the step as it stands on a GPU too, which the tests compare with
SHRINK_AT = 0.75  # drop finished rows once the live ones fill no more than this share of the buffers


@torch.no_grad()
def sample(
    model, prompts, num_generations, max_completion_length, temperature, eos_ids, pad_id, budget=math.inf, begin=None
):
    """Draw `num_generations` completions of each prompt. Temperature 0 is greedy.

    `model` is transformers' model inside a model.Policy (its attention is the packed one), weights whole (see
    model.gathered). `prompts` are data.encode_prompt's dicts with `position_ids`. With N = prompts x G, the G
    completions of a prompt side by side, returns tokens (N, R) and log-probs (N, R) on the model's device, R being
    the longest completion's length; behind a completion's first end-of-sequence token stand `pad_id` and 0.
    And how the decoding went: its seconds, and the bytes of weights, keys and values that its steps had to read.
    The noise comes from torch's global generator: seed it, and the same prompts give the same completions. With a
    `budget` (--max_tokens_per_forward) they come in waves that take no more memory than such a forward, see `waves`;
    `begin` is called with each.
    """
    limits = num_generations, max_completion_length
    parts, longest, seconds, read = [], 0, 0.0, 0
    for wave in waves(model, prompts, *limits, budget):
        if begin:
            begin(wave)
        decoder = Decoder(model, wave, *limits, temperature, eos_ids, pad_id)
        decoder.lengths.max().item()  # waits for the GPU: the prefill is over
        began = time.perf_counter()
        for step in range(1, max_completion_length):
            decoder.step()
            if step % CHECK_EVERY == 0 and not decoder.drop_finished():
                break
        longest = max(longest, decoder.lengths.max().item())  # waits for the GPU: the wave is over
        seconds, read = seconds + time.perf_counter() - began, read + decoder.read
        parts.append((decoder.tokens, decoder.logps))
        del decoder  # its caches go before the next wave's come
    tokens, logps = map(torch.cat, zip(*parts, strict=True))
    return tokens[:, :longest], logps[:, :longest], {"seconds": seconds, "bytes": read}


def waves(model, prompts, G, R, budget):
    """Cut prompts, in order, into lists that are within `budget` as `wave_tokens` counts, or of one prompt."""
    found = [[]]
    for prompt in prompts:
        if found[-1] and wave_tokens(model, [*found[-1], prompt], G, R) > budget:
            found.append([])
        found[-1].append(prompt)
    return found


def wave_tokens(model, prompts, G, R):
    """The budget (tokens in a forward of the update) that takes the memory of sampling all these prompts at once.

    The prefill is such a forward. After it a token keeps a key and a value a layer, where the update with checkpointing
    keeps the layer's input and, for the layer that it computes again and the logits, about as much once more: in
    Qwen2.5-VL-3B 2 x 2 heads x 128 numbers against 2 x 2048, so eight tokens here are one there (7 in the 7B, 4 in
    Qwen3-VL-8B)."""
    a, P = model.model.language_model.layers[0].self_attn, max(len(prompt["input_ids"]) for prompt in prompts)
    share = a.k_proj.out_features / a.q_proj.in_features
    return math.ceil(len(prompts) * max(P, share * (P + G * R)))


class Decoder:
    """The buffers of one rollout and the step that advances them: B prompts, G completions each, n = B*G live rows."""

    @torch.no_grad()
    def __init__(self, model, prompts, G, max_completion_length, temperature, eos_ids, pad_id):
        self.text, self.head = model.model.language_model, model.lm_head
        self.layers = [Weights.of(layer) for layer in self.text.layers]
        self.temperature, self.pad_id = temperature, pad_id
        device, N, R = model.device, len(prompts) * G, max_completion_length
        self.eos = torch.tensor(eos_ids, device=device)
        self.penalty = token_penalty(len(self.head.weight), placeholder_ids(model.config), device)
        # Results, one line a completion. Row i of the live buffers writes line self.line[i].
        self.tokens = torch.full((N, R), pad_id, device=device)
        self.logps = torch.zeros(N, R, device=device)
        self.lengths = torch.zeros(N, dtype=torch.long, device=device)
        self.line = torch.arange(N, device=device)
        # State of the live rows.
        self.B, self.G = len(prompts), G
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # index of the token drawn last
        self.current = torch.zeros(N, dtype=torch.long, device=device)  # that token, a row
        self.finished = torch.zeros(N, dtype=torch.bool, device=device)
        starts = [int(prompt["position_ids"].max()) + 1 for prompt in prompts]
        self.first_position = torch.tensor(starts, device=device).repeat_interleave(G)  # (B,) -> (N,)
        last_hidden = self._prefill(model, prompts)  # (B, H)
        _, heads, _, D = self.prompt[0][0].shape
        self.own = [[last_hidden.new_zeros(N, heads, R, D) for _ in "kv"] for _ in self.layers]
        self.warm, self.graph = False, None
        self.steps, self.read = 0, 0
        self.weight_bytes = self.head.weight.nbytes + sum(
            x.nbytes for w in self.layers for x in w if torch.is_tensor(x)
        )
        # The prompt's last hidden state predicts the first token: G draws from the same logits.
        self._draw(self.head(last_hidden).repeat_interleave(G, dim=0))  # (B, V) -> (N, V)

    def _prefill(self, model, prompts):
        """Run the prompts as one packed row; keep keys and values as (B, heads, P, D) a layer, padded on the right.
        Returns the last hidden state of each prompt (B, H)."""
        row = build_row([(prompt, []) for prompt in prompts], model.device)
        row["kv"] = []
        hidden = hidden_states(model, row)  # (T, H)
        lengths = [end - start for start, end in row["groups"]]
        longest = max(lengths)
        self.prompt_lengths = torch.tensor(lengths, device=model.device)
        self.prompt_tokens = sum(lengths)

        # (T, kv heads, D) -> (B, kv heads, P, D) for keys and values of all layers at once; padding repeats some row
        place = torch.arange(longest)[None] + torch.tensor([[start] for start, _ in row["groups"]])  # (B, P)
        place = place.clamp(max=len(hidden) - 1).to(model.device)
        tables = torch.stack([x for kv in row["kv"] for x in kv])[:, place].transpose(2, 3).contiguous()
        self.prompt = list(zip(tables[::2], tables[1::2], strict=True))
        return hidden[torch.tensor([end - 1 for _, end in row["groups"]], device=model.device)]

    @torch.no_grad()
    def step(self):
        """Advance every live row by one token. A graph holds addresses and shapes, so it is captured anew (0.03 s)
        whenever the buffers shrink, and in every rollout: under ZeRO-3 the gathered weights also move."""
        self.steps += 1
        self.read += self._bytes()
        if not (CAPTURE and self.line.is_cuda):
            return self._forward()
        if not self.warm:  # what compiles or loads a library must not happen in a capture
            self.warm = True
            return self._forward()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's watchdog thread may ask about its events meanwhile, which "global" forbids
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._forward()
        self.graph.replay()

    def _bytes(self):
        """What a step has to read: every weight once, each prompt's keys and values once, each row's own."""
        _, kv, _, D = self.prompt[0][0].shape
        a_key = kv * D * self.prompt[0][0].element_size()
        return self.weight_bytes + 2 * len(self.layers) * a_key * (self.prompt_tokens + len(self.line) * self.steps)

    def _forward(self):
        """The step itself, on buffers only: it never looks at a value from the CPU."""
        x = self.text.embed_tokens(self.current)  # (n, H)
        # Text has the same position on mRoPE's three axes, so this is the ordinary rotary embedding in all families.
        rotary = self.text.rotary_emb
        angles = (self.first_position + self.t)[:, None] * rotary.inv_freq.float()  # (n, D/2)
        angles = torch.cat([angles, angles], dim=-1)  # (n, D)
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        for weights, prompt, own in zip(self.layers, self.prompt, self.own, strict=True):
            q = before_attention(x, cos, sin, *own, self.t, weights)
            parts = attend(q, *prompt, self.prompt_lengths, *own, self.t, weights.scaling)
            x = after_attention(x, *parts, weights)
        self.t += 1
        self._draw(self.head(self.text.norm(x)))

    def _draw(self, logits):
        """Draw a token a row from logits (n, V) and write it, its log-prob and whether the row has ended."""
        tokens, logps = draw(logits, self.temperature, self.penalty)
        tokens = tokens.masked_fill(self.finished, self.pad_id)
        column = self.t.expand_as(self.line)
        self.tokens.index_put_((self.line, column), tokens)
        self.logps.index_put_((self.line, column), logps.masked_fill(self.finished, 0.0))
        self.lengths.index_add_(0, self.line, (~self.finished).long())
        self.current.copy_(tokens)
        self.finished |= (tokens[:, None] == self.eos).any(1)

    def drop_finished(self):
        """Take finished rows out of the buffers where that shrinks them enough; False once all have ended.

        Rows keep their (B, G) grid, which the shared prompt needs: groups with nothing alive leave, and G becomes
        the largest number alive in one group, the others filling up with finished rows.
        """
        alive = ~self.finished.view(self.B, self.G).cpu()  # waits for the GPU
        if not alive.any():
            return False
        groups, G = alive.any(1).nonzero()[:, 0], int(alive.sum(1).max())
        if len(groups) * G > SHRINK_AT * alive.numel():
            return True
        order = (~alive).int().argsort(dim=1, stable=True)[groups, :G]  # alive rows first
        rows = (groups[:, None] * self.G + order).flatten().to(self.line.device)
        groups = groups.to(self.line.device)
        self.B, self.G, self.warm, self.graph = len(groups), G, False, None
        for name in ("line", "current", "finished", "first_position"):
            setattr(self, name, getattr(self, name)[rows])
        self.prompt_lengths = self.prompt_lengths[groups]
        self.prompt_tokens = int(self.prompt_lengths.sum())
        self.prompt = [[x[groups] for x in kv] for kv in self.prompt]
        self.own = [[x[rows] for x in kv] for kv in self.own]
        return True


# --- One layer, one token a row ------------------------------------------------------------------------------------


class Weights(namedtuple("Weights", "norm1 eps qkv bias q_norm k_norm out norm2 gate_up down heads scaling")):
    """A decoder layer's weights, projections that read the same input side by side: one product instead of two or
    three. The copies (two thirds of the weights) live as long as the rollout."""

    @classmethod
    def of(cls, layer):
        a, mlp = layer.self_attn, layer.mlp
        three = a.q_proj, a.k_proj, a.v_proj
        return cls(
            norm1=layer.input_layernorm.weight,
            eps=layer.input_layernorm.variance_epsilon,
            qkv=torch.cat([f.weight for f in three]),
            bias=None if a.q_proj.bias is None else torch.cat([f.bias for f in three]),
            q_norm=a.q_norm.weight if hasattr(a, "q_norm") else None,  # Qwen3-VL
            k_norm=a.k_norm.weight if hasattr(a, "k_norm") else None,
            out=a.o_proj.weight,
            norm2=layer.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
            heads=[len(f.weight) // a.head_dim for f in three],
            scaling=a.scaling,
        )


def norm(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


@fused(rows=5)
def before_attention(x, cos, sin, own_k, own_v, t, w):
    """x (n, H), cos and sin (n, D) -> q (n, heads, D); the token's key and value go into the caches at place t."""
    D = cos.shape[1]
    q, k, v = F.linear(norm(x, w.norm1, w.eps), w.qkv, w.bias).view(len(x), -1, D).split(w.heads, dim=1)
    if w.q_norm is not None:
        q, k = norm(q, w.q_norm, w.eps), norm(k, w.k_norm, w.eps)
    q, k = rotate(q, k, cos, sin)
    own_k.index_copy_(2, t, k[:, :, None])  # (n, kv, D) -> (n, kv, 1, D)
    own_v.index_copy_(2, t, v[:, :, None])
    return q.contiguous()


@fused(rows=4)
def after_attention(x, out, largest, total, w):
    """x (n, H) and the attention's parts over S pieces of the keys -> x (n, H) behind the layer.

    A piece gives the values weighted by exp(score - largest), out (n, S, heads, D), and the sum of these weights, total
    (n, S, heads): the softmax over all keys follows by rescaling to the common largest (Flash-Decoding)."""
    scale = (largest - largest.amax(1, keepdim=True)).exp()  # (n, S, heads)
    y = (out * scale[..., None]).sum(1) / (total * scale).sum(1)[..., None]  # (n, heads, D)
    x = x + F.linear(y.flatten(1).to(x.dtype), w.out)
    gate, up = F.linear(norm(x, w.norm2, w.eps), w.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w.down)


def attend(q, prompt_k, prompt_v, prompt_lengths, own_k, own_v, t, scaling):
    """Attention of one new token a row, q (n, heads, D), over its prompt (B, kv heads, P, D) and its own tokens 0 ... t
    (n, kv heads, R, D), in the parts that `after_attention` puts together."""
    arguments = q, prompt_k, prompt_v, prompt_lengths, own_k, own_v, t, scaling
    return attend_kernel(*arguments) if CAPTURE and q.is_cuda else attend_plain(*arguments)


def attend_plain(q, prompt_k, prompt_v, prompt_lengths, own_k, own_v, t, scaling):
    """Two parts: the prompt, read once a group, whose G x rep query heads are rows of one product, and own tokens."""
    (n, heads, D), (B, kv, P, _), R = q.shape, prompt_k.shape, own_k.shape[2]
    G, rep = n // B, heads // kv  # rep query heads share a key head

    def part(q, k, v, seen):
        scores = (q @ k.transpose(-1, -2)).float() * scaling
        scores = scores.masked_fill(~seen, float("-inf"))
        largest = scores.amax(-1)
        weights = (scores - largest[..., None]).exp()
        return (weights.to(v.dtype) @ v).float(), largest, weights.sum(-1)

    grouped = q.view(B, G, kv, rep, D).transpose(1, 2).reshape(B, kv, G * rep, D)
    seen = torch.arange(P, device=q.device) < prompt_lengths[:, None, None, None]  # (B, 1, 1, P)
    on_prompt = part(grouped, prompt_k, prompt_v, seen)
    on_prompt = [x.view(B, kv, G, rep, -1).transpose(1, 2).reshape(n, heads, -1) for x in on_prompt]
    on_own = part(q.view(n, kv, rep, D), own_k, own_v, torch.arange(R, device=q.device) <= t)
    on_own = [x.reshape(n, heads, -1) for x in on_own]
    out, largest, total = (torch.stack(both, dim=1) for both in zip(on_prompt, on_own, strict=True))
    return out, largest[..., 0], total[..., 0]  # (n, 2, heads, D), (n, 2, heads) twice


if triton:

    @triton.jit(do_not_specialize=["G", "P", "R"])
    def _attend(
        q, prompt_k, prompt_v, prompt_lengths, own_k, own_v, t, out, largest, total, scaling, G, P, R,
        S: tl.constexpr, KV: tl.constexpr, REP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        """One row, one key head, one of S pieces of its keys: the first S/2 divide up the prompt, the others its own
        tokens. Softmax on the fly, KEYS keys at a time (FlashAttention, arXiv 2205.14135)."""
        n, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        if s < S // 2:
            base = ((n // G) * KV + h).to(tl.int64) * P * D
            k, v, count, piece = prompt_k + base, prompt_v + base, tl.load(prompt_lengths + n // G), s
        else:
            base = (n * KV + h).to(tl.int64) * R * D
            k, v, count, piece = own_k + base, own_v + base, tl.load(t) + 1, s - S // 2
        size = tl.cdiv(tl.cdiv(count, S // 2), KEYS) * KEYS
        start, end = piece * size, tl.minimum(count, (piece + 1) * size)
        row, d, key = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, KEYS)
        place = (n * KV + h) * REP + row  # of the query heads that share this key head; ROWS is at least tl.dot's 16
        x = tl.load(q + place[:, None] * D + d, mask=row[:, None] < REP, other=0.0)
        y, sums = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        for first in range(start, end, KEYS):
            here = first + key < end
            keys = tl.load(k + (first + key)[None, :] * D + d[:, None], mask=here[None, :], other=0.0)  # (D, KEYS)
            scores = tl.where(here[None, :], tl.dot(x, keys, input_precision="ieee") * scaling, float("-inf"))
            new = tl.maximum(m, tl.max(scores, 1))
            weights, shrink = tl.exp(scores - new[:, None]), tl.exp(m - new)
            values = tl.load(v + (first + key)[:, None] * D + d, mask=here[:, None], other=0.0)  # (KEYS, D)
            y = y * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            sums = sums * shrink + tl.sum(weights, 1)
            m = new
        place = (n * S + s) * KV * REP + h * REP + row
        tl.store(out + place[:, None] * D + d, y, mask=row[:, None] < REP)
        tl.store(largest + place, m, mask=row < REP)
        tl.store(total + place, sums, mask=row < REP)


def attend_kernel(q, prompt_k, prompt_v, prompt_lengths, own_k, own_v, t, scaling):
    """The same in one kernel. Few rows are cut into more pieces, so that all of the GPU has something to do."""
    (n, heads, D), (_, kv, P, _), R = q.shape, prompt_k.shape, own_k.shape[2]
    S, rep = 16 if n < 32 else 8 if n < 128 else 4, heads // kv
    out = torch.empty(n, S, heads, D, device=q.device)
    largest, total = torch.empty(2, n, S, heads, device=q.device)
    pointers = q, prompt_k, prompt_v, prompt_lengths, own_k, own_v, t, out, largest, total
    rows = max(16, triton.next_power_of_2(rep))
    _attend[(n, kv, S)](*pointers, scaling, n // len(prompt_k), P, R, S, kv, rep, rows, D, KEYS=64)
    return out, largest, total


# --- Drawing -------------------------------------------------------------------------------------------------------


def draw(logits, temperature, penalty):
    """A token a row from softmax(logits / temperature + penalty), and its log-prob: (n, V) -> (n,), (n,). Temperature 0
    takes the likeliest.

    argmax(log p + Gumbel noise) is a draw from p (Gumbel-max), and unlike torch.multinomial never waits for the GPU;
    minus the logarithm of an exponential variable is such noise."""
    if temperature:
        noise = torch.empty(logits.shape, device=logits.device).exponential_()
    else:
        noise = torch.ones(len(logits), 1, device=logits.device)
    return choose(logits, noise, penalty, temperature or 1.0)


@fused(rows=2)
def choose(logits, exponential, penalty, temperature):
    z = logits.float() / temperature + penalty
    tokens = (z - exponential.log()).argmax(-1)
    return tokens, z.gather(1, tokens[:, None])[:, 0] - z.logsumexp(-1)
