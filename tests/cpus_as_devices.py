"""Accelerate takes CPUs for devices: left to itself it shards no model over CPUs, and cuts none by its heads.

accelerate launch ... tests/cpus_as_devices.py SCRIPT ARGUMENTS
"""

import runpy
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def take_cpus_for_devices() -> None:
    """All else, the wrapping, sharding, saving and exchanges, is what devices have."""

    def prepare_backend(self, cpu: bool = False, *args, **kwargs):
        return "gloo", DistributedType.MULTI_CPU if cpu else DistributedType.MULTI_XPU

    def set_device(self) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = prepare_backend, set_device


if __name__ == "__main__":
    take_cpus_for_devices()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
