"""The update on fixed completions: the same weights after 3 steps however it is cut, spread and sharded, and the same
as plain PyTorch with repeated prompts."""

import functools

import numpy as np
import pytest
import torch

import grpo
import model as M
from ranks import run_ranks
from test_model import make_prompt

G, STEPS = 4, 3
PICTURES = [[(56, 84)], [(28, 28), (84, 56)], [], [(84, 84)]]  # of the four prompts; one has none


def arguments(folder, out, **flags):
    flags = {"bf16": False, "num_generations": G, "max_completion_length": 10, "learning_rate": 1e-2} | flags
    flags = {"lr_scheduler_type": "constant", "zero_stage": 3, "max_tokens_per_forward": 4096} | flags
    return grpo.Arguments(model_name_or_path=folder, output_dir=str(out), **flags)


def fixed_step(model, processor, step):
    """Prompts, completions (some cut, one empty end) and rewards of a step, the same in every process."""
    prompts = [make_prompt(model, processor, sizes, f"question {i}") for i, sizes in enumerate(PICTURES)]
    for prompt in prompts:
        prompt["columns"] = {"problem": "q"}
    generator = torch.Generator().manual_seed(step)
    N = len(prompts) * G
    tokens = torch.randint(0, 250, (N, 10), generator=generator)
    lengths = torch.randint(1, 11, (N,), generator=generator)
    mask = torch.arange(10) < lengths[:, None]
    return prompts, tokens.masked_fill(~mask, 0), mask, torch.rand(N, generator=generator)


def rank_batch(prompts, tokens, mask, scores, rank, world):
    """A rank's share of a fixed step, as the phases before compare_phase would leave it."""
    B = len(prompts) // world
    mine = slice(rank * B * G, (rank + 1) * B * G)
    batch = {"prompts": prompts[rank * B : (rank + 1) * B], "tokens": tokens[mine], "mask": mask[mine]}
    batch |= {"lengths": mask[mine].sum(1).tolist(), "truncated": [False] * (B * G), "texts": [""] * (B * G)}
    batch |= {"rewards": scores[mine].tolist(), "scores": {"r": scores[mine].tolist()}}
    return batch | {"sampler_logps": torch.zeros(B * G, 10), "decoding": {}}


