"""Data: VLM-R1's sources -> one packed file -> records -> prompts -> batches.

Reads jsonl lines `{"image": "a.jpg" or [...], "conversations": [{"from": "human", "value": "<image>Where is the cup?"},
{"from": "gpt", "value": "[10, 20, 30, 40]"}]}` (the first question and answer count), the older `{"image", "problem",
"solution"}` as jsonl or one json list, and a yaml that names several of them: `datasets: [{json_path: refcoco.json,
sampling_strategy: "all" | "first:100" | "end:10%" | "random:100"}]`, each with our own optional `image_folder: DIR` and
`split: val` (held out); a relative path in it starts at the current folder, else at the yaml's. A record needs no
picture. What is broken is skipped with one line that says where and what to do; every good record beside it is kept.

    python data.py pack --data_file_paths a.jsonl:b.jsonl --image_folders images:images --output FILE
    python data.py info FILE
    python data.py verify FILE

Left out: other sources, augmentation, re-encoding (a picture's bytes stay as they are on disk), videos.

The packed file (little-endian, no padding; all that is read is covered by a crc32):

    header  magic "GRPODATA", u32 version, u64 records, u64 train records, u64 pictures stored, u64 source records
            skipped, u64 offset of the index, u64 size of the file, 32 bytes fingerprint (SHA-256 of what
            `ensure_packed` saw of the sources; zeros from `pack`), u32 crc of the 92 bytes before
    blobs   pictures; and records: JSON (UTF-8) of a record's fields, then for each of its pictures u64 offset,
            u64 length, u32 crc. Records share pictures: RefCOCO asks about each several times.
    index   a record: u64 offset of its blob, u32 bytes of JSON, u32 pictures, u32 crc of the blob, u32 crc of these 20

Train records come first, so that the split is a number in the header. Opening reads the header alone, so it takes the
same time for any number of records; the rest is checked when it is read. Fields are the source line's own, and
`problem` (the question without "<image>"), `solution` (as in the source), `image_size` ([width, height] of the first
picture as stored: no EXIF rotation, because boxes belong to stored pixels; absent without a picture) and `source`
("a.jsonl:12": the line, or the place in a json list). A line's own `image_size`, `source` or `images` gives way.
"""

import argparse
import codecs
import functools
import hashlib
import io
import json
import math
import mmap
import operator
import os
import re
import shutil
import struct
import sys
import tempfile
import warnings
import zlib
from typing import NamedTuple

import numpy as np
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader
from tqdm import tqdm

MAGIC, VERSION = b"GRPODATA", 1
HEADER = struct.Struct("<8sI6Q32sI")
ENTRY = struct.Struct("<QIIII")
PICTURE = struct.Struct("<QQI")
MAX_RECORD_BYTES = 1 << 24  # of one source record; with MAX_PICTURE_BYTES it bounds what packing holds in RAM
MAX_PICTURE_BYTES = 1 << 28
MAX_PIXELS = 89_478_485  # where PIL begins to warn of a decompression bomb
MAX_ASPECT = 200  # Qwen2-VL's image processor refuses more
MIN_SIDE = 28  # one merged patch of 2 x 14 pixels
MAX_PLACED = 1 << 16  # stored pictures whose place is remembered while packing, to store a repeated one once
MAX_PROBLEMS = 1000  # lines that `pack` returns; all of them are printed and counted

# VLM-R1's wording for referring expressions.
QUESTION_TEMPLATE = (
    "{Question} First output the thinking process in <think> </think> tags and then output the final answer in "
    "<answer> </answer> tags. Output the final answer in JSON format."
)


class DataError(Exception):
    """What is wrong with the data, where, and the cure."""


def _say(line):
    tqdm.write(line, file=sys.stderr)


# ---- sources -> records ----------------------------------------------------------------------------------------------


