"""The maths of grpo.py: advantages, masks, the loss, the learning rate, the cutting of rows, the batch arithmetic.

The loss is compared twice: with the formulas written out in numpy, one token at a time in float64, and with TRL's own
`GRPOTrainer._compute_loss`, which runs here unbound on the few settings that it reads. What the loss is fed by a model
is tested in test_model.py, what is done with it in test_update.py.

    pytest tests/test_loss.py
"""

import collections
import dataclasses
import itertools
import math
import types

import numpy as np
import pytest
import torch
import transformers
import trl
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "cispo"]
LEVELS = ["token", "sequence"]
WIDTH = 9  # max_completion_length, wider than the batch below

# --- Advantages ----------------------------------------------------------------------------------------------------


def advantages_by_numpy(rewards, scale):
    """A of each completion, one group at a time over the rewards that were given."""
    everything = rewards[~np.isnan(rewards)]
    result = np.zeros_like(rewards)
    for b, group in enumerate(rewards):
        known = group[~np.isnan(group)]
        for i, r in enumerate(group):
            if np.isnan(r):
                continue
            among = {"group": known, "batch": everything, "none": None}[scale]
            spread = 1.0 if among is None else (np.std(among, ddof=1) if len(among) > 1 else 0.0) + 1e-4
            result[b, i] = (r - known.mean()) / spread
    return result


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("missing", [0, 1, 5])
def test_advantages_match_the_formula(scale, missing):
    rng = np.random.default_rng(missing)
    rewards = rng.normal(size=(4, 6)) * np.array([[1], [0.001], [30], [1]])
    rewards.flat[rng.choice(rewards.size, missing, replace=False)] = np.nan
    ours = grpo.group_advantages(torch.tensor(rewards), scale)
    np.testing.assert_allclose(ours.numpy(), advantages_by_numpy(rewards, scale), rtol=1e-10, atol=1e-12)


def test_advantages_are_scaled_by_group_unless_told_otherwise():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 10.0]], dtype=torch.float64)
    std = math.sqrt(0.5)  # of 0 and 1 with ddof 1
    expected = [[-0.5 / (std + 1e-4), 0.5 / (std + 1e-4)], [-5 / (10 * std + 1e-4), 5 / (10 * std + 1e-4)]]
    torch.testing.assert_close(grpo.group_advantages(rewards), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_that_says_nothing_has_no_advantage(scale):
    nan = float("nan")
    rewards = torch.tensor([[nan, nan, nan], [nan, 7.0, nan], [2.0, 2.0, 2.0], [nan, 3.0, 3.0], [0.0, 1.0, nan]])
    ours = grpo.group_advantages(rewards, scale)
    assert ours[:4].eq(0).all()  # nobody, one alone, all equal, two equal and one unknown
    assert ours[4, 0] < 0 < ours[4, 1] and ours[4, 2] == 0
    alone = torch.tensor([[nan, 5.0], [nan, nan]])
    assert grpo.group_advantages(alone, scale).eq(0).all()


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1])
def test_equal_rewards_teach_exactly_nothing(reward):
    """In float32 the mean of equal numbers need not be that number, and what is left would be divided by 1e-4; Adam
    turns the smallest gradient into a step."""
    for scale in ("group", "batch", "none"):
        A = grpo.group_advantages(torch.full((2, 7), reward), scale)
        assert A.dtype == torch.float32 and A.eq(0).all(), scale


def test_advantages_refuse_what_cannot_be_compared():
    with pytest.raises(ValueError, match="at least 2"):
        grpo.group_advantages(torch.zeros(4, 1))
    with pytest.raises(ValueError, match="'true'"):
        grpo.group_advantages(torch.zeros(4, 2), "true")


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.integers(2, 8).flatmap(
        lambda G: st.lists(
            st.lists(st.none() | st.integers(-8, 8).map(lambda k: k / 4), min_size=G, max_size=G), min_size=1
        )
    ),
    scale=st.sampled_from(["group", "batch", "none"]),
    shift=st.integers(-64, 64).map(lambda k: k / 4),  # quarters: r + shift is exact
)
def test_advantages_are_relative(rewards, scale, shift):
    r = torch.tensor([[math.nan if v is None else v for v in row] for row in rewards], dtype=torch.float64)
    A = grpo.group_advantages(r, scale)
    torch.testing.assert_close(grpo.group_advantages(r + shift, scale), A, rtol=1e-6, atol=1e-8)
    assert A.sum(1).abs().max() < 1e-8
    assert A[r.isnan()].eq(0).all() and A.isfinite().all()
    order = torch.argsort(r.nan_to_num(0), dim=1)  # a better completion never has the smaller advantage
    for row, ranks, known in zip(A, order, ~r.isnan(), strict=True):
        ranked = row[[i for i in ranks.tolist() if known[i]]]
        assert (ranked.diff() >= -1e-12).all()


