"""A stand-in for `libnvidia-ml.so.1`, which comes with NVIDIA's driver and cannot exist on a machine without a GPU.

A small shared library in C, so that the real nvidia-ml-py runs: it answers as the FAKE_NVML_* variables say. It knows
only the functions that `fsdp_lab.hardware` and Ray call, with the signatures of NVML's API reference.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int gpu, instance; } Device;  /* instance -1: the whole GPU */
typedef struct { unsigned long long total, free, used; } Memory;

static Device devices[64][8];
static int initialised = 0;

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoi(value) : otherwise;
}

/* FAKE_NVML_MIG="0,3": instances of each GPU; a GPU that is not named has MIG off. */
static int instances(int gpu) {
    const char *at = getenv("FAKE_NVML_MIG");
    for (; at && gpu > 0; gpu--) { at = strchr(at, ','); at = at ? at + 1 : at; }
    return at && *at && *at != '-' ? atoi(at) : -1;
}

int nvmlInit_v2(void) { int s = number("FAKE_NVML_INIT", 0); initialised += s == 0; return s; }
int nvmlInitWithFlags(unsigned f) { return nvmlInit_v2(); }
int nvmlShutdown(void) { if (!initialised) return 1; initialised--; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialised) return 1;  /* NVML_ERROR_UNINITIALIZED */
    *count = number("FAKE_NVML_GPUS", 0);
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!initialised) return 1;
    if ((int)index >= number("FAKE_NVML_GPUS", 0)) return 2;
    Device *d = &devices[index][7]; d->gpu = index; d->instance = -1; *handle = d;
    return 0;
}
/* FAKE_NVML_SILENT: a container that may count GPUs and nothing more. */
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    Device *d = handle;
    if (getenv("FAKE_NVML_SILENT")) return 4;  /* NVML_ERROR_NO_PERMISSION */
    if (d->instance < 0) snprintf(text, length, "GPU-%d%dcafe00-0000-0000-0000-00000000000%d", d->gpu, d->gpu, d->gpu);
    else snprintf(text, length, "MIG-%d%dbeef00-0000-0000-0000-00000000000%d", d->gpu, d->instance, d->gpu);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned length) {
    Device *d = handle;
    if (getenv("FAKE_NVML_SILENT")) return 4;
    snprintf(text, length, d->instance < 0 ? "NVIDIA H200" : "NVIDIA H200 MIG 1g.18gb");
    return 0;
}
/* FAKE_NVML_MIB="143771,81559": of each GPU; the last counts for all after it. */
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    Device *d = handle;
    if (getenv("FAKE_NVML_SILENT")) return 4;
    const char *at = getenv("FAKE_NVML_MIB");
    for (int gpu = d->gpu; at && gpu > 0 && strchr(at, ','); gpu--) at = strchr(at, ',') + 1;
    memory->total = (d->instance < 0 ? (at && *at ? atoll(at) : 143771) : 18 << 10) << 20;
    memory->free = memory->total; memory->used = 0;
    return 0;
}
/* FAKE_NVML_RESERVED_MIB: what the driver keeps of each GPU; without it NVML is too old to say. */
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *memory) {
    const char *reserved = getenv("FAKE_NVML_RESERVED_MIB");
    if (!reserved || memory->version != (sizeof(Memory2) | 2 << 24)) return 3;
    Memory plain;
    nvmlDeviceGetMemoryInfo(handle, &plain);
    memory->total = plain.total; memory->reserved = (unsigned long long)atoll(reserved) << 20;
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    Device *d = handle;
    if (!getenv("FAKE_NVML_MIG")) return 3;  /* NVML_ERROR_NOT_SUPPORTED */
    *current = *pending = instances(d->gpu) >= 0;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **mig) {
    Device *d = handle;
    if ((int)index >= instances(d->gpu)) return 6;  /* NVML_ERROR_NOT_FOUND */
    Device *m = &devices[d->gpu][index]; m->gpu = d->gpu; m->instance = index; *mig = m;
    return 0;
}
/* FAKE_NVML_CAPABILITY="90,89": of each GPU, major and minor; the last counts for all after it. */
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    Device *d = handle;
    if (getenv("FAKE_NVML_SILENT")) return 4;
    const char *at = getenv("FAKE_NVML_CAPABILITY");
    for (int gpu = d->gpu; at && gpu > 0 && strchr(at, ','); gpu--) at = strchr(at, ',') + 1;
    int both = at && *at ? atoi(at) : 90;
    *major = both / 10; *minor = both % 10;
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    const char *version = getenv("FAKE_NVML_DRIVER");
    snprintf(text, length, "%s", version ? version : "580.65.06");
    return 0;
}
/* FAKE_NVML_LIBCUDA: what libcuda says; without it NVML_ERROR_LIBRARY_NOT_FOUND, and the first form is asked. */
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = number("FAKE_NVML_LIBCUDA", 0);
    return *version ? 0 : 12;
}
int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = number("FAKE_NVML_CUDA", 13020);
    return *version ? 0 : 999;
}
"""


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> Path:
    """Compile the stand-in, by the name of the real one, into a folder that can be in `LD_LIBRARY_PATH`."""
    source, made = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(_SOURCE)
    command = [compiler() or "cc", "-shared", "-fPIC", "-o", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


def use(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """Let this process load that library as NVML."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(library)))


def variables(**answers: object) -> dict[str, str]:
    """`variables(gpus=8, cuda=12020)`: the environment in which the stand-in answers so."""
    return {f"FAKE_NVML_{name.upper()}": str(value) for name, value in answers.items()}