class Source(NamedTuple):
    path: str
    folder: str | None  # its real path: the boundary that no picture may leave
    sampling: str = "all"
    split: str = "train"


def parse_sources(data_file_paths=None, image_folders=None, dataset_name=None, image_root=None):
    """The four flags -> [(json, jsonl or yaml path, image folder or None)], as `pack` and `ensure_packed` take it."""
    if bool(data_file_paths) == bool(dataset_name):
        raise DataError("give --data_file_paths with --image_folders, or --dataset_name (a yaml) with --image_root")
    if dataset_name:
        return [(dataset_name, image_root)]
    files, folders = data_file_paths.split(":"), image_folders.split(":") if image_folders else []
    if len(files) != len(folders):
        counts = f"--data_file_paths has {len(files)} entries, --image_folders {len(folders)}"
        raise DataError(f"{counts}; give one folder for each file, joined by ':' (a folder may be repeated)")
    return list(zip(files, folders, strict=True))


def _expand(sources):
    """[(path, folder)] -> [Source]: yaml files replaced by what they name, train before val."""
    found = []
    for path, folder in sources:
        path = os.fspath(path)
        found += _read_yaml(path, folder) if path.endswith((".yaml", ".yml")) else [Source(path, folder)]
    for source in found:
        if not os.path.isfile(source.path):
            raise DataError(f"{source.path}: no such file; check the path")
        if source.folder is not None and not os.path.isdir(source.folder):
            raise DataError(f"{source.folder}: no such image folder (for {source.path}); check the path")
    found = [s if s.folder is None else s._replace(folder=os.path.realpath(s.folder)) for s in found]
    return sorted(found, key=lambda source: source.split == "val")  # sorted() keeps the order within a split


def _read_yaml(path, folder):
    try:
        with open(path, encoding="utf-8-sig") as file:
            entries = yaml.safe_load(file)["datasets"]
        entries = [{"sampling_strategy": "all", "split": "train", **entry} for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path}: not a yaml with `datasets:` and a list of `- json_path: ...` ({error!r})") from error
    keys = {"json_path", "sampling_strategy", "split", "image_folder"}
    for entry in entries:
        if (
            not {"json_path"} <= set(entry) <= keys
            or not all(isinstance(value, str) for value in entry.values())
            or not re.fullmatch(r"all|(first|end|random):(\d+|\d+(\.\d+)?%)", entry["sampling_strategy"])
            or entry["split"] not in ("train", "val")
        ):
            raise DataError(
                f"{path}: expected json_path: FILE, and maybe sampling_strategy: all, first:N, end:N, random:N or N%, "
                f"split: train or val, image_folder: DIR; found {entry}"
            )
        for key in ("json_path", "image_folder"):
            if key in entry and not os.path.exists(entry[key]):
                entry[key] = os.path.join(os.path.dirname(path), entry[key])
    return [Source(e["json_path"], e.get("image_folder", folder), e["sampling_strategy"], e["split"]) for e in entries]


def _read_items(path):
    """Yield (number, bytes read so far, parsed record, or the DataError that says why there is none)."""
    with open(path, "rb") as file:
        head = file.read(4096)
        start = 3 if head.startswith(b"\xef\xbb\xbf") else 0  # past a byte-order mark
        is_list = not path.endswith(".jsonl") and head[start:].lstrip().startswith(b"[")
        file.seek(head.index(b"[") + 1 if is_list else start)
        yield from (_read_list if is_list else _read_lines)(file)


def _read_lines(file):
    number = 0
    while line := file.readline(MAX_RECORD_BYTES):
        number, rest = number + 1, line
        while len(rest) == MAX_RECORD_BYTES and not rest.endswith(b"\n"):  # too long: read past it, piece by piece
            rest = file.readline(MAX_RECORD_BYTES)
        if not line.strip():
            continue
        try:
            item = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, a number of 5,000 digits
            item = DataError(f"does not parse as UTF-8 JSON ({error}); correct or delete the line")
        yield number, file.tell(), item


