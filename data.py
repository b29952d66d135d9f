"""Data: VLM-R1's sources -> one packed file -> records -> prompts -> batches.

    python data.py pack --data_file_paths a.jsonl:b.jsonl --image_folders images:images --output FILE
    python data.py info FILE    # or: verify FILE, which reads all of it

Reads jsonl lines `{"image": "a.jpg" or [...], "conversations": [{"from": "human", "value": "<image>Where is the cup?"},
{"from": "gpt", "value": "[10, 20, 30, 40]"}]}` (the first of each counts; no image is fine), the older `{"image",
"problem", "solution"}` as jsonl or one json list, and a yaml of several: `datasets: [{json_path: refcoco.json,
sampling_strategy: "all" | "first:100" | "end:10%" | "random:100"}]`, each with our own optional `image_folder: DIR` and
`split: val` (held out); a relative path starts at the current folder, else at the yaml's. A bad record is skipped with
one line that says where and what to do; every good one beside it is kept, of a json list up to where it does not parse.
All are read a record at a time: packing holds a bounded amount in RAM. Left out: other sources, augmentation, videos.

The packed file (little-endian, no padding; all that is read is covered by a crc32):

    header  magic "GRPODATA", u32 version, u64 records, u64 train records, u64 pictures stored, u64 source records
            skipped, u64 offset of the index, u64 size of the file, 32 bytes fingerprint (SHA-256 of what
            `ensure_packed` saw of the sources; zeros from `pack`), u32 crc of the 92 bytes before
    blobs   pictures as they are on disk; and records: JSON (UTF-8) of a record's fields, then for each of its pictures
            u64 offset, u64 length, u32 crc. Records share pictures: RefCOCO asks about each several times.
    index   a record: u64 offset of its blob, u32 bytes of JSON, u32 pictures, u32 crc of the blob, u32 crc of these 20

Train records come first. Opening reads the header alone; the rest is checked when it is read. Fields are the source
line's own and, in place of any of that name, `problem` (the question without "<image>"), `solution` (as in the source),
`image_size` ([width, height] of the first picture as stored: no EXIF rotation, because boxes belong to stored pixels;
null without a picture) and `source` ("a.jsonl:12": the line, or the place in a json list).
"""

import argparse
import contextlib
import fcntl
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import mmap
import os
import re
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections import namedtuple

import numpy as np
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader
from tqdm import tqdm

MAGIC = struct.pack("<8sI", b"GRPODATA", 1)  # with the version
HEADER, ENTRY, PICTURE = struct.Struct("<12s6Q32sI"), struct.Struct("<QIIII"), struct.Struct("<QQI")
Source = namedtuple("Source", "json_path image_folder sampling_strategy split", defaults=("all", "train"))  # as in yaml
MAX_PICTURE_BYTES = 1 << 28
MAX_RECORD_BYTES = 1 << 24  # of a source's JSON: what is held while looking for a record's end
WINDOW = 1 << 20  # characters of a json list that are read at a time
MAX_SPARES = 10  # records that a loader tries in place of one that cannot be used
MAX_ASPECT = 200  # Qwen2-VL's image processor refuses more
MIN_SIDE = 28  # one merged patch of 2 x 14 pixels
MAX_PLACED = 1 << 16  # stored pictures whose place is remembered while packing, to store a repeated one once
FORMATS = "AVIF BMP GIF JPEG JPEG2000 PNG PPM TGA TIFF WEBP".split()  # not EPS, which PIL has Ghostscript run
QUESTION_TEMPLATE = (  # VLM-R1's wording for referring expressions
    "{Question} First output the thinking process in <think> </think> tags and then output the final answer in "
    "<answer> </answer> tags. Output the final answer in JSON format."
)


class DataError(Exception):
    """What is wrong with the data, where, and the cure."""


