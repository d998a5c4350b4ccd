# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training text: finds its files, trains tokenizers, packs tokens into blocks before training or streams them during it."""

import glob
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from datasets import Dataset, Features, List, Value, load_from_disk
from scripting import COMPRESSION_EXTENSIONS, LOADERS, check_limits, file_extension, read_dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.hf_argparser import HfArg

from tost_hf.training.streams import PackedStream, select_texts


END_OF_TEXT = "<|endoftext|>"
FINGERPRINT_TEXT = "  Tokens, 1 2 34:\n\tÄpfel & def f(x): # tost\n"
TEXT_FORMATS = f"{', '.join(LOADERS)}, also compressed: {', '.join(COMPRESSION_EXTENSIONS)}"


@dataclass
class TextArguments:
    """Which text, and how it is tokenized."""

    dataset_name: str | None = HfArg(default=None, help="The dataset, a Hub id or a folder.")
    dataset_config_name: str | None = HfArg(default=None, help="The configuration of the dataset.")
    train_file: list[str] | None = HfArg(
        default=None,
        help=f"The training text: files of one kind ({TEXT_FORMATS}), patterns such as 'data/*.jsonl.gz', folders of "
        "them, or a folder that prepare_tokens.py wrote.",
    )
    text_column: str | None = HfArg(default=None, help="The column with the text. Default: 'text', or the only column.")
    block_size: int | None = HfArg(default=None, help="Tokens of one block. Default: the model's maximum, up to 1,024.")
    add_eos_token: bool | None = HfArg(
        default=None,
        help="Whether to end each example with the tokenizer's eos token. Default: yes, as an example is a document, "
        "but not for txt, where it is a line; there, write the eos token's text between documents yourself.",
        metadata={"nargs": "?", "const": True},
    )
    keep_linebreaks: bool = HfArg(default=True, help="Whether to keep the line breaks of txt files.")

    def __post_init__(self):
        self.train_file = expand_files(self.train_file)


@dataclass
class DataTrainingArguments(TextArguments):
    """Which text, and how it is packed into blocks."""

    validation_file: list[str] | None = HfArg(default=None, help="The validation text, of the same kinds.")
    validation_split_percentage: int = HfArg(
        default=5, help="The percentage of training examples to hold out if there is no validation text."
    )
    max_train_samples: int | None = HfArg(default=None, help="The maximum number of training blocks.")
    max_eval_samples: int | None = HfArg(default=None, help="The maximum number of validation blocks.")
    streaming: bool = HfArg(default=False, help="Read the data while training, without preparing all of it.")
    shuffle_buffer: int = HfArg(
        default=1_000, help="Blocks of a stream that are shuffled at a time; 0: no shuffling of blocks and files."
    )
    overwrite_cache: bool = HfArg(default=False, help="Tokenize again even if the result is cached.")
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenize.")

    def __post_init__(self):
        if self.dataset_name is None and self.train_file is None and self.validation_file is None:
            raise ValueError("There is no text to work on: give --dataset_name, --train_file or --validation_file.")
        check_limits(self)
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(
                f"--validation_split_percentage must be at least 0 and below 100, got {self.validation_split_percentage}."
            )
        if self.shuffle_buffer < 0:
            raise ValueError(f"--shuffle_buffer must be at least 0, got {self.shuffle_buffer}.")
        if self.streaming and self.max_train_samples is not None:
            raise ValueError("--max_train_samples is for text prepared beforehand; --max_steps ends a run with --streaming.")
        super().__post_init__()
        self.validation_file = expand_files(self.validation_file)
        if self.streaming and any(is_prepared(files[0]) for files in (self.train_file, self.validation_file) if files):
            raise ValueError("--streaming is for text; a folder that prepare_tokens.py wrote is read without it.")


# Files ---------------------------------------------------------------------------------------------------------------


