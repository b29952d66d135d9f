"""The monitor's verdicts, each on a series that has its trouble and on one that has not; sampling, live table, wandb.

NVML is stood in for by a module of its names, as CI has no GPU. What reads it, and what starts and ends it, is real.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import monitor
from test_launch import environment, launch, processes_with, until
from test_run import flags, pictures, run_once  # noqa: F401, a fixture

import grpo
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
PHASES = {"time/wait_data": 0.02, "time/rollout": 2.4, "time/reward": 0.05, "time/compare": 0.03, "time/update": 2.5}


def steps(count=200, **changes):
    """Training rows of a healthy run of 5 s a step: noise, rewards that rise. `changes`: metric, its slashes written as
    double underscores -> function of the step."""
    rng, rows = random.Random(0), []
    for step in range(1, count + 1):
        row = {"step": step, "reward": 1 + step / count, "frac_reward_zero_std": rng.uniform(0.1, 0.6), "loss": 1e-9}
        row |= {"completions/clipped_ratio": rng.uniform(0, 0.3), "completions/max_length": rng.randint(200, 256)}
        row |= {"peak_gb": 70 + rng.uniform(-1, 1), "grad_norm": 0.5, "kl": None, "parse_failure_rate": 0.0} | PHASES
        row |= {name.replace("__", "/"): of(step) for name, of in changes.items()}
        row["step_time"] = sum(value for name, value in row.items() if name.startswith("time/"))
        rows.append(row)
    return rows


def gpus(training, count=8, seconds=None, **changes):
    """Samples of a healthy node every 5 s: idle while it loads, then busy; memory grows until its cache is full, heat
    for three minutes. `changes`: field -> function of (GPU, time, the healthy value)."""
    rng, rows, now, ends = random.Random(1), [], 0.0, [60.0]
    for row in training:
        ends.append(ends[-1] + (seconds or row["step_time"]))
    while now < ends[-1]:
        step = sum(end <= now for end in ends[1:])
        for gpu in range(count):
            loads = now < 60
            row = {"utilisation": 0 if loads else rng.randint(90, 100), "total_gb": 150.8}
            row["memory_gb"] = now if loads else 75.0 - 10 * math.exp(-(now - 60) / 40) + rng.choice([0, 0.01])
            row["temperature"] = round(62 - 30 * math.exp(-now / 60) + gpu % 4)
            row["power_w"] = 120 if loads else 600 + rng.uniform(-40, 40)
            row |= {name: of(gpu, now, row[name]) for name, of in changes.items()}
            rows.append({"launch": 0.0, "step": step, "time": now, "gpu": gpu, "name": "NVIDIA H200"} | row)
        now += 5
    return rows


def test_a_healthy_run_has_no_verdict():
    training = steps()
    assert monitor.verdicts(training, gpus(training)) == []
    assert monitor.verdicts(training, []) == monitor.verdicts([], []) == monitor.verdicts([], gpus(training)) == []
    for count in (1, 2, 9, 25):  # too little to judge by is no trouble
        assert monitor.verdicts(training[:count], gpus(training[:count])) == []


def test_a_healthy_demo_run_has_no_verdict_at_any_time():
    """The first 200 steps of `bash launch.sh` on two CPU cores, to three digits; GPUs as above beside it."""
    columns = json.loads((ROOT / "tests" / "demo_metrics.json").read_text())
    training = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert len(training) == 200
    for count in range(1, 201):
        assert monitor.verdicts(training[:count], []) == []
    assert len(gpus(training)) > 8 * 20 and monitor.verdicts(training, gpus(training)) == []


def half_idle(gpu, now, busy):
    return busy if now % 10 < 5 or gpu != 5 else 20


@pytest.mark.parametrize(
    "phases, seconds, cause, number",
    [
        ({"time__wait_data": lambda step: 2.0}, None, "waits for data: raise --num_workers", "time/wait_data 2.00 s"),
        ({"time__compare": lambda step: 1.5}, None, "waits for communication, for the rank", "time/compare 1.50 s"),
        ({"time__reward": lambda step: 3.0}, None, "waits for the reward functions", "time/reward 3.00 s"),
        ({}, 8.0, "waits for evaluation and saving", "between steps 2.99 s of the 7.99 s"),
        ({}, None, "waits for communication (one GPU", "of the 5.00 s"),
    ],
)
def test_utilisation_that_swings_names_the_phase(phases, seconds, cause, number):
    training = steps(**phases)
    assert monitor.swinging(training, gpus(training, seconds=seconds)) is None
    said = monitor.swinging(training, gpus(training, seconds=seconds, utilisation=half_idle))
    assert "GPU 5 is between 20 and 9" in said and cause in said and number in said, said


def test_only_gpus_of_the_run_are_judged():
    """Others on the node stand idle and cold, or are another job's that swings."""
    empty = {"memory_gb": lambda gpu, now, usual: usual if gpu < 4 else 0.6}
    cold = {
        "temperature": lambda gpu, now, usual: usual if gpu < 4 else 28,
        "utilisation": lambda gpu, now, u: u * (gpu < 4),
    }
    training = steps()
    assert monitor.verdicts(training, gpus(training, **empty, **cold)) == []


