"""Long Range Arena's generators: labels match a second implementation, lengths and class balance the published data."""

import random
import statistics
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datasets import load_dataset
from scipy import ndimage


sys.path.append(str(Path(__file__).parents[1] / "examples" / "research" / "lra"))

import listops
import lra_tasks
import make_data
import pathfinder


FUNCTIONS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: int(str(sum(x))[-1])}


def evaluate(tokens: list[str]) -> int:
    """Evaluates ListOps tokens without parentheses, independently of listops.py: with a stack and Python's median."""
    stack = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token == "]":
            operator, *values = stack.pop()
            stack[-1].append(FUNCTIONS[operator](values))
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value


def remove_parentheses(tokens: list[str]) -> list[str]:
    """Removes the parentheses of the published form `( ( ( [MAX 2 ) 9 ) ] )`, of which each pair encloses two items."""
    stack = [[]]
    for token in tokens:
        if token == "(":
            stack.append([])
        elif token == ")":
            first, second = stack.pop()
            stack[-1].append(first + second)
        else:
            stack[-1].append([token])
    ((inner_tokens,),) = stack
    return inner_tokens


def test_listops_expressions():
    rules, examples = listops.ListOpsRules(), []
    for example, _ in zip(listops.generate_expressions(rules, seed=0), range(1000)):
        tokens = [token for token in example["Source"].split() if token not in "()"]
        assert remove_parentheses(example["Source"].split()) == tokens
        assert evaluate(tokens) == example["Target"]
        assert len(tokens) == example["length"] and 500 < example["length"] < 2000
        examples.append(example)
    assert len({example["Source"] for example in examples}) == 1000
    fractions = {label: count / 1000 for label, count in Counter(example["Target"] for example in examples).items()}
    assert all(0.13 < fractions[label] < 0.21 for label in (0, 9))  # in the published data: about 17 %
    assert all(0.05 < fractions[label] < 0.12 for label in range(1, 9))
    operators = Counter(token for example in examples for token in example["Source"].split() if token.startswith("["))
    assert set(operators) == set(listops.OPERATORS)
    assert all(0.22 < count / sum(operators.values()) < 0.28 for count in operators.values())


# Pathfinder -----------------------------------------------------------------------------------------------------------

SCALE = 8  # resolution of the pictures in which paths are followed, relative to a model's


def find_dash_ends(picture: np.ndarray) -> np.ndarray:
    """Both ends of every dash, (dashes, 2, 2), from the principal axis of each connected component of bright pixels."""
    components, count = ndimage.label(picture > 60, np.ones((3, 3)))
    ends = []
    for label in range(1, count + 1):
        pixels = np.argwhere(components == label)
        center = (pixels.min(0) + pixels.max(0)) / 2
        axis = np.linalg.svd(pixels - pixels.mean(0), full_matrices=False)[2][0]
        projections = (pixels - center) @ axis
        ends.append([center + projections.min() * axis, center + projections.max() * axis])
    return np.array(ends)


def follow_path(picture: np.ndarray, marked_picture: np.ndarray, rules: pathfinder.PathfinderRules) -> tuple[int, int]:
    """Whether one path connects both markers, and its number of dashes, from large pictures without and with markers."""
    ends = find_dash_ends(picture)
    axes = ends - ends[:, ::-1]
    joints = ends + rules.margin * SCALE * axes / np.linalg.norm(axes, axis=-1, keepdims=True)
    y, x = np.indices(marked_picture.shape)
    radius = 0.95 * rules.marker_radius * SCALE
    fill_ratios = [
        [(marked_picture[(y - end[0]) ** 2 + (x - end[1]) ** 2 < radius**2] > 60).mean() for end in pair] for pair in ends
    ]
    marked_ends = np.argsort(np.ravel(fill_ratios))[-2:]
    (dash, side), goal = divmod(marked_ends[0], 2), divmod(marked_ends[1], 2)
    visited = {dash}
    while True:
        side = 1 - side
        distances = np.linalg.norm(joints - joints[dash, side], axis=-1)
        distances[list(visited)] = np.inf
        nearest = np.unravel_index(distances.argmin(), distances.shape)
        if distances[nearest] > 0.4 * SCALE:
            return int((dash, side) == goal), len(visited)
        dash, side = nearest
        visited.add(dash)


def test_pathfinder_scenes():
    """Following the path in the picture confirms each scene's dashes and label; the classes are balanced."""
    count, rules, num_correct, labels = 30, pathfinder.PathfinderRules(), 0, []
    for index in range(count):
        scene = pathfinder.make_scene(np.random.default_rng((7, index)), rules)
        pictures = [pathfinder.draw(scene, rules, scale=SCALE, marked=marked) for marked in (False, True)]
        num_correct += follow_path(*pictures, rules) == (scene.label, rules.dashes)
        labels.append(scene.label)
        assert [len(path) for path in scene.paths[:2]] == [14, 14]
        assert all(len(path) == 4 for path in scene.paths[2:]) and len(scene.paths) <= 7
        distance = np.linalg.norm(scene.paths[0][0, 0] - scene.paths[1][0, 0])
        assert distance == pytest.approx(rules.seed_distance)
    assert num_correct == count
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / count**0.5


# Files ----------------------------------------------------------------------------------------------------------------

COUNTS = ["--train_examples", "12", "--validation_examples", "3", "--test_examples", "4"]
SMALL = {
    "listops": ["--min_length", "5", "--max_length", "40"],
    "pathfinder": ["--side", "16", "--dashes", "3", "--seed_distance", "3", "--distractors", "1", "--num_proc", "2"],
    "retrieval": ["--excerpt", "20"],
}


@pytest.fixture
def text_folders(tmp_path):
    """Folders of two text data sets, one of letters and one of digits."""
    for name, characters in (("letters", "abcdef "), ("digits", "0123456 ")):
        (tmp_path / name).mkdir()
        for split in ("train", "validation", "test"):
            text = "".join(random.Random(f"{name} {split}").choices(characters, k=400))
            (tmp_path / name / f"{split}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    return [str(tmp_path / "letters"), str(tmp_path / "digits")]


@pytest.mark.parametrize("task", SMALL)
def test_files_are_read_by_datasets_and_by_the_task(tmp_path, text_folders, task):
    text_args = ["--texts", *text_folders] if task == "retrieval" else []
    for folder in ("one", "two"):
        make_data.main([task, "--output_dir", str(tmp_path / folder), *COUNTS, *SMALL[task], *text_args])
    splits = load_dataset(str(tmp_path / "one"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 12, "validation": 3, "test": 4}
    for split in splits:  # the same seed writes the same bytes
        assert (tmp_path / "one" / f"{split}.parquet").read_bytes() == (tmp_path / "two" / f"{split}.parquet").read_bytes()
    task_splits = lra_tasks.load_splits(str(tmp_path / "one"), lra_tasks.TASKS[task], cache_dir=str(tmp_path / "cache"))
    examples = lra_tasks.Examples(task_splits["train"], lra_tasks.TASKS[task], 256)
    examples.check_labels(10)
    for example, stored in zip(examples, splits["train"]):
        if task == "retrieval":
            kinds = {stored[name].replace(" ", "").isdigit() for name in ("text1", "text2")}
            assert example["labels"] == (len(kinds) == 1) and len(example["other_input_ids"]) == 20
        elif task == "pathfinder":
            assert [x - 1 for x in example["input_ids"]] == list(stored["image"].tobytes())
        else:
            assert [listops.TOKENS[x - 1] for x in example["input_ids"]] == remove_parentheses(stored["Source"].split())
