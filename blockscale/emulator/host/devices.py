"""What the stand-in for the driver says of the device that it plays: limits by architecture.

The numbers are those of the CUDA C++ Programming Guide, "Compute Capabilities", and of the common
product of each architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host.fatbin import capability, runs_on

DRIVER_VERSION = 13000
DEFAULT_SHARED = 49152
"""Shared memory that a block may use without asking for more (static and dynamic)."""

RESERVED_SHARED = 1024
"""Shared memory of every block that the system keeps for itself."""


@dataclass(frozen=True)
class Device:
    """A device: the newest architecture-specific target that it runs, and its limits."""

    arch: str
    name: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, major and minor."""
        return capability(self.arch)

    def attribute(self, number: int) -> int | None:
        """Return CUdevice_attribute ``number`` (cuda.h), or None for one that is not modelled."""
        major, minor = self.capability
        return {
            1: 1024,  # MAX_THREADS_PER_BLOCK
            2: 1024,  # MAX_BLOCK_DIM_X
            3: 1024,  # MAX_BLOCK_DIM_Y
            4: 64,  # MAX_BLOCK_DIM_Z
            5: 2**31 - 1,  # MAX_GRID_DIM_X
            6: 65535,  # MAX_GRID_DIM_Y
            7: 65535,  # MAX_GRID_DIM_Z
            8: DEFAULT_SHARED,  # MAX_SHARED_MEMORY_PER_BLOCK
            9: 65536,  # TOTAL_CONSTANT_MEMORY
            10: 32,  # WARP_SIZE
            11: 2**31 - 1,  # MAX_PITCH
            12: 65536,  # MAX_REGISTERS_PER_BLOCK
            13: 1_800_000,  # CLOCK_RATE, kHz
            14: 512,  # TEXTURE_ALIGNMENT
            15: 1,  # GPU_OVERLAP
            16: self.multiprocessors,  # MULTIPROCESSOR_COUNT
            17: 0,  # KERNEL_EXEC_TIMEOUT
            18: 0,  # INTEGRATED
            19: 1,  # CAN_MAP_HOST_MEMORY
            20: 0,  # COMPUTE_MODE
            31: 1,  # CONCURRENT_KERNELS
            32: 1,  # ECC_ENABLED
            33: 0,  # PCI_BUS_ID
            34: 0,  # PCI_DEVICE_ID
            35: 0,  # TCC_DRIVER
            36: 3_000_000,  # MEMORY_CLOCK_RATE, kHz
            37: 8192,  # GLOBAL_MEMORY_BUS_WIDTH
            38: self.l2_bytes,  # L2_CACHE_SIZE
            39: self.threads_per_multiprocessor,  # MAX_THREADS_PER_MULTIPROCESSOR
            40: 1,  # ASYNC_ENGINE_COUNT
            41: 1,  # UNIFIED_ADDRESSING
            50: 0,  # PCI_DOMAIN_ID
            75: major,  # COMPUTE_CAPABILITY_MAJOR
            76: minor,  # COMPUTE_CAPABILITY_MINOR
            78: 1,  # STREAM_PRIORITIES_SUPPORTED
            81: self.shared_per_multiprocessor,  # MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
            82: 65536,  # MAX_REGISTERS_PER_MULTIPROCESSOR
            83: 1,  # MANAGED_MEMORY
            84: 0,  # MULTI_GPU_BOARD
            88: 0,  # PAGEABLE_MEMORY_ACCESS
            89: 1,  # CONCURRENT_MANAGED_ACCESS
            90: 1,  # COMPUTE_PREEMPTION_SUPPORTED
            95: 1,  # COOPERATIVE_LAUNCH
            97: self.shared_per_block,  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            102: 1,  # VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            106: self.blocks_per_multiprocessor,  # MAX_BLOCKS_PER_MULTIPROCESSOR
            108: self.l2_bytes // 2,  # MAX_PERSISTING_L2_CACHE_SIZE
            109: 128 << 20,  # MAX_ACCESS_POLICY_WINDOW_SIZE
            111: RESERVED_SHARED,  # RESERVED_SHARED_MEMORY_PER_BLOCK
            115: 1,  # MEMORY_POOLS_SUPPORTED
            120: int(major >= 9),  # CLUSTER_LAUNCH
            127: int(major >= 9),  # TENSOR_MAP_ACCESS_SUPPORTED
            132: 0,  # MULTICAST_SUPPORTED: of memory between devices
        }.get(number)


DEVICES = {
    device.arch: device
    for device in (
        Device("sm_80", "A100", 108, 166912, 167936, 2048, 32, 40 << 20, 80 << 30),
        Device("sm_86", "RTX 3090", 82, 101376, 102400, 1536, 16, 6 << 20, 24 << 30),
        Device("sm_89", "RTX 4090", 128, 101376, 102400, 1536, 24, 72 << 20, 24 << 30),
        Device("sm_90a", "H200", 132, 232448, 233472, 2048, 32, 50 << 20, 141 << 30),
        Device("sm_100a", "B200", 148, 232448, 233472, 2048, 32, 126 << 20, 180 << 30),
        Device("sm_103a", "B300", 148, 232448, 233472, 2048, 32, 126 << 20, 270 << 30),
        Device("sm_120a", "RTX 5090", 170, 101376, 102400, 1536, 24, 96 << 20, 32 << 30),
        Device("sm_121a", "DGX Spark", 48, 101376, 102400, 1536, 24, 24 << 20, 120 << 30),
    )
}
PREFERRED = ("sm_100a", "sm_103a", "sm_120a", "sm_121a", "sm_90a")
"""Which device is played when a library holds PTX for several."""


def device(target: str, multiprocessors: int | None = None) -> Device:
    """Return the device that ``target`` names ("sm_100a", "sm_100f" and "sm_100" are one).

    Raises:
        EmulationError: none of the known devices has this compute capability.
    """
    for known in DEVICES.values():
        if known.capability == capability(target):
            return (
                known
                if multiprocessors is None
                else replace(known, multiprocessors=multiprocessors)
            )
    raise EmulationError(
        f"target {target!r} is no device that the emulator can play; choose one of "
        f"{', '.join(DEVICES)}"
    )


def guess(architectures: list[str]) -> str:
    """Return the device to play for a library with PTX for these architectures."""
    for own in (True, False):  # first a device for which the PTX was made, then one that takes it
        for arch in PREFERRED:
            for made_for in architectures:
                same = capability(made_for) == capability(arch)
                if runs_on(made_for, arch) and (same or not own):
                    return arch
    return PREFERRED[0]
