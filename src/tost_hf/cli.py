# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The `tost-hf` command. Each subcommand is a function that adds its parser and one that runs it."""

import argparse
import os
import sys
from pathlib import Path

from .commands import add_command
from .commands.runtimes import add_cache, add_export, add_export_kernel, add_generate, add_serve, add_space, run_serve
from .version import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs `tost-hf` with these arguments (the command line's by default).

    Returns:
        The exit status: 0, or 1 after an error, whose sentence is on stderr. Wrong usage exits with 2, as argparse does.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not run_serve:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        return args.run(args) or 0
    except (ValueError, OSError, ImportError) as error:
        print(f"tost-hf: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tost-hf",
        description="ToST, the Token Statistics Transformer, for Hugging Face transformers.",
        epilog="'tost-hf COMMAND --help' explains a command. The Hub's token is the one of `hf auth login`, or HF_TOKEN.",
    )
    parser.add_argument("--version", action="version", version=f"tost-hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _add_init,
        _add_convert,
        _add_card,
        _add_publish,
        _add_verify,
        _add_info,
        _add_inspect,
        add_generate,
        add_cache,
        add_serve,
        add_export,
        add_space,
        add_export_kernel,
    ):
        add(commands)
    return parser


def _add_init(commands) -> None:
    parser = add_command(
        commands,
        "init",
        _init,
        summary="a new model of one of the paper's sizes, with random weights",
        description=(
            "Writes a folder with the configuration and freshly initialised float32 weights of a preset. A vision model "
            "gets its image processor, a text model the tokenizer that --tokenizer names."
        ),
        examples=(
            "tost-base ./my-tost --tokenizer gpt2",
            "tost-vision-small-patch16 ./my-tost-vision --seed 1",
            "tost-lra-listops ./my-classifier",
        ),
    )
    parser.add_argument("preset", metavar="PRESET", help="tost-base, tost-vision-tiny-patch16, tost-lra-text, ...")
    parser.add_argument("output", metavar="OUT", help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is already at OUT")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER|REPO_ID",
        help="write this tokenizer beside a text model, which takes over its special tokens",
    )


def _init(args: argparse.Namespace) -> None:
    import torch

    import tost_hf

    from .files import check_folder, staged_folder
    from .hub.checks import model_class
    from .hub.loading import load_fitting_tokenizer
    from .image_processing import save_image_processor

    presets = [*tost_hf.PRESETS, *tost_hf.LRA_PRESETS, *tost_hf.VISION_PRESETS]
    if args.preset not in presets:
        raise ValueError(f"There is no preset {args.preset!r}; choose one of {', '.join(presets)}.")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to {2**63 - 1}, got {args.seed}.")
    target, tokenizer = Path(args.output), None
    check_folder(target, args.overwrite)
    torch.manual_seed(args.seed)
    if args.preset in tost_hf.VISION_PRESETS:
        if args.tokenizer is not None:
            raise ValueError(f"{args.preset} reads images; --tokenizer is for text models.")
        vision = tost_hf.ToSTVisionConfig.from_preset(args.preset, num_labels=1000)
        with staged_folder(target) as folder:
            tost_hf.ToSTForImageClassification(vision).save_pretrained(folder)
            save_image_processor(vision, folder)
    else:
        config = tost_hf.ToSTConfig.from_preset(args.preset)
        if args.tokenizer is not None:
            tokenizer = load_fitting_tokenizer(args.tokenizer, config)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(tokenizer, name))
        with staged_folder(target) as folder:
            wanted = model_class(config) if config.architectures else tost_hf.ToSTForCausalLM
            wanted(config).save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    print(f"Wrote {target}")


