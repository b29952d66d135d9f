"""What a run did, drawn from the files that it left: `python tools/monitor.py runs/demo`.

It reads metrics.jsonl, completions.jsonl and run.json in the run's folder, prints where held-out accuracy started and
ended, and writes beside them

- curves.png: reward, held-out IoU and accuracy, completion lengths, loss, gradient norm, entropy, seconds a phase;
- rollouts.html: one self-contained page, true and predicted boxes drawn on the pictures, first against last step.

It works on a run that is still going (a last line cut short is left out) and needs neither a GPU nor the model.
Left out: anything that would need a server. A completion is text that a model sampled, so it is shown as hostile text:
every string on the page is escaped, every number is formatted here, and the page holds no script.
"""

import base64
import html
import io
import itertools
import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import rewards

RECORDS_SHOWN = 24  # held-out records, in the file's order: not the best ones
GROUPS_SHOWN = 3  # training groups of the first step, and of the last
TEXT_SHOWN = 600  # characters of a completion
SIDE_SHOWN = 480  # pixels: larger pictures are scaled down before they go into the page


# --- Reading -----------------------------------------------------------------------------------------------------


def read_jsonl(path):
    """Yields the objects of a file with one JSON object a line. A last line cut short, as a running or killed process
    leaves it, is left out; anything else that is not an object raises ValueError with the line's number."""
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
            yield row


def read_metrics(run):
    """(training rows, evaluation rows) of metrics.jsonl, by step. After a resume a step may stand there twice: the
    later one belongs to the run that went on."""
    training, evaluation = {}, {}
    for row in read_jsonl(run / "metrics.jsonl"):
        if "eval/iou" in row:
            evaluation[row["step"]] = row
        elif "reward" in row:
            training[row["step"]] = row
    return [training[s] for s in sorted(training)], [evaluation[s] for s in sorted(evaluation)]


def first_and_last(path):
    """{"train": (first, last), "eval": ...}, each (step, its rows): all that is kept of a file of any size."""
    ends = {}
    for (split, step), rows in itertools.groupby(read_jsonl(path), key=lambda row: (row["split"], row["step"])):
        entry = step, list(rows)
        ends[split] = ends.get(split, (entry,))[0], entry
    return ends


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


def draw_curves(training, evaluation, title, path):
    """Nine small panels over the same steps."""
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "legend.fontsize": 8})
    figure, axes = plt.subplots(3, 3, figsize=(13, 8.4), sharex=True, layout="constrained")
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
    for axis in axes[2]:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- Rollouts ----------------------------------------------------------------------------------------------------

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
    if len(argv) != 1:
        print("usage: python tools/monitor.py RUN    (RUN: a run's folder, the one with metrics.jsonl)")
        return 2
    run = Path(argv[0])
    if not (run / "metrics.jsonl").exists():
        print(f"{run}: no metrics.jsonl here; give the --output_dir of a run of grpo.py")
        return 2
    settings = json.loads((run / "run.json").read_text(encoding="utf-8")) if (run / "run.json").exists() else {}
    args = settings.get("args", {})
    training, evaluation = read_metrics(run)
    title = f"GRPO run {args.get('run_name') or run.resolve().name}"
    facts = describe(training, evaluation, args)
    for name, value in facts:
        print(f"{name}: {value}")
    draw_curves(training, evaluation, title, run / "curves.png")
    print(f"wrote {run / 'curves.png'}")
    if (run / "completions.jsonl").exists():
        packed = None
        if settings.get("packed") and Path(settings["packed"]).exists():
            packed = data.PackedDataset(settings["packed"])
        else:
            print(f"the page has boxes without pictures: the packed file {settings.get('packed')} is not there")
        page = rollouts_page(title, facts, first_and_last(run / "completions.jsonl"), packed)
        (run / "rollouts.html").write_text(page, encoding="utf-8")
        print(f"wrote {run / 'rollouts.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