# --- The completion's mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, eos, kept",
    [
        ([5, 6, 2, 7, 8], [2], 3),  # the end is kept, what follows is not
        ([5, 6, 2, 2, 2], 2, 3),  # pad = eos: the first is the end, the rest is padding; an int is as good as a list
        ([5, 6, 3, 2, 0], [2, 3], 3),  # two ids: the first of either
        ([5, 2, 6, 3, 0], [3, 2], 2),
        ([5, 6, 7, 8, 9], [2, 3], 5),  # cut short
        ([2, 5, 6, 2, 0], [2], 1),  # an answer of nothing but its end
        ([0, 0, 0, 2, 0], [2], 4),  # the pad id before the end is a token like any other
    ],
)
def test_completion_mask(tokens, eos, kept):
    mask = grpo.completion_mask(torch.tensor([tokens, [9, 9, 9, 9, 9]]), eos)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[i < kept for i in range(5)], [True] * 5]


# --- The loss against its formulas ---------------------------------------------------------------------------------


def loss_by_numpy(logps, old, A, mask, ref, o, frozen=None):
    """Loss and metrics, token by token. `frozen` (default logps) is what stands in the ratio of cispo: it is
    constant there, so a finite difference moves `logps` alone."""
    frozen = logps if frozen is None else frozen
    limit = lambda x: max(-20.0, min(20.0, x))  # noqa: E731
    high = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    sums, low_clipped, high_clipped, either, kl, tokens = [], 0, 0, 0, 0.0, 0
    for n in range(len(logps)):
        where = [t for t in range(logps.shape[1]) if mask[n, t]]
        moving = frozen if o["loss_type"] == "cispo" else logps
        differences = {t: moving[n, t] - old[n, t] for t in where}
        total = 0.0
        for t in where:
            x = differences[t] if o["level"] == "token" else sum(differences.values()) / len(where)
            rho = math.exp(limit(x))
            if o["loss_type"] == "cispo":
                loss = -min(rho, high) * A[n] * logps[n, t]
                is_low, is_high = False, rho > high and A[n] > 0
            else:
                bounded = rho if o["delta"] is None else min(rho, o["delta"])
                clipped = min(max(rho, 1 - o["epsilon"]), 1 + high)
                loss = -min(bounded * A[n], clipped * A[n])
                is_low, is_high = rho < 1 - o["epsilon"] and A[n] < 0, rho > 1 + high and A[n] > 0
            if o["beta"]:
                d = limit(ref[n, t] - logps[n, t])
                k = math.exp(d) - d - 1
                loss, kl = loss + o["beta"] * k, kl + k
            total += loss
            tokens += 1
            low_clipped, high_clipped, either = (
                low_clipped + is_low,
                high_clipped + is_high,
                either + (is_low or is_high),
            )
        sums.append((total, len(where)))
    metrics = {"low": low_clipped / tokens, "high": high_clipped / tokens, "region": either / tokens, "kl": kl / tokens}
    if o["loss_type"] == "grpo":
        return sum(total / length for total, length in sums if length) / len(sums), metrics
    if o["loss_type"] == "dr_grpo":
        return sum(total for total, _ in sums) / (len(sums) * WIDTH), metrics
    return sum(total for total, _ in sums) / tokens, metrics


