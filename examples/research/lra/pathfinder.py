# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Pathfinder of Long Range Arena: do two marked ends belong to one dashed path? Reimplemented from the published rules.

Two long paths of dashes start at a given distance from each other; short paths are scattered between them as distractors. A
path continues after a gap from the end of its last dash, in a direction sampled with weight cos^2(continuity * turn) from
those that are free: a dash must be clear of all others except the one before it. (At a dead end both paths backtrack a few
dashes; the published program restarts.) A disc marks a path's first end, another the last end of the same path (label 1) or of
the other one (label 0). Coordinates are real numbers here, while the published program rounds them to pixels; as there, an
image is drawn at twice its size and downscaled.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw


PUBLISHED_EXAMPLES = {"train": 160_000, "validation": 20_000, "test": 20_000}
DIRECTIONS = np.arange(36) * (2 * math.pi / 36)
MIN_WEIGHT = 1e-4  # of a direction
MAX_DISTRACTOR_TRIALS = 20  # paths tried before a distractor is omitted
MAX_STEPS_PER_DASH = 6  # before both paths are restarted
BACKTRACK_DASHES = 3  # that both paths lose at a dead end
POINTS_PER_DASH = 4  # between which distances of dashes are measured


@dataclass
class PathfinderRules:
    """Sizes in pixels; the defaults are those of Long Range Arena's Pathfinder-32, at the hard level of 14 dashes."""

    side: int = 32
    dashes: int = 14
    dash_length: float = 2.0
    thickness: float = 0.5
    margin: float = 1.0  # around every dash; two of them are the gap within a path
    padding: float = 1.0  # at the picture's edges
    seed_distance: float = 7.0
    continuity: float = 1.0
    marker_radius: float = 1.5
    distractor_dashes: int = 4
    distractors: int = 5
    contrast: float = 1.5

    def __post_init__(self):
        if 2 * self.seed_distance >= self.side / 2:
            raise ValueError("No path can start twice seed_distance from all edges: lower it, or make the picture larger.")


@dataclass
class Scene:
    """A scene: paths (distractors last), each (dashes, 2 ends, 2) of y and x; two marked points; the label."""

    paths: list[np.ndarray]
    markers: np.ndarray
    label: int


def _step(directions: np.ndarray | float, length: float) -> np.ndarray:
    return length * np.stack([np.sin(directions), np.cos(directions)], -1)


def _sample_points(dashes: np.ndarray) -> np.ndarray:
    """Points along dashes (..., 2 ends, 2): (..., POINTS_PER_DASH, 2)."""
    tails, heads = dashes[..., None, 0, :], dashes[..., None, 1, :]
    return tails + np.linspace(0, 1, POINTS_PER_DASH)[:, None] * (heads - tails)


def _is_clear(dashes: np.ndarray, others: list[np.ndarray], rules: PathfinderRules) -> np.ndarray:
    """Whether each of the dashes (N, 2, 2) is within the image and clear of all the others, (N,)."""
    low, high = rules.padding, rules.side - 1 - rules.padding
    is_clear = ((dashes >= low) & (dashes <= high)).all((1, 2))
    if others and is_clear.any():
        points, other_points = _sample_points(dashes[is_clear]), _sample_points(np.stack(others)).reshape(-1, 2)
        squared_distances = ((points[:, :, None] - other_points) ** 2).sum(-1).min((1, 2))
        is_clear[is_clear] = squared_distances >= (2 * rules.margin + rules.thickness) ** 2
    return is_clear


def make_scene(rng: np.random.Generator, rules: PathfinderRules) -> Scene:
    """A scene; restarts until both long paths fit."""
    label, start = int(rng.integers(2)), int(rng.integers(2))
    while (paths := _make_paths(rng, rules)) is None:
        pass
    end = start if label else 1 - start
    markers = np.stack([paths[start][0][0], paths[end][-1][1]])
    for _ in range(rules.distractors):
        path = _make_distractor(rng, rules, [dash for path in paths for dash in path])
        if path is not None:
            paths.append(path)
    return Scene([np.stack(path) for path in paths], markers, label)


