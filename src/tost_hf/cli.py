# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The `tost-hf` command. Each subcommand is a function that runs it and one that adds its parser."""

import argparse
import os
import sys

from .version import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs `tost-hf` with these arguments (the command line's by default).

    Returns:
        The exit status: 0, or 1 after an error, whose sentence is on stderr. Wrong usage exits with 2, as argparse does.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"tost-hf: error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tost-hf",
        description="ToST, the Token Statistics Transformer, for Hugging Face transformers.",
        epilog="'tost-hf COMMAND --help' explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"tost-hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_convert,):
        add(commands)
    return parser


def _add_convert(commands) -> None:
    parser = commands.add_parser(
        "convert",
        help="a checkpoint of the authors' code to a transformers folder, or back",
        description=(
            "Converts a checkpoint of the authors' code (a file: ckpt.pt of a language model, checkpoint.pth of a vision "
            "model or one of its baselines) to a folder that AutoModelForCausalLM.from_pretrained or "
            "AutoModelForImageClassification.from_pretrained loads. Given such a folder, it converts back to a file. "
            "Which model it is, and its sizes, is read from the tensors. Weights keep their values and their dtype. "
            "A checkpoint is opened without running any code in it. It has no tokenizer: the authors' models use GPT-2's."
        ),
        epilog=(
            "examples:\n"
            "  tost-hf convert out/ckpt.pt ./my-tost\n"
            "  tost-hf convert ./my-tost ckpt.pt\n"
            "  tost-hf convert --ema checkpoint.pth ./my-tost-vision"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> None:
    from .convert import convert_from_original, convert_to_original

    vision = {name: getattr(args, name) for name in ("ema", "num_attention_heads", "normalize_patch_tokens")}
    if not os.path.isdir(args.source):
        written = convert_from_original(args.source, args.output, overwrite=args.overwrite, **vision)
    elif vision == {"ema": False, "num_attention_heads": None, "normalize_patch_tokens": None}:
        written = convert_to_original(args.source, args.output, overwrite=args.overwrite)
    else:
        raise ValueError(f"{args.source} is a folder, to convert back; the options of vision checkpoints are not for it.")
    print(f"Wrote {written}")


if __name__ == "__main__":
    sys.exit(main())