def _read_list(file):
    """The items of a json list, read in pieces, so that no set is ever in RAM as a whole."""
    decode, skip = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    utf8, buffer, number, ended = codecs.getincrementaldecoder("utf-8")(), "", 0, False
    while True:
        raw, error = file.read(1 << 20), None
        try:
            text, ended = utf8.decode(raw, final=not raw), not raw
        except UnicodeDecodeError as caught:
            text, ended, error = caught.object[: caught.start].decode("utf-8"), True, caught
        buffer, at = buffer + text, 0
        while True:
            at = skip.match(buffer, at).end()
            try:
                item, end = decode(buffer, at)
            except (ValueError, RecursionError) as caught:  # broken, at the list's end, or in need of more text
                error = error or caught
                break
            number, at = number + 1, end
            yield number, file.tell(), item
        buffer = buffer[at:]
        closed = buffer.startswith("]")
        if closed and not buffer[1:].strip():
            return
        if closed or ended or len(buffer) > MAX_RECORD_BYTES:
            what = getattr(error, "msg", error)  # without its position, which is one in the buffer
            cure = "nothing from here on is read; correct it, or use jsonl, where a bad line loses only itself"
            yield number + 1, file.tell(), DataError(f"does not parse as a UTF-8 JSON list ({what}); {cure}")
            return


def _sample(source):
    """Which of a source's records its sampling strategy takes, as a mask; None for all of them."""
    if source.sampling == "all":
        return None
    kind, amount = source.sampling.split(":")
    total = sum(1 for _ in _read_items(source.path))
    wanted = math.ceil(total * float(amount[:-1]) / 100) if amount.endswith("%") else int(amount)
    if wanted > total:
        _say(f"{source.path}: sampling_strategy {source.sampling} asks for {wanted} of {total} records; taking all")
    mask = np.arange(total) < wanted
    if kind == "random":  # a fixed seed: the same sources give the same file
        np.random.default_rng(0).shuffle(mask)
    return mask[::-1] if kind == "end" else mask


