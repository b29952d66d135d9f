"""How fast stored pictures become tensors, read in four ways; what opening a set costs; what a GPU needs of it.

    python bench/data.py --tokenizer FOLDER_OF_A_QWEN_TOKENIZER

All four read the same 640x480 JPEGs, shuffled where that is possible, and end in `data.encode_prompt`, training's own:

    sequential   one json list, its pictures in a folder, one process
    parallel     as many jsonl files as workers, pictures in a folder, each worker its own file
    mapped       the packed file, `data.prompt_loader`: what training does
    arrow        Hugging Face `datasets`: pictures in a memory-mapped Arrow table, the same loader around it

Rates are medians over rounds in which the readers take turns, counted between whole rounds of all workers once the
first batches are through; CPU is that of this process and its workers. Files are in the page cache, so a slow disk is
not in these numbers. Pictures are dead leaves (occluding shapes) with 1/f texture: a photograph's edges and spectrum,
hence its size and decoding time. Opening is the best of five on text records; a worker's RSS is that after 2,000 of
them at random.

Writes --output after every row, and a picture beside it. Linux only (/proc).
"""

import argparse
import functools
import io
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time

# Before the imports: this folder holds a data.py, too; forked workers need no threads, and nothing is downloaded.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from PIL import Image
from step import HERE, meta, write
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import data
import model

try:
    import datasets

    VERSION = datasets.__version__
except ImportError as error:  # no datasets, or no pyarrow for it
    datasets, VERSION = None, f"{type(error).__name__}: {error}"

BATCH = 8  # pictures a step, and prompts a batch
QUESTION = "Please provide the bounding box coordinate of the region this sentence describes: the red cup."
COLORS = {"sequential": "#888888", "parallel": "#d98c21", "mapped": "#2166ac", "arrow": "#5aae61"}


# --- The data ------------------------------------------------------------------------------------------------------


def texture(rng, height, width, slope):
    """A random field whose amplitude falls as frequency ** -slope, with mean 0 and std 1: (height, width)."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    noise = rng.standard_normal(frequency.shape) + 1j * rng.standard_normal(frequency.shape)
    field = np.fft.irfft2(noise / frequency**slope, s=(height, width))
    return field / field.std()


def photograph(seed, height=480, width=640, shapes=60):
    """A JPEG of quality 90, 80 to 120 kB: shapes over shapes, each with its tone, colour and amount of texture."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    label = np.zeros((height, width), dtype=int)
    for k in range(1, shapes):
        dy, dx, turn, size = y - rng.uniform(0, height), x - rng.uniform(0, width), rng.uniform(0, np.pi), rng.random()
        size = 20 * (0.02 + size) ** -0.6  # few large ones, many small
        u, v = dx * np.cos(turn) + dy * np.sin(turn), 2 * (dy * np.cos(turn) - dx * np.sin(turn))
        label[(np.maximum(abs(u), abs(v)) < size) if k % 3 == 0 else (u * u + v * v < size * size)] = k
    tone, strength, *hues = (rng.normal(0, s, shapes)[label] for s in (28, 16, 9, 9))
    light = 115 + tone + abs(strength) * texture(rng, height, width, 1.0)
    red, blue = (hue + 6 * texture(rng, height, width, 1.3) for hue in hues)
    pixels = np.stack([light + red, light - 0.5 * red - 0.3 * blue, light + blue], axis=-1)
    encoded = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def write_json(path, records):
    lines = [json.dumps(record) for record in records]
    with open(path, "w") as file:
        file.write(f"[{', '.join(lines)}]" if path.endswith(".json") else "\n".join(lines) + "\n")
    return path


def write_pictures(folder, count):
    """Pictures, and records of them as one json list."""
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for i, encoded in enumerate(pool.imap(photograph, range(count))):
            with open(os.path.join(folder, f"{i}.jpg"), "wb") as file:
                file.write(encoded)
    records = [{"image": f"{i}.jpg", "problem": QUESTION, "solution": [100, 100, 300, 300]} for i in range(count)]
    return write_json(os.path.join(folder, "all.json"), records), records


