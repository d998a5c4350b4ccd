# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Generates data for Long Range Arena's synthetic tasks and for retrieval, as parquet files.

    python examples/research/lra/make_data.py listops --output_dir data/listops
    python examples/research/lra/make_data.py pathfinder --output_dir data/pathfinder --num_proc 8
    python examples/research/lra/make_data.py retrieval --texts WIKITEXT_FOLDER IMDB_FOLDER --output_dir data/pairs

Defaults are the published sizes and rules. `retrieval` is not the arena's task but has its format: pairs of excerpts, to be
classified by whether both are from the same data set. The arena's task has papers of the ACL Anthology Network, which are
available from its authors; `run_lra.py` reads their files.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import Pool
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Features, Image, Value
from tqdm import tqdm


sys.path.append(str(Path(__file__).parents[2]))

import listops
import pathfinder
from scripting import parse_args, read_dataset, run
from transformers.hf_argparser import HfArg

from tost_hf.files import staged_file


SPLITS = ("train", "validation", "test")
BATCH = 500  # examples written at a time
PAIR_EXAMPLES = {"train": 20_000, "validation": 2_000, "test": 2_000}


@dataclass
class MakeArguments:
    """The output folder, the numbers of examples, and the seed."""

    output_dir: str = HfArg(help="The folder for train.parquet, validation.parquet and test.parquet.")
    train_examples: int | None = HfArg(default=None, help="Default: as many as published.")
    validation_examples: int | None = HfArg(default=None, help="Default: as many as published.")
    test_examples: int | None = HfArg(default=None, help="Default: as many as published.")
    seed: int = HfArg(default=0, help="The same seed gives the same examples.")
    num_proc: int = HfArg(default=1, help="Processes that draw images; does not change the examples.")

    def counts(self, published: dict[str, int]) -> dict[str, int]:
        """The number of examples of each split."""
        counts = {split: getattr(self, f"{split}_examples") for split in SPLITS}
        return {split: published[split] if count is None else count for split, count in counts.items()}


@dataclass
class PairRules:
    """The data sets that pairs are made from, and the size of the excerpts."""

    texts: list[str] = HfArg(help="Two or more data sets, folders or Hub ids, with a column text and training and test data.")
    excerpt: int = HfArg(default=4_000, help="Characters of an excerpt.")


def write_split(folder: Path, split: str, features: Features, examples: Iterable[dict], count: int) -> None:
    """Writes the first `count` examples to the split's file, a few hundred at a time; no file if it is 0."""
    if not count:
        return
    examples = islice(examples, count)
    with staged_file(folder / f"{split}.parquet") as file, pq.ParquetWriter(file, features.arrow_schema) as writer:
        with tqdm(total=count, desc=split, unit="examples") as bar:
            while batch := [features.encode_example(x) for x in islice(examples, BATCH)]:
                writer.write_table(pa.Table.from_pylist(batch, schema=features.arrow_schema))
                bar.update(len(batch))


def make_listops(args: MakeArguments, rules: listops.ListOpsRules) -> None:
    features = Features({"Source": Value("string"), "Target": Value("int64"), "length": Value("int64")})
    examples = listops.generate_expressions(rules, args.seed)  # one iterator, so that no two splits share an expression
    for split, count in args.counts(listops.PUBLISHED_EXAMPLES).items():
        write_split(Path(args.output_dir), split, features, examples, count)


def make_pathfinder(args: MakeArguments, rules: pathfinder.PathfinderRules) -> None:
    features = Features({"image": Image(), "label": ClassLabel(names=["different paths", "same path"])})
    with Pool(args.num_proc) as pool:
        for split_index, (split, count) in enumerate(args.counts(pathfinder.PUBLISHED_EXAMPLES).items()):
            make = partial(pathfinder.make_example, rules, args.seed, split_index)
            write_split(Path(args.output_dir), split, features, pool.imap(make, range(count), chunksize=16), count)


def make_pairs(args: MakeArguments, rules: PairRules) -> None:
    names = ("label", "id1", "id2", "text1", "text2")
    features = Features({name: Value("int64" if name == "label" else "string") for name in names})
    datasets = {name: read_dataset(name) for name in rules.texts}
    for split, count in args.counts(PAIR_EXAMPLES).items():
        texts = ["\n".join(splits[split]["text"]) for splits in datasets.values()] if count else []
        examples = draw_pairs(texts, rules.excerpt, random.Random(f"{args.seed} {split}"))
        write_split(Path(args.output_dir), split, features, examples, count)


def draw_pairs(texts: list[str], size: int, rng: random.Random) -> Iterator[dict]:
    """Yields pairs of excerpts of `size` characters, equally often from one text (label 1) and from two (0)."""
    while True:
        label = rng.randrange(2)
        first_index = rng.randrange(len(texts))
        second_index = first_index if label else rng.choice([i for i in range(len(texts)) if i != first_index])
        starts = [rng.randrange(len(texts[i]) - size + 1) for i in (first_index, second_index)]
        first, second = (texts[i][start : start + size] for i, start in zip((first_index, second_index), starts))
        yield {
            "label": label,
            "id1": f"{first_index}:{starts[0]}",
            "id2": f"{second_index}:{starts[1]}",
            "text1": first,
            "text2": second,
        }


TASKS = {
    "listops": (make_listops, listops.ListOpsRules),
    "pathfinder": (make_pathfinder, pathfinder.PathfinderRules),
    "retrieval": (make_pairs, PairRules),
}


def main(args: list[str] | None = None) -> None:
    task, *options = (sys.argv[1:] if args is None else args) or [""]
    if task in ("-h", "--help"):
        parse_args([task], MakeArguments, *(rules for _, rules in TASKS.values()), description=__doc__)
    if task not in TASKS:
        raise ValueError(f"Which data? Give one of {', '.join(TASKS)} first, then its options; --help lists them.")
    make, rules = TASKS[task]
    make(*parse_args(options, MakeArguments, rules, description=__doc__))


if __name__ == "__main__":
    run(main)
