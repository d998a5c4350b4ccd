"""Makes Accelerate treat CPUs as devices: without this it supports neither FSDP nor tensor parallelism on CPUs.

accelerate launch ... tests/cpus_as_devices.py SCRIPT ARGUMENTS
"""

import runpy
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def treat_cpus_as_devices() -> None:
    """Wrapping, sharding, saving and communication then run the code used for other devices."""

    def prepare_backend(self, cpu: bool = False, *args, **kwargs):
        return "gloo", DistributedType.MULTI_CPU if cpu else DistributedType.MULTI_XPU

    def set_device(self) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = prepare_backend, set_device


if __name__ == "__main__":
    treat_cpus_as_devices()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
