/* A stand-in for libnvidia-ml.so.1 with the signatures of nvml.h, to try the calls through ctypes.

   Three GPUs: one in parts (MIG), one that this user may not use, and one with 70 processes. */
#include <stdio.h>
#include <string.h>

typedef struct device { int number; } *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
  unsigned int pid;
  unsigned long long usedGpuMemory;
  unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

enum { OK = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { PROCESSES = 70, PLACES = 7 };

static struct device devices[3] = {{0}, {1}, {2}}, parts[2] = {{10}, {11}};
static int open_count = 0;

static int put(char *text, unsigned int length, const char *value) {
  if (strlen(value) + 1 > length) return TOO_SMALL;
  strcpy(text, value);
  return OK;
}

int open_contexts(void) { return open_count; }
int nvmlInit_v2(void) { open_count++; return OK; }
int nvmlShutdown(void) { open_count--; return OK; }
const char *nvmlErrorString(int status) {
  return status == NO_PERMISSION ? "Insufficient Permissions" : "an error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
  return put(text, length, "580.65.06");
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
  if (index == 1) return NO_PERMISSION;
  *device = &devices[index];
  return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  if (strcmp(uuid, "GPU-2")) return NOT_FOUND;
  *device = &devices[2];
  return OK;
}
int nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned int length) {
  return put(text, length, device->number ? "Tesla V100-SXM2-32GB" : "NVIDIA A100-SXM4-80GB");
}
int nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned int length) {
  char name[32];
  snprintf(name, sizeof name, device->number < 10 ? "GPU-%d" : "MIG-%d", device->number);
  return put(text, length, name);
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  memory->total = 80ULL << 30;
  memory->used = (unsigned long long)(device->number + 1) << 30;
  memory->free = memory->total - memory->used;
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  *major = device->number ? 7 : 8;
  *minor = 0;
  return OK;
}
int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending) {
  if (device->number) return NOT_SUPPORTED;
  *now = *pending = 1;
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
  *count = device->number ? 0 : PLACES;
  return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *part) {
  (void)device;
  if (index != 1 && index != 4) return NOT_FOUND;
  *part = &parts[index == 4];
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                            nvmlProcessInfo_t *infos) {
  (void)device;
  if (*count < PROCESSES) {
    *count = PROCESSES;
    return TOO_SMALL;
  }
  for (unsigned int i = 0; i < PROCESSES; i++) {
    infos[i].pid = 1000 + i;
    infos[i].usedGpuMemory = i == 3 ? ~0ULL : (unsigned long long)i << 20;
    infos[i].gpuInstanceId = infos[i].computeInstanceId = 0xffffffff;
  }
  *count = PROCESSES;
  return OK;
}
int nvmlSystemGetProcessName(unsigned int pid, char *text, unsigned int length) {
  if (pid == 1001) return NOT_FOUND;
  return put(text, length, pid == 1069 ? "/usr/bin/python3 train.py" : "other");
}
int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit) {
  (void)device;
  *limit = 150000;
  return OK;
}
int nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *limit) {
  (void)device;
  *limit = 300000;
  return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
  (void)device;
  *reasons = 0x1 | 0x20 | 0x4;
  return OK;
}
