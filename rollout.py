"""The sampler: G completions of each prompt, drawn from exactly the distribution that the trainer differentiates.

One prefill a prompt, packed like a training row (the vision tower and the prompt run once, not G times); its keys and
values are shared by the prompt's G completions. Then one token a step for all completions at once, written as a plain
function over static buffers: what changes from step to step lives in tensors that are written in place.

On a GPU that step is captured as a CUDA graph and replayed: launched from Python, its thousand small kernels cost 50 ms
of processor time a token and 5 ms of GPU time. On a CPU, and as the graph's oracle in the tests, it runs as it stands.

By hand rather than through transformers' `generate`, which repeats the prompt G times, spends some 70 ms a token on
launching kernels, and obeys the top_k and repetition_penalty of the checkpoint's generation config: then the log-probs
that it sampled from are not the policy's, and GRPO's ratio is wrong before training starts.

Left out: top-p, top-k, beams (GRPO wants the policy's own distribution), paged caches, continuous batching.
"""

from __future__ import annotations

import torch

from model import build_row, hidden_states, placeholder_ids

CHECK_EVERY = 8  # decode steps between two looks at which completions have ended: a look waits for the GPU
OWN_BUCKET = 128  # a completion's own keys are read in multiples of this, so that short ones don't pay for long ones
CAPTURE = True  # False: run the step as it stands on a GPU too, which the tests compare with
SHRINK_AT = 0.75  # drop finished rows once the live ones fill no more than this share of the buffers


@torch.no_grad()
def sample(model, prompts, num_generations, max_completion_length, temperature, eos_ids, pad_id):
    """Draw `num_generations` completions of each prompt. Temperature 0 is greedy.

    `model` is transformers' model inside a model.Policy (its attention is the packed one), weights whole (see
    model.gathered). `prompts` are data.encode_prompt's dicts with `position_ids`. With N = prompts x G, the G
    completions of a prompt side by side, returns tokens (N, R) and log-probs (N, R) on the model's device, R being
    the longest completion's length; behind a completion's first end-of-sequence token stand `pad_id` and 0.
    The noise comes from torch's global generator: seed it, and the same prompts give the same completions.
    """
    decoder = Decoder(model, prompts, num_generations, max_completion_length, temperature, eos_ids, pad_id)
    for step in range(1, max_completion_length):
        decoder.step()
        if step % CHECK_EVERY == 0 and not decoder.drop_finished():
            break
    longest = decoder.lengths.max().item()  # waits for the GPU: the rollout is over
    return decoder.tokens[:, :longest], decoder.logps[:, :longest]


