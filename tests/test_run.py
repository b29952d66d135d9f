"""Whole runs through grpo's own entry: learning, resuming, evaluation, checkpoints, DeepSpeed's files, bad flags."""

import functools
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import grpo
import model as M
from ranks import run_ranks


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A data set in VLM-R1's form: 12 noise pictures with a box each."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    with open(folder / "a.jsonl", "w") as file:
        for i in range(12):
            Image.fromarray(rng.integers(0, 255, (56, 84, 3), dtype=np.uint8)).save(folder / f"{i}.png")
            turns = [{"from": "human", "value": f"<image>box {i}"}, {"from": "gpt", "value": "[1, 2, 30, 40]"}]
            file.write(json.dumps({"id": i, "image": f"{i}.png", "conversations": turns}) + "\n")
    return folder


@pytest.fixture
def reward_file(tmp_path):
    """Reward: the share of one letter in the completion, which any policy can learn to write."""
    path = tmp_path / "letters.py"
    share = "[c.count('e') / max(1, len(c)) for c in completions]"
    path.write_text(f"def letters(prompts, completions, **columns):\n    return {share}\n")
    return f"{path}:letters"


def flags(checkpoint, pictures, out, **more):
    given = {"bf16": False, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8}
    given |= {"lr_scheduler_type": "constant", "question_template": "{Question}", "num_workers": 0, "stall_timeout": 60}
    given |= {"data_file_paths": str(pictures / "a.jsonl"), "image_folders": str(pictures), "save_only_model": True}
    return grpo.Arguments(model_name_or_path=str(checkpoint), output_dir=str(out), **given | more)


def run_once(args):
    run, *rest = grpo.start(args)
    grpo.train(run, *rest)


def lines(folder, name="metrics.jsonl"):
    with open(os.path.join(folder, name)) as file:
        return [json.loads(line) for line in file]


def test_grpo_learns(checkpoints, pictures, tmp_path, reward_file):
    """On a random policy the reward rises from chance to most of the tokens."""
    args = flags(checkpoints["qwen2_5_vl"], pictures, tmp_path / "run", reward_funcs=[reward_file], max_steps=40)
    args.learning_rate, args.num_generations, args.per_device_train_batch_size = 1e-2, 8, 32
    run_ranks(1, run_once, args)
    rewards = [line["reward"] for line in lines(args.output_dir)]
    assert np.mean(rewards[:3]) < 0.1 and np.mean(rewards[-3:]) > 0.5, rewards