def completions(seed=0, lengths=(6, 1, 0, 4, 3, 6, 2)):
    """Ragged completions, one of them empty, 6 wide, float64. Their ratios, by token and by sequence, lie on both
    sides of every bound that `options` sets, for advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    draw = lambda: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    A = torch.tensor([1.2, -0.4, 1.0, -1.5, 0.3, -0.7, 0.8], dtype=torch.float64)[: len(lengths)]
    sequence_ratio = torch.tensor([1.27, 0.7, 1.0, 1.4, 1.5, 0.95, 0.6], dtype=torch.float64)[: len(lengths)]
    noise = 0.3 * draw()
    noise = noise - (noise * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    logps = -2 + draw()
    old = logps - sequence_ratio.log()[:, None] - noise
    return types.SimpleNamespace(logps=logps, old=old, ref=logps + 0.7 * draw(), mask=mask, A=A)


def options(loss_type="grpo", level="token", epsilon_high=None, delta=None, beta=0.0):
    """As flags say them; `epsilon_high` of cispo is a bound on the ratio, of the others a distance from 1."""
    if loss_type == "cispo":
        epsilon_high = 1.1 if epsilon_high is None else 1.0 + epsilon_high
    names = ("loss_type", "level", "epsilon", "epsilon_high", "delta", "beta")
    return dict(zip(names, (loss_type, level, 0.2, epsilon_high, delta, beta), strict=True))


def ours(c, o, rows=slice(None), width=None, **denominators):
    """grpo_loss of some of the completions under the options."""
    o = dict(o)
    level, cut = o.pop("level"), (rows, slice(width))
    return grpo.grpo_loss(
        c.logps[cut],
        c.old[cut],
        c.A[rows],
        c.mask[cut],
        ref_logps=c.ref[cut] if o["beta"] else None,
        importance_sampling_level=level,
        max_completion_length=WIDTH,
        **o,
        **denominators,
    )


def loss_and_gradient(c, o, **more):
    c.logps = c.logps.detach().requires_grad_()
    loss, metrics = ours(c, o, **more)
    (gradient,) = torch.autograd.grad(loss, c.logps)
    return loss.detach(), gradient, metrics


EVERY_OPTION = list(itertools.product(LOSS_TYPES, LEVELS, [None, 0.35], [None, 1.25], [0.0, 0.04]))


@pytest.mark.parametrize("loss_type, level, epsilon_high, delta, beta", EVERY_OPTION)
@pytest.mark.parametrize("policy", ["on", "off"])
def test_loss_gradient_and_metrics_match_the_formulas(loss_type, level, epsilon_high, delta, beta, policy):
    c, o = completions(), options(loss_type, level, epsilon_high, delta, beta)
    if policy == "on":
        c.old = c.logps.clone()
    loss, gradient, metrics = loss_and_gradient(c, o)
    logps, old, A, mask, ref = (t.detach().numpy() for t in (c.logps, c.old, c.A, c.mask, c.ref))
    expected, figures = loss_by_numpy(logps, old, A, mask, ref, o)
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12, atol=1e-14)

    names = {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/region_mean": "region"}
    names |= {"kl": "kl"} if beta else {}
    assert set(metrics) == set(names)
    for ours_, theirs in names.items():
        assert metrics[ours_].is_floating_point() and not metrics[ours_].requires_grad
        np.testing.assert_allclose(metrics[ours_].item(), figures[theirs], rtol=1e-6)  # a count in float32

    h, slopes = 1e-6, np.zeros_like(logps)
    for i in np.ndindex(*logps.shape):
        step = np.zeros_like(logps)
        step[i] = h
        above, _ = loss_by_numpy(logps + step, old, A, mask, ref, o, frozen=logps)
        below, _ = loss_by_numpy(logps - step, old, A, mask, ref, o, frozen=logps)
        slopes[i] = (above - below) / (2 * h)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-6, atol=1e-8)
    assert gradient[~c.mask].eq(0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_completions_reach_every_bound(level):
    """Else the tests above would say nothing of clipping: each option changes the loss, and both clips occur."""
    c = completions()
    plain, _, metrics = loss_and_gradient(c, options("grpo", level))
    assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0
    for changed in ({"epsilon_high": 0.35}, {"delta": 1.25}, {"beta": 0.04}):
        assert abs(loss_and_gradient(c, options("grpo", level, **changed))[0] - plain) > 1e-4, changed
    assert loss_and_gradient(c, options("cispo", level))[2]["clip_ratio/high_mean"] > 0


def test_on_policy_gradient_is_the_policy_gradient():
    """At ratio 1 each type is -A * grad logp, over its own denominator: worked out by hand for two completions."""
    c = completions(lengths=(2, 1))
    c.old = c.logps.clone()
    for loss_type, scale in (
        ("grpo", (4, 2)),
        ("dr_grpo", (2 * WIDTH, 2 * WIDTH)),
        ("dapo", (3, 3)),
        ("cispo", (3, 3)),
    ):
        gradient = loss_and_gradient(c, options(loss_type))[1]
        expected = torch.tensor([[-1.2 / scale[0]] * 2, [0.4 / scale[1], 0]], dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, msg=loss_type)


def test_loss_refuses_what_it_does_not_know():
    c = completions()
    with pytest.raises(ValueError, match="'bnpo'"):
        ours(c, options("bnpo"))
    with pytest.raises(ValueError, match="'tokens'"):
        ours(c, options(level="tokens"))
    with pytest.raises(ValueError, match="epsilon_high"):
        ours(c, options("cispo") | {"epsilon_high": None})


# --- The loss against TRL ------------------------------------------------------------------------------------------


def loss_by_trl(c, o):
    """TRL's own code on the same log-probs: (loss, gradient, metrics). Its trainer needs a model, an accelerator and a
    data set to be built; the loss itself reads only what stands here."""
    logps = c.logps.detach().clone().requires_grad_()
    mask = c.mask.double()
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, torch.zeros_like(mask), None),
        loss_type=o["loss_type"],
        importance_sampling_level=o["level"],
        beta=o["beta"],
        epsilon_low=o["epsilon"],
        epsilon_high=o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"],
        max_completion_length=WIDTH,
        args=types.SimpleNamespace(delta=o["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
    )
    ids = torch.zeros(c.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": c.A,
        "old_per_token_logps": c.old,
        "ref_per_token_logps": c.ref,
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("loss_type, level, epsilon_high, delta, beta", EVERY_OPTION)
def test_loss_and_gradient_match_trl(loss_type, level, epsilon_high, delta, beta):
    c, o = completions(seed=1), options(loss_type, level, epsilon_high, delta, beta)
    loss, gradient, metrics = loss_and_gradient(c, o)
    trl_loss, trl_gradient, trl_metrics = loss_by_trl(c, o)
    torch.testing.assert_close(loss, trl_loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, trl_gradient, rtol=1e-12, atol=1e-14)
    same = ["kl"] if beta else []
    if level == "token" and loss_type != "cispo" and delta is None:
        # elsewhere TRL counts otherwise: sequences, not tokens; a metric of its own; ratios after delta's bound
        same += ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
    for name in same:
        assert metrics[name].item() == pytest.approx(trl_metrics[name], rel=1e-6), name


# --- The loss at its edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rubbish", [-math.inf, math.inf, math.nan, 1e38])
def test_padding_may_hold_anything(loss_type, level, rubbish):
    c, o = completions(), options(loss_type, level, delta=1.25, beta=0.04)
    loss, gradient, metrics = loss_and_gradient(c, o)
    for name in ("logps", "old", "ref"):  # each alone, then all: inf - inf is NaN only when both are
        dirty = completions()
        setattr(dirty, name, torch.where(dirty.mask, getattr(dirty, name), rubbish))
        assert_same(loss_and_gradient(dirty, o), (loss, gradient, metrics), dirty.mask)
    dirty = completions()
    for name in ("logps", "old", "ref"):
        setattr(dirty, name, torch.where(dirty.mask, getattr(dirty, name), rubbish))
    assert_same(loss_and_gradient(dirty, o), (loss, gradient, metrics), dirty.mask)


def assert_same(result, expected, mask):
    assert result[0].isfinite() and result[1][~mask].eq(0).all()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_parts_add_up_to_the_whole(loss_type, level):
    """Each part is as wide as its own longest completion, as a packed row is; one part holds nothing but the empty
    completion, and the denominators are the whole step's."""
    c, o = completions(), options(loss_type, level, delta=1.25, beta=0.04)
    whole, gradient, whole_metrics = loss_and_gradient(c, o)
    sizes = {"num_sequences": len(c.A), "num_tokens": int(c.mask.sum())}
    total, sums = 0, collections.Counter()
    for rows in ([0, 3], [1], [2], [4, 5, 6]):
        tokens = c.mask[rows].sum()
        loss, metrics = ours(c, o, rows=rows, width=max(1, c.mask[rows].sum(1).max()), **sizes)
        total = total + loss
        for name, value in metrics.items():
            sums[name] += (value * tokens).item()
    torch.testing.assert_close(total.detach(), whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(total, c.logps)[0], gradient, rtol=1e-12, atol=1e-14)
    for name, value in whole_metrics.items():  # means over tokens: weighted by tokens, they add up too
        assert sums[name] / sizes["num_tokens"] == pytest.approx(value.item(), rel=1e-6), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [1000.0, -1000.0])