class Decoder:
    """The buffers of one rollout and the step that advances them: B prompts, G completions each, n = B*G live rows."""

    def __init__(self, model, prompts, G, max_completion_length, temperature, eos_ids, pad_id):
        self.text, self.head = model.model.language_model, model.lm_head
        self.temperature, self.pad_id = temperature, pad_id
        device, N, R = model.device, len(prompts) * G, max_completion_length
        self.eos = torch.tensor(eos_ids, device=device)
        self.banned = torch.tensor(placeholder_ids(model.config), device=device)
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
        _, heads, _, D = self.prefix[0][0].shape
        self.steps, self.graph, room = 0, None, (N, heads, min(R, OWN_BUCKET), D)
        self.own = [(last_hidden.new_zeros(room), last_hidden.new_zeros(room)) for _ in self.prefix]
        # The prompt's last hidden state predicts the first token: G draws from the same logits.
        self._draw(self.head(last_hidden).repeat_interleave(G, dim=0))  # (B, V) -> (N, V)

    def _prefill(self, model, prompts):
        """Run the prompts as one packed row; keep keys and values as (B, heads, P, D) a layer, padded on the right.
        Returns the last hidden state of each prompt (B, H)."""
        row = build_row([(prompt, []) for prompt in prompts], model.device)
        row["kv"] = {}
        hidden = hidden_states(model, row)  # (T, H)
        extents = [(start, end) for start, end, _ in row["blocks"]]
        longest = max(end - start for start, end in extents)
        P = torch.tensor([end - start for start, end in extents], device=model.device)
        self.prefix_mask = (torch.arange(longest, device=model.device) < P[:, None])[:, None, None]  # (B, 1, 1, P)

        def padded(x):  # (heads, T, D) -> (B, heads, P, D)
            table = x.new_zeros(len(extents), x.shape[0], longest, x.shape[2])
            for b, (start, end) in enumerate(extents):
                table[b, :, : end - start] = x[:, start:end]
            return table

        self.prefix = [(padded(k), padded(v)) for _, (k, v) in sorted(row["kv"].items())]
        return hidden[torch.tensor([end - 1 for _, end in extents], device=model.device)]

    def step(self):
        """Advance every live row by one token. A graph holds addresses and shapes, so it is captured anew (0.03 s)
        whenever the buffers grow or shrink; under ZeRO-3 the gathered weights also move from rollout to rollout."""
        if self.steps == self.own[0][0].shape[2]:
            self._grow()
        capture = CAPTURE and self.line.is_cuda and self.steps > 0  # the first step warms the libraries up
        if capture and self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's watchdog thread may ask about its events meanwhile, which "global" forbids
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._forward()
        self.graph.replay() if capture else self._forward()
        self.steps += 1

    def _forward(self):
        """The step itself, on buffers only: it never looks at a value from the CPU."""
        room = self.own[0][0].shape[2]
        x = self.text.embed_tokens(self.current)  # (n, H)
        rotation = self._rotation(x.dtype)
        seen = torch.arange(room, device=x.device) <= self.t  # (R,): a row's own keys so far, this token's included
        prefix_mask = self.prefix_mask.repeat_interleave(self.G, dim=0)  # (B, 1, 1, P) -> (n, 1, 1, P)
        mask = torch.cat([prefix_mask, seen.expand(len(x), 1, 1, room)], dim=-1)  # (n, 1, 1, P+R)
        for layer, prefix, own in zip(self.text.layers, self.prefix, self.own, strict=True):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), rotation, prefix, own, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.t += 1
        self._draw(self.head(self.text.norm(x)))

    def _rotation(self, dtype):
        """cos and sin (n, 1, D) at each row's position. Text has the same position on mRoPE's three axes, so this is
        the ordinary rotary embedding (arXiv 2104.09864) in all three families."""
        rotary = self.text.rotary_emb
        angles = (self.first_position + self.t)[:, None] * rotary.inv_freq.float()  # (n, D/2)
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # (n, 1, D)
        return [(f(angles) * rotary.attention_scaling).to(dtype) for f in (torch.cos, torch.sin)]

    def _attend(self, attention, x, rotation, prefix, own, mask):
        """One layer's attention for one new token a row: x (n, H) -> (n, H). The keys are [prompt, own tokens]; the
        prompt's are read once a group: its G x rep query heads are rows of one matrix product."""
        n, D = len(x), attention.head_dim
        q, k, v = (f(x).view(n, -1, D) for f in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):  # Qwen3-VL
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        for cache, new in zip(own, (k, v), strict=True):
            cache.index_copy_(2, self.t, new[:, :, None])  # (n, kv, D) -> (n, kv, 1, D)
        B, G, kv, (P, R) = self.B, self.G, k.shape[1], (prefix[0].shape[2], own[0].shape[2])
        rep = q.shape[1] // kv  # query heads that share a key head
        q_own = q.view(n, kv, rep, D)
        q_prompt = q.view(B, G, kv, rep, D).transpose(1, 2).reshape(B, kv, G * rep, D)
        scores_prompt = q_prompt @ prefix[0].transpose(2, 3)  # (B, kv, G*rep, P)
        scores_prompt = scores_prompt.view(B, kv, G, rep, P).transpose(1, 2).reshape(n, kv, rep, P)
        scores = torch.cat([scores_prompt, q_own @ own[0].transpose(2, 3)], dim=-1) * attention.scaling
        weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(x.dtype)  # (n, kv, rep, P+R)
        on_prompt, on_own = weights.split([P, R], dim=-1)
        on_prompt = on_prompt.view(B, G, kv, rep, P).transpose(1, 2).reshape(B, kv, G * rep, P)
        out = (on_prompt @ prefix[1]).view(B, kv, G, rep, D).transpose(1, 2).reshape(n, kv, rep, D)
        return attention.o_proj((out + on_own @ own[1]).reshape(n, -1))  # (n, kv, rep, D) -> (n, H)

    def _draw(self, logits):
        """Draw a token a row from logits (n, V) and write it, its log-prob and whether the row has ended."""
        tokens, logps = draw(logits, self.temperature, self.banned)
        tokens = tokens.masked_fill(self.finished, self.pad_id)
        column = self.t.expand_as(self.line)
        self.tokens.index_put_((self.line, column), tokens)
        self.logps.index_put_((self.line, column), logps.masked_fill(self.finished, 0.0))
        self.lengths.index_add_(0, self.line, (~self.finished).long())
        self.current.copy_(tokens)
        self.finished |= (tokens[:, None] == self.eos).any(1)

    def _grow(self):
        """Room for OWN_BUCKET more tokens a row."""
        pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, OWN_BUCKET))  # noqa: E731
        self.own, self.graph = [(pad(k), pad(v)) for k, v in self.own], None

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
        self.B, self.G, self.graph = len(groups), G, None
        for name in ("line", "current", "finished", "first_position"):
            setattr(self, name, getattr(self, name)[rows])
        self.prefix_mask = self.prefix_mask[groups]
        self.prefix = [(k[groups], v[groups]) for k, v in self.prefix]
        self.own = [(k[rows], v[rows]) for k, v in self.own]
        return True


def rotate(x, cos, sin):
    """Rotary embedding in the half-split layout: x (n, heads, D), cos and sin (n, 1, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def draw(logits, temperature, banned):
    """A token a row from softmax(logits / temperature) without the banned ids, and its log-prob: (n, V) -> (n,), (n,).

    argmax(log p + Gumbel noise) is a draw from p (Gumbel-max), and unlike torch.multinomial never waits for the GPU.
    """
    logits = logits.float() / (temperature or 1.0)
    logps = logits.index_fill(1, banned, float("-inf")).log_softmax(-1)
    noise = -torch.empty_like(logps).exponential_().log() if temperature else 0.0
    tokens = (logps + noise).argmax(-1)
    return tokens, logps.gather(1, tokens[:, None])[:, 0]