def parse_sources(data_file_paths=None, image_folders=None, dataset_name=None, image_root=None):
    """The four flags -> [(json, jsonl or yaml path, image folder or None)], as `pack` and `ensure_packed` take it."""
    if bool(data_file_paths) == bool(dataset_name) or (image_root if data_file_paths else image_folders):
        given = {"data_file_paths": data_file_paths, "image_folders": image_folders}
        given |= {"dataset_name": dataset_name, "image_root": image_root}
        given = " ".join(f"--{name}" for name, value in given.items() if value) or "none of them"
        raise DataError(
            f"give --data_file_paths with --image_folders, or --dataset_name (a yaml) with --image_root, not {given}"
        )
    if dataset_name or (data_file_paths.endswith(".packed") and not image_folders):
        return [(dataset_name or data_file_paths, image_root)]
    files, folders = data_file_paths.split(":"), image_folders.split(":") if image_folders else []
    if len(files) != len(folders):
        raise DataError(f"--data_file_paths has {len(files)} entries, --image_folders {len(folders)}: give as many")
    return list(zip(files, folders, strict=True))


def _expand(sources):
    """[(path, folder)] -> [Source]: yaml files replaced by what they name, paths made absolute, train before val."""
    found = []
    for path, folder in sources:
        path = os.fspath(path)
        found += _read_yaml(path, folder) if path.endswith((".yaml", ".yml")) else [Source(path, folder)]
    for i, (path, folder, *how) in enumerate(found):
        if path.endswith(".packed"):
            raise DataError(f"{path} is packed: train on it alone, without an image folder; it cannot be packed again")
        if not os.path.isfile(path):
            raise DataError(f"{path} is no file, seen from {os.getcwd()}; check the path")
        if folder and not os.path.isdir(folder):
            raise DataError(
                f"{folder}, the image folder of {path}, is no folder, seen from {os.getcwd()}; check the path"
            )
        found[i] = Source(os.path.abspath(path), os.path.realpath(folder) if folder else None, *how)
    return sorted(found, key=lambda source: source.split == "val")  # sorted() keeps the order within a split


def _read_yaml(path, folder):
    try:
        found = []
        if not os.path.isfile(path):  # opening a pipe would block
            raise FileNotFoundError("no such file")
        with open(path, encoding="utf-8-sig") as file:
            for entry in yaml.safe_load(file)["datasets"]:
                for key in {"json_path", "image_folder"} & entry.keys():
                    beside = os.path.join(os.path.dirname(path), entry[key])
                    entry[key] = entry[key] if os.path.exists(entry[key]) else beside
                found.append(Source(**{"image_folder": folder, **entry}))  # TypeError for an unknown or missing key
                amount = r"([1-9]\d{0,8}|\d{1,9}(\.\d+)?%)"
                known = re.fullmatch(f"all|(first|end|random):{amount}", found[-1].sampling_strategy)
                if not known or found[-1].split not in ("train", "val"):
                    raise ValueError(entry)
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError) as error:
        form = "datasets: [{json_path: FILE, sampling_strategy: all | first:N | end:N% | random:N, split: train | val}]"
        raise DataError(f"{path}: {error!r}; the form is {form}") from error