def make_processor(folder, tokenizer):
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056).save_pretrained(folder)  # Qwen2.5-VL's limits
    return model.Processor(folder, "qwen2_5_vl")


# --- The readers: each gives lists of BATCH encoded prompts without end ----------------------------------------------


def load_pictures(record, folder):
    """What a loader without `pack` does at every visit: open the record's picture."""
    with open(os.path.join(folder, record["image"]), "rb") as file:
        encoded = file.read()
    return record | {"images": [encoded], "image_size": list(Image.open(io.BytesIO(encoded)).size)}


def batches(records, folder, encode):
    records = itertools.cycle(records)
    while True:
        yield [encode(load_pictures(record, folder)) for record in itertools.islice(records, BATCH)]


def sequential(path, folder, encode):
    with open(path) as file:
        yield from batches(json.load(file), folder, encode)


class Files(IterableDataset):
    """Each worker reads its own jsonl file, line by line."""

    def __init__(self, paths, folder, encode):
        self.paths, self.folder, self.encode = paths, folder, encode

    def lines(self):
        while True:
            with open(self.paths[get_worker_info().id]) as file:
                yield from map(json.loads, file)

    def __iter__(self):
        return batches(self.lines(), self.folder, self.encode)


class Arrow:
    """The records of a saved `datasets.Dataset`, in PackedDataset's form."""

    def __init__(self, path):
        self.rows = datasets.load_from_disk(path)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        record = self.rows[int(i)]
        return record | {"images": [record["images"]] if record["images"] else []}


def save_arrow(path, records):
    """records: PackedDataset's, at most one picture each."""
    columns = {name: [record.get(name) for record in records] for name in ("problem", "image_size")}
    columns["images"] = [record["images"][0] if record["images"] else None for record in records]
    datasets.Dataset.from_dict(columns).save_to_disk(path)
    return path


def loader_over(dataset, encode, workers):
    return data.prompt_loader(dataset, np.arange(len(dataset)), encode, 0, 0, 10**9, BATCH, num_workers=workers)


# --- Measuring -------------------------------------------------------------------------------------------------------