def train_fixed(folder, out, world, **flags):
    """STEPS updates through grpo's own phases; returns the weights and the metrics of every step."""
    args = arguments(folder, out, per_device_train_batch_size=16 // world, **flags)
    rank, world, device = grpo.start_processes(args)
    model, processor = grpo.load_policy(args, device)
    run = grpo.Run(args, rank, world, device, processor, eos=[0], pad=0, total=STEPS)
    run.engine = grpo.start_engine(args, model, world, device)
    if args.beta > 0:
        run.reference = grpo.start_engine(args, grpo.load_policy(args, device)[0], world, device, trained=False)
    metrics = []
    for run.step in range(STEPS):
        with M.gathered(run.engine):  # a rollout lies between two updates
            pass
        batch = rank_batch(*fixed_step(model, processor, run.step), rank, world)
        everyone = grpo.compare_phase(run, batch)
        metrics.append(grpo.update_phase(run, batch, everyone))
    if args.zero_stage == 3 and args.max_tokens_per_forward == 4096:
        # the order of modules is known after the first step, so the next layer's weights can be fetched ahead
        assert run.engine.optimizer.parameter_offload.get_param_coordinator().is_complete_trace()
    with M.gathered(run.engine) as whole:
        weights = {name: parameter.detach().clone().numpy() for name, parameter in whole.named_parameters()}
    return weights, metrics


def train_plainly(folder, loss_type="grpo", iterations=1, beta=0.0):
    """The oracle: no DeepSpeed, no packed rows; the formulas of DeepSeekMath written out for one sequence at a time."""
    torch.set_num_threads(1)
    model, processor = M.load_policy(folder, torch_dtype="float32")
    frozen, _ = M.load_policy(folder, torch_dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    metrics = []
    for step in range(STEPS):
        prompts, tokens, mask, scores = fixed_step(model, processor, step)
        lengths = mask.sum(1).tolist()
        groups = scores.view(-1, G)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        old, losses = None, []
        for _ in range(iterations):
            total = 0.0
            now = []
            for b, prompt in enumerate(prompts):
                own = [tokens[i, : lengths[i]] for i in range(b * G, b * G + G)]
                now += M.repeated_logps(model, prompt, own)
            old = old or [x.detach() for x in now]
            for i, logps in enumerate(now):
                ratio = (logps - old[i]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                token = -torch.minimum(ratio * advantages[i], clipped * advantages[i])
                if beta:
                    prompt, own = prompts[i // G], tokens[i, : lengths[i]]
                    with torch.no_grad():
                        (ref,) = M.repeated_logps(frozen, prompt, [own])
                    token = token + beta * ((ref - logps).exp() - (ref - logps) - 1)
                if loss_type == "grpo":
                    total = total + token.mean() / len(now)
                elif loss_type == "dapo":
                    total = total + token.sum() / sum(lengths)
                else:
                    total = total + token.sum() / (len(now) * 10)
            losses.append(total.item())
            optimizer.zero_grad()
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        metrics.append({"loss": sum(losses) / iterations, "grad_norm": norm.item()})
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}, metrics


@functools.cache
def oracle(folder, **options):
    return run_ranks(1, functools.partial(train_plainly, folder, **options))[0]


def assert_same(result, want):
    weights, metrics = result
    for got, expected in zip(metrics, want[1], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], abs=2e-6)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, expected in want[0].items():
        # AdamW divides by sqrt(v): where a gradient is near 0, float32 noise is a step of its own (lr 1e-2)
        np.testing.assert_allclose(weights[name], expected, atol=2e-4, rtol=1e-3, err_msg=name)
    moved = np.concatenate([(weights[n] - want[0][n]).ravel() for n in want[0]])
    assert np.sqrt((moved**2).mean()) < 1e-5  # the mean difference is far smaller


SETTINGS = {
    "1 rank, ZeRO-3": (1, {}),
    "1 rank, a small token budget": (1, {"max_tokens_per_forward": 60}),
    "2 ranks, ZeRO-3": (2, {}),
    "2 ranks, ZeRO-3, a small token budget": (2, {"max_tokens_per_forward": 70}),
    "2 ranks, ZeRO-3, checkpointing not reentrant": (2, {"gradient_checkpointing_kwargs": '{"use_reentrant": false}'}),
    "2 ranks, ZeRO-3, no checkpointing": (2, {"gradient_checkpointing": False, "max_tokens_per_forward": 70}),
    "1 rank, ZeRO-0": (1, {"zero_stage": 0}),
    "2 ranks, ZeRO-0": (2, {"zero_stage": 0}),
    "2 ranks, ZeRO-1, a small token budget": (2, {"zero_stage": 1, "max_tokens_per_forward": 70}),
    "2 ranks, ZeRO-2, a small token budget": (2, {"zero_stage": 2, "max_tokens_per_forward": 70}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_update_however_spread(checkpoints, tmp_path, setting):
    world, flags = SETTINGS[setting]
    folder = checkpoints["qwen2_5_vl"]
    for result in run_ranks(world, functools.partial(train_fixed, folder, tmp_path, world, **flags)):
        assert_same(result, oracle(folder))


@pytest.mark.parametrize(
    "flags",
    [{"loss_type": "dapo"}, {"loss_type": "dr_grpo"}, {"num_iterations": 2}, {"beta": 0.1}],
    ids=lambda flags: " ".join(f"{k}={v}" for k, v in flags.items()),
)
def test_same_update_of_other_losses(checkpoints, tmp_path, flags):
    folder = checkpoints["qwen2_5_vl"]
    want = oracle(folder, **{{"num_iterations": "iterations"}.get(name, name): value for name, value in flags.items()})
    run = functools.partial(train_fixed, folder, tmp_path, 2, max_tokens_per_forward=70, **flags)
    for result in run_ranks(2, run):
        assert_same(result, want)


def fetched(folder, out):
    """The modules whose weights ZeRO-3 gathers in an update."""
    args = arguments(folder, out, per_device_train_batch_size=8, freeze_vision_modules=True)
    rank, world, device = grpo.start_processes(args)
    model, processor = grpo.load_policy(args, device)
    run = grpo.Run(args, rank, world, device, processor, eos=[0], pad=0, total=1)
    run.engine = grpo.start_engine(args, model, world, device)
    coordinator, names = run.engine.optimizer.parameter_offload.get_param_coordinator(), []
    fetch = coordinator.fetch_sub_module
    coordinator.fetch_sub_module = lambda module, forward: [names.append(type(module).__name__), fetch(module, forward)]
    batch = rank_batch(*fixed_step(model, processor, 0), rank, world)
    everyone = grpo.compare_phase(run, batch)
    grpo.update_phase(run, batch, everyone)
    return names


def test_zero_3_gathers_a_block_at_a_time(checkpoints, tmp_path):
    """With the vision tower frozen: its blocks once, the decoder's layers before forward and backward."""
    for names in run_ranks(2, functools.partial(fetched, checkpoints["qwen2_5_vl"], tmp_path)):
        assert names.count("Qwen2_5_VLDecoderLayer") == 2 * 2 and names.count("Qwen2_5_VLVisionBlock") == 3
        assert "Qwen2_5_VLMLP" not in names


def stepped(folder, out, own, spoil, **flags):
    """Two optimizer steps of stage 0 in bf16 on random gradients, by DeepSpeed's own function or by ours."""
    args = arguments(folder, out, per_device_train_batch_size=16, zero_stage=0, bf16=True, weight_decay=0.1, **flags)
    _, world, device = grpo.start_processes(args)
    engine = grpo.start_engine(args, grpo.load_policy(args, device)[0], world, device)
    assert engine.optimizer.step.func is grpo.step_at_once
    if own:
        del engine.optimizer.step  # what the class defines is left
    norms, generator = [], torch.Generator().manual_seed(0)
    for step in range(2):
        for i, parameter in enumerate(engine.module.parameters()):
            if i != 3:  # one took no part
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        if spoil and step == 1:
            parameter.grad[-1] = torch.inf
        engine.optimizer.step()
        norms.append(engine.optimizer._global_grad_norm)
        engine.optimizer.zero_grad()
    assert engine.optimizer.overflow is spoil and engine.optimizer.loss_scale_config.cur_iter == 2
    masters = [master.detach().numpy() for master in sum(engine.optimizer.fp32_groups, [])]
    return norms, masters, [parameter.detach().float().numpy() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("spoil, limit", [(False, 1.0), (False, 0.0), (True, 1.0)])
def test_the_step_at_once_is_deepspeeds(checkpoints, tmp_path, spoil, limit):
    run = functools.partial(stepped, checkpoints["qwen2_5_vl"], tmp_path, spoil=spoil, max_grad_norm=limit)
    ((norms, masters, weights),) = run_ranks(1, functools.partial(run, own=False))
    ((want_norms, want_masters, want_weights),) = run_ranks(1, functools.partial(run, own=True))
    assert norms == pytest.approx(want_norms, rel=1e-5)
    for got, want in zip(masters, want_masters, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    differ = sum((got != want).sum() for got, want in zip(weights, want_weights, strict=True))
    assert differ < 20  # rounded to the other side