def test_huge_differences_stay_finite(loss_type, level, dtype, difference):
    o = options(loss_type, level, beta=0.04)
    for moved in ("old", "ref"):
        c = completions()
        setattr(c, moved, c.logps - difference)
        c.logps, c.old, c.ref, c.A = (t.detach().to(dtype) for t in (c.logps, c.old, c.ref, c.A))
        loss, gradient, metrics = loss_and_gradient(c, o)
        assert loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())
        logps, old, A, mask, ref = (t.detach().double().numpy() for t in (c.logps, c.old, c.A, c.mask, c.ref))
        expected, _ = loss_by_numpy(logps, old, A, mask, ref, o)
        assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_to_learn_from_is_zero_with_a_graph(loss_type, level):
    """A blank row must run its backward like any other: ZeRO's ranks wait for each other in it."""
    c, o = completions(lengths=(0, 0, 3)), options(loss_type, level, beta=0.04)
    c.mask[:] = False
    c.logps = torch.full_like(c.logps, -math.inf).requires_grad_()
    for sizes in ({}, {"num_sequences": 8, "num_tokens": 0}, {"num_sequences": 8, "num_tokens": 50}):
        loss, metrics = ours(c, o, **sizes)
        assert loss.item() == 0 and loss.requires_grad
        assert torch.autograd.grad(loss, c.logps)[0].eq(0).all()
        assert all(value == 0 for value in metrics.values())


