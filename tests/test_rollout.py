"""rollout.py: cached sampling against transformers' generate and against the trainer's log-probs."""

import functools
import json
import os
from collections import Counter

import pytest
import torch
from test_update import arguments
from torch.profiler import ProfilerActivity, profile

import grpo
import model as M
import rollout
from ranks import run_ranks
from test_model import FAMILIES, make_prompt


def load(folder, attention="sdpa"):
    policy, processor = M.load_policy(folder, torch_dtype="float32", attn_implementation=attention)
    return policy, processor, M.eos_token_ids(policy, processor.tokenizer)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """So that the buffers shrink within a test's few tokens."""
    monkeypatch.setattr(rollout, "CHECK_EVERY", 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(checkpoints, family):
    policy, processor, eos = load(checkpoints[family])
    plain, _, _ = load(checkpoints[family])
    M.Policy(policy)
    prompts = [
        make_prompt(policy, processor, [(56, 84)], "a red box"),
        make_prompt(policy, processor, [], "no picture at all, and longer"),
        make_prompt(policy, processor, [(28, 28), (84, 56)], "two"),
    ]
    tokens, _, _ = rollout.sample(policy, prompts, 2, 30, 0.0, eos, pad_id=0)
    for i, prompt in enumerate(prompts):
        ids = prompt["input_ids"][None]
        pictures = {k: prompt[k] for k in ("pixel_values", "image_grid_thw") if prompt[k] is not None}
        want = plain.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == plain.config.image_token_id).int(),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=1.0,
            top_k=None,
            temperature=None,
            eos_token_id=eos,
            pad_token_id=0,
            suppress_tokens=M.placeholder_ids(plain.config),
            **pictures,
        )[0, ids.shape[1] :]
        for row in tokens[2 * i : 2 * i + 2]:
            assert row[: len(want)].tolist() == want.tolist()
            assert (row[len(want) :] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_logps_equal_trainer_logps(checkpoints, family):
    """What the sampler says it drew from is what the trainer differentiates, to float32's last digits, although rows
    end at different times and the buffers shrink on the way."""
    policy, processor, eos = load(checkpoints[family])
    prompts = [make_prompt(policy, processor, [(56, 84)], "a"), make_prompt(policy, processor, [], "bb")]
    eos = list(range(0, 250, 12)) + eos  # many tokens that end a completion, so that most do
    trainer = M.Policy(policy, temperature=0.8)
    torch.manual_seed(0)
    tokens, logps, _ = rollout.sample(policy, prompts, 6, 40, 0.8, eos, pad_id=3)
    ends = torch.isin(tokens, torch.tensor(eos))
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1])
    assert lengths.min() < lengths.max() and tokens.shape[1] == lengths.max()
    completions = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    groups = [(prompt, completions[6 * i : 6 * i + 6]) for i, prompt in enumerate(prompts)]
    table, _ = trainer(M.build_row(groups))
    torch.testing.assert_close(logps, table.detach(), rtol=1e-5, atol=1e-5)
    for row, length in zip(tokens, lengths, strict=True):
        assert (row[length:] == 3).all()


def test_same_seed_same_completions(checkpoints):
    policy, processor, eos = load(checkpoints["qwen2_5_vl"])
    prompts = [make_prompt(policy, processor, [(56, 84)])]
    M.Policy(policy)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(rollout.sample(policy, prompts, 4, 12, 1.0, eos, 0)[0].tolist())
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(row) for row in runs[0]}) == 4  # a group's completions differ


def test_draws_follow_the_distribution():
    """20,000 draws against the exact probabilities; banned ids never come."""
    torch.manual_seed(0)
    logits, banned = torch.randn(1, 12) * 2, torch.tensor([2, 7])
    tokens, logps = rollout.draw(logits.expand(20_000, -1), 1.5, M.token_penalty(12, [2, 7], "cpu"))
    want = (logits[0] / 1.5).index_fill(0, banned, float("-inf")).softmax(0)
    share = torch.bincount(tokens, minlength=12) / 20_000
    assert (share - want).abs().max() < 0.015
    assert share[banned].sum() == 0
    torch.testing.assert_close(logps, want[tokens].log())


def test_no_placeholder_is_ever_sampled(checkpoints):
    policy, processor, eos = load(checkpoints["qwen2_5_vl"])
    banned = M.placeholder_ids(policy.config)
    with torch.no_grad():  # a model that wants nothing else
        policy.lm_head.weight[banned] *= 50
    M.Policy(policy)
    torch.manual_seed(0)
    tokens, logps, _ = rollout.sample(policy, [make_prompt(policy, processor, [(56, 56)])], 8, 20, 1.0, eos, 0)
    assert not torch.isin(tokens, torch.tensor(banned)).any()
    assert logps.isfinite().all()


def test_one_token_completions(checkpoints):
    policy, processor, eos = load(checkpoints["qwen2_vl"])
    M.Policy(policy)
    tokens, logps, _ = rollout.sample(policy, [make_prompt(policy, processor, [])], 3, 1, 1.0, eos, 0)
    assert tokens.shape == logps.shape == (3, 1)