def _read_items(path):
    """Yield (number, bytes read so far, parsed record, or the DataError that says why there is none)."""
    with open(path, "rb") as file:
        if path.endswith(".json") and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _read_list(path)
            return
        file.seek(0)
        for number, text in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES), b""), start=1):
            if text.isspace():
                continue
            try:
                item = json.loads(text.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, a number of 5,000 digits
                item = DataError(f"is no UTF-8 JSON ({error}); correct it (at most {MAX_RECORD_BYTES:,} bytes a line)")
            yield number, file.tell(), item


def _read_list(path):
    """What `_read_items` yields, of a JSON list: its elements are parsed one by one out of a window that moves on."""
    mark, decode = re.compile(r"\s*(\[\s*\]|[\[,\]])\s*"), json.JSONDecoder().raw_decode
    text, at, number, cure = "", 0, 0, "correct it: the rest of the list is lost"
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:  # a byte that is no UTF-8: see `_checked`
        while True:
            try:
                found = mark.match(text, at)
                if not found or (found[1][0] == "[") != (number == 0):
                    raise ValueError(f"no {', or ]' if number else '['} behind {number} records")
                if found[1][-1] == "]":
                    break
                item, end = decode(text, found.end())
                if not isinstance(item, dict) and not mark.match(text, end):  # 12 of a 12.3 that the window cuts
                    raise ValueError("cut short")
            except (ValueError, RecursionError) as error:
                more = file.read(max(WINDOW, len(text) - at)) if len(text) - at < MAX_RECORD_BYTES else ""
                if not more:
                    yield number + 1, file.buffer.tell(), DataError(f"is no UTF-8 JSON ({error}); {cure}")
                    return
                text, at = text[at:] + more, 0
            else:
                at, number = end, number + 1
                yield number, file.buffer.tell(), item
        if text[found.end() :] or any(part.strip() for part in iter(lambda: file.read(WINDOW), "")):
            yield number + 1, file.buffer.tell(), DataError(f"text behind the list's end; {cure}")


def _sample(path, strategy):
    """What `_read_items` yields of a source, as far as its sampling strategy takes it."""
    if strategy == "all":
        return _read_items(path)
    kind, amount = strategy.split(":")
    total = sum(1 for _ in _read_items(path))
    wanted = math.ceil(total * float(amount[:-1]) / 100) if amount.endswith("%") else int(amount)
    if wanted > total:
        tqdm.write(f"{path}: sampling_strategy {strategy} of {total} records; taking all", file=sys.stderr)
    mask = np.arange(total) < wanted
    if kind == "random":  # a fixed seed: the same sources give the same file
        np.random.default_rng(0).shuffle(mask)
    return itertools.compress(_read_items(path), mask[::-1] if kind == "end" else mask)


def _check_solution(solution, size):
    """Raise DataError for a solution that is meant as a box, or boxes, but is none on a picture of this size."""
    if isinstance(solution, str):
        text = re.sub(r"</?answer>|```(?:json)?", "", solution).strip()
        try:
            solution = json.loads(text)
        except (ValueError, RecursionError):
            if re.fullmatch(r"\[[-+.,\s\deE\[\]]*", text):
                raise DataError(f"the box {text!r:.80} does not parse; give [x1, y1, x2, y2]") from None
    (width, height), left = size or (0, 0), [solution]
    while left:
        box = left.pop()
        if isinstance(box, dict):
            left += [box[key] for key in ("bbox_2d", "bbox", "box") if key in box]
        elif isinstance(box, list) and not any(type(v) in (int, float) for v in box):  # isinstance takes True for one
            left += box
        elif isinstance(box, list):  # any list with a number in it is meant as a box
            numbers = len(box) == 4 and all(type(v) in (int, float) for v in box)
            # COCO's boxes overhang by parts of a pixel. NaN and Infinity fail these comparisons too.
            if not numbers or not (-1 <= box[0] < box[2] <= width + 1 and -1 <= box[1] < box[3] <= height + 1):
                raise DataError(f"{box!r:.80} is no [x1, y1, x2, y2] inside its {width} x {height} pixels; correct it")


def _find_picture(name, folder):
    """Real path of a picture; DataError where `..`, an absolute path or a link leads out of its folder."""
    if folder is None:
        raise DataError(f"image {name!r} but no image folder; give --image_folders or --image_root")
    try:
        path = os.path.realpath(os.path.join(folder, name))
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise DataError(f"image {name!r} is no file name ({error}); correct it") from error
    if os.path.commonpath([folder, path]) != folder:
        raise DataError(f"image {name!r} leaves the image folder {folder}; move it there, or name a folder above both")
    if not os.path.isfile(path) or os.path.getsize(path) > MAX_PICTURE_BYTES:  # a pipe is no file: reading could block
        raise DataError(f"image {name!r} is no file in {folder}, or over {MAX_PICTURE_BYTES:,} bytes; check both")
    return path


def decode_image(data, name="the picture", min_side=MIN_SIDE):
    """Encoded bytes -> PIL picture in RGB, as stored (no EXIF rotation), its shorter side at least min_side pixels.

    The image processor alone would round a side under half a patch to 0. Raises DataError for what does not decode.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)  # an animation's first frame
        if math.prod(image.size) > Image.MAX_IMAGE_PIXELS or max(image.size) > MAX_ASPECT * min(image.size):
            raise ValueError(f"{image.size} pixels: too many, or an aspect ratio over {MAX_ASPECT}")
        if image.mode.startswith("I"):  # 16-bit grey: PIL's own conversion clips at 255, which is white
            image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
        elif image.has_transparency_data:  # on white, as transformers does it
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("RGB")
    except Exception as error:  # damaged bytes make PIL's readers raise nearly any type: SyntaxError, KeyError, ...
        raise DataError(f"{name} cannot be decoded ({type(error).__name__}: {error}); replace it") from error
    scale = min_side / min(image.size)
    return image if scale <= 1 else image.resize([round(side * scale) for side in image.size], Image.BICUBIC)


def pack(sources, output, fingerprint=bytes(32)):
    """Write one packed file, at exactly `output`, whole or not at all; its bytes depend on the sources' content alone.

    sources: [(json, jsonl or yaml path, image folder or None)]. A bad record is skipped with a line on stderr.
    -> counts of "records", "train" records, "images" stored, "skipped" records and "bytes". Raises DataError where a
    source cannot be read, nothing is left to pack, or the file cannot be written.
    """
    output, sources = os.path.abspath(os.fspath(output)), _expand(sources)
    if os.path.isdir(output) or os.path.realpath(output) in {os.path.realpath(s.json_path) for s in sources}:
        raise DataError(f"{output} is a folder, or one of the sources; give --output a file of its own")
    if os.path.exists(output) and not os.path.isfile(output):  # a rename would replace a device
        raise DataError(f"{output} is no ordinary file; give --output another name")
    temporary = f"{output}.{os.getpid()}-{os.urandom(4).hex()}.tmp"  # the same folder, where a rename is atomic
    try:
        with open(temporary, "wb") as out, tempfile.TemporaryFile(dir=os.path.dirname(output)) as index:
            with contextlib.suppress(OSError):  # a file system without locks: then nothing is cleared either
                fcntl.flock(out, fcntl.LOCK_EX)  # ends with the process, however that ends
            _remove_leftovers(output)
            summary = _write(sources, out, index, fingerprint)
            out.flush()
            os.fsync(out.fileno())  # before the rename, or a power cut could leave the name without the bytes
        os.replace(temporary, output)
    except OSError as error:
        raise DataError(f"packing {output}: {error}; check space and permissions, or give another --output") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    counts = "{records} records, {images} pictures, {bytes:,} bytes; {skipped} skipped".format(**summary)
    tqdm.write(f"{output}: {counts}", file=sys.stderr)
    return summary


def _remove_leftovers(output):
    """What a packing that was killed has left beside `output`: nobody holds its lock."""
    for path in glob.glob(glob.escape(output) + ".*-????????.tmp"):
        with contextlib.suppress(OSError), open(path, "rb+") as file:  # one that is locked, gone, or not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.getmtime(path) < time.time() - 60:  # not one that is about to be locked
                os.remove(path)


def _write(sources, out, index, fingerprint):
    out.write(bytes(HEADER.size))  # the true one when the counts are known
    summary = {"records": 0, "train": 0, "images": 0, "skipped": 0}  # in the header's order
    done, placed = 0, {}  # placed: real path of a picture -> (offset, length, crc, (width, height))
    bar = tqdm(total=sum(os.path.getsize(s.json_path) for s in sources), unit="B", unit_scale=True, desc="packing")
    for source in sources:
        for number, read, item in _sample(source.json_path, source.sampling_strategy):
            bar.update(done + read - bar.n)
            try:
                text, paths, new = _checked(item, number, source, placed)
            except (DataError, OSError, RecursionError) as error:
                summary["skipped"] += 1
                tqdm.write(f"skipped {source.json_path}:{number}: {error}", file=sys.stderr)
                continue
            for path, (data, size) in new.items():
                placed[path] = (out.tell(), len(data), zlib.crc32(data), size)
                out.write(data)
            blob = text + b"".join(PICTURE.pack(*placed[path][:3]) for path in paths)
            entry = struct.pack("<QIII", out.tell(), len(text), len(paths), zlib.crc32(blob))
            index.write(entry + struct.pack("<I", zlib.crc32(entry)))
            out.write(blob)
            summary["records"] += 1
            summary["train"] += source.split == "train"
            summary["images"] += len(new)
            if len(placed) > MAX_PLACED:
                placed.clear()  # a picture's questions stand together in a source: few are stored twice
        done += os.path.getsize(source.json_path)
    bar.close()
    if not summary["records"]:
        raise DataError(f"no usable record in {len(sources)} source(s), {summary['skipped']} skipped")
    index_offset, size = out.tell(), out.tell() + index.tell()
    index.seek(0)
    shutil.copyfileobj(index, out)
    header = struct.pack("<12s6Q32s", MAGIC, *summary.values(), index_offset, size, fingerprint)
    out.seek(0)
    out.write(header + struct.pack("<I", zlib.crc32(header)))
    return {**summary, "bytes": size}


def _checked(item, number, source, placed):
    """A source record -> (its JSON, real paths of its pictures, {path: (bytes, size)} of those not stored yet)."""
    if not isinstance(item, dict):
        raise item if isinstance(item, DataError) else DataError(f"expected a JSON object, found {item!r:.80}")
    fields, turns = dict(item), item.get("conversations")
    for turn in reversed(turns if isinstance(turns, list) else []):  # reversed: the first of each speaker counts
        if isinstance(turn, dict) and turn.get("from") in ("human", "gpt"):
            fields["problem" if turn["from"] == "human" else "solution"] = turn.get("value")
    problem, solution, names = (fields.get(key) for key in ("problem", "solution", "image"))
    if not isinstance(problem, str):
        raise DataError(f"the question is {problem!r:.80}; give text as problem, or as conversations' value from human")
    if not isinstance(solution, (str, int, float, list)) or solution in ("", []):
        raise DataError(f"the solution is {solution!r:.80}; give text, a number or a list, so too as gpt's value")
    names = [] if names is None else names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name for name in names) or ("<image>" in problem and not names):
        raise DataError(f"image must be a file's name or a list of them, not {fields.get('image')!r:.80}")
    paths, new = [_find_picture(name, source.image_folder) for name in names], {}
    for path in paths:
        if path not in placed:
            with open(path, "rb") as file:
                data = file.read()
            new[path] = data, decode_image(data, f"image {path!r}", min_side=1).size
    size = (new.get(paths[0]) or placed[paths[0]])[-1] if paths else None
    _check_solution(solution, size)
    fields |= {"problem": problem.replace("<image>", "").strip(), "image_size": size}
    fields["source"] = f"{os.path.basename(source.json_path)}:{number}"
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8"), paths, new
    except ValueError as error:
        raise DataError(f"not UTF-8 JSON ({error}); write null for NaN, and no half of a surrogate pair") from error


def ensure_packed(sources, output_dir):
    """Path of the sources' packed file: beside the first source or, where that folder is read-only, in `output_dir`.

    It is made again where it is missing, damaged, or the size or time of a json or jsonl file, its sampling, split or
    image folder changed. Pictures are not looked at again: delete the packed file after changing one. A single source
    FILE.packed, made by `pack`, is taken as it is.
    """
    if len(sources) == 1 and os.fspath(sources[0][0]).endswith(".packed"):
        return PackedDataset(sources[0][0]).path
    seen = [[*s, os.path.getsize(s.json_path), os.path.getmtime(s.json_path)] for s in _expand(sources)]
    fingerprint = hashlib.sha256(json.dumps(seen).encode()).digest()
    names = json.dumps([[os.path.abspath(part) if part else "" for part in source] for source in sources])
    first = os.path.abspath(sources[0][0])
    name = f"{os.path.basename(first)}.{hashlib.sha256(names.encode()).hexdigest()[:8]}.packed"
    for folder in (os.path.dirname(first), os.path.abspath(output_dir)):
        path = os.path.join(folder, name)
        try:
            if os.path.exists(path) and (packed := PackedDataset(path)).fingerprint == fingerprint:
                if packed.skipped:
                    tqdm.write(f"{path}: {packed.skipped} bad records were skipped when it was packed", file=sys.stderr)
                return path
        except DataError as error:
            tqdm.write(f"{error}: packing again", file=sys.stderr)
        if os.access(folder, os.W_OK):
            pack(sources, path, fingerprint)
            return path
    raise DataError(f"neither {os.path.dirname(first)} nor {output_dir} can be written to; give another --output_dir")


class PackedDataset:
    """The records of a packed file: len(), [i] -> dict of its fields and `images`, a list of encoded bytes.

    Memory-mapped: reads only what is asked for. Works after a fork, pickles as its path. Raises DataError for whatever
    is wrong with the file, and, as sequences do, IndexError past the end.
    """

    def __init__(self, path):
        self.path = os.path.abspath(os.fspath(path))
        try:
            if not os.path.isfile(self.path):  # opening a pipe would block
                raise FileNotFoundError("no such file")
            self._file = open(self.path, "rb")
            self._map = np.memmap(self._file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise DataError(f"{self.path}: {error}; make it with `python data.py pack`") from error
        if self._map[: len(MAGIC)].tobytes() != MAGIC:
            raise DataError(f"{self.path}: not a packed file of this code's version; pack it again")
        header = HEADER.unpack(self._read(0, HEADER.size, "the header"))
        _, self.records, self.train, self.pictures, self.skipped, self._index, whole, self.fingerprint, _ = header
        if not self._index + self.records * ENTRY.size == whole == len(self._map) or self.train > self.records:
            raise DataError(f"{self.path}: {len(self._map)} bytes, the header says {whole}; copy or pack it again")

    def __len__(self):
        return self.records

    def __reduce__(self):
        return PackedDataset, (self.path,)

    def splits(self):  # (train, val): ranges of record numbers
        return range(self.train), range(self.train, self.records)

    def _record(self, i):
        """A record's fields, and where its pictures are: [(offset, length, crc)]."""
        i = range(self.records)[i]  # negative numbers and IndexError as everywhere
        entry = self._read(self._index + i * ENTRY.size, ENTRY.size, f"index entry {i}")
        offset, text_bytes, count, crc, _ = ENTRY.unpack(entry)
        blob = self._read(offset, text_bytes + count * PICTURE.size, f"record {i}", crc)
        try:
            return {**json.loads(blob[:text_bytes])}, [*PICTURE.iter_unpack(blob[text_bytes:])]
        except (ValueError, TypeError, RecursionError) as error:  # the checksum is right: not `pack`'s work
            raise DataError(f"{self.path}: record {i} is no JSON object ({error}); pack it again") from error

    def __getitem__(self, i):
        record, pictures = self._record(i)
        what = f"a picture of record {i}"
        return record | {"images": [self._read(offset, length, what, crc) for offset, length, crc in pictures]}

    def size(self, i):
        """About how many tokens record i's prompt has, without reading its pictures; 0 for one that is damaged."""
        try:
            record, pictures = self._record(i)
        except DataError:
            return 0  # said where the record is read to be used
        width, height = record["image_size"] or (0, 0)
        return len(pictures) * width * height / MIN_SIDE**2 + len(record["problem"]) / 4

    def _read(self, start, length, what, crc=None):
        """Bytes of the file, checked against crc or, without one, against the crc in their own last four."""
        # A file that was cut short since it was opened (its name may be another's by now): touching what is gone from a
        # map kills the process.
        if self._map is None or start + length > min(len(self._map), os.fstat(self._file.fileno()).st_size):
            raise DataError(f"{self.path}: closed, or {what} lies past its end; open or pack it again")
        data = self._map[start : start + length].tobytes()
        # Unmap what was just read (the page cache keeps it), or a worker's RSS grows with all that it ever read. All of
        # the map, because the kernel has mapped neighbouring pages too.
        self._map.base.madvise(mmap.MADV_DONTNEED)
        body, crc = (data, crc) if crc is not None else (data[:-4], int.from_bytes(data[-4:], "little"))
        if zlib.crc32(body) != crc:
            raise DataError(f"{self.path}: {what} is damaged (checksum); copy or pack the file again")
        return data

    def checksum(self):
        """Of the index, which holds every record's: equal for equal records, wherever they come from. No CRC-32, which
        of entries that end with their own CRC-32 is always the same."""
        return hashlib.sha256(self._map[self._index :]).hexdigest()[:8]

    def close(self):
        self._map = None  # the last reference: numpy has no other way to unmap
        self._file.close()


def train_val_split(dataset, val_split_ratio, seed):
    """(train, val) record numbers, uint32 arrays: the sources' own val records and a random share of the others."""
    if not 0 <= val_split_ratio < 1:
        raise DataError(f"--val_split_ratio {val_split_ratio} is not in [0, 1)")
    train, val = (np.arange(part.start, part.stop, dtype=np.uint32) for part in dataset.splits())
    held, kept = np.split(np.random.default_rng(seed).permutation(train), [math.ceil(val_split_ratio * len(train))])
    return np.sort(kept), np.concatenate([np.sort(held), val])


def encode_prompt(record, processor, question_template=QUESTION_TEMPLATE, max_prompt_length=None):
    """A record of PackedDataset -> what the model takes, and what reward functions take.

    -> {"input_ids": int64 (P,), "pixel_values": float32 (patches, patch_dim) or None, "image_grid_thw": int64 (k, 3) or
    None, "columns": the record's fields, with image_size and model_size as (width, height) or None}. model_size is the
    frame of the model's boxes: processor.box_scale or, where that is None, pixels of the first picture as resized.
    Raises DataError for a picture that does not decode and a prompt over max_prompt_length.
    """
    if "{Question}" not in question_template:
        raise DataError(f"--question_template {question_template!r} has no {{Question}}: say where the question goes")
    tokenizer, question = processor.tokenizer, record["problem"]
    # Text from a data file must not become control tokens: <|image_pad|> would claim pixels that do not exist,
    # <|im_end|> end the turn. A space breaks them up; unlike deletion it cannot put a new one together.
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for token in specials | {processor.image_token}:
        question = question.replace(token, f"{token[0]} {token[1:]}")
    text = {"type": "text", "text": question_template.replace("{Question}", question)}
    messages = [{"role": "user", "content": [{"type": "image"} for _ in record["images"]] + [text]}]
    chat = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]  # the chat template has put them in
    columns = {k: v for k, v in {"image_size": None, **record, "model_size": None}.items() if k != "images"}
    pixel_values, grid, counts = None, None, []  # counts: tokens that the vision tower makes of each picture
    if record["images"]:
        images = processor.image_processor
        pictures = [decode_image(data, f"a picture of {record.get('source')}") for data in record["images"]]
        inputs = images(images=pictures, return_tensors="pt")
        pixel_values, grid = inputs["pixel_values"], inputs["image_grid_thw"]
        counts = (grid.prod(dim=1) // images.merge_size**2).tolist()
        (_, rows, cols), side, scale = grid[0].tolist(), images.patch_size, processor.box_scale
        columns["image_size"] = tuple(record["image_size"])
        columns["model_size"] = (scale, scale) if scale else (cols * side, rows * side)
    # Repeat each picture's placeholder once a token: by hand, because transformers' own processors want torchvision.
    image_id, left = tokenizer.convert_tokens_to_ids(processor.image_token), iter(counts)
    if ids.count(image_id) != len(counts):
        raise DataError(f"the chat template has {ids.count(image_id)} placeholders for {len(counts)} pictures; mend it")
    ids = [i for token in ids for i in ([token] * next(left) if token == image_id else [token])]
    if max_prompt_length is not None and len(ids) > max_prompt_length:  # cut short, it would lose picture tokens
        over = f"a prompt of {len(ids)} tokens is over --max_prompt_length {max_prompt_length}"
        raise DataError(f"{record.get('source')}: {over}; raise it, or lower --max_pixels")
    return {"input_ids": torch.tensor(ids), "pixel_values": pixel_values, "image_grid_thw": grid, "columns": columns}


@functools.lru_cache(maxsize=2)  # a step may lie across two epochs
def epoch_order(n, seed, epoch):
    """The order of n records in an epoch: a permutation, uint32 (n,), a function of its arguments alone."""
    return np.random.default_rng([seed, epoch]).permutation(np.arange(n, dtype=np.uint32))


def prompt_indices(n, seed, step, count):
    """Positions (0 … n - 1) of the `count` records of a step, those of all ranks.

    Steps cut one endless row of epochs into pieces: every record is seen once an epoch, and to resume is to ask for a
    later step.
    """
    if n < 1:
        raise DataError("no training records; check the sources and --val_split_ratio")
    first = step * count
    return [int(epoch_order(n, seed, place // n)[place % n]) for place in range(first, first + count)]


def share(dataset, numbers, rank, world):
    """A rank's part of a step's records, as many as any other's and about as many tokens, so that no rank waits long
    for another in the update: sorted by size and dealt out in turns, every second turn backwards."""
    batch = len(numbers) // world
    if world == 1 or batch == 1:  # nothing to choose
        return numbers[rank * batch : (rank + 1) * batch]
    order = np.argsort([-dataset.size(i) for i in numbers], kind="stable").reshape(batch, world)
    order[1::2] = order[1::2, ::-1]
    return [numbers[i] for i in order[:, rank]]


def _encode_records(dataset, encode, indices, rank, world, numbers):
    """Encoded prompts of a rank's part of these records. In place of one that cannot be used (too long, damaged since
    it was packed) comes another, drawn from its number alone: every rank needs as many prompts as the others."""
    prompts = []
    for number in share(dataset, numbers, rank, world):
        for i in [number, *np.random.default_rng(int(number)).choice(indices, MAX_SPARES)]:
            try:
                prompts.append({**encode(dataset[i]), "record": int(i)})
                break
            except DataError as error:
                fault = error
                tqdm.write(f"record {i} is skipped, another takes its place: {error}", file=sys.stderr)
        else:
            raise DataError(f"{1 + MAX_SPARES} records one after the other cannot be used, at last: {fault}") from fault
    return prompts


def prompt_loader(dataset, indices, encode, seed, start_step, steps, batch, rank=0, world=1, num_workers=-1):
    """Lists of `batch` encoded prompts for the steps from start_step up to, not including, `steps`; iterate once.

    indices: record numbers (`train_val_split`); encode: record -> dict, as encode_prompt; `record`, the number, is
    added. num_workers -1: two a rank, at most the cores there are; 0: in this process. A record that cannot be used is
    said and replaced by another; a worker's error, DataError where MAX_SPARES others cannot either, surfaces here.
    """
    if num_workers < 0:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has none
        num_workers = min(2, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world)))  # torchrun's: ranks on this node
    # Set before workers fork, so that tokenizers does not warn of its threads in each; one prompt needs no threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return DataLoader(
        indices,
        batch_sampler=(prompt_indices(len(indices), seed, s, batch * world) for s in range(start_step, steps)),
        collate_fn=functools.partial(_encode_records, dataset, encode, indices, rank, world),  # runs in the workers
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        persistent_workers=num_workers > 0,
    )


def info(path):
    """Print a packed file's counts, size and the fields of its first record."""
    dataset = PackedDataset(path)
    print(f"{path}: {os.path.getsize(path):,} bytes, {dataset.pictures} pictures, {dataset.skipped} records skipped")
    print(f"{len(dataset)} records: {dataset.train} train, {len(dataset) - dataset.train} val; the first one's fields:")
    for key, value in dataset[0].items() if len(dataset) else ():
        value = f"{len(value)} encoded" if key == "images" else repr(value)
        print(f"  {repr(key)[1:-1]:.100}: {value:.100}")  # repr: no field's control sequence reaches a terminal


def verify(path):
    """Read every record and decode every picture; print what is wrong; -> how many records are."""
    dataset, wrong = PackedDataset(path), 0
    for i in tqdm(range(len(dataset)), desc="verifying", unit="record"):
        try:
            for data in dataset[i]["images"]:
                decode_image(data)
        except DataError as error:
            wrong += 1
            tqdm.write(f"record {i}: {error}")
    print(f"{path}: {len(dataset)} records, {wrong} of them damaged")
    return wrong


def main(argv=None):
    """The command line; -> exit status: 0, 1 for bad data, argparse's 2 for bad usage, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Pack VLM-R1's data into one file, and look into it.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write one packed file from json, jsonl or yaml sources")
    for flag in ("data_file_paths", "image_folders", "dataset_name", "image_root", "output"):
        packing.add_argument(f"--{flag}", required=flag == "output")
    commands.add_parser("info", help="counts, size and fields").add_argument("path")
    commands.add_parser("verify", help="read everything; status 1 if anything is damaged").add_argument("path")
    args = vars(parser.parse_args(argv))
    command, output = args.pop("command"), args.pop("output", None)
    try:
        if command == "verify":
            return int(verify(**args) > 0)
        if command == "info":
            info(**args)
        else:
            pack(parse_sources(**args), output)
        return 0
    except KeyboardInterrupt:
        return 130
    except DataError as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
