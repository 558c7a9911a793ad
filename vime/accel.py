"""The one room that knows accelerators: NVIDIA, AMD (ROCm calls its devices cuda and RCCL nccl), Ascend (npu, by torch_npu), and the CPU as all others.

Elsewhere a device is a torch.device, whose kind nobody asks for. Run so far on CPUs only: docs/accelerators.md.
"""

import time

import torch
import torch.distributed as dist

BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}  # of collectives; an accelerator that isn't here is left alone


def kind() -> str:
    """Of this host's accelerators: "cuda", "npu", or "cpu" where there is none that vime trains on."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in BACKENDS else "cpu"


def claim(rank: int) -> torch.device:
    """The device of trainer rank `rank`, made the current one."""
    if kind() == "cpu":
        return torch.device("cpu")
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind(), index)


def use(device: torch.device) -> None:
    """Make it the current one of this thread, too."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def of_group(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors the group's collectives take."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device(kind(), torch.accelerator.current_device_index())


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic()


def memory(device: torch.device) -> dict[str, float]:
    """Metrics: GB at most held by torch since the last call, and GB of the device. Of a CPU none: its memory is not the trainer's."""
    if device.type == "cpu":
        return {}
    most, total = torch.accelerator.max_memory_allocated(device), torch.accelerator.get_memory_info(device)[1]
    torch.accelerator.reset_peak_memory_stats(device)
    return {"perf/train_memory_gb": most / 1e9, "perf/device_memory_gb": total / 1e9}