def step_under_zero_3(folder, out, bucket):
    """A step whose completions end at their first token on rank 0 and never on rank 1: lengths, how often the rollout
    and then the update gathered, and anything else that the rollout exchanged."""
    args = arguments(folder, out, num_generations=2, per_device_train_batch_size=2, max_completion_length=40)
    rank, world, device = grpo.start_processes(args)
    if bucket is not None:
        args.deepspeed = os.path.join(out, f"{rank}.json")
        with open(args.deepspeed, "w") as file:
            zero = {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": "auto"}
            json.dump({"zero_optimization": zero}, file)
    model, processor = grpo.load_policy(args, device)
    prompt, every_id = make_prompt(model, processor, [(56, 84)]), list(range(len(model.lm_head.weight)))
    run = grpo.Run(args, rank, world, device, processor, every_id if rank == 0 else [-1], pad=0, total=2)
    run.engine = grpo.start_engine(args, model, world, device)
    for run.step in range(2):  # in the first DeepSpeed learns the order that it prefetches in
        with profile(activities=[ProfilerActivity.CPU]) as rollout_seen:
            batch = grpo.sample_phase(run, [prompt])
        batch |= {"texts": ["", ""], "scores": {"r": [0.0, 1.0]}, "rewards": [0.0, 1.0]}
        everyone = grpo.compare_phase(run, batch)
        with profile(activities=[ProfilerActivity.CPU]) as update_seen:
            grpo.update_phase(run, batch, everyone)
    seen = [Counter(e.name for e in p.events() if e.name.startswith("c10d::")) for p in (rollout_seen, update_seen)]
    matrices = sum(len(p.ds_shape) > 1 for p in run.engine.parameters())
    vectors = sum(len(p.ds_shape) == 1 for p in run.engine.parameters())
    gathers = [calls.pop("c10d::_allgather_base_") for calls in seen]
    return batch["lengths"], gathers, seen[0], matrices, vectors


def test_zero_3_gathers_once_a_rollout_and_in_the_update_a_block_at_a_time(checkpoints, tmp_path):
    """Every matrix is gathered once however long the rollout is: through the hooks it would be once a layer a token,
    and a rank that ends first would leave the other alone. In the update a block's matrices come together, or several
    small blocks, ahead of use, unless the bucket forbids it; norms and biases, whole on every rank, are gathered after
    the optimizer's step, one by one."""
    step = functools.partial(step_under_zero_3, checkpoints["qwen2_5_vl"], tmp_path)
    for bucket, fewest, most in ((None, 1, 6), (0, 7, 24)):
        (first, *same), (second, *also) = run_ranks(2, step, bucket)
        (rollout_calls, update_calls), others, matrices, vectors = same
        assert first == [1, 1] and second == [40, 40] and same == also
        assert rollout_calls == matrices == 33 and not others
        assert fewest <= update_calls - vectors <= most


def test_waves_draw_what_one_wave_draws(checkpoints):
    """Greedy, so that no noise comes in: the same tokens and log-probs, rows ending at different times; and the count
    of bytes is that of all waves."""
    policy, processor, eos = load(checkpoints["qwen2_5_vl"])
    sizes = [[(56, 84)], [], [(84, 84)], [(28, 28)], []]
    prompts = [make_prompt(policy, processor, pictures, "a" * 9 * i) for i, pictures in enumerate(sizes)]
    M.Policy(policy)
    eos = list(range(0, 250, 12)) + eos
    tokens, logps, decoding = rollout.sample(policy, prompts, 3, 30, 0.0, eos, 1)
    budget = rollout.wave_tokens(policy, prompts[:3], 3, 30)
    cut = rollout.waves(policy, prompts, 3, 30, budget)
    assert len(cut) == 2 and sum(cut, []) == prompts
    for small in (budget, 1):
        got = rollout.sample(policy, prompts, 3, 30, 0.0, eos, 1, small)
        assert torch.equal(got[0], tokens)
        torch.testing.assert_close(got[1], logps, rtol=1e-5, atol=1e-5)
        assert got[2]["bytes"] > decoding["bytes"]  # every wave reads the weights
    assert [len(wave) for wave in rollout.waves(policy, prompts, 3, 30, 1)] == [1] * 5


@pytest.mark.parametrize("family, share", [("qwen2_5_vl", 4), ("qwen3_vl", 2)])
def test_a_wave_takes_the_memory_of_a_forward(checkpoints, family, share):
    """Hidden size over keys and values: 64 over 2 x 2 heads x 16 here, 1; of the published models 4 and 2. The update
    keeps twice the hidden states."""
    policy, _, _ = load(checkpoints[family])
    attention = policy.model.language_model.layers[0].self_attn
    prompts = [{"input_ids": range(100)}, {"input_ids": range(70)}]
    assert rollout.wave_tokens(policy, prompts, 4, 75) == 100 + 4 * 75
    attention.k_proj.out_features = 64 // 2 // share
    assert rollout.wave_tokens(policy, prompts, 4, 375) == (100 + 4 * 375) // share
    assert rollout.wave_tokens(policy, prompts, 4, 5) == 2 * 100  # the prefill