def stairs(rise, every):
    """Memory that gains `rise` GB each `every` seconds on GPU 3, as an allocator takes whole segments."""
    return lambda gpu, now, usual: usual + (gpu == 3) * rise * (now // every)


@pytest.mark.parametrize("rise, every", [(0.5, 40), (2.0, 180), (0.05, 5)])
def test_memory_stairs_are_a_leak_with_their_slope(rise, every):
    training = steps()
    said = monitor.leaking(training, gpus(training, memory_gb=stairs(rise, every)))
    slope = float(said.split(" MB a step")[0].split()[-1])
    assert "memory of GPU 3 climbs" in said and "a leak" in said
    assert slope == pytest.approx(1000 * 5 * rise / every, rel=0.1)
    said = monitor.leaking(steps(peak_gb=lambda step: 70 + 0.02 * step), [])
    assert "rank 0's tensors climbs" in said and "20.0 MB a step" in said


@pytest.mark.parametrize(
    "memory",
    [
        lambda gpu, now, usual: usual + 20 * (now > 500),  # one long completion: one step
        lambda gpu, now, usual: usual + 20 * (now > 300) + 10 * (now > 800),
        lambda gpu, now, usual: usual + 5 * math.sin(now / 200),  # waves
        lambda gpu, now, usual: usual - now / 100,
        lambda gpu, now, usual: 75 + 20 * (1 - math.exp(-now / 300)),  # a cache that fills slowly
        lambda gpu, now, usual: 75 + now / 2000,  # 0.7 %
    ],
)
def test_memory_that_jumps_or_settles_is_no_leak(memory):
    training = steps()
    assert monitor.leaking(training, gpus(training, memory_gb=memory)) is None


def test_noise_is_rarely_stairs():
    rng = random.Random(2)
    assert not [1 for _ in range(2000) if monitor.climb([*range(200)], [70 + rng.gauss(0, 3) for _ in range(200)])]


def test_temperatures_apart():
    training = steps()
    hot = gpus(
        training,
        temperature=lambda gpu, now, usual: usual + 9 * (gpu == 7),
        power_w=lambda g, t, w: 700 - 400 * (g == 4),
    )
    said = monitor.uneven(hot)
    assert "12 °C apart, GPU 7 74 °C (700 W, 95 % busy) and GPU 0 62 °C (700 W" in said and "uneven load" in said
    near = gpus(training, temperature=lambda gpu, now, usual: usual + 7 * (gpu == 7))
    assert monitor.uneven(near) is None  # 10 apart
    warming = gpus(training, temperature=lambda gpu, now, usual: usual if now > 500 or gpu else 30)
    assert monitor.uneven(warming) is None


def test_every_completion_clipped():
    said = monitor.clipped(steps(completions__clipped_ratio=lambda s: 1.0, completions__max_length=lambda s: 256))
    assert "every completion of the last 10 steps was cut, at 256 tokens: raise --max_completion_length" in said
    assert monitor.clipped(steps(completions__clipped_ratio=lambda step: 1.0 if step != 195 else 0.9)) is None
    assert monitor.clipped(steps(9, completions__clipped_ratio=lambda step: 1.0)) is None


def test_no_reward_spread():
    same = {"frac_reward_zero_std": lambda step: 1.0 if step > 150 else 0.5, "reward": lambda step: 0.0}
    said = monitor.without_spread(steps(**same, parse_failure_rate=lambda step: 0.75))
    assert "in 100% of the last 10 steps' groups" in said and "reward 0.00, 75% without a box" in said
    assert monitor.without_spread(steps(frac_reward_zero_std=lambda step: 0.9)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value):
    said = monitor.not_finite(steps(grad_norm=lambda step: value if step >= 120 else 1.0))
    assert f"grad_norm is {value} in step 120, the first of 81 values" in said
    assert monitor.not_finite(steps(grad_norm=lambda step: 1e30, kl=lambda step: None)) is None


def test_verdicts_and_gpus_of_a_folder(tmp_path, capsys):
    """What the command prints and draws; of several launches the newest is judged."""
    training = steps(loss=lambda step: math.nan if step == 7 else 0.0)
    rows = gpus(training, memory_gb=stairs(0.5, 40))
    earlier = [row | {"launch": -9999.0, "utilisation": 0 if row["step"] % 2 else 100} for row in rows]
    for name, of in ("metrics.jsonl", training), ("gpus.jsonl", earlier + rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in of))
    assert monitor.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("VERDICT: ") == 2 and "memory of GPU 3" in said and "loss is nan in step 7" in said
    assert "verdicts: 2, from 200 steps and" in said and "of 8 GPUs\n" in said
    with Image.open(tmp_path / "curves.png") as curves:
        with_gpus = curves.height
    (tmp_path / "gpus.jsonl").unlink()
    assert monitor.main([str(tmp_path)]) == 0
    assert "verdicts: 1," in (said := capsys.readouterr().out) and "gpus.jsonl is absent" in said
    with Image.open(tmp_path / "curves.png") as curves:
        assert curves.height < with_gpus


