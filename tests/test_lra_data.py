"""Long Range Arena's generators: what they make is evaluated by other means, and is as published in length and balance."""

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


MEANINGS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: int(str(sum(x))[-1])}


def value_of(tokens: list[str]) -> int:
    """A second evaluator of ListOps, of tokens without parentheses: with a stack, and by Python's own median."""
    stack = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token == "]":
            operator, *values = stack.pop()
            stack[-1].append(MEANINGS[operator](values))
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value


def parsed(tokens: list[str]) -> list[str]:
    """Tokens of the published form `( ( ( [MAX 2 ) 9 ) ] )` as those within its parentheses; each pair holds two things."""
    stack = [[]]
    for token in tokens:
        if token == "(":
            stack.append([])
        elif token == ")":
            left, right = stack.pop()
            stack[-1].append(left + right)
        else:
            stack[-1].append([token])
    ((found,),) = stack
    return found


def test_a_thousand_expressions():
    rules, examples = listops.ListOpsRules(), []
    for example, _ in zip(listops.expressions(rules, seed=0), range(1000)):
        tokens = [token for token in example["Source"].split() if token not in "()"]
        assert parsed(example["Source"].split()) == tokens
        assert value_of(tokens) == example["Target"]
        assert len(tokens) == example["length"] and 500 < example["length"] < 2000
        examples.append(example)
    assert len({example["Source"] for example in examples}) == 1000
    share = {label: count / 1000 for label, count in Counter(example["Target"] for example in examples).items()}
    assert all(0.13 < share[label] < 0.21 for label in (0, 9))  # of the published kind: about 17 %
    assert all(0.05 < share[label] < 0.12 for label in range(1, 9))
    operators = Counter(token for example in examples for token in example["Source"].split() if token.startswith("["))
    assert set(operators) == set(listops.OPERATORS)
    assert all(0.22 < count / sum(operators.values()) < 0.28 for count in operators.values())


# Pathfinder -----------------------------------------------------------------------------------------------------------

SCALE = 8  # how much finer than a model's picture the one is in which paths are followed


def ends_in_picture(picture: np.ndarray) -> np.ndarray:
    """Both ends of every dash, (dashes, 2, 2), by the principal axis of each connected patch of bright pixels."""
    patches, count = ndimage.label(picture > 60, np.ones((3, 3)))
    found = []
    for number in range(1, count + 1):
        pixels = np.argwhere(patches == number)
        centre = (pixels.min(0) + pixels.max(0)) / 2
        axis = np.linalg.svd(pixels - pixels.mean(0), full_matrices=False)[2][0]
        along = (pixels - centre) @ axis
        found.append([centre + along.min() * axis, centre + along.max() * axis])
    return np.array(found)


def follow(picture: np.ndarray, marked: np.ndarray, rules: pathfinder.PathfinderRules) -> tuple[int, int]:
    """Whether both marked ends are of one path, and its dashes, found in a fine picture without and with its marks."""
    ends = ends_in_picture(picture)
    axes = ends - ends[:, ::-1]
    joints = ends + rules.margin * SCALE * axes / np.linalg.norm(axes, axis=-1, keepdims=True)
    y, x = np.indices(marked.shape)
    radius = 0.95 * rules.marker_radius * SCALE
    filled = [[(marked[(y - end[0]) ** 2 + (x - end[1]) ** 2 < radius**2] > 60).mean() for end in pair] for pair in ends]
    best = np.argsort(np.ravel(filled))[-2:]
    (dash, side), goal = divmod(best[0], 2), divmod(best[1], 2)
    steps = {dash}
    while True:
        side = 1 - side
        distances = np.linalg.norm(joints - joints[dash, side], axis=-1)
        distances[list(steps)] = np.inf
        nearest = np.unravel_index(distances.argmin(), distances.shape)
        if distances[nearest] > 0.4 * SCALE:
            return int((dash, side) == goal), len(steps)
        dash, side = nearest
        steps.add(dash)


def test_paths_are_followed_in_the_picture():
    """Markers, dashes and label of every scene are what following the path finds, and the classes are balanced."""
    count, rules, right, labels = 60, pathfinder.PathfinderRules(), 0, []
    for number in range(count):
        scene = pathfinder.make_scene(np.random.default_rng((7, number)), rules)
        fine = [pathfinder.draw(scene, rules, scale=SCALE, marked=marked) for marked in (False, True)]
        right += follow(*fine, rules) == (scene.label, rules.dashes)
        labels.append(scene.label)
        assert [len(path) for path in scene.paths[:2]] == [14, 14]
        assert all(len(path) == 4 for path in scene.paths[2:]) and len(scene.paths) <= 7
        distance = np.linalg.norm(scene.paths[0][0, 0] - scene.paths[1][0, 0])
        assert distance == pytest.approx(rules.seed_distance)
    assert right == count
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / count**0.5


# Files ----------------------------------------------------------------------------------------------------------------

COUNTS = ["--train_examples", "12", "--validation_examples", "3", "--test_examples", "4"]
SMALL = {
    "listops": ["--min_length", "5", "--max_length", "40"],
    "pathfinder": ["--side", "16", "--dashes", "3", "--seed_distance", "3", "--distractors", "1", "--num_proc", "2"],
    "retrieval": ["--excerpt", "20"],
}


@pytest.fixture
def texts(tmp_path):
    """Two data sets of texts, one of letters and one of digits."""
    for name, characters in (("letters", "abcdef "), ("digits", "0123456 ")):
        (tmp_path / name).mkdir()
        for split in ("train", "validation", "test"):
            text = "".join(random.Random(f"{name} {split}").choices(characters, k=400))
            (tmp_path / name / f"{split}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    return [str(tmp_path / "letters"), str(tmp_path / "digits")]


@pytest.mark.parametrize("task", SMALL)
def test_files_are_read_by_datasets_and_by_the_task(tmp_path, texts, task):
    own = ["--texts", *texts] if task == "retrieval" else []
    for folder in ("one", "two"):
        make_data.main([task, "--output_dir", str(tmp_path / folder), *COUNTS, *SMALL[task], *own])
    splits = load_dataset(str(tmp_path / "one"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(part) for split, part in splits.items()} == {"train": 12, "validation": 3, "test": 4}
    for split in splits:  # the same seed, the same bytes
        assert (tmp_path / "one" / f"{split}.parquet").read_bytes() == (tmp_path / "two" / f"{split}.parquet").read_bytes()
    found = lra_tasks.load_splits(str(tmp_path / "one"), lra_tasks.TASKS[task], cache_dir=str(tmp_path / "cache"))
    examples = lra_tasks.Examples(found["train"], lra_tasks.TASKS[task], 256)
    examples.check_labels(10)
    for example, stored in zip(examples, splits["train"]):
        if task == "retrieval":
            kinds = {stored[name].replace(" ", "").isdigit() for name in ("text1", "text2")}
            assert example["labels"] == (len(kinds) == 1) and len(example["other_input_ids"]) == 20
        elif task == "pathfinder":
            assert [x - 1 for x in example["input_ids"]] == list(stored["image"].tobytes())
        else:
            assert [listops.TOKENS[x - 1] for x in example["input_ids"]] == parsed(stored["Source"].split())
