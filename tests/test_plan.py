"""tools/plan.py: its counts beside what autograd saves and DeepSpeed allocates, and the command as a user types it."""

import gc
import json
import math
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from test_launch import launch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo
import model as M
import rollout
from bench import work
from ranks import run_ranks
from tools import plan


def flags(folder, **changed):
    return grpo.Arguments(model_name_or_path=folder, **changed)


def prompt(model, patches, text):
    config = model.config
    picture = [config.image_token_id] * (patches // 4)
    ids = torch.tensor([config.vision_start_token_id, *picture, config.vision_end_token_id, *[65] * text])
    size = model.model.visual.config.patch_size
    pixels = torch.randn(patches, 3 * 2 * size**2)
    made = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, patches // 8]])}
    return made | {"position_ids": M.prompt_positions(model, made)}


def saved_by_autograd(policy, row):
    """Bytes of the storages that a forward saves, each once; weights, buffers and the row itself are not counted."""
    known = [*policy.parameters(), *policy.buffers(), *(x for x in row.values() if torch.is_tensor(x))]
    known, saved = {tensor.untyped_storage()._cdata for tensor in known}, {}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in known:
            saved[tensor.untyped_storage()._cdata] = tensor  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(row)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def norms_on_cpu(model, checkpointed, T, n):
    """A CPU's RMS norm also keeps its normalised input, which CUDA's kernel computes again: numbers in these tables."""
    total = 0
    for name, module in model.named_modules():
        if hasattr(module, "variance_epsilon") and not (checkpointed and (".layers." in name or ".blocks." in name)):
            heads = {"q_norm": 4, "k_norm": 2}.get(name.split(".")[-1], 1)
            total += (n if "visual" in name else T) * len(module.weight) * heads
    return total


@pytest.mark.parametrize("patches, text, G, R", [(64, 20, 4, 11), (128, 50, 3, 40), (64, 150, 8, 25)])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", list(M.FAMILIES))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_activations(checkpoints, attention, family, checkpointed, patches, text, G, R):
    model, _ = M.load_policy(checkpoints[family], torch_dtype="float32", attn_implementation=attention)
    if checkpointed:
        M.checkpoint_blocks(model, use_reentrant=True)
    policy, one = M.Policy(model), prompt(model, patches, text)
    row = M.build_row([(one, [torch.arange(R) + 5] * G)] * 2)
    groups, count = [(len(one["input_ids"]), [R] * G)] * 2, plan.meta_model(flags(checkpoints[family]))
    found = plan.activations(count, attention, 4, checkpointed, groups, patches)
    T, n = len(row["input_ids"]), 2 * patches
    expected = found["kept"] + 4 * norms_on_cpu(model, checkpointed, T, n)
    if checkpointed:  # hands the rotary tables on by itself, past the hooks: alive all the same
        vision = count.model.visual.blocks[0].attn
        expected -= 2 * 4 * (T * 16 + n * vision.proj.in_features // vision.num_heads)
    assert expected == pytest.approx(saved_by_autograd(policy, row), rel=0.02)


def test_activations_with_a_variable_length_kernel(checkpoints):
    """No GPU here. What such a kernel takes is the whole difference to a dense one, and no T x T table."""
    model, T, keys = plan.meta_model(flags(checkpoints["qwen2_5_vl"])), 100, 260
    dense = plan.decoder_saved(model, "eager", 2, T, keys, 0) - 2 * keys * 64 * 2  # keys and values for 4 heads of 16
    assert plan.decoder_saved(model, "varlen", 2, T, keys, T**2) == dense + 2 * keys * 32 * 2 + 4 * 4 * T


class Live(TorchDispatchMode):
    """Follows the bytes of all storages but those of `before`."""

    def __init__(self, before):
        super().__init__()
        self.before, self.sizes, self.peak = {tensor.untyped_storage()._cdata for tensor in before}, {}, 0

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage._cdata not in self.before and storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, storage._cdata)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def tensors():
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided and not tensor.is_meta]


def bytes_of_a_step(folder, stage):
    """(bytes after the last row's backward, the most in the optimizer's step) of the second step, and the plan's."""
    before = tensors()
    args = flags(folder, zero_stage=stage)
    _, world, device = grpo.start_processes(args)
    model, _ = grpo.load_policy(args, device)
    read = grpo.deepspeed_config
    config = read(args, world, 64, "cpu")
    config["optimizer"]["params"]["fused"] = True  # as on a GPU: PyTorch's other AdamW keeps tables while it steps
    config["zero_optimization"] |= {"reduce_bucket_size": 10000, "stage3_prefetch_bucket_size": 1000}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    grpo.deepspeed_config = lambda *_: config
    engine = grpo.start_engine(args, model, world, device)
    prompt, completions = M.blank_group(model)
    for _ in range(2):
        for last in (False, True):
            engine.set_gradient_accumulation_boundary(last)
            logps, _ = engine(M.build_row([(prompt, completions * 3)]))
            engine.backward(logps.sum())
            if not last:
                engine.step()
        del logps
        live = Live(before)
        for tensor in tensors() + [p.grad for p in engine.parameters() if p.grad is not None]:
            live.see(tensor)
        start = sum(live.sizes.values())
        with live:
            engine.step()
    P = sum(parameter.ds_numel if stage == 3 else parameter.numel() for parameter in model.parameters())
    weights, states, _, ready, step = plan.optimizer_bytes(args, config["zero_optimization"], world, P, P)
    return (start, live.peak), (weights + states + ready, weights + states + ready + step)


