"""What a run and its GPUs did, from the files that they left: `python tools/monitor.py runs/demo`.

It reads metrics.jsonl, gpus.jsonl, completions.jsonl and run.json in the run's folder, prints where held-out accuracy
started and ended and a verdict, numbers and a cure, on each trouble that it knows, and writes beside them

- curves.png: reward, held-out IoU and accuracy, completion lengths, loss, entropy, seconds a phase, the GPUs;
- rollouts.html: one self-contained page, true and predicted boxes drawn on the pictures (page.py).

It works on a run that is still going (a last line cut short is left out) and needs neither a GPU nor the model. Without
a folder it is a live table of this machine's GPUs. `--hang RUN` tells which rank is missing where a run ended with
status 4. `--sample RUN [PARENT]` writes RUN/gpus.jsonl for as long as its
parent process lives: launch.sh has one beside a run. These two ask NVML, through nvidia-ml-py.
Left out: anything that would need a server, and GPUs of a run's other nodes.
"""

import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from page import number, rollouts_page  # data (it loads torch) and matplotlib come later: the sampler stays small

# --- Reading -----------------------------------------------------------------------------------------------------


def read_jsonl(path, numbers=(), text=()):
    """Yields the objects of a file with one JSON object a line, in each of which the fields `numbers` and `text` must
    be such. A last line cut short, as a running or killed process leaves it, is left out; anything else raises
    ValueError with the line's number."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):  # only a file's last line can lack its end
                    return
                raise ValueError(f"{path}, line {number}: not JSON ({error}); remove that line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object; remove that line")
            for name in (*numbers, *text):
                if not isinstance(row.get(name), str if name in text else (int, float)):
                    raise ValueError(f"{path}, line {number}: {name} is {row.get(name)!r:.80}; remove that line")
            yield row


def read_metrics(run):
    """(training rows, evaluation rows) of metrics.jsonl, by step. After a resume a step may stand there twice: the
    later one belongs to the run that went on."""
    training, evaluation = {}, {}
    for row in read_jsonl(run / "metrics.jsonl", numbers=["step"]):
        if "eval/iou" in row:
            evaluation[row["step"]] = row
        elif "reward" in row:
            training[row["step"]] = row
    return [training[s] for s in sorted(training)], [evaluation[s] for s in sorted(evaluation)]


def first_and_last(path):
    """{"train": (first, last), "eval": ...}, each (step, its rows): all that is kept of a file of any size."""
    ends = {}
    lines = read_jsonl(path, numbers=["step", "record"], text=["split", "prompt", "completion"])
    for (split, step), rows in itertools.groupby(lines, key=lambda row: (row["split"], row["step"])):
        entry = step, list(rows)
        ends[split] = ends.get(split, (entry,))[0], entry
    return ends


def read_samples(run):
    """Rows of gpus.jsonl of the newest launch; none where nobody sampled."""
    path = run / "gpus.jsonl"
    rows = list(read_jsonl(path, numbers=["time", "launch", "step", "gpu"])) if path.exists() else []
    return [row for row in rows if row["launch"] == rows[-1]["launch"]]


# --- GPUs --------------------------------------------------------------------------------------------------------


class NoGPU(Exception):
    """There is no GPU to ask. Its text says why, and the cure."""


def samples(interval):
    """Yields every `interval` seconds a list with a dict for each GPU of this machine, whatever CUDA_VISIBLE_DEVICES
    says: time (s), gpu (NVML's index), name, utilisation (%), memory_gb in use and total_gb (10^9 bytes), temperature
    (°C), power_w; None for what a GPU cannot tell. Raises NoGPU."""
    try:
        import pynvml as nvml
    except ImportError as error:
        raise NoGPU("GPUs are not watched: pip install nvidia-ml-py") from error

    def ask(function, *details):
        try:
            return function(*details)
        except nvml.NVMLError_NotSupported:  # utilisation under MIG, power of some cards
            return None

    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise NoGPU(f"no NVIDIA GPU or no driver on this machine (NVML: {error})") from error
    if not handles:
        raise NoGPU("no NVIDIA GPU on this machine")
    while True:
        rows = []
        for gpu, handle in enumerate(handles):
            rates, power = ask(nvml.nvmlDeviceGetUtilizationRates, handle), ask(nvml.nvmlDeviceGetPowerUsage, handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)  # as nvidia-smi: without the reserved
            row = {"time": time.time(), "gpu": gpu, "name": nvml.nvmlDeviceGetName(handle)}
            row |= {"utilisation": rates and rates.gpu, "memory_gb": memory.used / 1e9, "total_gb": memory.total / 1e9}
            row["temperature"] = ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
            rows.append(row | {"power_w": power and power / 1000})
        yield rows
        time.sleep(interval)


def sample(run, parent):
    """Appends the samples and the step that the run is in to gpus.jsonl until `parent` is no longer this process's
    parent: however a launch ends, it leaves no sampler behind. The run makes the folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    launch = time.time()
    for rows in samples(5):
        if os.getppid() != parent:
            return
        metrics = run / "metrics.jsonl"  # one older than this launch is an earlier run's
        lines = metrics.read_bytes().split(b"\n") if metrics.exists() and metrics.stat().st_mtime > launch else []
        mark = {"launch": launch, "step": json.loads(lines[-2])["step"] if len(lines) > 1 else 0}
        if run.is_dir():
            with open(run / "gpus.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(mark | row) + "\n" for row in rows))


def watch():
    """The live table, every two seconds until Ctrl-C; once where the output is no terminal."""
    for rows in samples(2):
        print("\033[H\033[2J" * sys.stdout.isatty() + "GPU   busy      memory in use   heat   power   name")
        for row in rows:
            busy, heat, power = (number(row[name], 0) for name in ("utilisation", "temperature", "power_w"))
            memory = f"{row['memory_gb']:6.1f} of {row['total_gb']:5.1f} GB"
            print(f"{row['gpu']:3d}  {busy:>3} %  {memory}  {heat:>3} °C  {power:>4} W   {row['name']}", flush=True)
        if not sys.stdout.isatty():
            return


# --- Verdicts ----------------------------------------------------------------------------------------------------
# A rule takes training rows of metrics.jsonl, rows of gpus.jsonl or both and returns a verdict, its numbers and a cure,
# or None, also where there is too little to judge by. 30 %, 10 °C and "stairs" are VLM-R1's guide to several GPUs.

RECENT = 10  # the last steps that must agree on "every completion" and "no spread"
WAITS = {  # where a GPU has nothing to do: metric, and what to do about it
    "time/wait_data": "data: raise --num_workers, lower --max_pixels, or move the packed file to a local disk",
    "time/reward": "the reward functions, which run on the CPU: make them faster",
    "time/compare": "communication, for the rank whose completions are longest: more prompts a rank "
    "(--per_device_train_batch_size) even that out",
    "between steps": "evaluation and saving: raise --eval_steps and --save_steps",
    "rollout and update": "communication (one GPU: launches of small kernels), since no waiting phase takes a tenth of "
    "the time: the smallest --zero_stage that fits, more prompts a rank, `nvidia-smi topo -m` for slow links",
}


def known(rows, name):
    return [value for value in column(rows, name) if math.isfinite(value)]


def mean(rows, name):
    return statistics.fmean(known(rows, name) or [math.nan])


def settled(samples):
    """{GPU: its rows}, without loading and the first steps, which compile, and without GPUs that are less than a
    twentieth full: those are not the run's."""
    first = min((row["step"] for row in samples if row["step"]), default=0)
    rows = sorted((row for row in samples if row["step"] > first), key=lambda row: row["gpu"])  # stable: by time in it
    gpus = {gpu: list(its) for gpu, its in itertools.groupby(rows, key=lambda row: row["gpu"])}
    used = lambda its: mean(its, "memory_gb") > its[0]["total_gb"] / 20  # noqa: E731
    return {gpu: its for gpu, its in gpus.items() if len(its) >= 20 and used(its)}


def swinging(training, samples):
    """90th less 10th percentile of a GPU's utilisation, and the phase that takes most of the time that it waits."""
    spread = lambda rows: statistics.quantiles(known(rows, "utilisation") or [0, 0], n=10)[::8]  # noqa: E731
    tenths = {gpu: spread(rows) for gpu, rows in settled(samples).items()}
    gpu, (low, high) = max(tenths.items(), key=lambda item: item[1][1] - item[1][0], default=(0, (0, 0)))
    if high - low <= 30:
        return None
    rows = settled(samples)[gpu]
    last = next(row for row in rows if row["step"] == rows[-1]["step"])  # two samples at the start of a step
    steps = [row for row in training if rows[0]["step"] < row["step"] <= last["step"]]
    if len(steps) < 2:
        return None
    clock = (last["time"] - rows[0]["time"]) / (last["step"] - rows[0]["step"])
    seconds = {name: mean(steps, name) for name in WAITS if known(steps, name)}
    seconds["between steps"] = max(0.0, clock - mean(steps, "step_time"))
    cause = max(seconds, key=seconds.get)
    cause = cause if seconds[cause] > 0.1 * clock else "rollout and update"
    shown = ", ".join(f"{name} {its:.2f} s" for name, its in seconds.items())
    said = f"GPU {gpu} is between {low:.0f} and {high:.0f} % busy ({shown} of the {clock:.2f} s of a step)"
    return f"{said}: it waits for {WAITS[cause]}"


def climb(steps, values):
    """(first level, last level, rise a step) of values that climb like stairs, else None. Levels are medians of eight
    stretches. Stairs never go down, have several steps (one long completion makes one) and go on in the second half (an
    allocator's cache fills up and stays); all together rise by 2 %."""
    size = len(values) // 8
    if size < 5 or steps[4 * size] == steps[-1]:
        return None
    levels = [statistics.median(values[i * size : (i + 1) * size]) for i in range(8)]
    rises, total = [b - a for a, b in itertools.pairwise(levels)], levels[-1] - levels[0]
    if total < 0.02 * levels[0] or min(rises) < -0.1 * total or max(rises) > 0.4 * total or sum(rises[4:]) < total / 4:
        return None
    late = slice(4 * size, None)  # the slope is that of the second half, behind the filling of caches
    return levels[0], levels[-1], statistics.linear_regression(steps[late], values[late]).slope


def leaking(training, samples):
    """Memory in use of each GPU, all that NVML sees, and the peak of rank 0's tensors a step."""
    series = {f"GPU {gpu}": (rows, "memory_gb") for gpu, rows in settled(samples).items()}
    series["rank 0's tensors"] = [row for row in training[1:] if "peak_gb" in row], "peak_gb"
    found = {of: climb(column(rows, "step"), column(rows, name)) for of, (rows, name) in series.items()}
    of, stairs = max(found.items(), key=lambda item: item[1][2] if item[1] else 0)
    if not stairs:
        return None
    first, last, slope = stairs
    tokens = [mean(part, "completions/max_length") for part in (training[:20], training[-20:])]
    return (
        f"memory of {of} climbs in stairs, {first:.1f} to {last:.1f} GB, {1000 * slope:.1f} MB a step (the longest "
        f"completions: {tokens[0]:.0f} to {tokens[1]:.0f} tokens): if completions do not explain it, a leak. Something "
        "keeps a step's tensors; look for lists that grow in your reward functions, and store `.item()` there"
    )


def uneven(samples):
    """Temperatures, in the second half of the samples: warming up takes minutes."""
    late = {gpu: rows[len(rows) // 2 :] for gpu, rows in settled(samples).items() if known(rows, "temperature")}
    heat = sorted((mean(rows, "temperature"), gpu) for gpu, rows in late.items())
    if not heat or heat[-1][0] - heat[0][0] <= 10:
        return None
    low, high = (
        f"GPU {gpu} {t:.0f} °C ({mean(late[gpu], 'power_w'):.0f} W, {mean(late[gpu], 'utilisation'):.0f} % busy)"
        for t, gpu in (heat[0], heat[-1])
    )
    return (
        f"temperatures are {heat[-1][0] - heat[0][0]:.0f} °C apart, {high} and {low}: uneven load. More prompts a rank "
        "(--per_device_train_batch_size) even it out; look for another process in nvidia-smi; where the power is the "
        "same, it is the cooling"
    )


def clipped(training):
    """Every completion reaches --max_completion_length."""
    last = training[-RECENT:]
    shares = known(last, "completions/clipped_ratio")
    if len(shares) < RECENT or min(shares) < 0.99:
        return None
    return (
        f"every completion of the last {RECENT} steps was cut, at {mean(last, 'completions/max_length'):.0f} tokens: "
        "raise --max_completion_length or ask for shorter answers; a base model that never stops needs supervised steps"
    )


def without_spread(training):
    """Nearly all groups score the same throughout: their advantages are 0."""
    last = training[-RECENT:]
    share = mean(last, "frac_reward_zero_std")
    if len(known(last, "frac_reward_zero_std")) < RECENT or share < 0.95:
        return None
    return (
        f"no reward spread in {share:.0%} of the last {RECENT} steps' groups: they teach nothing (reward "
        f"{mean(last, 'reward'):.2f}, {mean(last, 'parse_failure_rate'):.0%} without a box). At the best reward the "
        "task is learned; at the worst train the format first; else raise --temperature or --num_generations"
    )


def not_finite(training):
    """NaN or infinity in any metric; one that is missing or null was not measured."""
    values = [(row["step"], name, value) for row in training for name, value in row.items() if isinstance(value, float)]
    found = [entry for entry in values if not math.isfinite(entry[2])]
    if not found:
        return None
    step, name, value = found[0]
    return (
        f"{name} is {value} in step {step}, the first of {len(found)} values that are not finite: go on from a "
        "checkpoint before it, with a lower --learning_rate or --max_grad_norm; or mend the reward function"
    )


PHASES = "start log save evaluation wait_data rollout reward compare update".split()  # as they follow a step's count


def hang(run):
    """Of a run that ended with status 4: what each rank was doing, which is missing, being behind the others or unable
    to say, and how to go on. From the files in RUN/ranks; a rank writes its process there when it starts, its step
    and phase when the run stalls."""
    said = {}
    for path in (run / "ranks").glob("stacks_*.txt") if (run / "ranks" / "stalled").exists() else ():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        said[int(path.stem[7:])] = row = {"step": -1, "phase": "start", "pid": "?", "host": "?"}
        for line in lines:
            if line.startswith("{") and line.endswith("}"):  # else cut short
                row |= json.loads(line)
    if not said:
        return None
    place = {rank: (row["step"], PHASES.index(row["phase"])) for rank, row in sorted(said.items())}
    behind = [rank for rank in place if place[rank] == min(place.values())]
    who = f"missing: rank {', '.join(map(str, behind))}" if len(behind) < len(said) else "no rank is behind the others"
    doing = {}
    for rank, (step, _) in place.items():
        what = f"{said[rank]['phase']} after step {step}" if step >= 0 else "frozen, or stuck in C"
        doing.setdefault(what, []).append(str(rank))
    shown = "; ".join(f"rank {', '.join(ranks)}: {what}" for what, ranks in doing.items())
    first, folder = said[behind[0]], run / "ranks"
    return (
        f"the run hung, {who} ({shown}). Their Python stacks: {folder}/stacks_*.txt. To go on: `py-spy dump --pid "
        f"{first['pid']}` on {first['host']} while it hangs (torchrun leaves a frozen rank 30 s, or "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT); NCCL_DEBUG=INFO before the same command, then "
        f"{folder}/nccl_{behind[0]}.txt; a larger --stall_timeout for what is only slow"
    )


def verdicts(training, samples):
    of_gpus = swinging(training, samples), leaking(training, samples), uneven(samples)
    return [said for said in (*of_gpus, clipped(training), without_spread(training), not_finite(training)) if said]


# --- Curves ------------------------------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#2f6fb5", "#d9772b", "#3a9257", "#c4453f", "#7d62b0", "#8a8f98"


def column(rows, name):
    """One metric over the rows, NaN where a row lacks it."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]


def smooth(values, span):
    """Centred mean over `span` values, NaN left out."""
    result = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - span // 2) : i + span // 2 + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


def draw_lines(axis, rows, series):
    """Each series (metric, label, colour) as measured, thin, and smoothed over a twentieth of the run, thick."""
    steps = column(rows, "step")
    for name, label, colour in series:
        values = column(rows, name)
        if all(math.isnan(v) for v in values):
            continue
        span = max(1, len(values) // 20)
        axis.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35 if span > 1 else 1)
        axis.plot(steps, smooth(values, span), color=colour, linewidth=1.8, label=label)
    if len(series) > 1 and axis.lines:
        axis.legend(frameon=False)


def draw_phases(axis, rows):
    phases = sorted({name for row in rows for name in row if name.startswith("time/")})
    span = max(1, len(rows) // 20)
    layers = [smooth([0.0 if math.isnan(v) else v for v in column(rows, name)], span) for name in phases]
    if layers:
        labels = [name.removeprefix("time/").replace("_", " ") for name in phases]
        palette = itertools.cycle([BLUE, ORANGE, GREEN, VIOLET, RED, GREY])
        colours = [colour for colour, _ in zip(palette, phases, strict=False)]
        axis.stackplot(column(rows, "step"), layers, labels=labels, colors=colours, alpha=0.85)
        axis.set_ylim(0, 1.35 * max(map(sum, zip(*layers, strict=True))))
        axis.legend(frameon=False, loc="upper left", ncols=3)


GPU_PANELS = ("GPUs busy, %", "utilisation"), ("GPU memory, GB", "memory_gb"), ("GPU temperature, °C", "temperature")


def draw_curves(training, evaluation, samples, title, path):
    """Nine small panels over the same steps, and three of the GPUs where there are samples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "legend.fontsize": 8})
    count = 4 if samples else 3  # rows of panels
    figure, axes = plt.subplots(count, 3, figsize=(13, 2.8 * count), sharex=True, layout="constrained")
    names = sorted({n for row in training for n in row if n.startswith("rewards/") and n.endswith("/mean")})
    parts = [
        (n, n.split("/", 1)[1].removesuffix("/mean"), c) for n, c in zip(names, itertools.cycle([BLUE, ORANGE, GREEN]))
    ]
    kl = [("kl", "KL", RED)] if any("kl" in row for row in training) else []
    panels = [
        ("Reward, mean of a step", [("reward", "reward", BLUE)]),
        ("Reward by function", parts),
        ("Held out, greedy", None),
        ("Completion length, tokens", [("completions/mean_length", "mean length", VIOLET)]),
        (
            "Shares: cut off, and groups without spread",
            [("completions/clipped_ratio", "clipped ratio", RED), ("frac_reward_zero_std", "reward std 0", GREY)],
        ),
        ("Entropy, nats a token" + (", and KL" if kl else ""), [("entropy", "entropy", GREEN), *kl]),
        ("Loss: 0 up to rounding with one update a rollout", [("loss", "loss", BLUE)]),
        ("Gradient norm, before clipping", [("grad_norm", "grad norm", ORANGE)]),
        ("Seconds a phase", None),
        *((title, None) for title, _ in GPU_PANELS[: 3 * (count - 3)]),
    ]
    for axis, (name, series) in zip(axes.flat, panels, strict=True):
        axis.set_title(name, loc="left")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if series:
            draw_lines(axis, training, series)
    for name, label, colour in ("eval/iou", "mean IoU", BLUE), ("eval/accuracy", "accuracy at IoU 0.5", ORANGE):
        values = column(evaluation, name)
        label += f" {values[0]:.2f} → {values[-1]:.2f}" if values else ""
        axes[0, 2].plot(column(evaluation, "step"), values, "o-", color=colour, markersize=4, label=label)
    if evaluation:
        axes[0, 2].legend(frameon=False, loc="lower right")
    axes[0, 2].set_ylim(0, 1.1)
    axes[1, 1].set_ylim(-0.03, 1.03)
    axes[1, 0].set_ylim(bottom=0)
    axes[2, 0].ticklabel_format(useOffset=False)
    axes[2, 0].yaxis.get_offset_text().set_position((-0.14, 0))
    axes[2, 1].set_ylim(bottom=0)
    draw_phases(axes[2, 2], training)
    for axis, (_, name) in zip(axes[3] if samples else (), GPU_PANELS, strict=False):
        for gpu in sorted({row["gpu"] for row in samples}):
            rows = [row for row in samples if row["gpu"] == gpu]
            axis.plot(column(rows, "step"), column(rows, name), linewidth=0.9, label=f"{gpu}")
        axis.set_ylim(bottom=0)
    if samples:
        axes[3, 1].legend(frameon=False, ncols=4, handlelength=1, loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- The command -------------------------------------------------------------------------------------------------


def describe(training, evaluation, args):
    """(name, value) pairs: what a reader wants to know first."""
    facts = []
    for name, label in ("eval/iou", "held-out mean IoU"), ("eval/accuracy", "held-out accuracy at IoU 0.5"):
        if evaluation and name in evaluation[0]:  # a run without the accuracy reward has neither
            ends = (number(row.get(name), 3) for row in (evaluation[0], evaluation[-1]))
            facts.append((label, " → ".join(ends)))
    if training:
        seconds = [t for t in column(training, "step_time") if math.isfinite(t)]
        facts.append(("steps", str(training[-1]["step"])))
        facts.append(("training time", f"{sum(seconds) / 60:.1f} min"))
        ends = (number(row.get("reward")) for row in (training[0], training[-1]))
        facts.append(("reward, first and last step", " → ".join(ends)))
    named = [
        ("model_name_or_path", "model"),
        ("num_generations", "completions a prompt"),
        ("learning_rate", "learning rate"),
    ]
    return facts + [(label, str(args[flag])) for flag, label in named if args.get(flag) is not None]


def main(argv):
    try:
        match argv:
            case []:
                return watch()
            case ["--sample", folder, *parent]:
                return sample(Path(folder), int(parent[0]) if parent else os.getppid())
            case ["--hang", folder]:
                if not Path(folder).is_dir():
                    raise ValueError(f"{folder}: no such folder; give the --output_dir of a run of grpo.py")
                print(hang(Path(folder)) or f"{folder}/ranks: no rank has reported a hang")
                return 0
            case [folder] if not folder.startswith("-"):
                return report(Path(folder))
    except KeyboardInterrupt:
        return 0
    except (NoGPU, OSError) as error:
        print(f"monitor.py: {error}", file=sys.stderr)
        return 2
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # the last three: JSON, but of something else
        folder = argv[-1]
        why = error if folder in str(error) else f"the files in {folder} are not as grpo.py writes them ({error!r})"
        print(f"monitor.py: {why}", file=sys.stderr)
        return 2
    print("usage: python tools/monitor.py [RUN | --hang RUN | --sample RUN [PARENT]]    (RUN: a run's folder)")
    return 2


def report(run):
    import data

    if not (run / "metrics.jsonl").exists():
        print(f"{run}: no metrics.jsonl here; give the --output_dir of a run of grpo.py")
        return 2
    settings = json.loads((run / "run.json").read_text(encoding="utf-8")) if (run / "run.json").exists() else {}
    args = settings.get("args", {})
    (training, evaluation), samples = read_metrics(run), read_samples(run)
    title = f"GRPO run {args.get('run_name') or run.resolve().name}"
    facts = describe(training, evaluation, args)
    for name, value in facts:
        print(f"{name}: {value}")
    found = [said for said in [hang(run)] if said] + verdicts(training, samples)
    for said in found:
        print(f"VERDICT: {said}")
    judged = settled(samples)
    print(
        f"verdicts: {len(found) or 'none'}, from {len(training)} steps and {sum(map(len, judged.values()))} samples of "
        f"{len(judged)} GPUs" + ("" if judged else " (gpus.jsonl is absent or short, or the GPUs stand empty)")
    )
    draw_curves(training, evaluation, samples, title, run / "curves.png")
    print(f"wrote {run / 'curves.png'}")
    if (run / "completions.jsonl").exists():
        packed = None
        if settings.get("packed") and Path(settings["packed"]).exists():
            try:
                packed = data.PackedDataset(settings["packed"])
            except data.DataError as error:
                print(f"the page has boxes without pictures: {error}")
        else:
            print(f"the page has boxes without pictures: the packed file {settings.get('packed')} is not there")
        page = rollouts_page(title, facts, first_and_last(run / "completions.jsonl"), packed)
        (run / "rollouts.html").write_text(page, encoding="utf-8")
        print(f"wrote {run / 'rollouts.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
