// libnvidia-ml.so.1: one device, no links, no other processes.
constexpr int NOT_SUPPORTED = 3;
extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* v) { *v = 13020; return 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** d) { static int device; *d = &device; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** d) { return nvmlDeviceGetHandleByIndex_v2(0, d); }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // leaves it at: none
const char* nvmlErrorString(int) { return "error of the twin"; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) { *n = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* n, void*) { *n = 0; return 0; }
}