def _normalise(item):
    """A parsed source record -> (its fields with problem and solution, names of its pictures)."""
    if isinstance(item, DataError):
        raise item
    if not isinstance(item, dict):
        raise DataError(f"expected a JSON object {{...}}, found {type(item).__name__}; write one object a record")
    fields = dict(item)
    if "conversations" in item:
        turns = item["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise DataError('conversations must be a list of {"from": "human" or "gpt", "value": ...}')
        for field, speaker in (("problem", "human"), ("solution", "gpt")):
            fields[field] = next((turn.get("value") for turn in turns if turn.get("from") == speaker), None)
    problem, solution, names = (fields.get(key) for key in ("problem", "solution", "image"))
    if not isinstance(problem, str):
        raise DataError(f"the question must be text, not {problem!r:.80}; give problem, or conversations from human")
    if not isinstance(solution, (str, int, float, list)) or solution in ("", []):
        cure = "give solution, or conversations from gpt, as text, a number or a list"
        raise DataError(f"{solution!r:.80} is no solution; {cure}")
    names = [] if names is None else [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"image must be a file's name or a list of them, not {names!r:.80}")
    if "<image>" in problem and not names:
        raise DataError("the question speaks of an <image> but the record names none; give image")
    fields["problem"] = problem.replace("<image>", "").strip()
    return fields, names


def _is_number(value):
    return type(value) in (int, float)  # isinstance would take True for one


def _boxes(value):
    """What is meant as a box in a parsed solution: any list with a number in it, in lists or under a box's key."""
    if isinstance(value, list) and any(map(_is_number, value)):
        return [value]
    inner = [value[key] for key in ("bbox_2d", "bbox", "box") if key in value] if isinstance(value, dict) else value
    return [box for item in inner for box in _boxes(item)] if isinstance(inner, list) else []


def _check_solution(solution, size):
    """Raise DataError for a solution that is meant as a box, or boxes, but is none on a picture of this size."""
    if isinstance(solution, str):
        text = re.sub(r"</?answer>|```(?:json)?", "", solution).strip()
        try:
            solution = json.loads(text)
        except (ValueError, RecursionError):
            if re.fullmatch(r"\[[-+.,\s\deE\[\]]*", text):
                raise DataError(f"the box {text:.80} does not parse; give [x1, y1, x2, y2]") from None
    for box in _boxes(solution):
        if len(box) != 4 or not all(_is_number(v) and abs(v) < 1e9 for v in box):  # NaN compares as False
            fault = "is not four finite numbers"
        elif box[2] <= box[0] or box[3] <= box[1]:
            fault = "has x2 <= x1 or y2 <= y1"
        elif size is None:
            fault = "has no picture"
        elif min(box) < -1 or box[2] > size[0] + 1 or box[3] > size[1] + 1:  # COCO's overhang by parts of a pixel
            fault = f"leaves the picture of {size[0]} x {size[1]} pixels"
        else:
            continue
        raise DataError(f"the box {box!r:.80} {fault}; give [x1, y1, x2, y2] in pixels of the stored picture")


# ---- pictures --------------------------------------------------------------------------------------------------------


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
    if not os.path.isfile(path):  # keeps out pipes and devices too: reading one could block
        raise DataError(f"image {name!r} is not in {folder}; check the name and the image folder")
    return path


def _load_picture(path):
    """(encoded bytes, (width, height)) of a picture file that decodes."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PICTURE_BYTES + 1)
        if len(data) > MAX_PICTURE_BYTES:
            raise DataError(f"over {MAX_PICTURE_BYTES} bytes; store it smaller")
        return data, _decode(data).size
    except (OSError, DataError) as error:
        raise DataError(f"image {path}: {error}") from error


@functools.cache
def _formats():
    Image.init()
    return sorted(set(Image.OPEN) - {"EPS", "IPTC"})  # PIL has Ghostscript run an EPS, which IPTC may hold


def _decode(data):
    """Encoded bytes -> RGB picture of the stored size."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's remarks on odd metadata: what matters is whether pixels come out
            image = Image.open(io.BytesIO(data), formats=_formats())  # an animation's first frame
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{image.size} pixels, over the limit of {MAX_PIXELS}; store it smaller")
            if max(image.size) > MAX_ASPECT * min(image.size):
                raise DataError(f"{image.size} pixels, an aspect ratio over {MAX_ASPECT}; crop it")
            if image.mode.startswith("I"):  # 16-bit grey: PIL's own conversion clips at 255, which is white
                image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
            elif image.has_transparency_data:  # on white, as transformers does it
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # damaged bytes make PIL's readers raise nearly any type: SyntaxError, KeyError, ...
        raise DataError(f"does not decode ({type(error).__name__}: {error}); replace the file") from error


def decode_image(data):
    """Encoded bytes -> PIL picture in RGB, as stored (no EXIF rotation), its shorter side at least MIN_SIDE pixels.

    A smaller one is enlarged here, with its aspect ratio kept: the image processor would round a side under half a
    patch to 0 and then stretch the picture to fit. Raises DataError for bytes that do not decode.
    """
    image = _decode(data)
    scale = MIN_SIDE / min(image.size)
    return image if scale <= 1 else image.resize([round(side * scale) for side in image.size], Image.BICUBIC)


# ---- packing ---------------------------------------------------------------------------------------------------------


def pack(sources, output, fingerprint=bytes(32)):
    """Write one packed file, at exactly `output`.

    sources: [(json, jsonl or yaml path, image folder or None)]. A bad record is skipped with a line on stderr. The
    bytes depend on the sources' content alone; the file appears under its name when it is whole, or not at all.
    -> {"records", "skipped", "images" (pictures stored), "bytes", "problems" (the first 1,000 lines)}.
    Raises DataError where a source cannot be read, nothing is left to pack, or the file cannot be written.
    """
    output = os.path.abspath(os.fspath(output))
    sources = _expand(sources)
    if os.path.isdir(output) or os.path.realpath(output) in {os.path.realpath(source.path) for source in sources}:
        raise DataError(f"{output} is a folder, or one of the sources; give --output a file of its own")
    temporary = f"{output}.{os.getpid()}-{os.urandom(4).hex()}.tmp"  # the same folder, where a rename is atomic
    try:
        with open(temporary, "wb") as out, tempfile.TemporaryFile(dir=os.path.dirname(output)) as index:
            summary = _write(sources, out, index, fingerprint)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, output)
    except OSError as error:
        raise DataError(f"packing {output}: {error}; check space and permissions, or give another --output") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    counts = "{records} records, {images} pictures, {bytes:,} bytes; {skipped} skipped".format(**summary)
    _say(f"{output}: {counts}")
    return summary


