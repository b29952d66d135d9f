"""Rewards: the parser against json.loads and hostile text, the IoU against counted pixels, users' functions."""

import gc
import json
import math
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewards import RewardError, format_reward, iou_reward, load_reward, parse_box, score, total

BOX = (10.0, 20.0, 30.0, 40.0)


# ---------------------------------------------------------------------------------------------- parse_box


@pytest.mark.parametrize(
    "text, box",
    [
        ("[10, 20, 30, 40]", BOX),
        ("The box is [10, 20, 30, 40].", BOX),
        ("[10,20,30,40] or [1,2,3,4]", BOX),
        ("[ 1e1 ,\n\t2.0E+1, 300e-1,40.0 ]", BOX),
        ("[-10, +20, 30, -0]", (-10.0, 20.0, 30.0, 0.0)),
        ("```json\n[10, 20, 30, 40]\n```", BOX),
        ('```json\n[{"label": "cat", "bbox_2d": [10, 20, 30, 40]}]\n```', BOX),
        ('{"bbox": [10, 20, 30, 40]}', BOX),
        ('{"box": [10, 20, 30, 40], "score": true}', BOX),
        ('[{"label": "no box"}, {"bbox_2d": [10, 20, 30, 40]}, {"bbox_2d": [1, 2, 3, 4]}]', BOX),
        ('{"size": [1, 2, 3, 4], "bbox_2d": [10, 20, 30, 40]}', BOX),
        ('{"label": "sign saying \\"[1, 2, 3, 4]\\" here", "bbox_2d": [10, 20, 30, 40]}', BOX),
        ('{"a": {"size": [1, 2, 3, 4]}, "bbox_2d": [10, 20, 30, 40]}', BOX),
        ('{"tags": [], "extra": {}, "bbox_2d": [10, 20, 30, 40]}', BOX),
        ("[[10, 20, 30, 40]]", BOX),
        ("[1, 2, 3, 4, 5] [10, 20, 30, 40]", BOX),
        ("[1, 2, 3] then [10, 20, 30, 40]", BOX),
        ("[1, 2, 3, 1e999] [10, 20, 30, 40]", BOX),
        ('[see "fig] the box is [10, 20, 30, 40]', BOX),
        ("{'bbox_2d': [10, 20, 30, 40]}", BOX),
        ("<answer>[10, 20, 30, 40]</answer>", BOX),
        ("<think>[1, 2, 3, 4]</think><answer>\n[10, 20, 30, 40]\n</answer> [5, 6, 7, 8]", BOX),
        ("[30, 40, 10, 20]", (30.0, 40.0, 10.0, 20.0)),
        ("", None),
        ("no box", None),
        ("[1, 2, 3]", None),
        ("[1, 2, 3, 4, 5]", None),
        ("[1, 2, 3, 4", None),
        ("[1, 2, 3, 4,]", None),
        ("[1, 2,, 3, 4]", None),
        ("[1 2 3 4]", None),
        ("(1, 2, 3, 4)", None),
        ("[1, 2, 3, 4}", None),
        ("[[1, 2], [3, 4]]", None),
        ("[1, 2, 3, true]", None),
        ("[1, 2, 3, null]", None),
        ('[1, 2, 3, "4"]', None),
        ("[NaN, 2, 3, 4]", None),
        ("[1, 2, 3, Infinity]", None),
        ("[1, 2, 3, 1e999]", None),
        ("[1, 2, 3, " + "9" * 5000 + "]", None),
        ("[١, ٢, ٣, ٤]", None),
        ('{"size": [1, 2, 3, 4]}', None),
        ('{"bbox_2d": [1, 2, 3]}', None),
        ('{"bbox_2d": "1, 2, 3, 4"}', None),
        ("<answer>[1, 2, 3, 4]", None),
        ("[1, 2, 3, 4]</answer>", None),
        ("</answer>[1, 2, 3, 4]<answer>", None),
        ("<answer>[1, 2, 3, 4]</answer><answer>[1, 2, 3, 4]</answer>", None),
        ("<answer></answer>[1, 2, 3, 4]", None),
    ],
)
def test_parse_box(text, box):
    assert parse_box(text) == box


numbers = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
others = st.none() | st.booleans() | st.text(max_size=8)
trees = st.recursive(
    numbers | others | st.lists(numbers, min_size=4, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["bbox_2d", "bbox", "box", "size", ""]), inner, max_size=4)
    ),
    max_leaves=12,
)