@pytest.mark.parametrize("stage, world", [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_optimizer_states_and_gradients(checkpoints, stage, world):
    for measured, planned in run_ranks(world, bytes_of_a_step, checkpoints["qwen2_5_vl"], stage):
        assert planned == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("budget, n", [(32768, 6), (300, 2), (1, 1)])
def test_sampling_holds_one_wave(checkpoints, budget, n):
    """The caches of a wave are the plan's, and six prompts in waves of n take the memory of n prompts."""
    folder, (B, G, R) = checkpoints["qwen2_5_vl"], (6, 4, 40)
    more = {"bf16": False, "num_generations": G, "max_completion_length": R, "per_device_train_batch_size": B * G}
    args = flags(folder, max_tokens_per_forward=budget, max_prompt_length=120, max_pixels=28 * 28 * 16, **more)
    model, _ = M.load_policy(folder, torch_dtype="float32")
    M.Policy(model)
    tokens, patches = plan.assumed_prompt(args, model.config)
    one = prompt(model, patches, tokens - patches // 4 - 2)
    decoder = rollout.Decoder(model, [one] * n, G, R, 1.0, [], 0)
    held = sum(x.nbytes for table in (decoder.prompt, decoder.own) for kv in table for x in kv)
    assert held == plan.memory(args, plan.meta_model(args), 1, {"stage": 0})["keys and values"][0]
    del decoder
    peaks = []
    for prompts, limit in (([one] * B, budget), ([one] * n, math.inf)):
        with Live(tensors()) as live:
            rollout.sample(model, prompts, G, R, 1.0, [], 0, limit)
        peaks.append(live.peak)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


# The shape of Qwen2.5-VL-3B; 8 prompts x 8 completions x 256 tokens with 640x480 pictures. GB of peak_gb on one H200.
MEASURED = [
    (106.21, {"zero_stage": 0, "gradient_checkpointing": False, "max_tokens_per_forward": 10240}),
    (67.90, {"zero_stage": 3}),
]


@pytest.mark.parametrize("gb, changed", MEASURED)
def test_measured_peaks(tmp_path, gb, changed):
    work.config().save_pretrained(tmp_path)
    args = flags(str(tmp_path), per_device_train_batch_size=64, **changed)
    model = plan.meta_model(args)
    zero = grpo.deepspeed_config(args, 1, 2048, "cpu")["zero_optimization"]
    assert max(plan.phases(plan.memory(args, model, 1, zero))) / 1e9 == pytest.approx(gb, rel=0.02)


def test_cures_help_one_after_the_other(checkpoints, monkeypatch):
    args = flags(
        checkpoints["qwen2_vl"], zero_stage=0, attn_implementation="eager", gradient_checkpointing=False,
        per_device_train_batch_size=64, max_pixels=200000,
    )  # fmt: skip
    model, world, zero = plan.meta_model(args), 1, {"stage": 0}
    monkeypatch.setattr(plan, "CONTEXT", 0)  # larger than all of a tiny model
    start = plan.needed(args, model, world, zero)
    found = list(plan.cures(args, model, world, zero, 0))
    totals = [total for _, _, total in found]
    assert found[0][0] == "--attn_implementation auto" and totals == sorted(totals, reverse=True) and totals[0] < start
    assert sum("--max_tokens_per_forward" in words for words, _, _ in found) > 1
    assert len(list(plan.cures(args, model, world, zero, totals[0]))) == 1  # no more than are needed
    assert not list(plan.cures(args, model, world, zero, start))


def test_command(checkpoints, tmp_path, monkeypatch, capsys):
    """Without data, weights or GPU: config.json is enough."""
    (tmp_path / "model").mkdir()
    shutil.copy(f"{checkpoints['qwen3_vl']}/config.json", tmp_path / "model")
    flags = ["--model_name_or_path", "model", "--plan_gpus", "8", "--beta", "0.04", "--plan_gb"]
    tight = launch("--plan", *flags, "1", cwd=tmp_path)  # CUDA and NCCL alone take more
    assert tight.returncode == 1 and "does not fit" in tight.stdout and "That is not enough" in tight.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plan.py", *flags, "80"])
    assert plan.main() == 0
    told = capsys.readouterr().out
    assert "it fits" in told and "reference (--beta)" in told and "That is not enough" not in told
    assert not (tmp_path / "runs").exists()


def test_sizes_that_make_no_model_are_not_a_model_that_does_not_fit(checkpoints, tmp_path):
    (tmp_path / "model").mkdir()
    config = json.loads(Path(f"{checkpoints['qwen2_5_vl']}/config.json").read_text())
    for part in (config, config["text_config"]):
        part |= {name: -5 for name in ("hidden_size", "vocab_size") if name in part}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert launch("--plan", "--model_name_or_path", "model", "--plan_gb", "80", cwd=tmp_path).returncode == 2