def _write(sources, out, index, fingerprint):
    out.write(bytes(HEADER.size))  # the true one when the counts are known
    records = train = pictures = skipped = done = 0
    problems, placed = [], {}  # placed: real path of a picture -> (offset, length, crc, (width, height))
    total = sum(os.path.getsize(source.path) for source in sources)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="packing")
    for source in sources:
        mask = _sample(source)
        for place, (number, read, item) in enumerate(_read_items(source.path)):
            bar.update(done + read - bar.n)
            if mask is not None and not mask[place : place + 1].any():
                continue
            try:
                text, paths, new = _checked(item, f"{os.path.basename(source.path)}:{number}", source.folder, placed)
            except (DataError, RecursionError) as error:
                skipped += 1
                line = f"skipped {source.path}:{number}: {error}"
                _say(line)
                problems += [line] if len(problems) < MAX_PROBLEMS else []
                continue
            for path, (data, size) in new.items():
                placed[path] = (out.tell(), len(data), zlib.crc32(data), size)
                out.write(data)
            blob = text + b"".join(PICTURE.pack(*placed[path][:3]) for path in paths)
            entry = struct.pack("<QIII", out.tell(), len(text), len(paths), zlib.crc32(blob))
            index.write(entry + struct.pack("<I", zlib.crc32(entry)))
            out.write(blob)
            records, train, pictures = records + 1, train + (source.split == "train"), pictures + len(new)
            while len(placed) > MAX_PLACED:
                del placed[next(iter(placed))]  # the oldest: sources keep one picture's questions together
        done += os.path.getsize(source.path)
    bar.close()
    if not records:
        raise DataError(f"no usable record in {len(sources)} source(s), {skipped} skipped (see the lines above)")
    index_offset = out.tell()
    index.seek(0)
    shutil.copyfileobj(index, out)
    size = out.tell()
    counts = records, train, pictures, skipped, index_offset, size
    header = struct.pack("<8sI6Q32s", MAGIC, VERSION, *counts, fingerprint)
    out.seek(0)
    out.write(header + struct.pack("<I", zlib.crc32(header)))
    return {"records": records, "skipped": skipped, "images": pictures, "bytes": size, "problems": problems}


def _checked(item, name, folder, placed):
    """A source record -> (its JSON, real paths of its pictures, {path: (bytes, size)} of those not stored yet)."""
    fields, names = _normalise(item)
    paths = [_find_picture(name, folder) for name in names]
    new = {path: _load_picture(path) for path in paths if path not in placed}
    fields["source"] = name
    fields.pop("image_size", None)
    if paths:
        fields["image_size"] = (new.get(paths[0]) or placed[paths[0]])[-1]
    _check_solution(fields["solution"], fields.get("image_size"))
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except ValueError as error:
        cure = "write null for NaN and Infinity, and no half of a surrogate pair"
        raise DataError(f"cannot be kept as UTF-8 JSON ({error}); {cure}") from error
    return text, paths, new


