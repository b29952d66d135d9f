"""launch.sh as a user starts it: quoting, ports, the printed command, exit status, signals, .venv.

Most runs here end before training (the model folder does not exist), so that what is seen is launch.sh's work; the last
ones train.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
MISSING = '/no such folder/it\'s "here" $HOME'


def environment(**variables):
    """This process's, without what would steer the launch, on CPU and with this Python."""
    steering = (
        "NPROC",
        "NNODES",
        "NODE_RANK",
        "MASTER_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "SLURM_",
        "OMP_",
        "DS_",
        "DEMO_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return {**kept, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}


def launch(*arguments, cwd, script=ROOT / "launch.sh", **variables):
    return subprocess.run(
        ["bash", script, *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def printed_command(output):
    """The torchrun command line that launch.sh printed, as a list of words."""
    return next(shlex.split(line) for line in output.splitlines() if "torch.distributed.run" in line)


def option(command, name):
    return command[command.index(name) + 1]


def test_arguments_arrive_as_typed_and_the_status_is_the_one_that_rank_0_wrote(tmp_path):
    folder = tmp_path / "out put" / "it's"
    folder.mkdir(parents=True)
    (folder / "exit_status").write_text("0")  # from an earlier run: must not count
    arguments = ["--model_name_or_path", MISSING, "--output_dir", "out put/it's"]
    arguments += ["--data_file_paths", "a.jsonl", "--image_folders", "."]
    done = launch(*arguments, cwd=tmp_path)
    assert MISSING in done.stdout.replace("\\", "").split("grpo.py", 1)[1].split("\n", 1)[1], done.stdout
    assert done.returncode == 2, done.stdout  # torchrun itself returns 1
    assert "no such folder" in done.stdout.splitlines()[-1]  # the cause comes last, below torchrun's own report
    assert (folder / "exit_status").read_text().strip() == "2"
    command = printed_command(done.stdout)
    assert command[command.index(str(ROOT / "grpo.py")) + 1 :] == arguments
    assert sys.executable in command and "DS_ACCELERATOR=cpu" in command
    assert f"OMP_NUM_THREADS={len(os.sched_getaffinity(0))}" in command
    assert option(command, "--nproc_per_node") == "1" and option(command, "--nnodes") == "1"
    assert 20000 <= int(option(command, "--master_port")) <= 60000
    assert "monitor.py" not in done.stdout  # nothing to draw


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"NPROC": "two"}, "NPROC=two is no number"),
        ({"NNODES": "2"}, "NNODES=2: set MASTER_ADDR"),
        ({"PYTHON": "no-such-python"}, "no-such-python not found"),
    ],
)
def test_what_cannot_be_started_says_why(tmp_path, variables, message):
    done = launch("--max_steps", "1", cwd=tmp_path, **variables)
    assert done.returncode == 2 and message in done.stdout and "torch.distributed.run" not in done.stdout


def processes_with(token):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if token in words:
            found.append(words)
    return found


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.05)