def first_box(value, may_be_box=True):
    """The definition, on a parsed value: depth first, in the order in which lists close."""
    if isinstance(value, dict):
        found = (first_box(child, key in ("bbox_2d", "bbox", "box")) for key, child in value.items())
    elif isinstance(value, list):
        if may_be_box and len(value) == 4 and all(type(v) in (int, float) for v in value):
            return tuple(map(float, value))
        found = (first_box(child, may_be_box) for child in value)
    else:
        return None
    return next((box for box in found if box), None)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(trees, max_size=5) | st.dictionaries(st.text(max_size=8), trees, max_size=4), st.booleans())
def test_any_json_value_gives_the_box_that_its_definition_gives(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if ascii_only else None)
    if "answer>" not in text:
        assert parse_box(f"Here: {text} [7, 7, 7, 7]") == (first_box(value) or (7.0, 7.0, 7.0, 7.0))


PIECES = ["[", "]", "{", "}", '"', "\\", ",", ":", "1", "-2.5e3", "e9", " ", "\n", "bbox_2d", '"box":', "[1,2,3,4]"]
PIECES += ["<answer>", "</answer>", "<think>", "</think>", "null", "NaN", "\ud800", "٣", "\x00", "1e999"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join) | st.text(st.characters(), max_size=60))
def test_no_text_raises(text):
    box = parse_box(text)
    assert box is None or (len(box) == 4 and all(type(v) is float and math.isfinite(v) for v in box))
    assert format_reward([""], [text])[0] in (0.0, 1.0)
    assert 0.0 <= iou_reward([""], [text], [[0, 0, 5, 5]])[0] <= 1.0