def test_resumed_run_equals_an_undisturbed_one_bit_for_bit(checkpoints, pictures, tmp_path, reward_file):
    """Weights, optimizer, data position and every random state: 3 steps, stop, 3 more, against 6 at once."""
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], pictures, reward_funcs=[reward_file], learning_rate=1e-3)
    make = functools.partial(
        make, save_only_model=False, save_steps=3, val_split_ratio=0.2, eval_steps=3, num_workers=1
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, run_once, make(whole, max_steps=6))
    run_ranks(2, run_once, make(parts, max_steps=3))
    # what a run leaves that dies after its last checkpoint: a step too many, and a line cut short
    with open(parts / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 9}\n{"step": 5, "lo')
    run_ranks(2, run_once, make(parts, max_steps=6, resume_from_checkpoint="true"))
    keys = ("step", "loss", "grad_norm", "reward", "entropy", "num_tokens", "eval/letters", "completions/mean_length")
    table = lambda folder: [[line.get(key) for key in keys] for line in lines(folder)]  # noqa: E731
    assert table(parts) == table(whole)
    texts = lambda folder: [(x["step"], x["completion"]) for x in lines(folder, "completions.jsonl")]  # noqa: E731
    assert texts(parts) == texts(whole)
    weights = [M.load_policy(str(folder / "checkpoint-6"), torch_dtype="float32")[0] for folder in (whole, parts)]
    for a, b in zip(weights[0].parameters(), weights[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_resumed_says_what_can_be_done(checkpoints, pictures, tmp_path, reward_file, capfd):
    make = functools.partial(flags, checkpoints["qwen2_5_vl"], pictures, tmp_path, reward_funcs=[reward_file])
    run_ranks(1, run_once, make(max_steps=2, save_steps=1, save_only_model=False, zero_stage=2))
    again = functools.partial(make, max_steps=9, resume_from_checkpoint="true")
    older = str(tmp_path / "checkpoint-1")
    for world, args, message in (
        (2, again(zero_stage=2), "number of ranks 1, now it is 2"),
        (1, again(zero_stage=3), "--zero_stage 2, now it is 3"),
        (1, make(max_steps=9), "--resume_from_checkpoint true, or give another --run_name"),
        (1, again(resume_from_checkpoint=older), "holds checkpoint-2; move it away"),
        (1, again(resume_from_checkpoint=str(pictures)), "no state.json there"),
    ):
        with pytest.raises(AssertionError, match=message):
            run_ranks(world, run_once, args)
    for done in (False, True):
        run_ranks(1, run_once, again(max_steps=3, zero_stage=2, save_only_model=False))
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
        assert ("nothing is left to train: step 3 of 3" in capfd.readouterr().err) == done


def test_nothing_to_train_on_or_to_evaluate_is_an_error(checkpoints, pictures, tmp_path):
    (tmp_path / "val.yaml").write_text(
        json.dumps({"datasets": [{"json_path": str(pictures / "a.jsonl"), "split": "val"}]})
    )
    alone = {"data_file_paths": None, "image_folders": None, "dataset_name": str(tmp_path / "val.yaml")}
    alone |= {"image_root": str(pictures)}
    for more, message in ((alone, "no records to train on"), ({"eval_steps": 1}, "nothing is held out")):
        with pytest.raises(AssertionError, match=message):
            run_ranks(1, run_once, flags(checkpoints["qwen2_5_vl"], pictures, tmp_path / "out", **more))


def test_packing_may_take_longer_than_a_stall(checkpoints, pictures, tmp_path, reward_file, monkeypatch):
    """Rank 0 packs while the others wait, and a large set takes longer than any step may."""
    packed = grpo.data.ensure_packed
    monkeypatch.setattr(grpo.data, "ensure_packed", lambda *sources: [time.sleep(6), packed(*sources)][1])
    args = flags(
        checkpoints["qwen2_5_vl"], pictures, tmp_path, reward_funcs=[reward_file], max_steps=1, stall_timeout=3
    )
    run_ranks(2, run_once, args)
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize("family", M.FAMILIES)
def test_saved_weights_are_the_trained_ones(checkpoints, pictures, tmp_path, reward_file, family):
    """Two ranks under ZeRO-3 save gathered weights that a fresh transformers model loads: changed by training, whole,
    and answering as the policy did at its last evaluation."""
    args = flags(checkpoints[family], pictures, tmp_path / "run", reward_funcs=[reward_file, "format"], max_steps=2)
    args.learning_rate, args.val_split_ratio, args.save_total_limit, args.save_steps = 1e-2, 0.3, 1, 1
    run_ranks(2, run_once, args)
    assert [os.path.basename(path) for path in grpo.checkpoints(args.output_dir)] == ["checkpoint-2"]
    folder = os.path.join(args.output_dir, "checkpoint-2")
    cls = getattr(transformers, M.FAMILIES[family][0])
    before, after = cls.from_pretrained(checkpoints[family]), cls.from_pretrained(folder)
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        assert a.shape == b.shape and b.numel() > 0
        assert not torch.equal(a, b), name
    trained = lines(args.output_dir)[-1]
    assert trained["step"] == 2 and trained["eval/count"] == 4
    again = flags(folder, pictures, tmp_path / "eval", reward_funcs=[reward_file, "format"], val_split_ratio=0.3)
    (result,) = run_ranks(1, evaluate_once, again)
    assert result["eval/letters"] == pytest.approx(trained["eval/letters"])


def evaluate_once(args):
    run, model, _, val_records = grpo.start(args)
    M.Policy(model)
    return grpo.evaluate(run, model, val_records)[0]


def test_the_command_that_evaluates_a_checkpoint(checkpoints, pictures, tmp_path, reward_file):
    """--eval_only prints the held-out metrics alone on stdout, and says so where the prompt is not training's."""
    run_ranks(1, run_once, flags(checkpoints["qwen2_vl"], pictures, tmp_path / "run", max_steps=1))
    command = [sys.executable, grpo.__file__, "--eval_only", "--model_name_or_path", tmp_path / "run" / "checkpoint-1"]
    command += [
        "--data_file_paths",
        pictures / "a.jsonl",
        "--image_folders",
        pictures,
        "--output_dir",
        tmp_path / "eval",
    ]
    command += ["--bf16", "false", "--max_completion_length", "4", "--val_split_ratio", "0.3"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert metrics["eval/count"] == 4 and {"eval/iou", "eval/accuracy", "eval/format"} <= set(metrics)
    assert "was trained with --question_template '{Question}'" in done.stderr
    assert "8 records not held out, 4 held out" in done.stderr


def test_metrics_and_completions_files(checkpoints, pictures, tmp_path):
    """TRL's names, plausible values, and completions that carry what the rollouts page draws."""
    args = flags(checkpoints["qwen2_vl"], pictures, tmp_path / "run", max_steps=2, beta=0.1, num_iterations=2)
    run_ranks(1, run_once, args)
    first, last = lines(args.output_dir)
    names = "reward reward_std frac_reward_zero_std rewards/accuracy/mean rewards/format/std completions/mean_length "
    names += "completions/min_length completions/max_terminated_length completions/clipped_ratio kl entropy loss epoch "
    names += "clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean grad_norm learning_rate num_tokens "
    names += (
        "step_time time/rollout time/update time/wait_data tokens_per_second/generated parse_failure_rate sampler_gap"
    )
    assert set(names.split()) <= set(last)
    assert first["sampler_gap"] < 1e-5 and first["learning_rate"] == 1e-6 and last["num_tokens"] > first["num_tokens"]
    assert sum(value for name, value in last.items() if name.startswith("time/")) == pytest.approx(last["step_time"])
    completions = lines(args.output_dir, "completions.jsonl")
    assert len(completions) == 16
    assert completions[0]["image_size"] == [84, 56] and completions[0]["model_size"] == [1000, 1000]
    assert set(completions[0]["rewards"]) == {"accuracy", "format"}
    for start in range(0, 16, 4):
        assert sum(line["advantage"] for line in completions[start : start + 4]) == pytest.approx(0, abs=1e-4)


ZERO_FILES = {  # the structure of the JSON files that VLM-R1's scripts name
    "zero2": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8},
    "zero3": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
ZERO_FILES["zero3_offload"] = ZERO_FILES["zero3"] | {
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
}


def zero_file(folder, name, **more):
    auto = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    config = dict.fromkeys(auto, "auto") | {"steps_per_print": 100, "wall_clock_breakdown": False}
    config |= {"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"}}
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config |= {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": ZERO_FILES[name]}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config | more))
    return str(path)


@pytest.mark.parametrize("name", ZERO_FILES)
def test_zero_files_of_vlm_r1_load_unchanged(checkpoints, pictures, tmp_path, reward_file, name):
    args = flags(checkpoints["qwen2_5_vl"], pictures, tmp_path / "run", reward_funcs=[reward_file], max_steps=1)
    args.deepspeed, args.bf16, args.torch_dtype = zero_file(tmp_path, name), True, "bfloat16"
    run_ranks(1, run_once, args)
    (line,) = lines(args.output_dir)
    assert np.isfinite(line["loss"]) and line["grad_norm"] > 0


def test_every_auto_is_filled_and_flags_decide(checkpoints, pictures, tmp_path, capsys):
    args = flags(checkpoints["qwen2_5_vl"], pictures, tmp_path, learning_rate=3e-6, weight_decay=0.1)
    args.deepspeed = zero_file(tmp_path, "zero3")
    config = grpo.deepspeed_config(args, 2, 64, "cpu")
    assert "auto" not in json.dumps(config)
    assert config["train_batch_size"] == 16 and config["gradient_clipping"] == 1.0 and not config["bf16"]["enabled"]
    assert config["optimizer"]["params"]["lr"] == 3e-6 and config["optimizer"]["params"]["weight_decay"] == 0.1
    args.zero_stage = 1
    assert grpo.deepspeed_config(args, 2, 64, "cpu")["zero_optimization"]["stage"] == 1
    rate = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    for contradiction in ({"train_batch_size": 999}, {"gradient_clipping": 0.5}, {"fp16": {"enabled": True}}, rate):
        args.deepspeed = zero_file(tmp_path, "zero2", **contradiction)
        with pytest.raises(ValueError, match="lr is 1e-05" if contradiction is rate else next(iter(contradiction))):
            grpo.deepspeed_config(args, 2, 64, "cpu")
    small = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1e6}}
    args.deepspeed = zero_file(tmp_path, "zero3", **small)
    grpo.deepspeed_config(args, 2, 64, "cpu")
    assert "under 5e7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config, said",
    [
        ([], "'list' object"),
        ({"zero_optimization": 5}, "'int' object"),
        ({"zero_optimization": None}, "'NoneType' object"),
        ({"zero_optimization": {"stage": "x"}}, "stage 'x'"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "must be objects"),
        ({"bf16": 3}, "must be objects"),
        ({"fp16": "auto"}, "must be objects"),
        ({"optimizer": "AdamW"}, "'str' object"),
        ({"optimizer": {"params": []}}, "must be objects"),
        ({"optimizer": {"params": {"lr": "auto"}}}, None),  # without a type: AdamW
    ],
)
def test_a_deepspeed_json_of_another_shape_is_named(tmp_path, config, said):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    args = grpo.Arguments(model_name_or_path="m", deepspeed=str(path))
    if said is None:
        assert grpo.deepspeed_config(args, 1, 64, "cpu")["optimizer"]["type"] == "AdamW"
        return
    with pytest.raises(ValueError, match=re.escape(f"{path} is no DeepSpeed configuration: ") + f".*{said}"):
        grpo.deepspeed_config(args, 1, 64, "cpu")


def test_shipped_json_is_what_the_readme_says():
    with open(os.path.join(grpo.HERE, "ds_zero3.json")) as file:
        config = json.load(file)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["contiguous_gradients"]) == (3, True, False)
    assert zero["reduce_bucket_size"] == 1e8 and zero["offload_optimizer"]["device"] == "none"