def expand_files(names: str | list[str] | None) -> list[str] | None:
    """Expands patterns and folders into files; a folder of prepared tokens is returned as it is.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is of an unknown kind, or they are of several kinds.
    """
    if names is None:
        return None
    names = [names] if isinstance(names, str) else names
    if is_prepared(names[0]):
        return names
    files = list(chain.from_iterable(map(_find_files, names)))
    for file in files:
        if file_extension(file) not in LOADERS:
            raise ValueError(f"The text file {file!r} must end in one of: {', '.join('.' + x for x in LOADERS)}.")
        if "://" not in file and not os.path.isfile(file):  # datasets fetches a URL
            raise FileNotFoundError(f"The text file {file!r} does not exist.")
    kinds = sorted({LOADERS[file_extension(file)] for file in files})
    if len(kinds) > 1:
        raise ValueError(f"Text files must be of one kind to be read together, not of several: {', '.join(kinds)}.")
    return files


def _find_files(name: str) -> list[str]:
    if os.path.isdir(name):
        files = sorted(str(path) for path in Path(name).iterdir() if path.is_file() and file_extension(path.name) in LOADERS)
        if not files:
            raise FileNotFoundError(f"The folder {name!r} has no text files ({TEXT_FORMATS}).")
        return files
    if glob.has_magic(name) and not os.path.exists(name) and "://" not in name:
        files = sorted(glob.glob(name, recursive=True))
        if not files:
            raise FileNotFoundError(f"No text file is called {name!r}.")
        return files
    return [name]


# Prepared tokens -----------------------------------------------------------------------------------------------------


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary and of the tokens of a text with many kinds of characters."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer(FINGERPRINT_TEXT)["input_ids"]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_prepared(folder: str) -> bool:
    """Whether the folder was written by `Dataset.save_to_disk`, as by prepare_tokens.py."""
    return Path(folder, "state.json").is_file()