def _add_convert(commands) -> None:
    parser = add_command(
        commands,
        "convert",
        _convert,
        summary="a checkpoint of the authors' code to a transformers folder, or back",
        description=(
            "Converts a checkpoint of the authors' code (a file: ckpt.pt of a language model, checkpoint.pth of a vision "
            "model or one of its baselines) to a folder that AutoModelForCausalLM.from_pretrained or "
            "AutoModelForImageClassification.from_pretrained loads. Given such a folder, it converts back to a file. "
            "Which model it is, and its sizes, is read from the tensors. Weights keep their values and their dtype. A "
            "checkpoint is opened without running any code in it. It has no tokenizer: the authors' models use GPT-2's."
        ),
        examples=(
            "out/ckpt.pt ./my-tost",
            "./my-tost ckpt.pt",
            "--ema checkpoint.pth ./my-tost-vision",
        ),
    )
    parser.add_argument("source", metavar="CHECKPOINT", help="the checkpoint file; or a model folder, to convert back")
    parser.add_argument("output", metavar="OUT", help="the folder to write; or the file, when converting back")
    parser.add_argument("--overwrite", action="store_true", help="replace a model or a file that is already at OUT")
    vision = parser.add_argument_group("vision checkpoints")
    vision.add_argument("--ema", action="store_true", help="take the averaged weights (model_ema)")
    vision.add_argument(
        "--num-attention-heads",
        type=int,
        metavar="N",
        help="heads of a softmax baseline, where args.model in the checkpoint does not name one of the authors' sizes",
    )
    vision.add_argument(
        "--no-normalize-patch-tokens",
        dest="normalize_patch_tokens",
        action="store_const",
        const=False,
        help="the model was trained with tokens_norm=False, unlike all released ones",
    )


def _convert(args: argparse.Namespace) -> None:
    from .convert import convert_from_original, convert_to_original

    vision = {name: getattr(args, name) for name in ("ema", "num_attention_heads", "normalize_patch_tokens")}
    if not os.path.isdir(args.source):
        written = convert_from_original(args.source, args.output, overwrite=args.overwrite, **vision)
    elif vision == {"ema": False, "num_attention_heads": None, "normalize_patch_tokens": None}:
        written = convert_to_original(args.source, args.output, overwrite=args.overwrite)
    else:
        raise ValueError(f"{args.source} is a folder, which is converted back to a file; the vision options do not apply.")
    print(f"Wrote {written}")


