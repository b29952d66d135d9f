"""Rewards: what a completion is worth, and the one parser that reads boxes out of answers.

A reward function has the signature of TRL and VLM-R1, `fn(prompts, completions, **columns) -> list[float | None]`, with
one entry a completion in every argument; columns are the records' fields, None says "no opinion". `--reward_funcs
accuracy format` are the two below; `--reward_funcs path/to/file.py:function` takes your own, called by keyword.
Left out: rewards that call a model or a service (write a function), clipping and shaping.
"""

import json
import math
import re
import reprlib
import runpy
import warnings


class RewardError(ValueError):
    """A reward function that cannot be loaded, that raised, or that returned something which is no reward."""


# A completion is whatever a model sampled: hostile text. json.loads recurses (ten thousand brackets raise), refuses
# integers of over 4300 digits, takes NaN and, tried anew at every bracket, needs time quadratic in the text. In these
# patterns no two neighbouring repeats match the same character, so a failed match has only one way back: linear.
STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
NUMBER = r"[+-]?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
FOUR_NUMBERS = re.compile(rf"\[\s*{NUMBER}\s*(?:,\s*{NUMBER}\s*){{3}}\]")
BRACKET = re.compile(r"[\[{]")
# One step inside an open bracket: (comma, closing bracket, key, number, opening bracket), None where absent.
STEP = re.compile(
    rf"\s*(?:(,)\s*)?(?:([\]}}])|(?:({STRING})\s*:\s*)?(?:({NUMBER})|([\[{{])|{STRING}|true|false|null))", re.DOTALL
)


def parse_box(text):
    """The first JSON box (x1, y1, x2, y2) in the one <answer> block of `text`, as floats, or None.

    Without any answer tag the whole text is searched, so that a base model can be evaluated; several blocks, or one
    that does not open or close, are None. A box is a list of exactly four finite numbers, by itself or inside other
    lists, or under the key bbox_2d, bbox or box of an object, but no other key. The numbers are returned as written, in
    the model's frame (see `iou_reward`); x1 < x2 is not required. Never raises, and takes time linear in the text.
    """
    opened, closed = text.count("<answer>"), text.count("</answer>")
    if opened == closed == 0:
        return _first_box(text)
    start, end = text.find("<answer>") + len("<answer>"), text.find("</answer>")
    return _first_box(text[start:end]) if opened == closed == 1 and start <= end else None


def _first_box(text):
    """Walk the text once. At a bracket, follow JSON for as long as the text is JSON; where it stops being so,
    forget the open brackets and look for the next one from there, never from further back."""
    if not FOUR_NUMBERS.search(text):  # most text without a box ends here, a hundred times faster than by walking
        return None
    position, stack = 0, []  # open brackets: (bracket, its values so far, may a list in it be the box?)
    while True:
        if not stack:
            found = BRACKET.search(text, position)
            if found is None:
                return None
            stack.append((found[0], [], True))
            position = found.end()
        bracket, values, may_be_box = stack[-1]
        step = STEP.match(text, position)
        comma, close, key, number, opened = step.groups() if step else [None] * 5
        if close:
            is_json = not comma and bracket + close in ("[]", "{}")
        else:
            is_json = step and (comma is not None) == (values != []) and (key is not None) == (bracket == "{")
        if not is_json:
            stack.clear()
            continue
        position = step.end()
        if close:
            if close == "]" and may_be_box and len(values) == 4 and all(map(math.isfinite, values)):
                return tuple(values)
            stack.pop()
            continue
        values.append(float(number) if number else math.nan)  # NaN stands for what is no number: not finite
        if opened:
            stack.append((opened, [], key[1:-1] in ("bbox_2d", "bbox", "box") if key else may_be_box))


def iou_reward(prompts, completions, solution, image_size=None, model_size=None, **columns):
    """Intersection over union of the answered box and the true one, in [0, 1]; 0.0 without a box.

    `solution` is in pixels of the original picture; the completion's numbers are in the model's frame: Qwen2.5-VL
    answers in pixels of the resized picture that it saw (its grid times 14), Qwen2-VL and Qwen3-VL on a scale of 0 to
    1000. `model_size` is that frame's (width, height) for each completion, `image_size` the original's: x is scaled by
    width / width, y by height / height. Where `model_size` is None the answer is in original pixels already.

    Boxes are continuous (x2 - x1 is the width, no + 1); x2 <= x1 or y2 <= y1 scores 0.0. A solution is a JSON value
    with a box, or its text, also in answer tags; one without is no bad answer but another task's, or a fault in the
    data: None, and a warning.
    """
    image_sizes = [None] * len(completions) if image_size is None else image_size
    model_sizes = [None] * len(completions) if model_size is None else model_size
    rewards = []
    for completion, truth, original, frame in zip(completions, solution, image_sizes, model_sizes, strict=True):
        truth = _true_box(truth)
        if truth is None:
            rewards.append(None)
            continue
        box = parse_box(completion_text(completion))
        if box is not None and frame is not None:
            if original is None:
                raise ValueError(f"model_size {frame} without image_size: give both, or neither")
            x, y = float(original[0]) / float(frame[0]), float(original[1]) / float(frame[1])
            box = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        rewards.append(0.0 if box is None else _iou(box, truth))
    return rewards


