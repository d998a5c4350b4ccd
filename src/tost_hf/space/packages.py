# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The JavaScript libraries of the page: npm packages with pinned versions and hashes."""

import base64
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants


class Package(NamedTuple):
    """A version of an npm package, and its files that the page needs."""

    name: str
    version: str
    integrity: str  # in npm's format: "sha512-" and the hash of the tarball in base64
    files: dict[str, str]  # path in the tarball -> file name in the folder of libraries

    @property
    def tarball(self) -> str:
        """The file name that `npm pack` writes."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def spec(self) -> str:
        """The argument of `npm pack`."""
        return f"{self.name}@{self.version}"


RUNTIME = Package(
    name="onnxruntime-web",
    version="1.30.0",
    integrity="sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    files={
        "package/dist/ort.wasm.bundle.min.mjs": "ort.wasm.bundle.min.mjs",
        "package/dist/ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
        "package/package.json": "onnxruntime-web.package.json",  # states the license
    },
)
TOKENIZERS = Package(
    name="@huggingface/tokenizers",
    version="0.2.0",
    integrity="sha512-LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
    files={
        "package/dist/tokenizers.min.mjs": "tokenizers.min.mjs",
        "package/package.json": "tokenizers.package.json",
        "package/LICENSE": "tokenizers.LICENSE",
    },
)


def unpack(packages: Sequence[Package], folder: Path, npm: str | os.PathLike | None = None) -> None:
    """Extracts the packages' files to a folder.

    ```python
    unpack([RUNTIME, TOKENIZERS], Path("vendor"))
    ```

    Args:
        npm: a folder with the tarballs of `npm pack`; if None, `npm pack` downloads them with the user's settings (.npmrc,
            proxies, mirrors) and cache, and without network access if HF_HUB_OFFLINE is set.

    Raises:
        OSError: the folder lacks a tarball; or npm is not installed or cannot download them.
        ValueError: a tarball does not have the expected hash.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if npm is None:
            _npm_pack(packages, temporary)
        for package in packages:
            content = _read_tarball(package, Path(temporary if npm is None else npm))
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                for member, name in package.files.items():
                    file = archive.extractfile(member)
                    assert file is not None  # the hash was checked
                    (folder / name).write_bytes(file.read())


def _npm_pack(packages: Sequence[Package], folder: str) -> None:
    """Downloads the tarballs with npm."""
    specs = [package.spec for package in packages]
    network = "--offline" if constants.HF_HUB_OFFLINE else "--prefer-offline"
    options = ["--loglevel=error", "--no-update-notifier", network, f"--pack-destination={folder}"]
    try:
        subprocess.run(["npm", "pack", *options, *specs], capture_output=True, text=True, cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = " ".join(getattr(error, "stderr", str(error)).split())
        raise OSError(
            f"npm cannot download the page's JavaScript libraries ({reason}). On another machine, run "
            f"`npm pack {' '.join(specs)}`, and name the folder of the files with --npm."
        ) from error


def _read_tarball(package: Package, folder: Path) -> bytes:
    """The tarball's content; ValueError if its hash is not the package's."""
    path = folder / package.tarball
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {package.tarball}; write it there with `npm pack {package.spec}`.")
    content = path.read_bytes()
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if f"sha512-{digest}" != package.integrity:
        raise ValueError(f"{path} is not {package.spec}: its hash is sha512-{digest}, not {package.integrity}.")
    return content