def _add_card(commands) -> None:
    parser = add_command(
        commands,
        "card",
        _card,
        summary="write or refresh the model card of a folder",
        description=(
            "Writes README.md from what the folder holds: configuration, weights, the training run's record and "
            "evaluation results. What nobody recorded is left out. Metadata written by hand is kept, and so is all text but "
            "that between the two comments, which is generated."
        ),
        examples=(
            "./my-tost --license apache-2.0",
            "--presets model_cards",
        ),
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("folder", metavar="FOLDER", nargs="?", help="the model folder")
    target.add_argument(
        "--presets",
        metavar="FOLDER",
        nargs="?",
        const="model_cards",
        help="write the cards of the paper's sizes, which have no weights, into this folder (default: model_cards)",
    )
    parser.add_argument(
        "--license", metavar="ID", help="licence of the weights, such as apache-2.0; by default the one in the card"
    )
    parser.add_argument("--repo-id", metavar="REPO_ID", help="where it will be published, for the loading examples")
    parser.add_argument("--revision", help="the tag or commit that the loading examples pin")


def _card(args: argparse.Namespace) -> None:
    from .hub.cards import write_card, write_preset_cards

    if args.presets is not None:
        for path in write_preset_cards(args.presets):
            print(f"Wrote {path}")
        return
    print(f"Wrote {write_card(args.folder, repo_id=args.repo_id, revision=args.revision, license=args.license)}")


def _add_publish(commands) -> None:
    parser = add_command(
        commands,
        "publish",
        _publish,
        summary="send a model folder to the Hub, in one commit",
        description=(
            "Checks a model folder and sends what the repository does not have yet, in one commit: all of it becomes "
            "visible at once, or nothing. Interrupted, it leaves the repository as it was; run it again. It refuses "
            "pickles, optimizer states, code that is not ToST's, files that look like secrets, weights with NaN, weights "
            "that do not fit config.json, and a card without a licence."
        ),
        examples=(
            "./my-tost me/my-tost --card",
            "./my-tost me/my-tost --private --tag v1 --card",
            "./my-tost tost/tost-base --create-pr",
            "--space ./my-page me/my-page",
        ),
    )
    parser.add_argument("folder", metavar="FOLDER", help="the model folder; it is not changed (but see --card)")
    parser.add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME; created if it is not there")
    parser.add_argument("--private", action="store_true", default=None, help="if the repository is created, make it private")
    parser.add_argument("--revision", metavar="BRANCH", help="the branch to commit to (default: main), created from main")
    parser.add_argument("--tag", help="a tag to put on the commit")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing to main")
    parser.add_argument("--dry-run", action="store_true", help="check, list what would be sent, and send nothing")
    code = parser.add_mutually_exclusive_group()
    code.add_argument(
        "--with-code",
        action="store_true",
        default=True,
        help="include the remote code, for trust_remote_code=True where tost_hf is not installed (the default)",
    )
    code.add_argument("--without-code", dest="with_code", action="store_false", help="leave them out")
    parser.add_argument("--card", action="store_true", help="write or refresh the card in FOLDER first (`tost-hf card`)")
    parser.add_argument("--space", action="store_true", help="FOLDER is a page that `tost-hf space` wrote; send it as a Space")


def _publish(args: argparse.Namespace) -> None:
    from .hub.publishing import check_target, publish, publish_space

    check_target(args.repo_id, revision=args.revision, tag=args.tag, create_pr=args.create_pr)
    if args.card and args.space:
        raise ValueError("--card writes a model's card; a Space has its own README.md, which `tost-hf space` wrote.")
    if args.card:
        from .hub.cards import write_card

        write_card(args.folder, repo_id=args.repo_id, revision=args.tag, with_code=args.with_code)
    options = {name: getattr(args, name) for name in ("private", "revision", "tag", "create_pr", "dry_run")}
    if args.space:
        done = publish_space(args.folder, args.repo_id, **options)
    else:
        done = publish(args.folder, args.repo_id, with_code=args.with_code, **options)
    print(f"{done.repo_id}: " + ("a Space" if done.num_parameters is None else f"{done.num_parameters:,} parameters"))
    for heading, files in (("send", done.uploaded), ("delete", done.deleted), ("unchanged", done.unchanged)):
        for name in files:
            print(f"  {heading:10}{name}")
    if args.dry_run:
        print("Dry run: nothing was sent.")
    elif done.url is None:
        print(f"The repository has all of it already, at {done.commit_hash}")
    else:
        print(f"Published: {done.url}")


def _add_verify(commands) -> None:
    parser = add_command(
        commands,
        "verify",
        _verify,
        summary="check that a folder or a repository is a complete, working model",
        description=(
            "Downloads a repository (a folder is taken as it is) and checks hashes, kinds of files, configuration, "
            "weights, code and card; then loads the model and runs it. The repository's own code is never run. Exit "
            "status 1 if anything fails."
        ),
        examples=(
            "me/my-tost",
            "me/my-tost --revision v1",
            "./my-tost",
        ),
    )
    _add_source(parser)


def _verify(args: argparse.Namespace) -> int:
    from .hub.verification import verify

    checks = verify(args.source, revision=args.revision)
    for check in checks:
        print(f"{'ok' if check.passed else 'FAILED':8}{check.name:10}{check.detail}")
    failed = sum(not check.passed for check in checks)
    print(
        f"{args.source}: {failed} of {len(checks)} checks failed"
        if failed
        else f"{args.source}: all {len(checks)} checks passed"
    )
    return int(failed > 0)


def _add_info(commands) -> None:
    parser = add_command(
        commands,
        "info",
        _info,
        summary="what a folder or a repository holds",
        description=("Prints size, state, positions, licence and files. Of a repository no weights are downloaded."),
        examples=(
            "me/my-tost",
            "./my-tost",
        ),
    )
    _add_source(parser)


def _info(args: argparse.Namespace) -> None:
    from .hub.verification import info

    for name, value in info(args.source, revision=args.revision).items():
        print(f"{name:12}{value}")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FOLDER|REPO_ID", help="a model folder, or a repository of the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")


def _add_inspect(commands) -> None:
    parser = add_command(
        commands,
        "inspect",
        _inspect,
        summary="look inside a model: memberships, compression, entropy, as pictures on a page",
        description=(
            "Runs a model on one picture or one text and writes its membership maps, class attention, compression terms, "
            "subspaces and entropies as PNG files, with an index.html that explains each."
        ),
        examples=(
            "./tost-digits cat.png --out inside",
            "./tost-demo source.py --out inside",
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    parser.add_argument("input", metavar="INPUT", help="a picture, a text file, or a text")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--layers", metavar="N", type=int, nargs="+", help="the layers to draw, counted from 1")
    parser.add_argument("--image-size", metavar="N", type=int, help="scale the picture to a shorter side of N pixels")
    parser.add_argument("--processor", metavar="ID", help="a tokenizer or image processor, where MODEL has none")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run a tokenizer or image processor that is code in its repository; without it such code is never run",
    )


def _inspect(args: argparse.Namespace) -> None:
    from .interpret import inspect_path

    options = {name: getattr(args, name) for name in ("layers", "image_size", "processor", "trust_remote_code")}
    for path in inspect_path(args.model, args.input, args.out, **options):
        print(f"Wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