def ensure_packed(sources, output_dir):
    """Path of the sources' packed file, made or remade where it is missing, damaged or out of date.

    It lies beside the first source or, where that folder is read-only, in `output_dir`. Out of date: the size or time
    of a json or jsonl file, its sampling, split or image folder changed. Pictures are not looked at again: delete the
    packed file after changing one.
    """
    seen = []
    for source in _expand(sources):
        stat = os.stat(source.path)
        seen.append((os.path.realpath(source.path), *source[1:], stat.st_size, stat.st_mtime_ns))
    fingerprint = hashlib.sha256(json.dumps(seen).encode()).digest()
    names = json.dumps([[os.path.abspath(part) if part else "" for part in source] for source in sources])
    first = os.path.abspath(sources[0][0])
    name = f"{os.path.basename(first)}.{hashlib.sha256(names.encode()).hexdigest()[:8]}.packed"
    for folder in (os.path.dirname(first), os.path.abspath(output_dir)):
        path = os.path.join(folder, name)
        try:
            if os.path.exists(path) and PackedDataset(path).fingerprint == fingerprint:
                return path
        except DataError as error:
            _say(f"{error}: packing again")
        if os.access(folder, os.W_OK):
            pack(sources, path, fingerprint)
            return path
    raise DataError(f"neither {os.path.dirname(first)} nor {output_dir} can be written to; give another --output_dir")


# ---- reading ---------------------------------------------------------------------------------------------------------


class PackedDataset:
    """The records of a packed file: len(), [i] -> dict of its fields and `images`, a list of encoded bytes.

    Memory-mapped: nothing but what is asked for is read. May be used after a fork; pickles as its path. Raises
    DataError for whatever is wrong with the file (and, as sequences do, IndexError past the end).
    """

    def __init__(self, path):
        self.path = os.path.abspath(os.fspath(path))
        self._map = None
        if not os.path.isfile(self.path):
            raise DataError(f"{self.path}: no such file; make it with `python data.py pack`")
        try:
            with open(self.path, "rb") as file:
                self._read_header(file.read(HEADER.size), os.fstat(file.fileno()).st_size)
                self._map = np.memmap(file, dtype=np.uint8, mode="r")
        except OSError as error:
            raise DataError(f"{self.path}: {error}") from error

    def _read_header(self, header, size):
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{self.path}: not a packed file, or cut; make it again with `python data.py pack`")
        _, version, *counts, self.fingerprint, crc = HEADER.unpack(header)
        self.records, self.train, self.pictures, self.skipped, self._index, whole = counts
        if version != VERSION:
            raise DataError(f"{self.path}: format version {version}, this code reads {VERSION}; pack it again")
        self._check(header[:-4], crc, "the header")
        if size != whole or self._index + self.records * ENTRY.size != size or self.train > self.records:
            raise DataError(f"{self.path}: {size} bytes, the header says {whole}; copy or pack it again")

    def __len__(self):
        return self.records

    def __reduce__(self):
        return PackedDataset, (self.path,)

    def splits(self):
        """(train, val): ranges of record numbers."""
        return range(self.train), range(self.train, self.records)

    def __getitem__(self, i):
        i = range(self.records)[operator.index(i)]  # negative numbers and IndexError as everywhere
        entry = self._read(self._index + i * ENTRY.size, ENTRY.size)
        offset, text_bytes, count, crc, entry_crc = ENTRY.unpack(entry)
        self._check(entry[:-4], entry_crc, f"index entry {i}")
        blob = self._read(offset, text_bytes + count * PICTURE.size)
        self._check(blob, crc, f"record {i}")
        try:
            record = json.loads(blob[:text_bytes])
            record["images"] = []
        except (ValueError, TypeError, RecursionError) as error:  # a right checksum by a wrong writer
            raise DataError(f"{self.path}: record {i} is no JSON object; pack it again") from error
        for offset, length, crc in PICTURE.iter_unpack(blob[text_bytes:]):
            record["images"].append(self._read(offset, length))
            self._check(record["images"][-1], crc, f"a picture of record {i} ({record.get('source')})")
        return record

    def _read(self, start, length):
        if self._map is None:
            raise DataError(f"{self.path}: closed")
        if start + length > len(self._map):
            raise DataError(f"{self.path}: an offset past the end; pack it again")
        data = self._map[start : start + length].tobytes()
        # Unmap what was just read (the page cache keeps it), or a worker's RSS grows with all that it ever read. All of
        # the map, because the kernel has mapped neighbouring pages too.
        self._map.base.madvise(mmap.MADV_DONTNEED)
        return data

    def _check(self, data, crc, what):
        if zlib.crc32(data) != crc:
            raise DataError(f"{self.path}: {what} is damaged (checksum); copy or pack the file again")

    def close(self):
        self._map = None  # the last reference: numpy has no other way to unmap


