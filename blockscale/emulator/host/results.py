"""What driver calls return: the CUresult codes that are used, and refusals with a reason."""

from __future__ import annotations

from enum import IntEnum


class Result(IntEnum):
    """CUresult, as far as the stand-in returns it (cuda.h)."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_INVALID_PTX = 218
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_NOT_SUPPORTED = 801

    @property
    def text(self) -> str:
        """What cuGetErrorString says."""
        return self.name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_").lower().replace("_", " ")


class Refusal(Exception):
    """A driver call fails with `result`; the sentence is for the Python caller.

    A `probe` is a question whose answer may well be no, such as whether a library has a kernel:
    it becomes an exception only when the function fails because of it.
    """

    def __init__(self, result: Result, sentence: str, *, probe: bool = False) -> None:
        super().__init__(sentence)
        self.result = result
        self.sentence = sentence
        self.probe = probe
