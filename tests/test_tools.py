"""The demo's parts (pictures, tokenizer, model, cold start, flags) and the monitor's reading and drawing."""

import html.parser
import io
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import demo
import monitor
import page as pages

import data
import grpo
import model as modeling
import rewards

# --- demo --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a space in its name, with the demo's pictures, packed, and its random model."""
    folder = tmp_path_factory.mktemp("de mo")
    demo.write_data(folder / "data", seed=3, pictures_per_box=1, held_out=96)
    demo.build_model(folder / "model", seed=3)
    sources = data.parse_sources(dataset_name=folder / "data" / "demo.yaml", image_root=folder / "data")
    return folder, data.PackedDataset(data.ensure_packed(sources, folder))


def test_boxes_held_out_are_never_drawn_in_training(made):
    _, dataset = made
    train, val = ({dataset[i]["solution"] for i in split} for split in dataset.splits())
    assert len(train) == 784 - 96 and len(val) == 96 and not train & val
    assert demo.split_boxes(3, 96) == demo.split_boxes(3, 96) != demo.split_boxes(4, 96)


def test_a_solution_is_the_drawn_shapes_bounding_box(made):
    _, dataset = made
    for i in [*range(0, len(dataset), 25)]:
        record = dataset[i]
        pixels = np.asarray(Image.open(io.BytesIO(record["images"][0])))
        ys, xs = np.nonzero(pixels[..., 2] > 100)  # only shapes are blue
        expected = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
        assert rewards.parse_box(record["solution"]) == expected, record["problem"]
        assert expected[2] - expected[0] >= 14 and expected[3] - expected[1] >= 14


def test_tokenizer_round_trip_and_short_answers(made):
    tokenizer = transformers.AutoTokenizer.from_pretrained(made[0] / "model")
    for text in ["the red box, 140 < 56?", "héllo\n\t<b>\u4e2d</b>", " a  b ", "<|im_start|>user\n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert demo.GRID == [0, 7, 14, 21, 28, 35, 42, 49, 56]
    assert all(len(tokenizer(str(n))["input_ids"]) == 1 for n in demo.GRID)
    answer = "<think></think><answer>[7,14,42,49]</answer>"
    ids = tokenizer(answer + "<|im_end|>")["input_ids"]
    assert len(ids) == 14 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == answer
    assert rewards.format_reward([""], [answer]) == [1.0]


def test_model_loads_through_transformers_and_through_load_policy(made):
    folder = made[0] / "model"
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    assert 1.5e6 < sum(p.numel() for p in model.parameters()) < 2e6
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    picture = demo.draw((7, 14, 42, 49), "white", "ellipse")
    processed = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[picture], return_tensors="pt")
    assert processed["image_grid_thw"].tolist() == [[1, 4, 4]]  # 56 x 56 pixels stay 56 x 56

    _, processor = modeling.load_policy(str(folder), torch_dtype="float32", device="cpu")
    prompt = data.encode_prompt(made[1][0], processor, demo.TEMPLATE)
    assert prompt["columns"]["image_size"] == prompt["columns"]["model_size"] == (56, 56)
    shown = processor.tokenizer.decode(prompt["input_ids"])
    question = made[1][0]["problem"]
    pads = "<|image_pad|>" * 4
    user = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{question}<|im_end|>\n"
    assert shown == user + "<|im_start|>assistant\n"


def test_cold_start_teaches_the_format_and_saves(made, tmp_path):
    demo.build_model(tmp_path, seed=3)
    answer = "<think></think><answer>[7,14,42,49]</answer><|im_end|>"

    def answer_logp():
        model, processor = modeling.load_policy(str(tmp_path), torch_dtype="float32", device="cpu")
        prompt = data.encode_prompt(made[1][0], processor, demo.TEMPLATE)
        tokens = torch.tensor(processor.tokenizer(answer)["input_ids"])
        return modeling.repeated_logps(model, prompt, [tokens])[0].mean().item()

    before = answer_logp()
    demo.cold_start(tmp_path, made[1], seed=0, steps=20, batch=4)
    assert before < -5 and answer_logp() > -2


