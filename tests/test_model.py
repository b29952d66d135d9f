"""model.py: the packed row against repeated rows, attention choice, checkpoint wrapping, loading."""

import types

import numpy as np
import pytest
import torch
from PIL import Image

import model as M

FAMILIES = list(M.FAMILIES)


def make_prompt(policy, processor, sizes, text="where is the red box"):
    """An encoded prompt with noise pictures of the given sizes; the data module's encoder has tests of its own."""
    rng = np.random.default_rng(len(text) + sum(w * 7 + h for w, h in sizes))
    pictures = [Image.fromarray(rng.integers(0, 255, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    content = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": text}]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prompt = {"pixel_values": None, "image_grid_thw": None}
    if pictures:
        prompt = dict(processor.image_processor(images=pictures, return_tensors="pt"))
        for grid in prompt["image_grid_thw"]:
            chat = chat.replace("<|image_pad|>", "<|X|>" * (int(grid.prod()) // 4), 1)
        chat = chat.replace("<|X|>", "<|image_pad|>")
    prompt["input_ids"] = processor.tokenizer(chat, return_tensors="pt").input_ids[0]
    prompt["position_ids"] = M.prompt_positions(policy, prompt)
    return prompt


def random_completions(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (R,), generator=generator) for R in lengths]


CASES = {  # pictures of each group's prompt, lengths of its completions
    "one group": [([(56, 84)], [5, 5, 5])],
    "unequal lengths, one empty": [([(56, 84)], [1, 9, 0, 4])],
    "two pictures": [([(56, 56), (112, 60)], [6, 3])],
    "text only": [([], [4, 7])],
    "several groups": [([(56, 84)], [3, 8]), ([], [5, 2]), ([(84, 56), (28, 28)], [1, 6, 6])],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_row_equals_repeated_rows(checkpoints, family, case):
    """Log-probs and every parameter's gradient, against one ordinary forward a completion."""
    packed, processor = M.load_policy(checkpoints[family], torch_dtype="float32")
    plain, _ = M.load_policy(checkpoints[family], torch_dtype="float32")
    groups = [
        (make_prompt(packed, processor, sizes), random_completions(lengths, i))
        for i, (sizes, lengths) in enumerate(CASES[case])
    ]
    expected = [logps for prompt, completions in groups for logps in M.repeated_logps(plain, prompt, completions, 0.7)]
    table, entropy = M.Policy(packed, temperature=0.7)(M.build_row(groups))
    assert table.shape == (len(expected), max(len(e) for e in expected))
    for row, want in zip(table, expected, strict=True):
        torch.testing.assert_close(row[: len(want)], want, rtol=1e-5, atol=1e-5)
        assert (row[len(want) :] == 0).all()
    # a loss in which every token weighs differently
    weights = torch.randn(table.shape, generator=torch.Generator().manual_seed(1))
    (table * weights).sum().backward()
    sum((want * weights[i, : len(want)]).sum() for i, want in enumerate(expected)).backward()
    for (name, a), (_, b) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
            continue
        error = (a.grad - b.grad).norm() / b.grad.norm().clamp(min=1e-3)
        assert error < 1e-5, f"{name}: gradient off by {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_modules_compute_what_transformers_own_compute(checkpoints, family):
    """RMSNorm, and linear layers with zeros added, against the classes' own forward: values and gradients."""
    policy, _ = M.load_policy(checkpoints[family], torch_dtype="float32")
    norms = [module for module in policy.modules() if hasattr(module, "variance_epsilon")]
    mlps = [module for module in policy.modules() if hasattr(module, "gate_proj")]
    torch.manual_seed(0)
    for module in [*norms[:1], *norms[-3:], *mlps[:1], *mlps[-1:]]:
        width = module.gate_proj.in_features if hasattr(module, "gate_proj") else len(module.weight)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        x, results = torch.randn(7, width), []
        for own in (True, False):
            if not own:
                for part in module.modules():
                    vars(part).pop("forward", None)
            y = module(x)
            results.append([y, *torch.autograd.grad(y.sin().sum(), list(module.parameters()))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_attention_on_a_cpu_against_its_definition(attention, causal):
    """Bottom-right alignment: query i of Lq sees keys 0 ... Lk - Lq + i."""
    torch.manual_seed(0)
    lengths, D = [(3, 3), (2, 5), (1, 7)], 8
    q, k = torch.randn(6, 4, D), torch.randn(15, 2, D)
    v, at_q, at_k = torch.randn(15, 2, D), 0, 0
    cu_q, cu_k = torch.tensor([0, 3, 5, 6]), torch.tensor([0, 3, 8, 15])
    out = M.varlen_attention(attention, q, k, v, cu_q, cu_k, 3, 7, 0.3, causal)
    for Lq, Lk in lengths:
        for i in range(Lq):
            end = at_k + (Lk - Lq + i + 1 if causal else Lk)
            for head in range(4):
                weights = (k[at_k:end, head // 2] @ q[at_q + i, head] * 0.3).softmax(0)
                torch.testing.assert_close(out[at_q + i, head], weights @ v[at_k:end, head // 2])
        at_q, at_k = at_q + Lq, at_k + Lk


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_backends_agree(checkpoints, attention):
    policy, processor = M.load_policy(checkpoints["qwen2_5_vl"], torch_dtype="float32", attn_implementation=attention)
    assert policy.config.text_config._attn_implementation == attention
    group = (make_prompt(policy, processor, [(56, 84)]), random_completions([6, 3]))
    expected = M.repeated_logps(policy, *group)
    table, _ = M.Policy(policy)(M.build_row([group]))
    for row, want in zip(table, expected, strict=True):
        torch.testing.assert_close(row[: len(want)], want, rtol=1e-5, atol=1e-5)


def test_entropy_and_placeholders(checkpoints):
    """The reported entropy is the distribution's, and pictures' placeholder ids have probability 0."""
    policy, _ = M.load_policy(checkpoints["qwen2_5_vl"], torch_dtype="float32")
    banned = M.placeholder_ids(policy.config)
    assert len(banned) == 4
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8), torch.randn(300, 8)
    targets = torch.tensor([0, 1, 2, 3, banned[0], 5])
    logps, entropy = M.LogProbs(torch.nn.Parameter(weight), banned, 0.5)(hidden, targets)
    keep = [i for i in range(300) if i not in banned]
    distribution = torch.distributions.Categorical(logits=(hidden @ weight.T)[:, keep] / 0.5)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-5, atol=1e-5)
    assert logps[4] == float("-inf")
    want = distribution.log_prob(torch.tensor([keep.index(i) for i in (0, 1, 2, 3, 5)]).repeat(6, 1).T).T
    torch.testing.assert_close(logps[[0, 1, 2, 3, 5]], want[[0, 1, 2, 3, 5], [0, 1, 2, 3, 4]], rtol=1e-5, atol=1e-5)


def test_logits_in_chunks_equal_logits_at_once(monkeypatch):
    torch.manual_seed(0)
    head = M.LogProbs(torch.nn.Parameter(torch.randn(50, 8)), [3], 1.0)
    hidden, targets = torch.randn(10, 8, requires_grad=True), torch.randint(4, 50, (10,))
    whole = torch.autograd.grad(head(hidden, targets)[0].pow(2).sum(), [hidden, head.weight])
    monkeypatch.setattr(M, "LOGIT_CHUNK", 3)
    parts = torch.autograd.grad(head(hidden, targets)[0].pow(2).sum(), [hidden, head.weight])
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_changes_memory_and_not_gradients(checkpoints, use_reentrant, every):
    def gradients(wrap):
        policy, processor = M.load_policy(checkpoints["qwen3_vl"], torch_dtype="float32")
        wrapped = M.checkpoint_blocks(policy, use_reentrant=use_reentrant, every=every) if wrap else 0
        row = M.build_row([(make_prompt(policy, processor, [(56, 84)]), random_completions([6, 3]))])
        runs = []
        layer = policy.model.language_model.layers[0].mlp.gate_proj
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
        wrapper = M.Policy(policy)
        wrapper(row)[0].sum().backward()
        trained = len(runs)
        with torch.no_grad():
            wrapper(row)
        return {n: p.grad for n, p in policy.named_parameters()}, wrapped, trained, len(runs) - trained

    plain, _, runs_plain, _ = gradients(False)
    saved, wrapped, runs_saved, runs_sampling = gradients(True)
    assert wrapped == 6 // every  # 3 vision blocks and 3 decoder layers
    # recomputed once when training, never where no gradient is asked for
    assert (runs_plain, runs_sampling) == (1, 1)
    assert runs_saved == (2 if every == 1 else 1)  # every=2 leaves this layer alone
    for name, gradient in plain.items():
        torch.testing.assert_close(saved[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_blank_group_runs_the_vision_tower_and_teaches_nothing(checkpoints):
    for family in FAMILIES:
        policy, _ = M.load_policy(checkpoints[family], torch_dtype="float32")
        table, _ = M.Policy(policy)(M.build_row([M.blank_group(policy)]))
        (table * 0).sum().backward()
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_attention_choice(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert M.select_attention("auto", cpu, torch.float32)[0] == "sdpa"
    assert "cpu" in M.select_attention("auto", cpu, torch.bfloat16)[1]
    assert M.select_attention("eager", cpu, torch.float32)[0] == "eager"
    with pytest.raises(ValueError, match="device is cpu"):
        M.select_attention("flash_attention_2", cpu, torch.bfloat16)
    with pytest.raises(ValueError, match="use auto"):
        M.select_attention("flash", cpu, torch.float32)
    # a GPU that is not here: only its capability is asked for
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert M.select_attention("auto", cuda, torch.bfloat16)[0] == "sdpa"
    with pytest.raises(ValueError, match=r"7\.5"):
        M.select_attention("flash_attention_2", cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(ValueError, match="float32"):
        M.select_attention("flash_attention_2", cuda, torch.float32)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)  # an import of None raises ImportError
    with pytest.raises(ValueError, match="does not import"):
        M.select_attention("flash_attention_2", cuda, torch.bfloat16)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", types.ModuleType("flash_attn"))
    assert M.select_attention("auto", cuda, torch.bfloat16)[0] == "flash_attention_2"


def test_family_comes_from_the_config_not_from_the_path(checkpoints, tmp_path):
    import json
    import shutil

    folder = tmp_path / "Qwen3-VL-but-not-really"
    shutil.copytree(checkpoints["qwen2_5_vl"], folder)
    policy, processor = M.load_policy(str(folder), torch_dtype="float32")
    assert policy.config.model_type == "qwen2_5_vl" and processor.box_scale is None
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="llama"):
        M.load_policy(str(folder))
    with pytest.raises(ValueError, match="no such folder"):
        M.load_policy("/no/such/folder")


def test_processor_saves_what_it_loads(checkpoints, tmp_path):
    for family in FAMILIES:
        policy, processor = M.load_policy(checkpoints[family], torch_dtype="float32", max_pixels=28 * 28 * 9)
        assert processor.image_processor.size["longest_edge"] == 28 * 28 * 9
        (tmp_path / family).mkdir()
        processor.save_pretrained(str(tmp_path / family))
        again = M.Processor(str(tmp_path / family), family)
        assert again.image_processor.size == processor.image_processor.size
        prompt, copy = make_prompt(policy, processor, [(90, 56)]), make_prompt(policy, again, [(90, 56)])
        assert prompt["input_ids"].tolist() == copy["input_ids"].tolist()
        assert torch.equal(prompt["pixel_values"], copy["pixel_values"])


def test_freezing_vision_leaves_the_rest_trainable(checkpoints):
    policy, _ = M.load_policy(checkpoints["qwen2_5_vl"], torch_dtype="float32", freeze_vision_modules=True)
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert frozen and all("visual" in name for name in frozen)
    assert not any(p.requires_grad for p in policy.model.visual.parameters())


def test_a_checkpoint_that_lacks_tensors_or_names_pickles_is_refused(checkpoints, tmp_path):
    """transformers would fill the holes with random weights, and read whatever file an index names."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "lacking"
    shutil.copytree(checkpoints["qwen2_5_vl"], folder)
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if "mlp" in name)
    save_file({n: t for n, t in tensors.items() if n != gone}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        M.load_policy(str(folder), torch_dtype="float32")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "w.bin")}))
    with pytest.raises(ValueError, match="no safetensors"):
        M.load_policy(str(folder), torch_dtype="float32")