# --- Sampling ----------------------------------------------------------------------------------------------------

NVML = """\
from types import SimpleNamespace
NVML_TEMPERATURE_GPU, nvmlMemory_v2 = 0, 2
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return f"Stand-in {handle}"
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=90 + handle, memory=10)
def nvmlDeviceGetMemoryInfo(handle, version): return SimpleNamespace(total=80 * 10**9, used=(20 + handle) * 10**9)
def nvmlDeviceGetTemperature(handle, sensor): return 60 + handle
def nvmlDeviceGetPowerUsage(handle):
    if handle: raise NVMLError_NotSupported
    return 345678
"""


@pytest.fixture
def nvml(tmp_path):
    """A folder for PYTHONPATH whose pynvml has two GPUs; the second cannot tell its power."""
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "pynvml.py").write_text(NVML)
    return str(tmp_path / "stand-in")


def tool(*words, **variables):
    command = [sys.executable, ROOT / "tools" / "monitor.py", *words]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=60)


def test_the_live_table(nvml):
    done = tool(PYTHONPATH=nvml)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert lines[0] == "0 90 % 20.0 of 80.0 GB 60 °C 346 W Stand-in 0".split()
    assert lines[1] == "1 91 % 21.0 of 80.0 GB 61 °C – W Stand-in 1".split()


def test_without_gpu_driver_or_package_it_says_so(tmp_path, nvml):
    (tmp_path / "pynvml.py").write_text("raise ImportError")
    none = tmp_path / "none"
    none.mkdir()
    failing = NVML.replace("def nvmlInit(): pass", "def nvmlInit(): raise NVMLError('Driver Not Loaded')")
    (none / "pynvml.py").write_text(failing)
    for path, said in (
        (tmp_path, "pip install nvidia-ml-py"),
        (none, "no driver on this machine (NVML: Driver Not Loaded)"),
    ):
        for words in ((), ("--sample", str(tmp_path))):
            done = tool(*words, PYTHONPATH=str(path))
            assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "gpus.jsonl").exists()
    assert tool("--nonsense").returncode == 2