def test_sloppy_boxes_are_boxes_at_most_a_cell_off():
    rng = random.Random(0)
    for box in demo.split_boxes(0, 0)[0][:200]:
        moved = demo.sloppy(box, rng)
        assert all(abs(a - b) in (0, 7) and 0 <= b <= 56 for a, b in zip(box, moved, strict=True))
        assert moved[0] < moved[2] and moved[1] < moved[3]
    drawn = {tuple(demo.sloppy((14, 14, 42, 42), rng)) for _ in range(3000)}
    assert len(drawn) == 81  # all of 3 ** 4


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_flags_are_grpos_and_a_step_is_128_completions(processes):
    words = demo.grpo_flags(Path("runs/de mo"), 5, processes)
    (args,) = transformers.HfArgumentParser(grpo.Arguments).parse_args_into_dataclasses(words)
    assert args.per_device_train_batch_size * processes == 128
    assert args.per_device_train_batch_size % args.num_generations == 0
    assert (args.output_dir, args.seed, args.reward_funcs) == ("runs/de mo", 5, ["accuracy", "format"])


# --- monitor -----------------------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\u202e"\'</td></table>&lt; <answer>[1e300, -1e300'


def completion(step, split, record, box, iou, **changes):
    row = {
        "step": step,
        "split": split,
        "record": record,
        "prompt": "where is it?",
        "completion": f"<think></think><answer>{box}</answer>",
        "rewards": {"accuracy": iou, "format": 1.0},
        "advantage": None if split == "eval" else iou - 0.5,
        "solution": "<answer>[10, 20, 50, 40]</answer>",
        "image_size": [100, 50],
        "model_size": [200, 100],
        "truncated": False,
    }
    return row | changes