def format_reward(prompts, completions, **columns):
    """1.0 for one <think> block, then one <answer> block with more than white space, and only that around; else 0.0."""
    rewards = []
    for text in map(completion_text, completions):
        # One of each tag, counted first, leaves the pattern a single place to match: linear, and no nesting.
        once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        blocks = once and re.fullmatch(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", text, re.DOTALL)
        rewards.append(1.0 if blocks and blocks[1].strip() else 0.0)
    return rewards


def completion_text(completion):
    """The text of a completion: a string, or TRL's chat style [{"role": ..., "content": text}]."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _true_box(solution):
    text = solution if isinstance(solution, str) else json.dumps(solution, default=lambda array: array.tolist())
    box = parse_box(text)
    if box is None:  # said once a solution; a run of days does not end over one record
        warnings.warn(
            f"solution {reprlib.repr(solution)} is no box: accuracy has no opinion on its answers", stacklevel=2
        )
    return box


def _iou(a, b):
    if a[2] <= a[0] or a[3] <= a[1] or b[2] <= b[0] or b[3] <= b[1]:
        return 0.0
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    overlap = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
    return overlap / union if 0.0 < union < math.inf else 0.0  # 1e200 squared is inf, 1e-200 squared is 0


BUILT_IN = {"accuracy": iou_reward, "format": format_reward}


def load_reward(spec):
    """(name, function) for "accuracy", "format" or "path/to/file.py:function", whose file is run; or RewardError."""
    if spec in BUILT_IN:
        return spec, BUILT_IN[spec]
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise RewardError(f"reward function {spec!r} is none of {', '.join(BUILT_IN)}, nor path/to/file.py:function")
    try:
        found = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # whatever a user's file raises, FileNotFoundError among it
        raise RewardError(f"reward function {spec!r}: running {path} raised {error!r}; correct it") from error
    function = found.get(name)
    if not callable(function):
        names = ", ".join(key for key, value in found.items() if callable(value) and not key.startswith("_"))
        raise RewardError(f"reward function {spec!r}: no function {name} in it, but {names or 'none'}")
    return name, function


def score(reward_funcs, prompts, completions, columns):
    """Call every (name, function) of `reward_funcs` on all completions: {name: list[float | None]}.

    Raises RewardError, naming function and completion, where one raises or does not return finite numbers or None.
    """
    scores = {}
    for name, function in reward_funcs:
        if name in scores:
            raise RewardError(f"two reward functions are called {name}: rename one, metrics are logged by name")
        try:
            values = function(prompts=list(prompts), completions=list(completions), **columns)
            values = values.tolist() if hasattr(values, "tolist") else values  # numpy and torch
        except (Exception, SystemExit) as error:
            if str(error).startswith("DataLoader worker"):  # PyTorch raises it in whatever runs when one is killed
                raise
            culprit = _first_raising(function, prompts, completions, columns)
            raise RewardError(f"reward function {name} raised {error!r} for {culprit}") from error
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            returned = f"{type(values).__name__} {reprlib.repr(values)} for {len(completions)} completions"
            raise RewardError(f"reward function {name} returned {returned}: give a list, one number or None for each")
        scores[name] = [_number(name, index, value) for index, value in enumerate(values)]
    return scores


def _number(name, index, value):
    try:
        finite = (
            value is None or math.isfinite(value) and abs(value) <= 1e30
        )  # bool, numpy and torch scalars too; float32 ends at 3e38
    except (TypeError, ValueError, OverflowError, RuntimeError):
        finite = False
    if not finite:
        returned = f"{reprlib.repr(value)} ({type(value).__name__}) for completion {index}"
        raise RewardError(
            f"reward function {name} returned {returned}: give a number within 1e30, or None for no opinion"
        )
    return None if value is None else float(value)


def _first_raising(function, prompts, completions, columns):
    """For the message only: call a function that raised on one completion at a time, to say which one it was."""
    for i, completion in enumerate(completions):
        try:
            one = {key: column[i : i + 1] for key, column in columns.items()}
            function(prompts=prompts[i : i + 1], completions=[completion], **one)
        except (Exception, SystemExit):
            return f"completion {i}: {reprlib.repr(completion)}"
    return f"the {len(completions)} completions together, though for none of them alone"


def total(scores, weights):
    """Weighted sum over the functions of `score`, in order, a float a completion; None adds nothing, NaN if all are."""
    if len(weights) != len(scores):
        raise RewardError(f"{len(weights)} reward weights for {len(scores)} reward functions ({', '.join(scores)})")
    totals = []
    for row in zip(*scores.values(), strict=True):
        given = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
        totals.append(sum(given) if given else math.nan)
    return totals