def cpu_seconds(pids):
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_mb(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def rate(loader, workers, seconds):
    """(pictures a second, cores busy) of a loader that was just made."""
    stream = iter(loader)
    for _ in range(2 * max(1, workers)):
        next(stream)
    pids = [os.getpid(), *(worker.pid for worker in getattr(stream, "_workers", ()))]
    cpu, start, done = cpu_seconds(pids), time.perf_counter(), 0
    while time.perf_counter() - start < seconds or done % max(1, workers):  # all workers have given as many batches
        next(stream)
        done += 1
    took = time.perf_counter() - start
    return done * BATCH / took, (cpu_seconds(pids) - cpu) / took


def measure_speed(add, folder, tokenizer, args):
    source, records = write_pictures(folder, args.pictures)
    packed = os.path.join(folder, "all.packed")
    data.pack([(source, folder)], packed)
    dataset = data.PackedDataset(packed)
    encode = functools.partial(data.encode_prompt, processor=make_processor(os.path.join(folder, "model"), tokenizer))
    sizes = [len(record["images"][0]) / 1e3 for record in dataset]
    add(part="pictures", count=len(sizes), min_kb=min(sizes), mean_kb=statistics.mean(sizes), max_kb=max(sizes))
    measure_stages(add, dataset, encode)
    arrow = datasets and Arrow(save_arrow(os.path.join(folder, "arrow"), list(dataset)))
    measure_readers(add, args, {"sequential": lambda: sequential(source, folder, encode)}, 0)
    for workers in args.workers:
        files = [os.path.join(folder, f"{workers}.{k}.jsonl") for k in range(workers)]
        for k, path in enumerate(files):
            write_json(path, records[k::workers])
        options = {"batch_size": None, "num_workers": workers, "prefetch_factor": 4}
        readers = {
            "parallel": lambda files=files, options=options: DataLoader(Files(files, folder, encode), **options),
            "mapped": lambda workers=workers: loader_over(dataset, encode, workers),
            "arrow": lambda workers=workers: loader_over(arrow, encode, workers),
        }
        measure_readers(add, args, readers, workers)
    return encode


def measure_readers(add, args, readers, workers):
    """A row for each of {name: function that makes its loader}, which take turns."""
    found, missing = {name: [] for name in readers}, {} if datasets else {"arrow": VERSION}
    for name, make in list(readers.items()) * args.rounds:
        try:
            if name not in missing:
                found[name].append(rate(make(), workers, args.seconds))
        except RuntimeError as error:  # a worker died, of a /dev/shm too small for what is prefetched, say
            missing[name] = str(error)
    for name, rates in found.items():
        row = {"part": "speed", "reader": name, "workers": workers}
        if name in missing:
            add(**row, missing=missing[name])
            continue
        speed, busy = (statistics.median(values) for values in zip(*rates, strict=True))
        row |= {"pictures_per_second": speed, "min": min(rates)[0], "max": max(rates)[0], "cores_busy": busy}
        add(**row, cpu_percent=100 * busy / len(os.sched_getaffinity(0)), cpu_ms_per_picture=1e3 * busy / speed)


def measure_stages(add, dataset, encode):
    """Where a picture's time goes, in this process: milliseconds each, medians."""
    images, times = encode.keywords["processor"].image_processor, []
    for i in itertools.islice(itertools.cycle(range(len(dataset))), 40):
        marks = [time.perf_counter()]
        record = dataset[i]
        marks.append(time.perf_counter())
        picture = data.decode_image(record["images"][0])
        marks.append(time.perf_counter())
        images(images=[picture], return_tensors="pt")
        marks.append(time.perf_counter())
        encode(record)
        marks.append(time.perf_counter())
        times.append(np.diff(marks) * 1e3)
    read, decode, process, whole = np.median(times, axis=0).tolist()
    add(part="stages", read_ms=read, decode_ms=decode, resize_and_patch_ms=process, encode_prompt_ms=whole)


def open_and_read(reader, path, encode):
    """Open and read one record, five times; then 2,000 at random in a worker -> (ms of the best, MB of the worker)."""
    opened = []
    for _ in range(5):
        start = time.perf_counter()
        if reader == "sequential":
            with open(path) as file:
                dataset = json.load(file)
        else:
            dataset = data.PackedDataset(path) if reader == "mapped" else Arrow(path)
        dataset[len(dataset) // 2]
        opened.append(1e3 * (time.perf_counter() - start))
    stream = iter(loader_over(dataset, encode, workers=1))
    for _ in range(2000 // BATCH):
        next(stream)
    return min(opened), resident_mb(stream._workers[0].pid)


def in_a_child(function, *arguments):
    """What function(*arguments) returns in a fork: this process, which workers are forked from, stays as large."""
    results = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=lambda: results.put(function(*arguments)))
    child.start()
    found = results.get(timeout=120)
    child.join()
    return found


def write_texts(folder, count):
    """Text records in every reader's form -> ({reader: path}, seconds that packing took)."""
    records = [{"problem": QUESTION, "solution": i, "images": []} for i in range(count)]
    paths = {"sequential": write_json(os.path.join(folder, "text.json"), records)}
    if datasets:
        paths["arrow"] = save_arrow(os.path.join(folder, f"text_{count}"), records)
    paths["mapped"] = os.path.join(folder, "text.packed")
    start = time.perf_counter()
    data.pack([(paths["sequential"], None)], paths["mapped"])
    return paths, time.perf_counter() - start


def measure_opening(add, folder, encode, counts):
    for count in counts:
        paths, seconds = in_a_child(write_texts, folder, count)
        add(part="pack", records=count, records_per_second=count / seconds)
        for reader, path in sorted(paths.items()):
            open_ms, worker = in_a_child(open_and_read, reader, path, encode)
            add(part="opening", reader=reader, records=count, open_ms=open_ms, worker_rss_mb=worker)
        if not datasets:
            add(part="opening", reader="arrow", records=count, missing=VERSION)


# --- The report ------------------------------------------------------------------------------------------------------


def add_need(add, rows, step_seconds):
    """What one GPU takes in GRPO, and what training's own loader gives with two workers a rank, its default."""
    mapped = [row for row in rows if row["part"] == "speed" and row["reader"] == "mapped" and "missing" not in row]
    two = min(mapped, key=lambda row: abs(row["workers"] - 2))
    need, given = BATCH / step_seconds, two["pictures_per_second"]
    add(
        part="need",
        step_seconds=step_seconds,
        pictures_per_second=need,
        workers=two["workers"],
        times_over=given / need,
    )


def shortest_step(path):
    """Seconds of the fastest step that bench/step.py measured, or where it has not 2.4, which it once gave."""
    if not os.path.exists(path):
        return 2.4
    with open(path) as file:
        return min((row["step_s"] for row in json.load(file)["rows"] if not row["error"]), default=2.4)


def draw(path, rows):
    """Left: pictures a second over workers, and the need. Right: opening time over records."""
    import matplotlib  # last of all: a machine without it still measures

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=110)
    for reader, color in COLORS.items():
        speed = [row for row in rows if row["part"] == "speed" and row["reader"] == reader and "min" in row]
        opening = [row for row in rows if row["part"] == "opening" and row["reader"] == reader and "open_ms" in row]
        x, y = [max(1, row["workers"]) for row in speed], [row["pictures_per_second"] for row in speed]
        spread = [[row["pictures_per_second"] - row["min"], row["max"] - row["pictures_per_second"]] for row in speed]
        if speed:
            left.errorbar(x, y, np.transpose(spread), color=color, marker="o", capsize=3, label=reader)
        x, y = [row["records"] for row in opening], [row["open_ms"] for row in opening]
        if opening:
            right.plot(x, y, color=color, marker="o", label=reader)
    for row in rows:
        if row["part"] == "need":
            label = f"needed by one GPU: {row['pictures_per_second']:.1f}"
            left.axhline(row["pictures_per_second"], color="black", linestyle=":", label=label)
    left.set(xlabel="workers (sequential: this process)", ylabel="pictures a second", xscale="log", ylim=(0, None))
    workers = sorted({max(1, row["workers"]) for row in rows if row["part"] == "speed"})
    left.set_xticks(workers, [str(count) for count in workers])
    left.minorticks_off()
    left.set_title("640x480 JPEG to the model's tensors")
    right.axhline(50, color="black", linestyle=":", label="50 ms")
    right.set(xlabel="records", ylabel="ms to open and read one", xscale="log", yscale="log", title="Opening a set")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a Qwen tokenizer")
    parser.add_argument("--output", default=os.path.join(HERE, "results", "data.json"))
    parser.add_argument(
        "--step_seconds", type=float, help="a GRPO step on one GPU; else bench/results/step.json's, or 2.4"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="those over the cores are left out"
    )
    parser.add_argument("--records", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6], help="of opening")
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each reader in each round")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    args.workers = [count for count in args.workers if count <= cores] or [1]
    torch.set_num_threads(1)  # as in the workers
    # In a child: the workers' parent had better not have touched the GPU, whose name this asks for.
    where, rows = in_a_child(functools.partial(meta, cores=cores, datasets=VERSION)), []

    def add(**row):
        rows.append({name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()})
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        write(args.output, where, rows)

    with tempfile.TemporaryDirectory() as folder:
        encode = measure_speed(add, folder, args.tokenizer, args)
        add_need(add, rows, args.step_seconds or shortest_step(os.path.join(HERE, "results", "step.json")))
        measure_opening(add, folder, encode, args.records)
    draw(os.path.splitext(args.output)[0] + ".png", rows)


if __name__ == "__main__":
    main()