def _make_paths(rng: np.random.Generator, rules: PathfinderRules) -> list[list[np.ndarray]] | None:
    """Two paths that grow alternately from points at `seed_distance`; None if they do not fit."""
    first = rng.uniform(2 * rules.seed_distance, rules.side - 1 - 2 * rules.seed_distance, 2)
    points = first, first + _step(rng.choice(DIRECTIONS), rules.seed_distance)
    one, two = ([np.stack([point, point + _step(rng.choice(DIRECTIONS), rules.dash_length)])] for point in points)
    if not (_is_clear(np.stack(one), two, rules)[0] and _is_clear(np.stack(two), one, rules)[0]):
        return None
    for _ in range(MAX_STEPS_PER_DASH * rules.dashes):
        path, other = (one, two) if len(one) <= len(two) else (two, one)
        if len(path) == rules.dashes:
            return [one, two]
        if not _extend(rng, rules, path, other):
            for blocked_path in (one, two):
                del blocked_path[max(1, len(blocked_path) - BACKTRACK_DASHES) :]
    return None


def _extend(rng: np.random.Generator, rules: PathfinderRules, path: list, others: list) -> bool:
    """Adds a dash at the path's end, clear of all others and of this path except its last dash; returns whether it fits."""
    tail, head = path[-1]
    heading = math.atan2(*(head - tail))
    turns = np.abs((DIRECTIONS - heading + math.pi) % (2 * math.pi) - math.pi)
    weights = np.cos(np.minimum(turns * rules.continuity, math.pi / 2)) ** 2
    starts = head + _step(heading, rules.margin) + _step(DIRECTIONS, rules.margin)
    dashes = np.stack([starts, starts + _step(DIRECTIONS, rules.dash_length)], 1)
    is_forward = weights > MIN_WEIGHT
    weights[~is_forward] = 0
    weights[is_forward] *= _is_clear(dashes[is_forward], [*others, *path[:-1]], rules)
    if not weights.any():
        return False
    path.append(dashes[rng.choice(len(dashes), p=weights / weights.sum())])
    return True


def _make_distractor(rng: np.random.Generator, rules: PathfinderRules, others: list) -> list[np.ndarray] | None:
    for _ in range(MAX_DISTRACTOR_TRIALS):
        point = rng.uniform(rules.padding, rules.side - 1 - rules.padding, 2)
        path = [np.stack([point, point + _step(rng.choice(DIRECTIONS), rules.dash_length)])]
        if not _is_clear(np.stack(path), others, rules)[0]:
            continue
        if all(_extend(rng, rules, path, others) for _ in range(rules.distractor_dashes - 1)):
            return path
    return None


def draw(scene: Scene, rules: PathfinderRules, scale: int = 1, marked: bool = True) -> np.ndarray:
    """The image, (side * scale, side * scale) of bytes; a larger `scale` draws the same scene at a higher resolution."""
    pixel_scale = 2 * scale
    image = Image.new("L", (rules.side * pixel_scale,) * 2)
    pen = ImageDraw.Draw(image)
    width = max(1, round(rules.thickness * pixel_scale))
    for dash in np.concatenate(scene.paths):
        pen.line([(x * pixel_scale, y * pixel_scale) for y, x in dash], fill=255, width=width)
    lines = _downscale(image, rules.side * scale) * rules.contrast
    if marked:
        image = Image.new("L", image.size)
        pen = ImageDraw.Draw(image)
        for y, x in scene.markers * pixel_scale:
            radius = rules.marker_radius * pixel_scale
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        lines = np.maximum(lines, _downscale(image, rules.side * scale))
    return (255 * lines / max(lines.max(), 1e-9)).round().astype(np.uint8)


def _downscale(image: Image.Image, side: int) -> np.ndarray:
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS), dtype=float) / 255


def make_example(rules: PathfinderRules, seed: int, split: int, number: int) -> dict:
    """An example, `image` and `label`, determined by (seed, split, number)."""
    scene = make_scene(np.random.default_rng((seed, split, number)), rules)
    return {"image": Image.fromarray(draw(scene, rules)), "label": scene.label}
