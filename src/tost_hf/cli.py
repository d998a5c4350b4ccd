# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The `tost-hf` command: the parser of its subcommands, and a function for each that runs it."""

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from .version import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs `tost-hf` with these arguments (the command line's by default).

    Returns:
        The exit status: 0, or 1 after an error, whose message is on stderr. Wrong usage exits with 2, as argparse does.
    """
    parser = _make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not _serve:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        return args.run(args) or 0
    except (ValueError, OSError, ImportError, SafetensorError, StrictDataclassError) as error:
        print(f"tost-hf: error: {error}", file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tost-hf",
        description="ToST, the Token Statistics Transformer, for Hugging Face transformers.",
        epilog="'tost-hf COMMAND --help' explains a command. The Hub's token is the one of `hf auth login`, or HF_TOKEN.",
    )
    parser.add_argument("--version", action="version", version=f"tost-hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(run: Callable, summary: str, *examples: str, parents=()) -> Callable:
        """Adds the command of a function, whose docstring describes it; returns `add_argument`."""
        name = run.__name__.strip("_")
        command = commands.add_parser(
            name,
            help=summary,
            description=inspect.getdoc(run),
            epilog="examples:\n" + "\n".join(f"  tost-hf {name} {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=list(parents),
        )
        command.set_defaults(run=run)
        return command.add_argument

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    model.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")
    conversion = argparse.ArgumentParser(add_help=False, parents=[model])
    conversion.add_argument("output", metavar="OUT", help="the folder to write")
    conversion.add_argument("--dtype", default="float32", metavar="DTYPE", help="float32 (the default), float16 or int8")
    conversion.add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="the tokenizer to write, where MODEL has none")
    conversion.add_argument("--overwrite", action="store_true", help="write to a folder that is not empty")

    examples = ("tost-base ./my-tost --tokenizer gpt2", "tost-vision-small-patch16 ./my-tost-vision --seed 1")
    argument = add(_init, "a new model of one of the paper's sizes, with random weights", *examples)
    argument("preset", metavar="PRESET", help="tost-base, tost-vision-tiny-patch16, tost-lra-text, ...")
    argument("output", metavar="OUT", help="the folder to write")
    argument("--overwrite", action="store_true", help="replace a model that is already at OUT")
    argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    argument("--tokenizer", metavar="FOLDER|REPO_ID", help="a tokenizer for a text model, which takes over its special tokens")

    examples = ("out/ckpt.pt ./my-tost", "./my-tost ckpt.pt")
    argument = add(_convert, "a checkpoint of the authors' code to a transformers folder, or back", *examples)
    argument("source", metavar="CHECKPOINT", help="the checkpoint file; or a model folder, to convert back")
    argument("output", metavar="OUT", help="the folder to write; or the file, when converting back")
    argument("--overwrite", action="store_true", help="replace a model or a file that is already at OUT")
    argument("--ema", action="store_true", help="of a vision checkpoint: take the EMA weights (model_ema)")
    heads = "heads of a softmax baseline of which args.model in the checkpoint names none of the authors' sizes"
    argument("--num-attention-heads", type=int, metavar="N", help=heads)
    tokens_norm = {"dest": "normalize_patch_tokens", "action": "store_const", "const": False}
    argument("--no-normalize-patch-tokens", **tokens_norm, help="it was trained with tokens_norm=False, unlike released ones")

    argument = add(_card, "write the model card of a folder", "./my-tost --license apache-2.0", "model_cards --presets")
    argument("folder", metavar="FOLDER", help="the model folder; with --presets the folder of their cards")
    argument("--presets", action="store_true", help="write the cards of the paper's sizes, which have no weights")
    argument("--license", metavar="ID", help="licence of the weights, such as apache-2.0")
    argument("--repo-id", metavar="REPO_ID", help="where it will be published, for the loading examples")
    argument("--revision", help="the tag or commit that the loading examples pin")
    argument("--overwrite", action="store_true", help="replace the README.md in FOLDER, text written by hand included")

    examples = ("./my-tost me/my-tost --card --license apache-2.0", "./my-tost me/my-tost --private --tag v1")
    argument = add(_publish, "send a model folder to the Hub, in one commit", *examples, "--space ./my-page me/my-page")
    argument("folder", metavar="FOLDER", help="the model folder; it is not changed (but see --card)")
    argument("repo_id", metavar="REPO_ID", help="OWNER/NAME; created if it is not there")
    argument("--private", action="store_true", default=None, help="if the repository is created, make it private")
    argument("--revision", metavar="BRANCH", help="the branch to commit to (default: main), created from main")
    argument("--tag", help="a tag to put on the commit")
    argument("--create-pr", action="store_true", help="open a pull request instead of committing to main")
    argument("--dry-run", action="store_true", help="check, list what would be sent, and send nothing")
    argument("--without-code", dest="with_code", action="store_false", help="leave out the code for trust_remote_code=True")
    argument("--card", action="store_true", help="write a card first (`tost-hf card`), only where FOLDER has no README.md")
    argument("--license", metavar="ID", help="licence of the weights, for the card that --card writes")
    argument("--space", action="store_true", help="FOLDER is a page that `tost-hf space` wrote; send it as a Space")

    sources = ("me/my-tost --revision v1", "./my-tost")
    add(_verify, "check that a folder or a repository is a complete, working model", *sources, parents=[model])
    add(_info, "what a folder or a repository holds", *sources, parents=[model])

    examples = ("./tost-digits cat.png --out inside", "./tost-demo source.py --out inside")
    argument = add(_inspect, "look inside a model: memberships, compression, entropy, as pictures on a page", *examples)
    argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    argument("input", metavar="INPUT", help="a picture, a text file, or a text")
    argument("--out", metavar="DIR", required=True, help="the folder to write")
    argument("--layers", metavar="N", type=int, nargs="+", help="the layers to draw, counted from 1")
    argument("--image-size", metavar="N", type=int, help="scale the picture to a shorter side of N pixels")
    argument("--processor", metavar="ID", help="a tokenizer or image processor, where MODEL has none")
    trust = "run a tokenizer or image processor that is code in its repository; without it such code is never run"
    argument("--trust-remote-code", action="store_true", help=trust)

    examples = ("./tost-demo --device cpu --port 8000", "OWNER/NAME --port 8000")
    add(_serve, "transformers' OpenAI-compatible server, for one user", *examples)

    examples = ("./tost-demo ./tost-onnx", "me/my-tost ./tost-onnx --dtype int8")
    add(_export, "a model for ONNX Runtime, checked against the model", *examples, parents=[conversion])

    examples = ("./tost-demo ./tost-page", "me/my-tost ./tost-page --title 'My ToST'")
    summary = "a web page that runs the model in the browser, ready to be a Space of the Hub"
    argument = add(_space, summary, *examples, parents=[conversion])
    argument("--title", help="the page's title (default: the model's name)")
    argument("--npm", metavar="FOLDER", help="`npm pack` tarballs of the JavaScript libraries (default: npm fetches them)")
    return parser


def _init(args: argparse.Namespace) -> None:
    """Writes the configuration and freshly initialised float32 weights of a preset.

    A vision model gets its image processor, a text model the tokenizer that --tokenizer names.
    """
    import torch

    import tost_hf

    from .files import check_folder, staged_folder
    from .hub.checks import model_class
    from .hub.loading import load_fitting_tokenizer
    from .image_processing import save_image_processor
    from .model.configuration_tost import LRA_PRESETS, PRESETS
    from .model.configuration_tost_vision import VISION_PRESETS

    presets = [*PRESETS, *LRA_PRESETS, *VISION_PRESETS]
    if args.preset not in presets:
        raise ValueError(f"There is no preset {args.preset!r}; choose one of {', '.join(presets)}.")
    target, tokenizer = Path(args.output), None
    check_folder(target, args.overwrite)
    torch.manual_seed(args.seed)
    config: Any
    kind: Any
    if args.preset in VISION_PRESETS:
        config = tost_hf.ToSTVisionConfig.from_preset(args.preset, num_labels=1000)
        kind = tost_hf.ToSTForImageClassification
    else:
        config = tost_hf.ToSTConfig.from_preset(args.preset)
        kind = model_class(config) if config.architectures else tost_hf.ToSTForCausalLM
    if args.tokenizer is not None:
        if args.preset in VISION_PRESETS:
            raise ValueError(f"{args.preset} reads images; --tokenizer is for text models.")
        tokenizer = load_fitting_tokenizer(args.tokenizer, config)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    with staged_folder(target) as folder:
        kind(config).save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if args.preset in VISION_PRESETS:
            save_image_processor(config, folder)
    print(f"Wrote {target}")


def _convert(args: argparse.Namespace) -> None:
    """Converts a checkpoint of the authors' code to a folder that from_pretrained loads, or such a folder back to a file.

    A checkpoint is ckpt.pt of a language model, or checkpoint.pth of a vision model or one of its baselines. Which model it
    is, and its sizes, is read from the tensors, which keep their values and their dtype. No code in a checkpoint is run. It
    has no tokenizer: the authors' models use GPT-2's.
    """
    from .convert import convert_from_original, convert_to_original

    vision = {name: getattr(args, name) for name in ("ema", "num_attention_heads", "normalize_patch_tokens")}
    if not os.path.isdir(args.source):
        written = convert_from_original(args.source, args.output, overwrite=args.overwrite, **vision)
    elif vision == {"ema": False, "num_attention_heads": None, "normalize_patch_tokens": None}:
        written = convert_to_original(args.source, args.output, overwrite=args.overwrite)
    else:
        raise ValueError(f"{args.source} is a folder, which is converted back to a file; the vision options do not apply.")
    print(f"Wrote {written}")


def _card(args: argparse.Namespace) -> None:
    """Writes README.md from what the folder holds: configuration, weights, the training run's record and evaluation results.

    What nobody recorded is left out. A README.md that exists is left as it is, unless --overwrite is given.
    """
    from .hub.cards import write_card, write_preset_cards

    if args.presets:
        print("\n".join(f"Wrote {path}" for path in write_preset_cards(args.folder)))
        return
    options = {name: getattr(args, name) for name in ("repo_id", "revision", "license", "overwrite")}
    print(f"Wrote {write_card(args.folder, **options)}")


def _publish(args: argparse.Namespace) -> None:
    """Checks a model folder and sends what belongs to a model in one commit: all of it becomes visible at once, or nothing.

    Interrupted, it leaves the repository as it was; run it again. Files of other kinds are left out and named. It rejects
    references to code that is not ToST's, tokens of the Hub, weights with NaN, weights that do not fit config.json, and a
    card without a licence.
    """
    from .hub.publishing import publish, publish_space

    if args.card and args.space:
        raise ValueError("--card writes a model's card; a Space has its own README.md, which `tost-hf space` wrote.")
    if args.license and not args.card:
        raise ValueError("--license is for the card that --card writes; a card that exists names its licence itself.")
    if args.card:
        from .hub.cards import write_card

        card = {"repo_id": args.repo_id, "revision": args.tag, "license": args.license, "with_code": args.with_code}
        try:
            write_card(args.folder, **card)
        except FileExistsError:
            print(f"{args.folder} has a README.md, which stays as it is.")
    options = {name: getattr(args, name) for name in ("private", "revision", "tag", "create_pr", "dry_run")}
    if args.space:
        done = publish_space(args.folder, args.repo_id, **options)
    else:
        done = publish(args.folder, args.repo_id, with_code=args.with_code, **options)
    print(f"{done.repo_id}: " + ("a Space" if done.num_parameters is None else f"{done.num_parameters:,} parameters"))
    for heading, files in (("send", done.uploaded), ("delete", done.deleted), ("leave out", done.left_out)):
        for name in files:
            print(f"  {heading:10}{name}")
    if args.dry_run:
        print("Dry run: nothing was sent.")
    elif done.url is None:
        print(f"The repository has all of it already, at {done.commit_hash}")
    else:
        print(f"Published: {done.url}")


def _verify(args: argparse.Namespace) -> int:
    """Downloads a repository (a folder is taken as it is) and checks hashes, texts, configuration, code, card and model.

    The model is loaded and run; the repository's own code is never run. Exit status 1 if anything fails.
    """
    from .hub.verification import verify

    checks = verify(args.model, revision=args.revision)
    for check in checks:
        print(f"{'ok' if check.passed else 'FAILED':8}{check.name:10}{check.detail}")
    failed = sum(not check.passed for check in checks)
    print(f"{args.model}: {failed} of {len(checks)} checks failed" if failed else f"{args.model}: all checks passed")
    return int(failed > 0)


def _info(args: argparse.Namespace) -> None:
    """Prints size, state, positions, licence and files. Of a repository no weights are downloaded."""
    from .hub.verification import info

    for name, value in info(args.model, revision=args.revision).items():
        print(f"{name:12}{value}")


def _inspect(args: argparse.Namespace) -> None:
    """Runs a model on one picture or text and writes its memberships, class attention, compression, subspaces and entropies.

    They are PNG files, with an index.html that explains each.
    """
    from .interpret import inspect_path

    options = {name: getattr(args, name) for name in ("layers", "image_size", "processor", "trust_remote_code")}
    for path in inspect_path(args.model, args.input, args.out, **options):
        print(f"Wrote {path}")


def _serve(args: argparse.Namespace) -> None:
    """Runs `transformers serve`, whose options these are, with ToST's classes registered.

    It answers one request after another: for more users run `vllm serve MODEL`, where tost-hf is installed.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("The server needs more packages: pip install 'tost-hf[serve]'.")
    from transformers.cli.transformers import app

    app(["serve", *args.rest], prog_name="tost-hf")


def _export(args: argparse.Namespace) -> None:
    """Writes the model as an ONNX program, with scripts that run it without this package.

    A text's state goes in and comes out as tensors: one program reads prompts and single tokens. Its outputs are compared with
    the model's first; if they differ nothing is written.
    """
    from .export import export_model

    options = {name: getattr(args, name) for name in ("dtype", "tokenizer", "revision", "overwrite")}
    done = export_model(args.model, args.output, **options)
    print(f"{done.agreement}\nWrote {done.folder}")


def _space(args: argparse.Namespace) -> None:
    """Writes a folder with a page, the model as ONNX and the JavaScript libraries.

    `npm pack` fetches these, and their hashes are checked. `python -m http.server` in the folder shows the page;
    `tost-hf publish --space OUT OWNER/NAME` sends it to the Hub.
    """
    from .space import write_space

    options = {name: getattr(args, name) for name in ("dtype", "tokenizer", "title", "npm", "revision", "overwrite")}
    print(f"Wrote {write_space(args.model, args.output, **options)}")


if __name__ == "__main__":
    sys.exit(main())
