# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The subcommands that deploy models: a server, other runtimes, a browser, the Hub's kernels."""

import argparse

from . import add_command


def add_serve(commands) -> None:
    add_command(
        commands,
        "serve",
        run_serve,
        summary="transformers' OpenAI-compatible server, with ToST in it",
        description=(
            "Starts `transformers serve` with ToST's classes and with limits: answers end at the model's last position, and "
            "a bad request gets a sentence and harms no other. Options are those of `transformers serve`, whose --help lists "
            "them. Started with a MODEL, the server loads no other. Without one, each request names a folder or repository, "
            "so let only clients in that may read them. A repository's code runs only with --trust-remote-code and a MODEL."
        ),
        examples=(
            "./tost-demo --device cpu --port 8000",
            "OWNER/NAME --trust-remote-code",
        ),
    )


def run_serve(args: argparse.Namespace) -> None:
    from ..serving import serve

    serve(args.rest)


def _add_model_and_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    parser.add_argument("output", metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", default="float32", metavar="DTYPE", help="float32 (the default), float16 or int8")
    parser.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")


def add_export(commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        summary="a model for ONNX Runtime, OpenVINO or torch.export, checked against the model",
        description=(
            "Writes the model as a program for another runtime, with scripts that run it without this package. A text's state "
            "goes in and comes out as tensors: one program reads prompts and single tokens. Its outputs are compared with the "
            "model's first; if they differ nothing is written."
        ),
        examples=(
            "./tost-demo ./tost-onnx",
            "me/my-tost ./tost-onnx --dtype int8",
        ),
    )
    _add_model_and_output(parser)
    parser.add_argument("--format", default="onnx", metavar="FORMAT", help="onnx (the default), openvino, executorch or torch")
    parser.add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="the tokenizer to write, where MODEL has none")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")


def _export(args: argparse.Namespace) -> None:
    from ..exporting import export_model

    options = {name: getattr(args, name) for name in ("format", "dtype", "tokenizer", "revision", "overwrite")}
    done = export_model(args.model, args.output, **options)
    print(f"{done.agreement}\nWrote {done.folder}")


def add_space(commands) -> None:
    parser = add_command(
        commands,
        "space",
        _space,
        summary="a web page that runs the model in the browser, ready to be a Space of the Hub",
        description=(
            "Writes a folder with a page, the model as ONNX and the JavaScript libraries, which `npm pack` fetches and whose "
            "hashes are checked. The page needs no network: `python -m http.server` in the folder shows "
            "it. `tost-hf publish --space OUT OWNER/NAME` sends it to the Hub."
        ),
        examples=(
            "./tost-demo ./tost-page",
            "me/my-tost ./tost-page --title 'My ToST'",
        ),
    )
    _add_model_and_output(parser)
    parser.add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="the model's tokenizer, where MODEL has none")
    parser.add_argument("--title", help="the page's title (default: the model's name)")
    parser.add_argument(
        "--npm",
        metavar="FOLDER",
        help="take the JavaScript libraries from this folder of `npm pack` tarballs (default: npm fetches them)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is already at OUT")


def _space(args: argparse.Namespace) -> None:
    from ..space import write_space

    options = {name: getattr(args, name) for name in ("dtype", "tokenizer", "title", "npm", "revision", "overwrite")}
    print(f"Wrote {write_space(args.model, args.output, **options)}")


def add_export_kernel(commands) -> None:
    parser = add_command(
        commands,
        "export-kernel",
        _export_kernel,
        summary="the Triton operator alone, in the layout of the Hub's kernels",
        description=("Writes the operator as a `kernels` repository ([torch-noarch]: Triton only, nothing compiled)."),
        examples=("./tssa-kernel",),
    )
    parser.add_argument("output", metavar="OUT", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is already at OUT")


def _export_kernel(args: argparse.Namespace) -> None:
    from ..hub.kernel_export import export_kernel

    print(f"Wrote {export_kernel(args.output, overwrite=args.overwrite)}")


__all__ = ["add_export", "add_export_kernel", "add_serve", "add_space", "run_serve"]