def check_prepared(folder: str, blocks: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
    """Raises a ValueError for tokens of another tokenizer, or in blocks of another size."""
    size = getattr(blocks.features.get("input_ids"), "length", None)
    if size != block_size:
        raise ValueError(f"The tokens of {folder!r} are in blocks of {size}, not {block_size}: use --block_size {size}.")
    if blocks.info.description != tokenizer_fingerprint(tokenizer):
        raise ValueError(f"The tokens of {folder!r} were made by another tokenizer; use that one, or prepare them again.")


# Examples ------------------------------------------------------------------------------------------------------------


def load_splits(model_args, data_args) -> dict:
    """The examples of "train" and "validation", each a `Dataset` or, streaming, an `IterableDataset`.

    Args:
        model_args: `HubArguments`.
        data_args: `DataTrainingArguments`.
    """
    options = {"cache_dir": model_args.cache_dir, "token": model_args.token, "streaming": data_args.streaming}
    if data_args.dataset_name is not None:
        splits = dict(read_dataset(data_args.dataset_name, data_args.dataset_config_name, **options))
    else:
        splits = {}
        for split, files in (("train", data_args.train_file), ("validation", data_args.validation_file)):
            if files is not None:
                splits[split] = load_files(files, data_args, **options)
    percentage = data_args.validation_split_percentage
    if "validation" not in splits and "train" in splits and percentage > 0:
        splits["train"], splits["validation"] = hold_out(splits["train"], percentage, data_args.text_column)
    return splits


def load_files(files: list[str], data_args: TextArguments, **options):
    """The examples of files, or the blocks of a folder of prepared tokens."""
    if is_prepared(files[0]):
        return load_from_disk(files[0]).with_format("numpy")
    text_options = {"keep_linebreaks": data_args.keep_linebreaks} if file_extension(files[0]) == "txt" else {}
    return read_dataset(LOADERS[file_extension(files[0])], data_files=files, split="train", **options, **text_options)


def hold_out(dataset, percentage: int, column: str | None = None) -> tuple:
    """Splits examples into training and validation examples: the first ones, or by a checksum of their text in a stream.

    A stream is sharded over processes, so its examples have no common index.
    """
    if not isinstance(dataset, Dataset):
        column = find_text_column("train", dataset, column)
        belongs = partial(_belongs_to_split, column=column, percentage=percentage)
        return dataset.filter(partial(belongs, held_out=False)), dataset.filter(partial(belongs, held_out=True))
    if len(dataset) < 2:
        raise ValueError(
            "The training text has a single example, of which none can be held out: give --validation_file, or "
            "--validation_split_percentage 0."
        )
    num_held_out = max(1, len(dataset) * percentage // 100)
    return dataset.select(range(num_held_out, len(dataset))), dataset.select(range(num_held_out))


def _belongs_to_split(example: dict, column: str, percentage: int, held_out: bool) -> bool:
    return (zlib.crc32(str(example[column]).encode(errors="replace")) % 100 < percentage) == held_out


def find_text_column(split: str, dataset, column: str | None = None) -> str:
    """The name of the column with the text.

    Raises:
        ValueError: there is no such column, or it contains something else.
    """
    first = first_example(split, dataset)
    columns = dataset.column_names or list(first)
    if column is None and "text" not in columns and len(columns) > 1:
        raise ValueError(f"The {split} data has no column 'text' but {', '.join(columns)}: name one with --text_column.")
    column = column or ("text" if "text" in columns else next(iter(columns), "text"))
    if column not in columns:
        raise ValueError(f"The {split} data has no column {column!r} but: {', '.join(columns) or 'no examples'}.")
    if not isinstance(first.get(column), str | None):
        raise ValueError(f"The column {column!r} of the {split} data contains no text but values such as {first[column]!r}.")
    return column


def first_example(split: str, dataset) -> dict:
    """The first example, or an empty dictionary.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return next(iter(dataset), {})
    except Exception as error:  # the readers of formats raise many types
        raise ValueError(f"The {split} text cannot be read: {error.__cause__ or error}") from error


# Tokenizers ----------------------------------------------------------------------------------------------------------


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,), lowercase: bool = False
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer like GPT-2's. The same texts give the same one, unlike with WordPiece."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(texts: Iterable[str], folder: str, vocab_size: int) -> None:
    """Trains and saves a tokenizer."""
    PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(texts, vocab_size),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",  # the model continues the text
    ).save_pretrained(folder)


# Blocks --------------------------------------------------------------------------------------------------------------


def encode(documents: list[str], tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None) -> list[int]:
    """Tokenizes and concatenates documents; each ends with `eos_token_id` unless that is None."""
    token_lists = tokenizer(documents, return_attention_mask=False, verbose=False)["input_ids"] if documents else []
    if eos_token_id is not None:
        token_lists = [ids if ids[-1:] == [eos_token_id] else [*ids, eos_token_id] for ids in token_lists]
    return list(chain.from_iterable(token_lists))


def pack_into_blocks(
    examples: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    block_size: int,
    eos_token_id: int | None,
    joins_lines: bool = False,
) -> dict[str, list[list[int]]]:
    """Tokenizes examples, concatenates them and splits them into blocks; an incomplete last block is dropped."""
    texts = select_texts(examples, column)
    if joins_lines:  # or a line's white space would become other tokens than within a text
        texts = ["".join(texts)]
    tokens = encode(texts, tokenizer, eos_token_id)
    return {"input_ids": [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]}


def is_line_based(files: list[str] | None) -> bool:
    return files is not None and file_extension(files[0]) == "txt"


def choose_eos(files: list[str] | None, tokenizer: PreTrainedTokenizerBase, data_args: TextArguments) -> int | None:
    """The token id to append to each example, if any."""
    add_eos = data_args.add_eos_token if data_args.add_eos_token is not None else not is_line_based(files)
    if add_eos and tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos token to end a document with; set one, or use --add_eos_token false.")
    return tokenizer.eos_token_id if add_eos else None


def choose_batch_size(split: str, dataset, maximum: int = 1_000) -> int:
    """How many texts to tokenize together: of about 4 MB, which takes two seconds, so that a progress bar moves."""
    if isinstance(dataset, Dataset):
        size = dataset.data.nbytes / max(1, len(dataset))
    else:
        size = len(str(first_example(split, dataset)))
    return max(1, min(maximum, int(4e6 / max(1.0, size))))


def pack(
    split: str, dataset, files: list[str] | None, tokenizer: PreTrainedTokenizerBase, block_size: int, text_args, **options
):
    """Packs examples into blocks of tokens, two bytes each if the vocabulary allows; `options` are those of `map`."""
    token_type = Value("uint16" if len(tokenizer) <= 1 << 16 else "int32")
    eos_token_id = choose_eos(files, tokenizer, text_args)
    return dataset.map(
        pack_into_blocks,
        batched=True,
        batch_size=choose_batch_size(
            split, dataset, 10_000 if is_line_based(files) else 1_000
        ),  # each drops less than a block
        remove_columns=dataset.column_names or list(first_example(split, dataset)),
        features=Features({"input_ids": List(token_type, length=block_size)}),
        fn_kwargs={
            "tokenizer": tokenizer,
            "column": find_text_column(split, dataset, text_args.text_column),
            "block_size": block_size,
            "eos_token_id": eos_token_id,
            "joins_lines": is_line_based(files) and eos_token_id is None,
        },
        **options,
    )


def prepare_blocks(
    split: str, dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, max_samples: int | None, data_args
):
    """Blocks of tokens for training or evaluation, of a stream in one pass; a ValueError if there is no block."""
    files = data_args.train_file if split == "train" else data_args.validation_file or data_args.train_file
    files = None if data_args.dataset_name is not None else files
    if files is not None and is_prepared(files[0]):
        check_prepared(files[0], dataset, tokenizer, block_size)
        blocks = dataset
    else:
        options = {}
        if not data_args.streaming:  # a stream has no workers, cache or length
            options["num_proc"] = data_args.preprocessing_num_workers
            options["load_from_cache_file"] = not data_args.overwrite_cache
            options["desc"] = f"Packing the {split} text into blocks of {block_size}"
        blocks = pack(split, dataset, files, tokenizer, block_size, data_args, **options)
        if not first_example(split, blocks):
            raise ValueError(
                f"The {split} text is shorter than one block of {block_size} tokens; choose a smaller --block_size."
            )
    return blocks if max_samples is None else blocks.take(max_samples)


def stream_blocks(dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, seed: int, data_args) -> PackedStream:
    """An endless stream of blocks, read during training."""
    prepare_blocks("train", dataset, tokenizer, block_size, None, data_args)  # raises an error if the text is too short
    eos_token_id = choose_eos(None if data_args.dataset_name is not None else data_args.train_file, tokenizer, data_args)
    return PackedStream(
        dataset,
        partial(encode, tokenizer=tokenizer, eos_token_id=eos_token_id),
        find_text_column("train", dataset, data_args.text_column),
        block_size,
        shuffle_buffer=data_args.shuffle_buffer,
        seed=seed,
        settings={
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "eos_token": eos_token_id,
            "validation_split_percentage": data_args.validation_split_percentage,
        },
    )


def load_blocks(model_args, data_args, training_args, tokenizer: PreTrainedTokenizerBase, block_size: int) -> dict:
    """The blocks of "train" and "validation" that the arguments request."""
    blocks = {}
    with training_args.main_process_first(desc="preparing the text"):
        splits = load_splits(model_args, data_args)
        for split, is_requested, max_samples in (
            ("train", training_args.do_train, data_args.max_train_samples),
            ("validation", training_args.do_eval, data_args.max_eval_samples),
        ):
            if is_requested and split not in splits:
                raise ValueError(f"There is no {split} text; give --{split}_file, or a dataset that has one.")
            if is_requested and split == "train" and data_args.streaming:
                seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
                blocks[split] = stream_blocks(splits[split], tokenizer, block_size, seed, data_args)
            elif is_requested:
                blocks[split] = prepare_blocks(split, splits[split], tokenizer, block_size, max_samples, data_args)
    return blocks
