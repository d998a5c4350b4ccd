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
            "Converts a language checkpoint of the authors' code (a file, usually ckpt.pt) to a folder that "
            "AutoModelForCausalLM.from_pretrained loads: config.json, model.safetensors, generation_config.json. "
            "Given such a folder, it converts back to a checkpoint file. Weights keep their values and their dtype. "
            "A checkpoint is opened without running any code in it. It has no tokenizer: the authors' models use GPT-2's."
        ),
        epilog="examples:\n  tost-hf convert out/ckpt.pt ./my-tost\n  tost-hf convert ./my-tost ckpt.pt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="CHECKPOINT", help="the checkpoint file; or a model folder, to convert back")
    parser.add_argument("output", metavar="OUT", help="the folder to write; or the file, when converting back")
    parser.add_argument("--overwrite", action="store_true", help="replace a model or a file that is already at OUT")
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> None:
    from .convert import convert_from_original, convert_to_original

    convert = convert_to_original if os.path.isdir(args.source) else convert_from_original
    print(f"Wrote {convert(args.source, args.output, overwrite=args.overwrite)}")


if __name__ == "__main__":
    sys.exit(main())