@pytest.fixture
def run(tmp_path):
    """A run of 20 steps with one 100 x 50 picture that the model saw as 200 x 100."""
    folder = tmp_path / "run & <b>"
    folder.mkdir()
    Image.new("RGB", (100, 50), (200, 30, 30)).save(folder / "a.png")
    turns = [{"from": "human", "value": "<image>where is it?"}, {"from": "gpt", "value": "[10, 20, 50, 40]"}]
    (folder / "a.jsonl").write_text(json.dumps({"image": "a.png", "conversations": turns}) + "\n")
    data.pack([(folder / "a.jsonl", folder)], folder / "a.packed")
    (folder / "run.json").write_text(
        json.dumps({"args": {"num_generations": 4, "run_name": "<i>mine"}, "packed": str(folder / "a.packed")})
    )
    lines = [{"step": 0, "eval/iou": 0.25, "eval/accuracy": 0.125, "eval/format": 1.0, "eval/count": 8}]
    for step in range(1, 21):
        phases = {"time/rollout": 0.2, "time/update": 0.3, "time/wait_data": 0.01}
        shares = {"completions/clipped_ratio": 0.0, "frac_reward_zero_std": 0.1, "completions/mean_length": 14.0}
        means = {"reward": 1 + step / 40, "rewards/accuracy/mean": step / 40, "rewards/format/mean": 1.0}
        rest = {"loss": float("nan"), "grad_norm": 0.4, "entropy": 0.3, "step_time": 3.0, "kl": None}
        lines.append({"step": step} | phases | shares | means | rest)
    lines.append({"step": 20, "eval/iou": 0.75, "eval/accuracy": 0.875, "eval/format": 1.0, "eval/count": 8})
    write(folder / "metrics.jsonl", lines)
    rows = [completion(0, "eval", 0, [20, 40, 60, 80], 0.5)]
    rows += [completion(1, "train", 0, [0, 0, 9 + i, 9], i / 4) for i in range(4)]
    rows += [completion(9, "train", 0, [0, 0, 8, 8], 0.1, completion="only the first and last step are shown")]
    rows += [completion(20, "train", 0, [0, 0, 8, 8], 0.1, completion=HOSTILE, prompt=HOSTILE)]
    rows += [completion(20, "eval", 0, [20, 40, 100, 80], 1.0)]
    write(folder / "completions.jsonl", rows)
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Tags(html.parser.HTMLParser):
    """What a browser would make of the page: its tags with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.text += text


def test_monitor_draws_curves_and_page_and_says_where_it_ended(run, capsys):
    assert monitor.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "mean IoU: 0.250 → 0.750" in said and "IoU 0.5: 0.125 → 0.875" in said and "1.0 min" in said
    with Image.open(run / "curves.png") as curves:
        assert curves.width > 1000 and len(set(curves.convert("L").resize((64, 64)).tobytes())) > 20
    page = (run / "rollouts.html").read_text(encoding="utf-8")
    assert "only the first and last" not in page
    sources = [attributes["href"] for tag, attributes in Tags(page).tags if tag == "image"]
    assert len(sources) == 3 and all(source.startswith("data:image/png;base64,") for source in sources)


def test_boxes_are_drawn_in_the_pictures_pixels(run):
    monitor.main([str(run)])
    tags = Tags((run / "rollouts.html").read_text(encoding="utf-8")).tags
    drawn = [tuple(float(a[k]) for k in ("x", "y", "width", "height")) for t, a in tags if t == "rect"]
    assert drawn[0] == (10, 20, 40, 20)  # the true box is in the picture's pixels already
    assert drawn[1] == (10, 20, 20, 20)  # [20, 40, 60, 80] on 200 x 100, picture 100 x 50
    assert drawn[2] == (10, 20, 40, 20)
    far = pages.rectangle((-1e300, 10, 1e300, 20), (100, 50), (1, 1), "up")
    assert re.findall(r'"([-\d.]+)"', far) == ["-10.00", "10.00", "120.00", "10.00"]
    assert pages.rectangle(None, (100, 50), (1, 1), "up") == pages.rectangle((5, 5, 1, 1), (9, 9), (1, 1), "up") == ""


def test_hostile_text_stays_text(run):
    monitor.main([str(run)])
    page = Tags((run / "rollouts.html").read_text(encoding="utf-8"))
    assert not {"script", "img", "answer", "think"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") == 2  # once as a completion, once as a prompt
    assert "GRPO run <i>mine" in page.text


def test_a_last_line_cut_short_is_left_out_and_a_broken_one_before_is_named(run, capsys):
    for name in ("metrics.jsonl", "completions.jsonl"):
        with open(run / name, "a", encoding="utf-8") as file:
            file.write('{"step": 21, "split": "tr')
    assert monitor.main([str(run)]) == 0
    assert monitor.read_metrics(run)[0][-1]["step"] == 20
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"step": 22, "reward": 1.0}\n')
    capsys.readouterr()
    assert monitor.main([str(run)]) == 2
    assert "metrics.jsonl, line 23: not JSON" in capsys.readouterr().err


def test_after_a_resume_the_later_line_counts(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": s, "reward": r} for s, r in [(1, 0.1), (2, 0.2), (2, 0.5), (3, 0.6)]])
    training, evaluation = monitor.read_metrics(tmp_path)
    assert [row["reward"] for row in training] == [0.1, 0.5, 0.6] and evaluation == []


def test_monitor_with_little_to_show(run, tmp_path, capsys):
    assert monitor.main([str(tmp_path / "nothing")]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().out
    write(run / "metrics.jsonl", [])
    write(run / "completions.jsonl", [])
    (run / "a.packed").unlink()
    assert monitor.main([str(run)]) == 0
    assert "boxes without pictures" in capsys.readouterr().out


def test_a_second_demo_keeps_the_first_whole(tmp_path, monkeypatch):
    """The folder is moved aside before anything is written: its page would show new pictures under old boxes."""
    for name in ("write_data", "build_model"):  # stop behind what is tested
        monkeypatch.setattr(demo, name, lambda *_: (_ for _ in ()).throw(InterruptedError))
    first = tmp_path / "demo"
    first.mkdir()
    (first / "flags.txt").write_text("--seed\n0\n")
    monkeypatch.setattr("sys.argv", ["demo.py", "--output", str(first)])
    with pytest.raises(InterruptedError):
        demo.main()
    assert (tmp_path / "demo.old" / "flags.txt").read_text() == "--seed\n0\n" and not first.exists()


def test_a_run_without_boxes_or_pictures_is_drawn_too(run):
    """Text-only records, a reward function of one's own and completions without any opinion."""
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines() if line.endswith("}")]
    for row in rows:
        row |= {
            "image_size": None,
            "model_size": None,
            "solution": "a word",
            "rewards": {"mine": None},
            "advantage": 0.0,
        }
    (run / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"step": 1, "reward": None, "step_time": 1.0}, {"step": 0, "eval/mine": None, "eval/count": 2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    assert monitor.main([str(run)]) == 0