# --- Learning rate -------------------------------------------------------------------------------------------------


def rates_by_transformers(kind, total, warmup):
    """The rate that each of `total` optimizer steps uses, from transformers' scheduler at peak 0.5."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = transformers.get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("total, ratio, warmup", [(7, 0, 0), (1, 0, 0), (20, 0.1, 2), (7, 0.3, 3), (10, 1.0, 10)])
def test_learning_rate(kind, total, ratio, warmup):
    rates = [grpo.learning_rate_at(step, total, 0.5, kind, ratio) for step in range(total)]
    theirs = rates_by_transformers("constant_with_warmup" if kind == "constant" else kind, total, warmup)
    assert rates == pytest.approx(theirs, abs=1e-12)  # transformers' "constant" ignores a warm-up; here it is obeyed


# --- Cutting a step into rows --------------------------------------------------------------------------------------


@st.composite
def groups(draw):
    B, G = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    prompts = draw(st.lists(st.integers(1, 20), min_size=B, max_size=B))
    return prompts, draw(st.lists(st.integers(0, 20), min_size=B * G, max_size=B * G)), draw(st.integers(1, 150))


@settings(max_examples=300, deadline=None)
@given(groups())
def test_rows_hold_every_completion_once_within_the_budget(case):
    prompts, lengths, budget = case
    G, B = len(lengths) // len(prompts), len(prompts)
    rows = grpo.cut_rows(prompts, lengths, budget)
    size = lambda row: sum(prompts[b] + sum(lengths[i] for i in part) for b, part in row)  # noqa: E731
    group = [prompts[b] + sum(lengths[b * G : b * G + G]) for b in range(B)]

    assert [i for row in rows for _, part in row for i in part] == list(range(B * G))
    assert all(part and {i // G for i in part} == {b} for row in rows for b, part in row)
    for row in rows:
        assert size(row) <= budget or [len(part) for _, part in row] == [1], "over budget with more than one completion"
    parts = collections.Counter(b for row in rows for b, _ in row)
    for b in range(B):
        assert group[b] > budget or parts[b] == 1, "a group that fits is split"
    filled = grpo.fill_rows(prompts, lengths, budget)
    assert len(rows) <= len(filled) and max(map(size, rows)) <= max(map(size, filled))
    for row, following in itertools.pairwise(filled):  # nothing that would have fitted begins a row
        b, part = following[0]
        begins = group[b] if part[0] == b * G else lengths[part[0]]
        assert size(row) + begins > budget, "a row was closed too early"


def test_rows_by_hand():
    assert grpo.cut_rows([10, 10], [5, 5, 5, 5], 40) == [[(0, [0, 1]), (1, [2, 3])]]  # exactly full
    assert grpo.cut_rows([10, 10], [5, 5, 5, 5], 39) == [[(0, [0, 1])], [(1, [2, 3])]]
    assert grpo.cut_rows([10, 10], [5, 5, 5, 5], 15) == [[(0, [0])], [(0, [1])], [(1, [2])], [(1, [3])]]
    assert grpo.cut_rows([10, 2], [5, 5, 1, 1], 19) == [[(0, [0])], [(0, [1]), (1, [2, 3])]]  # the rest is shared
    assert grpo.cut_rows([10] * 4, [5] * 8, 60) == [[(0, [0, 1]), (1, [2, 3])], [(2, [4, 5]), (3, [6, 7])]]  # not 3 + 1
    assert grpo.cut_rows([10], [50, 5], 30) == [[(0, [0])], [(0, [1])]]  # one that never fits stands alone


# --- Flags and the arithmetic of the batch -------------------------------------------------------------------------


def arguments(**flags):
    return grpo.Arguments("some/model", **flags)


@pytest.mark.parametrize("batch, G, prompts", [(1, 8, 1), (4, 8, 1), (8, 8, 1), (16, 8, 2), (12, 8, 3), (1, 2, 4)])
def test_auto_accumulation_by_hand(batch, G, prompts):
    assert grpo.prompts_per_rank(arguments(per_device_train_batch_size=batch, num_generations=G)) == prompts


def test_auto_accumulation_is_the_smallest_that_gives_eight_and_whole_groups():
    for batch, G in [*itertools.product(range(1, 14), range(2, 14)), (7, 10**6)]:
        whole = math.lcm(batch, G)  # completions of the smallest step of whole groups
        expected = whole * -(-8 // whole) // G
        args = arguments(per_device_train_batch_size=batch, num_generations=G, gradient_accumulation_steps="auto")
        assert grpo.prompts_per_rank(args) == expected, (batch, G)


def test_given_accumulation():
    def prompts(batch, steps, G):
        flags = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "num_generations": G}
        return grpo.prompts_per_rank(arguments(**flags))

    assert prompts(4, "6", 8) == 3
    assert prompts(2, 4, 8) == 1  # a number, from Python
    with pytest.raises(ValueError) as error:
        prompts(3, "4", 8)
    for part in (
        "per_device_train_batch_size 3",
        "gradient_accumulation_steps 4",
        "= 12",
        "num_generations 8",
        "8 or 16",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="product 8,"):  # 0 is not a cure
        prompts(3, "1", 8)


FLAGS = """
    model_name_or_path torch_dtype bf16 attn_implementation freeze_vision_modules gradient_checkpointing
    gradient_checkpointing_kwargs min_pixels max_pixels
    data_file_paths image_folders dataset_name image_root question_template val_split_ratio num_workers
    num_generations max_completion_length max_prompt_length temperature reward_funcs reward_weights beta epsilon
    epsilon_high delta num_iterations loss_type importance_sampling_level scale_rewards mask_truncated_completions
    per_device_train_batch_size gradient_accumulation_steps max_tokens_per_forward learning_rate lr_scheduler_type
    warmup_ratio weight_decay max_grad_norm num_train_epochs max_steps seed data_seed
    deepspeed zero_stage stall_timeout plan plan_gpus plan_gb
    output_dir run_name report_to logging_steps log_completions save_steps save_total_limit save_only_model
    resume_from_checkpoint eval_steps eval_only
