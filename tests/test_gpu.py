"""What only a GPU can show; `pytest -m gpu`. Oracles are the CPU's float32 and the plain attention."""

import pytest
import torch

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
    tokens, logps = rollout.sample(policy, prompts, 8, 64, 1.0, [], 0)
    with torch.no_grad():
        groups = [(prompt, list(tokens[8 * i : 8 * i + 8].cpu())) for i, prompt in enumerate(prompts)]
        table, _ = trainer(M.build_row(groups, "cuda"))
    gap = (table - logps).abs()
    assert gap.mean() < 0.03 and gap.max() < 0.3, (gap.mean(), gap.max())


def test_graph_equals_plain_steps(checkpoints, monkeypatch):
    """The captured step against the one launched from Python, while rows end, leave and make room; float32, so that
    the same noise gives the same tokens."""
    monkeypatch.setattr(rollout, "OWN_BUCKET", 16)
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
    tokens, logps = rollout.sample(policy, prompts, 8, 64, 1.0, [], 0)
    assert len({tuple(row) for row in tokens.tolist()}) == 16  # replays draw new noise each time