def test_a_folder_belongs_to_one_run_and_is_cleared_of_half_saves(tmp_path):
    (tmp_path / "checkpoint-3.tmp").mkdir()
    grpo.claim_folder(str(tmp_path))
    assert not (tmp_path / "checkpoint-3.tmp").exists()
    with pytest.raises(AssertionError, match="another run is writing there"):
        run_ranks(1, grpo.claim_folder, str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        grpo.claim_folder(str(tmp_path / "file" / "run"))


def test_of_a_folder_in_use_for_other_things_only_our_files_are_deleted(tmp_path):
    ours, theirs = ("stacks_0.txt", "nccl_11.txt", "stalled"), ("notes.txt", "stacks_of_hay.txt")
    (tmp_path / "run" / "ranks" / "folder").mkdir(parents=True)
    for name in ours + theirs:
        (tmp_path / "run" / "ranks" / name).touch()
    grpo.claim_folder(str(tmp_path / "run"))
    assert sorted(os.listdir(tmp_path / "run" / "ranks")) == sorted(("folder", *theirs))
    (tmp_path / "a" / "exit_status").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ranks").touch()
    for name, cause in (("a", "exit_status"), ("b", "ranks")):
        with pytest.raises(ValueError, match=f"--output_dir {tmp_path}/{name} cannot be written .*/{cause}"):
            grpo.claim_folder(str(tmp_path / name))


def main_with(*words):
    """grpo's command in this process; its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["grpo.py", *words])
        with pytest.raises(SystemExit) as stop:
            grpo.main()
    return stop.value.code


def test_statuses_are_left_for_launch_sh(checkpoints, pictures, tmp_path, capfd):
    """0; 2 with one line for what the user can mend, a reward function that exits among it."""
    (tmp_path / "r.py").write_text("def leave(prompts, completions, **columns):\n    raise SystemExit(0)\n")
    base = ["--model_name_or_path", checkpoints["qwen2_5_vl"], "--data_file_paths", str(pictures / "a.jsonl")]
    base += ["--image_folders", str(pictures), "--bf16", "false", "--max_completion_length", "4", "--max_steps", "1"]
    base += ["--num_generations", "2", "--per_device_train_batch_size", "2", "--save_only_model", "true"]
    cases = [
        ([], 0, ""),
        (["--reward_funcs", f"{tmp_path}/r.py:leave"], 2, "reward function leave raised SystemExit"),
        (["--nope", "1"], 2, "--nope"),
        (["--max_steps", "x"], 2, "invalid int value"),
        (["--model_name_or_path", "/no/such"], 2, "no such folder"),
        (["--output_di", "x"], 2, "--output_di"),  # abbreviations would put the status elsewhere
    ]
    for i, (words, status, message) in enumerate(cases):
        out = tmp_path / str(i)
        assert run_ranks(1, main_with, *base, "--output_dir", str(out), *words) == [status]
        assert (out / "exit_status").read_text() == f"{status}\n"
        if status and "invalid" not in message:  # argparse prints its own
            assert message in (out / "exit_message").read_text()
        said = capfd.readouterr().err
        assert message in said and "Traceback" not in said, said


def rotary_tables_in_bf16(args):
    _, world, device = grpo.start_processes(args)
    engine = grpo.start_engine(args, grpo.load_policy(args, device)[0], world, device)
    tables = {name: module.inv_freq for name, module in engine.module.named_modules() if hasattr(module, "inv_freq")}
    return {name: (str(table.dtype), table.float().numpy()) for name, table in tables.items()}


def test_rotary_tables_stay_float32_when_deepspeed_casts_the_model(checkpoints, pictures, tmp_path):
    args = flags(checkpoints["qwen2_5_vl"], pictures, tmp_path, bf16=True, torch_dtype="bfloat16", zero_stage=2)
    (tables,) = run_ranks(1, rotary_tables_in_bf16, args)
    assert {dtype for dtype, _ in tables.values()} == {"torch.float32"}
    (text,) = [table for name, (_, table) in tables.items() if "language_model" in name]
    np.testing.assert_allclose(text, 10000.0 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6)  # bf16 is 0.4 % off