HOSTILE = ["[", "{", "1", "]", " ", '"', "\\", "[1,", '{"a":', '["', '["\\"', '\\"', '{"', '{"k" ', "[ ", "[ ,", "[]"]
HOSTILE += ["[1,2,3,4", "[1,2,3,4,5]", '{"size":[1,2,3,4]}', '{"k":[1,2,3,4],', '[["\\', "<answer>", "<think>", "[1e"]
HOSTILE += ["[\ud800", "[٣,", "[" + " " * 300, "[" + "1" * 300, "[-", "[0.0", "true,", "[[1,2,3,4,", '"[1,2,3,4]']


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_takes_linear_time(piece):
    """Quadratic code needs seconds for the 50 kB here. The list at the end, under a key that holds no box, makes sure
    that the text is walked: without four numbers it would not be."""
    for prefix in ("", "[", '["'):
        text = prefix + piece * (50_000 // len(piece)) + 'x{"size":[1,2,3,4]}'
        start = time.process_time()  # of this process: a busy machine is no failure
        box = parse_box(text)
        format_reward([""], [text])
        assert time.process_time() - start < 1.0
        assert box in (None, (1.0, 2.0, 3.0, 4.0))


# ------------------------------------------------------------------------------------------- format_reward


@pytest.mark.parametrize(
    "text, reward",
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" \n<think>\na\n</think>\n\t<answer>\nb\n</answer>\n", 1.0),
        ("<think></think><answer>b</answer>", 1.0),
        ("<think>a < b, </i></think><answer>{}</answer>", 1.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<think>a</think><answer> \n</answer>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>x", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer><think></answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<Think>a</Think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(text, reward):
    assert format_reward(["q"], [text]) == [reward]
    assert format_reward(["q"], [[{"role": "assistant", "content": text}]]) == [reward]


# ---------------------------------------------------------------------------------------------- iou_reward


def test_iou_of_whole_pixels_equals_counting_them():
    """With integer corners a continuous box is a set of unit pixels: count them on a grid."""
    generator = random.Random(0)
    rows, columns = np.mgrid[0:16, 0:16]
    for _ in range(500):
        a, b = [[generator.randrange(17) for _ in range(4)] for _ in range(2)]
        inside = [(x1 <= columns) & (columns < x2) & (y1 <= rows) & (rows < y2) for x1, y1, x2, y2 in (a, b)]
        union = (inside[0] | inside[1]).sum() if all(mask.any() for mask in inside) else 0
        expected = (inside[0] & inside[1]).sum() / union if union else 0.0
        assert iou_reward([""], [json.dumps(a)], [b]) == [pytest.approx(expected, abs=1e-12)]


@pytest.mark.parametrize(
    "box",
    [[5, 1, 5, 4], [1, 5, 4, 5], [4, 1, 1, 4], [1, 4, 4, 1], [-1e308, -1e308, 1e308, 1e308], [0, 0, 1e-200, 1e-200]],
)
def test_degenerate_and_huge_boxes_score_zero(box):
    assert iou_reward([""], [json.dumps(box)], [[1, 1, 4, 4]]) == [0.0]
    assert iou_reward([""], ["[1, 1, 4, 4]"], [box]) == [0.0]
    assert iou_reward([""], [json.dumps(box)], [box]) == [0.0]


def test_boxes_are_mapped_from_the_models_frame_to_original_pixels():
    original, resized, thousand = (640, 480), (644, 476), (1000, 1000)
    truth = [64.0, 120.0, 320.0, 360.0]

    def forth(frame):
        return [v * frame[i % 2] / original[i % 2] for i, v in enumerate(truth)]

    assert forth(resized) == pytest.approx([64.4, 119.0, 322.0, 357.0])
    assert forth(thousand) == pytest.approx([100.0, 250.0, 500.0, 750.0])
    completions = [f"<answer>{json.dumps(forth(f))}</answer>" for f in (resized, thousand, original)]
    sizes = {"image_size": [original] * 3, "model_size": [resized, list(thousand), np.array(original)]}
    assert iou_reward([""] * 3, completions, [truth] * 3, **sizes) == pytest.approx([1.0] * 3, abs=1e-12)
    # Unmapped, the same answers miss: by a little for a resized picture, by a lot on the scale of 1000.
    unmapped = iou_reward([""] * 3, completions, [truth] * 3)
    assert unmapped[1] < 0.2 and 0.95 < unmapped[0] < 1.0 and unmapped[2] == 1.0
    # x by widths, y by heights: in a frame of 1280 x 480 only x doubles.
    halved = iou_reward(
        [""], ["[20, 10, 40, 30]"], [[10, 10, 20, 30]], image_size=[(640, 480)], model_size=[(1280, 480)]
    )
    assert halved == [1.0]


def test_solutions_and_completions_in_every_accepted_form():
    solutions = [[0, 0, 2, 2], (0.0, 0.0, 2.0, 2.0), np.array([0, 0, 2, 2]), "[0, 0, 2, 2]"]
    solutions += ["<answer> [0, 0, 2, 2] </answer>", '<answer>{"bbox_2d": [0, 0, 2, 2]}</answer>']
    solutions += [
        [{"bbox_2d": [0, 0, 2, 2], "label": "x"}],
        {"bbox": [0, 0, 2, 2]},
        [np.int64(0), 0, 2, torch.tensor(2)],
    ]
    for completion in ("[0, 0, 2, 1]", [{"role": "assistant", "content": "[0, 0, 2, 1]"}]):
        n = len(solutions)
        assert iou_reward(["q"] * n, [completion] * n, solutions, label=["x"] * n) == [0.5] * n


@pytest.mark.parametrize(
    "solution", ["no box", [1, 2, 3], [1, 2, 3, math.nan], "<answer>[1,2,3,4]", None, 7, [{"size": [1, 2, 3, 4]}]]
)
def test_a_solution_without_a_box_gets_no_opinion_not_a_zero(solution):
    with pytest.warns(UserWarning, match="solution .* is no box"):
        assert iou_reward(["", ""], ["[1, 2, 3, 4]"] * 2, [solution, [1, 2, 3, 4]]) == [None, 1.0]


def test_columns_of_another_length_and_half_a_pair_of_sizes_are_errors():
    with pytest.raises(ValueError):
        iou_reward([""] * 2, ["[1, 2, 3, 4]"] * 2, [[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="without image_size"):
        iou_reward([""], ["[1, 2, 3, 4]"], [[1, 2, 3, 4]], model_size=[(644, 476)])


# ------------------------------------------------------------------------------------ a user's own functions


def test_load_reward(tmp_path):
    assert load_reward("accuracy") == ("accuracy", iou_reward)
    assert load_reward("format") == ("format", format_reward)
    path = tmp_path / "it's my: file.py"
    path.write_text(
        "LIMIT = 3\ndef short(prompts, completions, **columns):\n    return [len(c) < LIMIT for c in completions]\n"
    )
    name, function = load_reward(f"{path}:short")
    assert name == "short"
    assert score([(name, function)], ["q"] * 2, ["ab", "abc"], {"solution": [1, 2]}) == {"short": [1.0, 0.0]}
    with pytest.raises(RewardError, match="no function long in it, but short"):
        load_reward(f"{path}:long")
    with pytest.raises(RewardError, match="no function LIMIT"):
        load_reward(f"{path}:LIMIT")
    with pytest.raises(RewardError, match="absent.py.*FileNotFoundError"):
        load_reward(f"{tmp_path}/absent.py:short")
    for spec in ("accurcy", "file.py", "file.py:", "", "file.txt:f"):
        with pytest.raises(RewardError, match="none of accuracy, format, nor path/to/file.py:function"):
            load_reward(spec)
    path.write_text("import does_not_exist_anywhere\n")
    with pytest.raises(RewardError, match="running .*does_not_exist_anywhere"):
        load_reward(f"{path}:short")


def call(function, n=3):
    return score([("mine", function)], ["q"] * n, [f"c{i}" for i in range(n)], {"x": list(range(n))})["mine"]


@pytest.mark.parametrize(
    "values",
    [
        [1, None, 0.5],
        (True, None, np.float32(0.5)),
        [np.int64(1), None, torch.tensor(0.5)],
        [np.bool_(True), None, torch.tensor([0.5])],
    ],
)
def test_score_accepts_numbers_and_none(values):
    assert call(lambda prompts, completions, x: values) == [1.0, None, 0.5]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_score_accepts_arrays(make):
    result = call(lambda prompts, completions, x: make([1.0, 0.0, 0.5]))
    assert result == [1.0, 0.0, 0.5] and all(type(v) is float for v in result)


@pytest.mark.parametrize(
    "value, kind",
    [
        (math.nan, "float"),
        (-math.inf, "float"),
        (np.float32("nan"), "float32"),
        ("1.0", "str"),
        (b"1", "bytes"),
        ([1.0], "list"),
        (1j, "complex"),
        (10**400, "int"),
        (torch.ones(2), "Tensor"),
    ],
)
def test_score_names_function_completion_and_type_of_what_is_no_number(value, kind):
    with pytest.raises(RewardError, match=rf"function mine returned .*\({kind}\) for completion 1"):
        call(lambda prompts, completions, x: [0.0, value, 0.0])


@pytest.mark.parametrize("values", [None, 1.0, "abc", {0: 1, 1: 1, 2: 1}, torch.tensor(1.0)])
def test_score_wants_a_list(values):
    with pytest.raises(RewardError, match="function mine returned .*give a list"):
        call(lambda prompts, completions, x: values)


def test_score_names_wrong_lengths_raises_and_name_clashes():
    with pytest.raises(RewardError, match=r"mine returned list \[1.0, 2.0\] for 3 completions"):
        call(lambda prompts, completions, x: [1.0, 2.0])
    with pytest.raises(RewardError, match="mine raised ZeroDivisionError.* for completion 0: 'c0'"):
        call(lambda prompts, completions, x: [1 / value for value in x])
    with pytest.raises(RewardError, match="mine raised ZeroDivisionError.* for completion 2: 'c2'"):
        call(lambda prompts, completions, x: [1 / (value - 2) for value in x])
    with pytest.raises(RewardError, match="mine raised KeyError.* together"):
        call(lambda prompts, completions, x: {1: [1.0]}[len(x)])
    with pytest.raises(RewardError, match="mine raised TypeError.*unexpected keyword argument 'x'"):
        call(lambda prompts, completions: [1.0] * 3)
    with pytest.raises(RewardError, match="two reward functions are called format"):
        score([("format", format_reward)] * 2, ["q"], ["c"], {})


def test_total_is_the_weighted_sum_and_none_adds_nothing():
    scores = {"a": [1.0, None, None, 0.5], "b": [0.5, 2.0, None, None]}
    totals = total(scores, [2.0, 3.0])
    assert totals[:2] == [3.5, 6.0] and math.isnan(totals[2]) and totals[3] == 1.0
    with pytest.raises(RewardError, match="1 reward weights for 2 reward functions"):
        total(scores, [1.0])


@pytest.mark.slow
def test_a_hundred_thousand_hostile_completions():
    """No completion of up to 8,000 characters raises, and none takes over 10 ms in the parser and both rewards:
    nothing that a policy says can slow a run down."""
    slowest = [0.0, ""]
    pieces = st.lists(st.sampled_from(PIECES + HOSTILE), max_size=80).map("".join)
    repeated = st.builds(
        lambda a, piece, n, b: a + piece * n + b, pieces, st.sampled_from(HOSTILE), st.integers(0, 80), pieces
    )
    wrapped = st.builds("<think>{}</think><answer>{}</answer>".format, pieces, st.text(st.characters(), max_size=200))

    @settings(
        max_examples=100_000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(pieces | repeated | wrapped | st.text(st.characters(), max_size=400))
    def fuzz(text):
        text, best = text[:8000], math.inf
        for _ in range(9):  # again only if slower than any other: a busy machine's pauses are not the parser's
            start = time.perf_counter()
            box = parse_box(text)
            score([("accuracy", iou_reward), ("format", format_reward)], [""], [text], {"solution": [[0, 0, 5, 5]]})
            best = min(best, time.perf_counter() - start)
            if best <= slowest[0]:
                break
        slowest[:] = max(slowest, [best, text])
        assert box is None or len(box) == 4 and all(map(math.isfinite, box))

    gc.disable()  # its pauses are not the parser's
    try:
        fuzz()
    finally:
        gc.enable()
    print(f"the slowest of 100,000: {1000 * slowest[0]:.2f} ms, {len(slowest[1])} characters")
    assert slowest[0] < 0.010, slowest