def test_samples_carry_the_runs_step_and_end_with_the_parent(tmp_path, nvml):
    """The parent is killed, as no trap can catch: the sampler still goes, within one interval."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 99}\n')  # an earlier run's
    os.utime(run / "metrics.jsonl", (1, 1))
    command = f'"{sys.executable}" "{ROOT}/tools/monitor.py" --sample "{run}" $$ & echo $!; wait'
    parent = subprocess.Popen(
        ["bash", "-c", command], env=environment(PYTHONPATH=nvml), stdout=subprocess.PIPE, text=True
    )
    sampler = int(parent.stdout.readline())
    until(lambda: (run / "gpus.jsonl").exists())
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    rows = lambda: [json.loads(line) for line in (run / "gpus.jsonl").read_text().splitlines()]  # noqa: E731
    until(lambda: len(rows()) >= 4)
    assert [(row["gpu"], row["step"]) for row in rows()[:4]] == [(0, 0), (1, 0), (0, 2), (1, 2)]
    first, second = monitor.read_samples(run)[:2]
    assert first["memory_gb"] == 20 and first["power_w"] == 345.678 and second["power_w"] is None
    assert 4 < rows()[2]["time"] - rows()[0]["time"] < 9
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not Path(f"/proc/{sampler}").exists(), seconds=15)


def test_launch_starts_a_sampler_where_a_gpu_is_and_ends_it(tmp_path, nvml):
    """This Python says that there are two GPUs; the run itself ends early, for want of a model. The sampler sleeps five
    minutes at a time, so that it is launch.sh that ends it."""
    with open(Path(nvml) / "pynvml.py", "a") as file:
        file.write("import sys, time\nsleep = time.sleep\n")  # torch imports it too
        file.write("if '--sample' in sys.argv: time.sleep = lambda seconds: sleep(300)\n")
    (tmp_path / "python").write_text(
        f'#!/bin/bash\ncase "$2" in *device_count*) echo 2 1 23999; exit; esac\nexec "{sys.executable}" "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    run = tmp_path / "my run"
    run.mkdir()
    words = ["--model_name_or_path", "/no such folder", "--output_dir", str(run), "--data_file_paths", "a.jsonl"]
    words += ["--image_folders", "."]
    variables = {"PYTHON": str(tmp_path / "python"), "PYTHONPATH": nvml, "NPROC": "1", "DS_ACCELERATOR": "cpu"}
    done = launch(*words, cwd=tmp_path, **variables)
    assert done.returncode == 2 and "Terminated" not in done.stdout, done.stdout
    assert [row["gpu"] for row in monitor.read_samples(run)][:2] == [0, 1]
    until(lambda: not [words for words in processes_with(str(run)) if "--sample" in words], seconds=10)


# --- wandb -------------------------------------------------------------------------------------------------------


def wandb_records(path):
    """The records of wandb's offline file: LevelDB's log format (blocks of 32 KiB; checksum, length and kind before a
    piece, which is whole, the first, a middle or the last one of a record) behind 7 bytes of its own."""
    content, at, record = path.read_bytes(), 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:  # no room for another head in this block
            at += 32768 - at % 32768
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def offline_run(args):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run_once(args)
    import wandb

    wandb.finish()


def test_wandb_gets_metrics_and_gpu_samples(checkpoints, pictures, tmp_path):  # noqa: F811
    """Two steps with the real package, offline; read back from the file that `wandb sync` would send."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    out = tmp_path / "run"
    out.mkdir()
    gpu = {
        "launch": 1.0,
        "step": 1,
        "name": "x",
        "utilisation": 97,
        "memory_gb": 71.5,
        "temperature": 61,
        "power_w": 640.0,
    }
    now = time.time()
    samples = [gpu | {"gpu": g, "time": t} for t, g in [(now - 999, 7), (now, 0), (now, 1), (now, 0)]]
    samples[-1]["utilisation"] = 98  # the newest counts, the old one not
    (out / "gpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    args = flags(checkpoints["qwen2_5_vl"], pictures, out, max_steps=2, report_to="wandb", run_name="offline")
    run_ranks(1, offline_run, args)
    (path,) = out.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for record in map(wandb_internal_pb2.Record.FromString, wandb_records(path)):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row, line in zip(rows, written, strict=True):
        assert {name: row[name] for name in line} == line
        assert row["gpu/0/utilisation"] == 98 and row["gpu/1/memory_gb"] == 71.5 and "gpu/7/power_w" not in row
    assert grpo.gpu_samples(tmp_path) == {}


def stalled(folder, told):
    """The files of ranks whose last word is told[rank]: (step, phase), or None of one that says nothing."""
    (folder / "ranks").mkdir()
    (folder / "ranks" / "stalled").touch()
    for rank, last in enumerate(told):
        text = json.dumps({"pid": 100 + rank, "host": f"node{rank // 2}"}) + "\n"
        if last:
            text += (
                json.dumps({"step": last[0], "phase": last[1]}) + '\nThread 0x1 (most recent call first):\n  File "x"\n'
            )
        (folder / "ranks" / f"stacks_{rank}.txt").write_text(text)


@pytest.mark.parametrize(
    "told, who, where",
    [
        (
            [(3, "compare"), (3, "reward"), (3, "compare")],
            "missing: rank 1 (rank 0, 2: compare after step 3; rank 1: ",
            1,
        ),
        ([(4, "log"), (4, "log"), (3, "update")], "missing: rank 2 (rank 0, 1: log after step 4; rank 2: update ", 2),
        ([(4, "wait_data"), (4, "evaluation"), (4, "log")], "missing: rank 2 (", 2),
        (
            [(3, "compare"), (3, "reward"), None],
            "missing: rank 2 (rank 0: compare after step 3; rank 1: reward after ",
            2,
        ),
        ([(7, "update")] * 3, "no rank is behind the others (rank 0, 1, 2: update after step 7)", 0),
    ],
)
def test_which_rank_a_hung_run_is_waiting_for(tmp_path, capsys, told, who, where):
    stalled(tmp_path, told)
    assert monitor.main(["--hang", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"the run hung, {who}" in said
    assert f"`py-spy dump --pid {100 + where}` on node{where // 2}" in said and f"ranks/nccl_{where}.txt" in said


def test_a_run_that_did_not_hang(tmp_path, capsys):
    stalled(tmp_path, [None, None])
    (tmp_path / "ranks" / "stalled").unlink()
    assert monitor.hang(tmp_path) is None and monitor.main(["--hang", str(tmp_path)]) == 0
    assert "no rank has reported a hang" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, line, said",
    [
        ("metrics.jsonl", '{"reward": 1.0}', "line 1: step is None"),
        ("metrics.jsonl", '{"step": "x", "reward": 1.0}', "line 1: step is 'x'"),
        ("metrics.jsonl", '{"step": 1, "reward": "x"}', "not as grpo.py writes them"),
        ("metrics.jsonl", '{"step": 1, "reward": []}', "not as grpo.py writes them"),
        ("gpus.jsonl", '{"gpu": 0}', "line 1: time is None"),
        ("completions.jsonl", '{"step": 1, "split": "train"}', "line 1: record is None"),
        ("completions.jsonl", '{"step": 1, "split": "train", "record": 0, "prompt": "", "completion": ""}', "not as"),
        ("run.json", "[]", "not as grpo.py writes them"),
        ("run.json", "{", "not as grpo.py writes them"),
        ("ranks/stacks_0.txt", '{"step": 1, "phase": "lunch"}', "lunch"),
        ("ranks/stacks_a.txt", '{"step": 1, "phase": "update"}', "not as grpo.py writes them"),
    ],
)
def test_files_that_are_not_a_runs_are_named(tmp_path, capsys, name, line, said):
    stalled(tmp_path, [(4, "update")])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    (tmp_path / name).write_text(line + "\n")
    assert monitor.main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told and str(tmp_path) in told


def test_a_packed_file_that_is_none_leaves_the_page_without_pictures(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    (tmp_path / "completions.jsonl").write_text("")
    (tmp_path / "run.json").write_text(json.dumps({"packed": str(tmp_path / "metrics.jsonl")}))
    assert monitor.main([str(tmp_path)]) == 0
    assert "without pictures" in capsys.readouterr().out


def test_hang_of_no_folder():
    assert monitor.main(["--hang", "/nowhere"]) == 2