def train_val_split(dataset, val_split_ratio, seed):
    """(train, val) record numbers, int64 arrays: the sources' own val records and a random share of the others.

    Drawn by record, as in VLM-R1: two questions about a picture may part ways. `split: val` holds out what you choose.
    """
    if not 0 <= val_split_ratio < 1:
        raise DataError(f"--val_split_ratio {val_split_ratio} is not in [0, 1)")
    train, val = (np.array(part, dtype=np.int64) for part in dataset.splits())
    held, kept = np.split(np.random.default_rng(seed).permutation(train), [math.ceil(val_split_ratio * len(train))])
    return np.sort(kept), np.concatenate([np.sort(held), val])


# ---- records -> prompts ----------------------------------------------------------------------------------------------


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

    columns = {key: value for key, value in record.items() if key != "images"}
    columns |= {"image_size": None, "model_size": None}
    pixel_values = grid = None
    if record["images"]:
        pictures = [decode_image(data) for data in record["images"]]
        inputs = processor.image_processor(images=pictures, return_tensors="pt")
        pixel_values, grid = inputs["pixel_values"], inputs["image_grid_thw"]
        (_, rows, cols), side, scale = grid[0].tolist(), processor.image_processor.patch_size, processor.box_scale
        columns["image_size"] = tuple(record["image_size"])
        columns["model_size"] = (scale, scale) if scale else (cols * side, rows * side)
    ids = _expand_placeholders(ids, grid, processor)
    if max_prompt_length is not None and len(ids) > max_prompt_length:
        raise DataError(  # not truncated: that would cut picture tokens whose pixels remain
            f"{record.get('source')}: a prompt of {len(ids)} tokens is over --max_prompt_length {max_prompt_length}; "
            "raise it, or lower --max_pixels"
        )
    return {"input_ids": torch.tensor(ids), "pixel_values": pixel_values, "image_grid_thw": grid, "columns": columns}


