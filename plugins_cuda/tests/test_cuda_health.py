"""Health of a GPU, read through NVML's functions."""

from __future__ import annotations

import ctypes

import pytest

from lmcore_cuda.driver.gpu_health import health_of


class FakeNvml:
    """NVML over one GPU, with its counts; *failing* returns *status*."""

    def __init__(self):
        self.errors, self.exhausted = 3, 0
        self.failing, self.status, self.opened = "", 0, 0

    def __getattr__(self, name):
        if name == "nvmlErrorString":
            return lambda status: f"error {status.value}".encode()

        def function(*arguments):
            if name == self.failing:
                return self.status
            answer = getattr(type(self), f"do_{name}", None)
            if answer is not None:
                answer(self, *arguments)
            return 0

        return function

    def do_nvmlInit_v2(self):  # noqa: N802
        self.opened += 1

    def do_nvmlShutdown(self):  # noqa: N802
        self.opened -= 1

    def do_nvmlDeviceGetTotalEccErrors(self, handle, kind, counter, count):  # noqa: N802
        assert (kind.value, counter.value) == (1, 0)
        ctypes.cast(count, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.errors

    def do_nvmlDeviceGetRemappedRows(self, handle, corrected, uncorrected, pending, failed):  # noqa: N802
        ctypes.cast(failed, ctypes.POINTER(ctypes.c_uint))[0] = self.exhausted


def test_faults_since_the_start_are_named():
    """Errors of earlier runs are not counted; a missing spare row is a fault at any time."""
    library = FakeNvml()
    check = health_of(library, "GPU-1")
    assert check is not None
    assert check() is None
    library.errors = 4
    assert check() == "1 uncorrectable error of its memory since the run began"
    library.errors = 5
    assert check() == "2 uncorrectable errors of its memory since the run began"
    library.errors, library.exhausted = 3, 1
    assert check() == "its memory has no spare rows left for faulty ones"
    assert library.opened == 0


@pytest.mark.parametrize("failing", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEccErrors"])
@pytest.mark.parametrize("status, lost", [(15, True), (16, True), (3, False), (999, False)])
def test_a_lost_gpu_is_a_fault_and_a_missing_answer_none(failing, status, lost):
    """Only NVML's statuses for a GPU that is lost or needs a reset say that it is faulty."""
    library = FakeNvml()
    check = health_of(library, "GPU-1")
    library.failing, library.status = failing, status
    expected = f"the driver has lost the GPU: error {status}" if lost else None
    assert check() == expected


def test_without_a_report_nothing_is_known():
    """No library, an unknown GPU, or one without spare rows."""
    assert health_of(None, "GPU-1") is None
    library = FakeNvml()
    library.failing, library.status = "nvmlDeviceGetHandleByUUID", 6
    assert health_of(library, "GPU-1") is None
    library.failing, library.status = "nvmlDeviceGetRemappedRows", 3
    assert health_of(library, "GPU-1")() is None
