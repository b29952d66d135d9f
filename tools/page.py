"""The page of a run's rollouts, which tools/monitor.py writes: true and predicted boxes drawn on the pictures.

A completion is text that a model sampled, so it is shown as hostile text: every string on the page is escaped, every
number is formatted here, pictures are decoded and encoded anew, and the page holds no script and loads nothing.
"""

import base64
import html
import io
import itertools
import json
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rewards

RECORDS_SHOWN = 24  # held-out records, in the file's order: not the best ones
GROUPS_SHOWN = 3  # training groups of the first step, and of the last
TEXT_SHOWN = 600  # characters of a completion
SIDE_SHOWN = 480  # pixels: larger pictures are scaled down before they go into the page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5d6b7a; --line: #d8dee6; --page: #fff; --panel: #f3f6f9;
  --true: #19c25f; --start: #ff9a3d; --up: #3b9cff; --down: #ff5a52; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ef; --soft: #9aa7b5; --line: #37424f; --page: #14191f; --panel: #1f2730; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1120px;
  margin: 0 auto; padding: 24px; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 4px; } p { margin: 4px 0 12px; }
p, dt, th, figcaption { color: var(--soft); } b { color: var(--ink); font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: 8px; } dt { font-size: 12px; } dd { margin: 0; font-weight: 600; }
dl div { background: var(--panel); border-radius: 8px; padding: 8px 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 16px; }
.group { display: flex; flex-wrap: wrap; gap: 20px; padding: 16px 0; border-top: 1px solid var(--line); }
.group figure { flex: 0 0 220px; } .group div { flex: 1 1 420px; overflow-x: auto; }
figure { margin: 0; } figcaption { font-size: 13px; margin-top: 4px; }
svg { display: block; width: 100%; height: auto; border-radius: 4px; background: #808080; }
rect { fill: none; stroke-width: 2.5px; vector-effect: non-scaling-stroke; } g { filter: drop-shadow(0 0 .4px #000); }
.true { stroke: var(--true); stroke-width: 5px; } .start { stroke: var(--start); stroke-dasharray: 6 4; }
.up { stroke: var(--up); } .down { stroke: var(--down); stroke-width: 1.5px; }
i { display: inline-block; width: 20px; margin: 0 5px 3px 14px; border-top: 4px solid; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 14px 2px 0; vertical-align: top; font-weight: 400; overflow-wrap: normal; }
td { border-top: 1px solid var(--line); } th:last-child, td:last-child { text-align: left; width: 90%; }
td:last-child { white-space: pre-wrap; font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def escape(value):
    return html.escape(str(value), quote=True)


def data_uri(encoded):
    """Image bytes as a data URI, decoded and encoded anew: the browser gets no bytes from the data set, and no EXIF
    rotation (boxes belong to the stored pixels)."""
    picture = Image.open(io.BytesIO(encoded)).convert("RGB")
    picture.thumbnail((SIDE_SHOWN, SIDE_SHOWN))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if max(picture.size) <= 128 else "JPEG", quality=85)
    kind = "png" if max(picture.size) <= 128 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def rectangle(box, size, scale, kind):
    """An SVG rectangle, or nothing without a box; `scale` takes it from the model's pixels to the picture's."""
    if box is None:
        return ""
    limits = (size[0], size[1]) * 2
    # A sampled number may be 1e300: keep what lies outside the picture just outside it.
    x1, y1, x2, y2 = (min(max(v * s, -0.1 * m), 1.1 * m) for v, s, m in zip(box, scale * 2, limits, strict=True))
    if x2 <= x1 or y2 <= y1:
        return ""
    return f'<rect class="{kind}" x="{x1:.2f}" y="{y1:.2f}" width="{x2 - x1:.2f}" height="{y2 - y1:.2f}"/>'


def true_box(row):
    solution = row["solution"]
    return rewards.parse_box(solution if isinstance(solution, str) else json.dumps(solution))


def picture(row, packed, predictions):
    """The record's picture as SVG with the true box and `predictions`, a list of (completion row, CSS class)."""
    if row["image_size"] is None:  # a record of text alone
        return ""
    width, height = row["image_size"]
    shown = ""
    if packed is not None:
        href = data_uri(packed[row["record"]]["images"][0])
        shown = f'<image href="{href}" width="{width:d}" height="{height:d}" preserveAspectRatio="none"/>'
    boxes = rectangle(true_box(row), (width, height), (1, 1), "true")
    for other, kind in predictions:
        scale = width / other["model_size"][0], height / other["model_size"][1]
        boxes += rectangle(rewards.parse_box(other["completion"]), (width, height), scale, kind)
    return f'<svg viewBox="0 0 {width:d} {height:d}" role="img">{shown}<g>{boxes}</g></svg>'


def number(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}"


def held_out_cards(first, last, packed):
    """The same held-out records where GRPO started and at the last evaluation."""
    before = {row["record"]: row for row in first[1]}
    cards = []
    for row in last[1][:RECORDS_SHOWN]:
        start = before.get(row["record"])
        drawn = ([(start, "start")] if start else []) + [(row, "up")]
        then = number(start["rewards"].get("accuracy")) if start else "–"
        now = number(row["rewards"].get("accuracy"))
        cards.append(
            f"<figure>{picture(row, packed, drawn)}<figcaption><b>{escape(row['prompt'])}</b><br>"
            f"IoU {then} → <b>{now}</b></figcaption></figure>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def group_block(rows, packed):
    """One prompt with its group of completions, best first."""
    rows = sorted(rows, key=lambda row: -(row["advantage"] or 0.0))
    names = list(rows[0]["rewards"])
    head = "".join(f"<th>{escape(name)}</th>" for name in [*names, "advantage", "completion"])
    body = ""
    for row in rows:
        values = [number(row["rewards"].get(name)) for name in names]
        text = row["completion"][:TEXT_SHOWN] + ("…" if len(row["completion"]) > TEXT_SHOWN or row["truncated"] else "")
        cells = [*values, "–" if row["advantage"] is None else f"{row['advantage']:+.2f}", escape(text)]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    drawn = [(row, "up" if (row["advantage"] or 0) > 0 else "down") for row in rows]
    return (
        f'<div class="group"><figure>{picture(rows[0], packed, drawn)}<figcaption><b>{escape(rows[0]["prompt"])}</b>'
        f"</figcaption></figure><div><table><tr>{head}</tr>{body}</table></div></div>"
    )


def rollouts_page(title, facts, ends, packed):
    """The page as a string. `facts`: (name, value) pairs for its head; `ends`: first_and_last's dict."""
    key = '<i style="border-color: var(--{})"></i>{}'.format
    body = f"<h1>{escape(title)}</h1><dl>"
    body += "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts) + "</dl>"
    if "eval" in ends:
        first, last = ends["eval"]
        legend = key("true", "true box") + key("start", f"step {first[0]:d}") + key("up", f"step {last[0]:d}")
        body += f"<h2>Held-out records, before and after</h2><p>Greedy answers, in the order of the file: {legend}</p>"
        body += held_out_cards(first, last, packed)
    for step, rows in dict(ends.get("train", ())).items():  # a dict, because the first step may be the last
        legend = key("true", "true box") + key("up", "advantage above 0") + key("down", "0 or below")
        body += f"<h2>Training groups of step {step:d}</h2><p>One prompt and its sampled completions: {legend}</p>"
        groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["record"])]
        body += "".join(group_block(group, packed) for group in groups[:GROUPS_SHOWN])
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return f"<!doctype html><html lang=en>{meta}<title>{escape(title)}</title><style>{STYLE}</style>{body}</html>\n"
