// libcuda.so.1: the driver API on device.cpp. PyTorch takes its virtual memory from here, Triton and Inductor launch here.
#include <cuda.h>
#include <cstdio>
#include <cstring>
#include <string>
#include "device.h"

namespace {
char the_context;
const CUcontext context = reinterpret_cast<CUcontext>(&the_context);
CUresult give(int code) { return CUresult(code); }
template <class T> void* at(T address) { return reinterpret_cast<void*>(address); }
struct Function { std::string name; };
CUresult launch(CUfunction f, CUstream s) { return give(twin_kernel(s, reinterpret_cast<Function*>(f)->name.c_str(), 0)); }
}  // namespace

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* v) { *v = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int n, CUdevice) { snprintf(name, n, "CUDA twin"); return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid* u, CUdevice) { *u = {}; u->bytes[0] = 1; return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) { *n = twin_total_bytes(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) { return give(twin_attribute(a, v)); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { *c = context; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* c) { *c = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* c) { if (c) *c = context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* d) { *d = 0; return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return give(twin_device_sync()); }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* v, CUlimit) { *v = 0; return CUDA_SUCCESS; }
CUresult cuStreamGetCtx(CUstream, CUcontext* c) { *c = context; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char** s) { *s = e == 2 ? "out of memory" : "error of the twin"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** s) { *s = "CUDA_ERROR_OF_THE_TWIN"; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  int type = twin_pointer_type(at(p));
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr*>(out) = p;
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *static_cast<unsigned*>(out) = type == 2 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *static_cast<int*>(out) = 0;
  else return CUDA_ERROR_NOT_SUPPORTED;
  return type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* a, void** out, CUdeviceptr p) {
  for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(out[i], a[i], p);
  return CUDA_SUCCESS;
}

// Memory.
CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) { return give(twin_malloc(reinterpret_cast<void**>(p), n)); }
CUresult cuMemFree_v2(CUdeviceptr p) { return give(twin_free(at(p))); }
CUresult cuMemGetInfo_v2(size_t* f, size_t* t) { return give(twin_memory_info(f, t)); }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t n) { return give(twin_copy(at(to), from, n, nullptr, true)); }
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t n) { return give(twin_copy(to, at(from), n, nullptr, true)); }
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return give(twin_copy(at(to), at(from), n, s, false)); }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t n, CUstream s) { return give(twin_copy(at(to), from, n, s, false)); }
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t n, CUstream s) { return give(twin_copy(to, at(from), n, s, false)); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return cuMemcpyAsync(to, from, n, s); }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s) { return give(twin_set(at(p), v, n, s)); }
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) { return give(twin_set(at(p), int(v), n * 4, s)); }
CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *n = 2u << 20; return CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) { return give(twin_reserve(reinterpret_cast<void**>(p), n)); }
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { return give(twin_unreserve(at(p), n)); }
CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp*, unsigned long long) {
  uint64_t handle = 0;
  int code = twin_create(n, &handle);
  *h = handle;
  return give(code);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) { return give(twin_release(h)); }
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle h, unsigned long long) { return give(twin_map(at(p), n, h)); }
CUresult cuMemUnmap(CUdeviceptr p, size_t n) { return give(twin_unmap(at(p), n)); }
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* p, CUmemGenericAllocationHandle) { *p = {}; return CUDA_SUCCESS; }

// Kernels: a function is its name.
CUresult cuModuleLoadData(CUmodule* m, const void*) { *m = reinterpret_cast<CUmodule>(new Function{}); return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) { return cuModuleLoadData(m, nullptr); }
CUresult cuModuleLoad(CUmodule* m, const char*) { return cuModuleLoadData(m, nullptr); }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* name) { *f = reinterpret_cast<CUfunction>(new Function{name}); return CUDA_SUCCESS; }
CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuFuncGetModule(CUmodule* m, CUfunction) { *m = nullptr; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int threads, size_t) { *n = 2048 / threads; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 16; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream s, void**, void**) { return launch(f, s); }
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) { return launch(f, c->hStream); }
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream s, void**) { return launch(f, s); }
CUresult cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { *m = {}; return CUDA_SUCCESS; }

// Streams and events.
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* s) { *s = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream s) { return give(twin_stream_sync(s)); }
CUresult cuStreamCreate(CUstream* s, unsigned) { return give(twin_stream_create(reinterpret_cast<void**>(s), 0)); }
CUresult cuStreamDestroy_v2(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned) { return give(twin_stream_wait(s, e)); }
CUresult cuEventCreate(CUevent* e, unsigned) { return give(twin_event_create(reinterpret_cast<void**>(e))); }
CUresult cuEventRecord(CUevent e, CUstream s) { return give(twin_event_record(e, s)); }
CUresult cuEventSynchronize(CUevent e) { return give(twin_event_sync(e)); }
CUresult cuEventDestroy_v2(CUevent e) { return give(twin_event_destroy(e)); }
}