def training(folder, checkpoints):
    """Flags of a run of two steps on four pictures, which are written below a folder with a space in its name."""
    rng = np.random.default_rng(0)
    (folder / "my pictures").mkdir()
    with open(folder / "my pictures" / "a.jsonl", "w") as file:
        for i in range(4):
            Image.fromarray(rng.integers(0, 255, (56, 84, 3), dtype=np.uint8)).save(folder / "my pictures" / f"{i}.png")
            file.write(json.dumps({"image": f"{i}.png", "problem": f"box {i}", "solution": [1, 2, 30, 40]}) + "\n")
    flags = "--bf16 false --num_generations 2 --per_device_train_batch_size 2 --max_completion_length 4 --max_steps 2"
    words = ["--model_name_or_path", checkpoints["qwen2_5_vl"], "--data_file_paths", "my pictures/a.jsonl"]
    return [*words, "--image_folders", "my pictures", *flags.split()]


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_step_of_two_processes_ends_them_all(tmp_path, checkpoints, number, status):
    """The reward function stops the step for as long as the signal needs; the variables given reach torchrun."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def slow(prompts, completions, **columns):\n"
        "    pathlib.Path('reached').touch()\n"
        "    time.sleep(60)\n"
    )
    stale = tmp_path / "runs" / "first try" / "exit_status"
    stale.parent.mkdir(parents=True)
    stale.write_text("0")
    command = ["bash", ROOT / "launch.sh", "--run_name=first try", *training(tmp_path, checkpoints), "--reward_funcs"]
    command.append(f"{tmp_path}/slow.py:slow")
    variables = {"NPROC": "2", "MASTER_PORT": "23457", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "4"  # instead of 30: as long as the ranks wait for the step's end
    log = tmp_path / "log"
    with open(log, "wb") as file:
        started = subprocess.Popen(command, cwd=tmp_path, env=environment(**variables), stdout=file, stderr=file)
    until(lambda: (tmp_path / "reached").exists() or started.poll() is not None, seconds=120)
    assert started.poll() is None, log.read_text()
    started.send_signal(number)
    assert started.wait(timeout=50) == status, log.read_text()
    assert processes_with(command[-1]) == []
    assert stale.read_text() == f"{status}\n"  # the earlier run's 0 is gone
    assert f"no time to save; nothing is saved in {tmp_path}/runs/first try yet" in log.read_text().splitlines()[-1]
    command = printed_command(log.read_text())
    assert option(command, "--nproc_per_node") == "2" and "OMP_NUM_THREADS=1" in command
    assert option(command, "--master_port") == "23457" and option(command, "--master_addr") == "localhost"


def test_under_slurm_every_node_finds_the_same_address_and_port(tmp_path):
    """There is no SLURM here: a script answers as `scontrol show hostnames` does. The run, whose first node does not
    exist, is ended as soon as its command has been printed."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]"}
    started = subprocess.Popen(
        ["bash", ROOT / "launch.sh", "--model_name_or_path", MISSING],
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", **slurm),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    command = printed_command(started.stdout.readline())
    started.terminate()
    started.communicate(timeout=40)
    assert option(command, "--nnodes") == "2" and option(command, "--node_rank") == "1"
    assert option(command, "--master_addr") == "node7"
    assert option(command, "--master_port") == str(20000 + 123456 % 40001)


def two_nodes(folder, words, **variables):
    """launch.sh as it runs on two nodes, here both on this machine: [(status, output)] of node 0 and node 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    nodes = []
    for number in ("0", "1"):
        settings = environment(**both, NODE_RANK=number, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4", **variables)
        with open(folder / f"node {number}", "w") as log:
            command = ["bash", ROOT / "launch.sh", *words]
            nodes.append(subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=log))
    try:
        statuses = [node.wait(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(status, (folder / f"node {i}").read_text()) for i, status in enumerate(statuses)]


def test_two_nodes_train_as_one(tmp_path, checkpoints):
    """Two torchrun agents over loopback, one output folder: one run, its files written once, by node 0."""
    words = [*training(tmp_path, checkpoints), "--output_dir", "my run"]
    (first, said), (second, also) = two_nodes(tmp_path, words)
    assert (first, second) == (0, 0), said + also
    assert "batch: 2 ranks x 4 prompts x 2 completions" in said and "batch:" not in also
    assert option(printed_command(also), "--node_rank") == "1"
    lines = [json.loads(line) for line in (tmp_path / "my run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(np.isfinite(line["loss"]) for line in lines)
    assert (tmp_path / "my run" / "exit_status").read_text() == "0\n"
    assert (tmp_path / "my run" / "checkpoint-2" / "model.safetensors").stat().st_size > 0
    assert "monitor.py" in said and "monitor.py" not in also  # drawn once


def test_a_rank_that_fails_on_node_1_ends_both_nodes(tmp_path, checkpoints):
    """Its own console says why; those of node 0, waiting for it in a collective, end too, and not with status 0."""
    (tmp_path / "bad.py").write_text(
        "import os\n"
        "def bad(prompts, completions, **columns):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('no reward on this node')\n"
        "    return [0.0] * len(completions)\n"
    )
    words = [*training(tmp_path, checkpoints), "--output_dir", "my run", "--reward_funcs", f"{tmp_path}/bad.py:bad"]
    (first, said), (second, also) = two_nodes(tmp_path, words)
    assert first != 0 and second != 0, said + also
    assert "no reward on this node" in also
    assert processes_with(words[-1]) == []


def test_what_is_missing_is_installed_into_a_venv_beside_launch_sh_and_nowhere_else(tmp_path):
    """pip is all that these requirements name, so that nothing is downloaded; a bare Python lacks even packaging."""
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    before = set(tmp_path.glob("bare/**/*"))
    copy = tmp_path / "it's a copy"
    copy.mkdir()
    shutil.copy(ROOT / "launch.sh", copy)
    for name in ("requirements.txt", "requirements-test.txt"):
        (copy / name).write_text("pip  # comment\n")
    done = launch("pytest", cwd=tmp_path, script=copy / "launch.sh", PYTHON=str(bare), PIP_NO_INDEX="1")
    assert f"installing into {copy}/.venv" in done.stdout
    assert f"{copy}/.venv/bin/python: No module named pytest" in done.stdout and done.returncode == 1
    assert set(tmp_path.glob("bare/**/*")) == before


def test_a_version_out_of_bounds_counts_as_missing(tmp_path):
    shutil.copy(ROOT / "launch.sh", tmp_path)
    for name in ("requirements.txt", "requirements-test.txt"):
        (tmp_path / name).write_text("numpy>=1,<1.0.1\n")
    done = launch("pytest", cwd=tmp_path, script=tmp_path / "launch.sh", PIP_NO_INDEX="1")
    assert "has numpy " in done.stdout and "not numpy<1.0.1,>=1" in done.stdout
    assert done.returncode != 0 and "No matching distribution found for numpy" in done.stdout


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_training_under_zero_3(tmp_path, checkpoints, processes):
    """The whole way as a user goes it: torchrun, gloo, ZeRO-3, metrics, checkpoint, curves and page."""
    words = [*training(tmp_path, checkpoints), "--output_dir", "my run"]
    done = launch(*words, cwd=tmp_path, NPROC=processes)
    assert done.returncode == 0, done.stdout
    assert f"batch: {processes} ranks x 4 prompts x 2 completions" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "my run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(np.isfinite(line["loss"]) for line in lines)
    for name in ("checkpoint-2/model.safetensors", "completions.jsonl", "curves.png", "rollouts.html"):
        assert (tmp_path / "my run" / name).stat().st_size > 0, name