"""


def test_flags_are_frozen():
    """A flag is a promise to users: adding one needs a reason, and an edit here."""
    assert sorted(field.name for field in dataclasses.fields(grpo.Arguments)) == sorted(FLAGS.split())
    assert all(field.metadata["help"] for field in dataclasses.fields(grpo.Arguments))


def test_defaults():
    args = arguments()
    assert (args.learning_rate, args.num_generations, args.epsilon, args.num_iterations) == (1e-6, 8, 0.2, 1)
    assert (args.temperature, args.beta, args.loss_type, args.scale_rewards) == (1.0, 0.0, "grpo", "group")
    assert (args.torch_dtype, args.output_dir, args.data_seed) == ("bfloat16", "runs/grpo", args.seed)
    assert (args.reward_funcs, args.reward_weights) == (["accuracy", "format"], [1.0, 1.0])


def parse(*words):
    (args,) = transformers.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(
        ["--model_name_or_path", "some/model", *words]
    )
    return args


def test_flags_as_they_are_typed():
    args = parse("--bf16", "false", "--gradient_accumulation_steps", "auto", "--reward_funcs", "accuracy", "format")
    assert (args.bf16, args.torch_dtype, args.gradient_accumulation_steps) == (False, "float32", "auto")
    assert args.reward_funcs == ["accuracy", "format"]
    assert parse("--bf16", "--gradient_checkpointing", "false").gradient_checkpointing is False
    assert parse("--gradient_accumulation_steps", "16").gradient_accumulation_steps == "16"
    kwargs = '{"use_reentrant": false}'
    assert parse("--gradient_checkpointing_kwargs", kwargs).gradient_checkpointing_kwargs == kwargs
    args = parse("--reward_funcs", "accuracy", "my.py:score", "--reward_weights", "1", "0.5", "--epsilon_high", "0.28")
    assert (args.reward_weights, args.epsilon_high) == ([1.0, 0.5], 0.28)
    args = parse("--run_name", "mine", "--seed", "7", "--zero_stage", "2", "--resume_from_checkpoint", "true")
    assert (args.output_dir, args.data_seed, args.zero_stage) == ("runs/mine", 7, 2)
    assert args.resume_from_checkpoint == "true"


@pytest.mark.parametrize(
    "typed, meant",
    [("true", "group"), ("false", "none"), ("True", "group"), ("False", "none")]
    + [(scale, scale) for scale in ("group", "batch", "none")],
)
def test_scale_rewards_true_and_false(typed, meant):
    assert parse("--scale_rewards", typed).scale_rewards == meant


def test_help_lists_every_flag():
    text = transformers.HfArgumentParser(grpo.Arguments).format_help()
    assert [flag for flag in FLAGS.split() if f"--{flag} " not in text] == []


@pytest.mark.parametrize(
    "flag, value",
    [
        ("loss_type", "bnpo"),
        ("importance_sampling_level", "tokens"),
        ("scale_rewards", "yes"),
        ("lr_scheduler_type", "polynomial"),
        ("report_to", "tensorboard"),
        ("torch_dtype", "float16"),
        ("num_generations", 1),
        ("num_generations", 0),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("learning_rate", float("nan")),
        ("reward_weights", [float("inf"), 1.0]),
        ("question_template", "no slot"),
        ("max_steps", 0),
        ("seed", -1),
        ("num_train_epochs", 0.0),
        ("save_total_limit", 0),
        ("max_pixels", 0),
        ("deepspeed", "/no/such.json"),
        ("max_completion_length", 0),
        ("num_iterations", 0),
        ("logging_steps", 0),
        ("save_steps", 0),
        ("reward_weights", [1.0]),
        ("val_split_ratio", 1.0),
        ("val_split_ratio", -0.1),
        ("zero_stage", 4),
        ("per_device_train_batch_size", 0),
        ("per_device_train_batch_size", -8),
        ("gradient_accumulation_steps", "0"),
        ("gradient_accumulation_steps", "-1"),
        ("gradient_accumulation_steps", "many"),
        ("gradient_accumulation_steps", "1.5"),
        ("gradient_checkpointing_kwargs", '{"preserve_rng_state": true}'),
        ("gradient_checkpointing_kwargs", "use_reentrant=false"),
        ("gradient_checkpointing_kwargs", "5"),
        ("delta", 0.9),
        ("num_generations", 99999999999),
        ("per_device_train_batch_size", 10**12),
        ("stall_timeout", 10**20),
        ("num_train_epochs", 1e308),
        ("max_steps", 10**20),
    ],
)
def test_a_flag_that_cannot_be_obeyed_is_named(flag, value):
    with pytest.raises(ValueError, match=f"--{flag} ?") as error:
        arguments(**{flag: value})
    if not isinstance(value, list):
        text = {"gradient_checkpointing_kwargs": ""}.get(flag, str(value))
        assert text in str(error.value)


def test_cispo_wants_its_bound():
    with pytest.raises(ValueError, match="--epsilon_high"):
        arguments(loss_type="cispo")
    assert arguments(loss_type="cispo", epsilon_high=5.0).epsilon_high == 5.0
