"""What only a GPU can show; `pytest -m gpu`. Oracles are the CPU's float32 and the plain attention."""

import pytest
import torch
from test_launch import launch, training

import grpo
import model as M
import rollout
from test_model import FAMILIES, make_prompt, random_completions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_row_in_bf16_against_float32_repeated(checkpoints, family, attention):
    exact, processor = M.load_policy(checkpoints[family], torch_dtype="float32", device="cpu")
    packed, _ = M.load_policy(checkpoints[family], torch_dtype="bfloat16", attn_implementation=attention)
    sizes = [([(56, 84)], [30, 8, 0, 17]), ([(84, 56), (28, 28)], [5, 64])]
    groups = [(make_prompt(exact, processor, pics), random_completions(R, i)) for i, (pics, R) in enumerate(sizes)]
    with torch.no_grad():
        want = [logps for prompt, completions in groups for logps in M.repeated_logps(exact, prompt, completions)]
        table, _ = M.Policy(packed)(M.build_row(groups, "cuda"))
    gap = torch.cat([(row[: len(w)].cpu() - w).abs() for row, w in zip(table, want, strict=True)])
    assert gap.mean() < 0.03 and gap.max() < 0.3, (gap.mean(), gap.max())  # a wrong mask is off by 0.5 and more


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_varlen_kernels_against_the_loop(attention, causal):
    """Grouped-query heads, keys longer than queries (aligned to the bottom right), values and gradients."""
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 70, 75, 130], [0, 70, 150, 300]))
    tensors = [torch.randn(T, heads, 64, device="cuda").bfloat16() for T, heads in ((130, 16), (300, 2), (300, 2))]
    results = []
    for backend in (attention, "eager"):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        assert M.has_varlen(backend, q) == (backend == attention)
        out = M.varlen_attention(backend, q, k, v, cu_q, cu_k, 70, 150, 0.125, causal)
        results.append([out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("n, G, P, t", [(8, 8, 500, 0), (64, 8, 470, 200), (6, 2, 33, 63), (256, 8, 100, 130)])
def test_decode_attention_kernel_against_the_plain_one(n, G, P, t):
    """The pieces differ, what they add up to does not; float32, and bf16 as the model has it."""
    torch.manual_seed(0)
    heads, kv, R, D, B = 16, 2, 256, 128, n // G
    shapes = (n, heads, D), (B, kv, -(-P // 16) * 16, D), (B, kv, -(-P // 16) * 16, D), (n, kv, R, D), (n, kv, R, D)
    q, pk, pv, ok, ov = (torch.randn(shape, device="cuda") for shape in shapes)
    lengths = torch.tensor([max(1, P - 3 * b) for b in range(B)], device="cuda")
    place = torch.tensor([t], device="cuda")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        results = []
        for function in (rollout.attend_kernel, rollout.attend_plain):
            tensors = [x.to(dtype) for x in (q, pk, pv, ok, ov)]
            out, largest, total = function(*tensors[:3], lengths, *tensors[3:], place, 0.09)
            scale = (largest - largest.amax(1, keepdim=True)).exp()
            results.append((out * scale[..., None]).sum(1) / (total * scale).sum(1)[..., None])
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_token_logps_on_the_gpu_against_autograd():
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 64, device="cuda"), torch.randn(1000, 64, device="cuda")
    targets, banned = torch.randint(0, 990, (50,), device="cuda"), [995, 999]
    head = M.LogProbs(torch.nn.Parameter(weight), banned, 0.7)
    hidden.requires_grad_()
    logps, entropy = head(hidden, targets)
    logits = (hidden @ head.weight.T / 0.7).index_fill(1, torch.tensor(banned, device="cuda"), float("-inf"))
    want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logps, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-3, atol=1e-3)
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), (hidden, head.weight)) for x in (logps, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_token_counts_share_a_compilation(checkpoints):
    """Rows of many lengths, batches of many sizes: PyTorch must not compile again for each."""
    policy, processor = M.load_policy(checkpoints["qwen2_5_vl"], torch_dtype="bfloat16")
    trainer = M.Policy(policy)
    prompts = [make_prompt(policy, processor, [(56, 84)], "a" * i) for i in range(1, 9)]

    def work(i):
        trainer(M.build_row([(prompts[i], random_completions([7, 3 + i]))], "cuda"))[0].sum().backward()
        rollout.sample(policy, prompts[: i + 2], 2 + i % 2, 5, 1.0, [], 0)  # under 32 rows: one way to cut keys

    work(0), work(1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for i in range(2, 6):
        work(i)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_the_gpu_equal_the_cpus(checkpoints, family):
    tokens = []
    for device in ("cpu", "cuda"):
        policy, processor = M.load_policy(checkpoints[family], torch_dtype="float32", device=device)
        eos = M.eos_token_ids(policy, processor.tokenizer)
        prompts = [make_prompt(policy, processor, [(56, 84)], "a"), make_prompt(policy, processor, [], "bb")]
        M.Policy(policy)
        tokens.append(rollout.sample(policy, prompts, 2, 40, 0.0, eos, 0)[0].cpu())
    assert torch.equal(*tokens)


def test_sampler_and_trainer_agree_in_bf16(checkpoints):
    policy, processor = M.load_policy(checkpoints["qwen2_5_vl"], torch_dtype="bfloat16")
    prompts = [make_prompt(policy, processor, [(56, 84)], "a"), make_prompt(policy, processor, [(84, 56)], "bb")]
    trainer = M.Policy(policy)
    tokens, logps, _ = rollout.sample(policy, prompts, 8, 64, 1.0, [], 0)
    with torch.no_grad():
        groups = [(prompt, list(tokens[8 * i : 8 * i + 8].cpu())) for i, prompt in enumerate(prompts)]
        table, _ = trainer(M.build_row(groups, "cuda"))
    gap = (table - logps).abs()
    assert gap.mean() < 0.03 and gap.max() < 0.3, (gap.mean(), gap.max())


def test_graph_equals_plain_steps(checkpoints, monkeypatch):
    """The captured step against the one launched from Python, while rows end, leave and make room; float32, so that
    the same noise gives the same tokens."""
    policy, processor = M.load_policy(checkpoints["qwen2_5_vl"], torch_dtype="float32")
    prompts = [make_prompt(policy, processor, [(56, 84)], "a"), make_prompt(policy, processor, [], "bb")]
    M.Policy(policy)
    runs = []
    for capture in (True, False):
        monkeypatch.setattr(rollout, "CAPTURE", capture)
        runs.append(rollout.sample(policy, prompts, 8, 64, 0.0, list(range(0, 250, 12)), 0))
    assert torch.equal(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    monkeypatch.setattr(rollout, "CAPTURE", True)
    tokens, logps, _ = rollout.sample(policy, prompts, 8, 64, 1.0, [], 0)
    assert len({tuple(row) for row in tokens.tolist()}) == 16  # replays draw new noise each time


def test_out_of_memory_is_known_also_where_a_capture_hides_it():
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)

    def captured():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.empty(2**30, device="cuda")

    try:
        for fails in (lambda: torch.empty(2**30, device="cuda"), captured):
            with pytest.raises(RuntimeError) as caught:
                fails()
            said = grpo.memory_message(None, grpo.out_of_memory(caught.value))
            assert "CUDA out of memory" in said and "GB allocated" in said and "no --max_tokens_per_forward" in said
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


SHORT = """import sys, torch


def short(prompts, completions, **columns):
    if "--max_tokens_per_forward" not in sys.argv:  # until it has been started again
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    return [float(len(set(text))) for text in completions]
"""


def test_a_run_out_of_memory_starts_again_with_half_the_budget(checkpoints, tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    words = [*training(tmp_path, checkpoints), "--max_completion_length", "500", "--per_device_train_batch_size", "64"]
    words += ["--reward_funcs", f"{tmp_path}/short.py:short"]
    done = launch(*words, cwd=tmp_path, NPROC="1", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0 and "rank 0: out of memory in update after step 0: CUDA out of memory" in done.stdout
    assert "starting again, 1 of 3, with --max_tokens_per_forward" in done.stdout
    assert "GB allocated" in done.stdout and "A GPU needs" in done.stdout
