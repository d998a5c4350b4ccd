# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The operator alone, as a kernel of the Hub that the `kernels` package loads: Triton and PyTorch, nothing compiled."""

import json
import os
import shutil
from pathlib import Path

from ..files import check_folder, staged_folder
from ..model.base_tost import OPERATOR_FILES, source_file
from ..version import __version__


KERNEL_FILES = (*OPERATOR_FILES, "layers_tost.py")  # the operator and the attention layer alone: they need only PyTorch
NAME = "tssa"
VERSION = 1  # of the kernel's interface, as the Hub counts it
BACKENDS = ("cuda", "cpu")  # on a CPU the operator's reference path runs
INIT = '''\
"""Token Statistics Self-Attention (arXiv 2412.17810), from tost_hf {version}."""

from .layers_tost import TokenStatisticsSelfAttention
from .tssa import TSSAOutput, tssa, tssa_step
from .tssa_reference import TSSAState


__all__ = ["TSSAOutput", "TSSAState", "TokenStatisticsSelfAttention", "tssa", "tssa_step"]
'''
BUILD_TOML = """\
[general]
name = "{name}"
version = {version}
license = "apache-2.0"
backends = [{backends}]

[torch-noarch]
pyext = ["py"]
"""


def export_kernel(output_dir: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Writes a kernel repository: the source (`build.toml`, `torch-ext/tssa`) and its builds, which are copies of it.

    Publish it with `hf upload OWNER/tssa OUT --repo-type kernel`; `kernels.get_kernel("OWNER/tssa", version=1)` loads it, and
    `kernels.get_local_kernel(OUT)` without publishing.

    Raises:
        FileExistsError: `output_dir` is a file, or is not empty and `overwrite` is false.
    """
    target = Path(output_dir)
    check_folder(target, overwrite)
    with staged_folder(target) as folder:
        backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
        (folder / "build.toml").write_text(BUILD_TOML.format(name=NAME, version=VERSION, backends=backends))
        _write_package(folder / "torch-ext" / NAME)
        for backend in BACKENDS:
            build = folder / "build" / f"torch-{backend}"
            _write_package(build)
            metadata = {
                "id": f"_{NAME}_{VERSION}_{backend}",
                "name": NAME,
                "version": VERSION,
                "license": "apache-2.0",
                "python-depends": [],
                "backend": {"type": backend},
            }
            (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return target


def _write_package(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(INIT.format(version=__version__))
    for name in KERNEL_FILES:
        shutil.copyfile(source_file(name), folder / name)