def _expand_placeholders(ids, grid, processor):
    """Repeat each picture's placeholder once for every token that the vision tower makes of the picture.

    By hand, because transformers' processors, which also do this, want torchvision for their video half.
    """
    image_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    counts = [] if grid is None else (grid.prod(dim=1) // processor.image_processor.merge_size**2).tolist()
    if ids.count(image_id) != len(counts):
        raise DataError(f"the chat template has {ids.count(image_id)} placeholders for {len(counts)} pictures; mend it")
    left = iter(counts)
    return [i for token in ids for i in ([token] * next(left) if token == image_id else [token])]


# ---- order and batches -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)  # a step may lie across two epochs
def epoch_order(n, seed, epoch):
    """The order of n records in an epoch: a permutation, int64 (n,), a function of its arguments alone."""
    order = np.random.default_rng([seed, epoch]).permutation(n)
    order.flags.writeable = False  # callers share it
    return order


def prompt_indices(n, seed, step, rank, world, batch):
    """Positions (0 … n - 1) of the `batch` records that a rank takes at a step.

    Ranks and steps cut one endless row of epochs, each a permutation, into pieces: over all ranks every record is seen
    once an epoch, and to resume is to ask for a later step.
    """
    if n < 1:
        raise DataError("no training records; check the sources and --val_split_ratio")
    first = (step * world + rank) * batch
    return [int(epoch_order(n, seed, place // n)[place % n]) for place in range(first, first + batch)]


class _EncodedPrompts:
    """What a DataLoader worker makes of a record number."""

    def __init__(self, dataset, encode):
        self.dataset, self.encode = dataset, encode

    def __getitem__(self, i):
        return {**self.encode(self.dataset[i]), "record": i}


def prompt_loader(dataset, indices, encode, seed, start_step, steps, batch, rank=0, world=1, num_workers=-1):
    """Lists of `batch` encoded prompts for the steps from start_step up to, not including, `steps`; iterate once.

    indices: record numbers to draw from (`train_val_split`); encode: record -> dict, such as a partial of
    encode_prompt; `record`, the record's number, is added. num_workers -1: two a rank, at most the machine's cores over
    its ranks; 0: in this process. An exception in a worker surfaces here with its type and message.
    """
    if num_workers < 0:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has none
        num_workers = min(2, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world)))  # torchrun's: ranks on this node
    # Set before workers fork, so that tokenizers does not warn of its threads in each; one prompt needs no threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    places = (prompt_indices(len(indices), seed, step, rank, world, batch) for step in range(start_step, steps))
    return DataLoader(
        _EncodedPrompts(dataset, encode),
        batch_sampler=([int(indices[i]) for i in step] for step in places),
        collate_fn=list,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        persistent_workers=num_workers > 0,
    )


# ---- command line ----------------------------------------------------------------------------------------------------


def info(path):
    """Print a packed file's counts, size and the fields of its first record."""
    dataset = PackedDataset(path)
    train, val = map(len, dataset.splits())
    print(f"{path}: format version {VERSION}, {os.path.getsize(path):,} bytes")
    print(f"{len(dataset)} records ({train} train, {val} val), {dataset.pictures} pictures, {dataset.skipped} skipped")
    for key, value in dataset[0].items():
        print(f"  {key}: {f'{len(value)} encoded' if key == 'images' else f'{value!r:.100}'}")


def verify(path):
    """Read every record and decode every picture; print what is wrong; -> how many records are."""
    dataset, wrong = PackedDataset(path), 0
    for i in tqdm(range(len(dataset)), desc="verifying", unit="record"):
        try:
            for data in dataset[i]["images"]:
                _decode(data)
        except DataError as error:
            wrong += 1
            tqdm.write(f"record {i}: {error}")
    print(f"{path}: {len(dataset)} records, {wrong} of them damaged")
    return wrong


def main(argv=None):
    """The command line; -> exit status 0, or 1 for bad data (and argparse's 2 for bad usage)."""
    parser = argparse.ArgumentParser(description="Pack VLM-R1's data into one file, and look into it.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write one packed file from json, jsonl or yaml sources")
    flags = ("data_file_paths", "image_folders", "dataset_name", "image_root")
    for flag in flags:
        packing.add_argument(f"--{flag}")
    packing.add_argument("--output", required=True)
    commands.add_parser("info", help="counts, size and fields").add_argument("file")
    commands.add_parser("verify", help="read everything; status 1 if anything is damaged").add_argument("file")
    args = parser.parse_args(argv)
    try:
        if args.command == "verify":
            return 1 if verify(args.file) else 0
        if args.command == "info":
            info(args.file)
        else:
            pack(parse_sources(*(getattr(args, flag) for flag in flags)), args.output)
        return 0
    except DataError as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
