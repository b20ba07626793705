// libcudart.so.13: the runtime API on device.cpp.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>
#include "device.h"

namespace {
std::mutex lock;
thread_local cudaError_t last = cudaSuccess;
thread_local int current = 0;
struct Call { dim3 grid, block; size_t shared; cudaStream_t stream; };
thread_local std::vector<Call> calls;
auto& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}
auto& variables() {  // of device code: address and bytes
  static auto* all = new std::unordered_map<const void*, std::pair<void*, size_t>>;
  return *all;
}
cudaError_t give(int code) {
  if (code && code != cudaErrorNotReady) last = cudaError_t(code);
  return cudaError_t(code);
}
cudaError_t launch(const void* kernel, cudaStream_t stream) {
  const char* name;
  {
    std::lock_guard<std::mutex> held(lock);
    auto at = kernel_names().find(kernel);
    name = at == kernel_names().end() ? "unknown" : at->second.c_str();
  }
  return give(twin_kernel(stream, name, 0));
}
int attribute(cudaDeviceAttr a) {
  int value = 0;
  twin_attribute(a, &value);
  return value;
}
int not_supported() { return cudaErrorNotSupported; }
}  // namespace

extern "C" {
// Kernels. Their handles are the host's functions.
void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> held(lock);
  kernel_names()[host] = name;
}
void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t bytes, int, int) {
  std::lock_guard<std::mutex> held(lock);
  variables()[host] = {nullptr, bytes};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  calls.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (calls.empty()) return cudaErrorInvalidConfiguration;
  *grid = calls.back().grid, *block = calls.back().block, *shared = calls.back().shared;
  *static_cast<cudaStream_t*>(stream) = calls.back().stream;
  calls.pop_back();
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(k, s); }
cudaError_t cudaLaunchKernel(const void* k, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(k, s); }
cudaError_t cudaLaunchCooperativeKernel(const void* k, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(k, s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* k, void**) { return launch(k, c->stream); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  *a = {};
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 64;
  a->ptxVersion = a->binaryVersion = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  a->maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int threads, size_t shared, unsigned) {
  size_t of_threads = attribute(cudaDevAttrMaxThreadsPerMultiProcessor) / std::max(1, threads);
  size_t of_shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (shared + 1024);
  *n = int(std::max<size_t>(1, std::min({of_threads, of_shared, size_t(32)})));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* k, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, k, threads, shared, 0);
}

// The device.
cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return d ? give(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) { return give(twin_attribute(a, value)); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  p->major = attribute(cudaDevAttrComputeCapabilityMajor), p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  snprintf(p->name, sizeof p->name, "CUDA twin sm_%d%d", p->major, p->minor);
  p->totalGlobalMem = twin_total_bytes();
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->reservedSharedMemPerBlock = 1024;
  p->totalConstMem = 65536;
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  p->textureAlignment = p->surfaceAlignment = 512;
  p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = p->managedMemory = p->memoryPoolsSupported = 1;
  p->uuid.bytes[0] = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int) { snprintf(id, n, "0000:01:00.0"); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return give(twin_device_sync()); }
cudaError_t cudaDeviceCanAccessPeer(int* yes, int, int) { *yes = 0; return cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t e) {
  static thread_local char text[64];
  snprintf(text, sizeof text, e == cudaErrorMemoryAllocation ? "out of memory" : "error %d of the twin", int(e));
  return e ? text : "no error";
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory.
cudaError_t cudaMalloc(void** p, size_t n) { return give(twin_malloc(p, n)); }
cudaError_t cudaFree(void* p) { return give(twin_free(p)); }
cudaError_t cudaMallocHost(void** p, size_t n) { return give(twin_host_alloc(p, n)); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return give(twin_host_alloc(p, n)); }
cudaError_t cudaFreeHost(void* p) { return give(twin_host_free(p, false)); }
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) { return give(twin_host_register(p, n)); }
cudaError_t cudaHostUnregister(void* p) { return give(twin_host_free(p, true)); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) { return give(twin_memory_info(free_bytes, total)); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  return give(twin_copy(to, from, n, nullptr, true));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  return give(twin_copy(to, from, n, s, false));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  return give(twin_copy(to, from, n, s, false));
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t s) {
  for (size_t row = 0; row < rows; row++)
    twin_copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, s, false);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int v, size_t n) { return give(twin_set(at, v, n, nullptr)); }
cudaError_t cudaMemsetAsync(void* at, int v, size_t n, cudaStream_t s) { return give(twin_set(at, v, n, s)); }
cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  std::lock_guard<std::mutex> held(lock);
  auto& [at, bytes] = variables()[symbol];
  if (!at) at = calloc(1, std::max<size_t>(bytes, 64));
  *p = at;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  *a = {};
  int type = twin_pointer_type(p);
  a->type = type == 2 ? cudaMemoryTypeDevice : type == 1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = type ? 0 : -2;
  a->devicePointer = type ? const_cast<void*>(p) : nullptr;
  a->hostPointer = type == 1 ? const_cast<void*>(p) : nullptr;
  return cudaSuccess;
}

// Streams and events.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  return give(twin_stream_create(reinterpret_cast<void**>(s), priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { *p = twin_stream_priority(s); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) { return give(twin_stream_wait(s, e)); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return give(twin_stream_sync(s)); }
cudaError_t cudaStreamQuery(cudaStream_t s) { return give(twin_stream_query(s)); }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) {
  f(s, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* data) { f(data); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* s) {
  uint64_t id;
  void* graph;
  *s = cudaStreamCaptureStatus(twin_capture_status(stream, &id, &graph));
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* s, unsigned long long* id, cudaGraph_t* g,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* n) {
  uint64_t number;
  void* graph;
  *s = cudaStreamCaptureStatus(twin_capture_status(stream, &number, &graph));
  if (id) *id = number;
  if (g) *g = static_cast<cudaGraph_t>(graph);
  if (n) *n = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  int number = *mode;
  twin_capture_mode(&number);
  *mode = cudaStreamCaptureMode(number);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) { return give(twin_capture_begin(s, mode)); }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  return give(twin_capture_end(s, reinterpret_cast<void**>(graph)));
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* run, cudaGraph_t graph, unsigned long long) {
  *run = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  *n = twin_graph_size(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t s) { return give(twin_graph_launch(run, s)); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return give(twin_event_create(reinterpret_cast<void**>(e))); }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return give(twin_event_destroy(e)); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return give(twin_event_record(e, s)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return give(twin_event_query(e)); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return give(twin_event_sync(e)); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { return give(twin_event_elapsed(ms, a, b)); }

// PyTorch asks the runtime where the driver's functions are.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3", "_v4"})
    if (driver && !*function) *function = dlsym(driver, (std::string(symbol) + suffix).c_str());
  if (!*function) {
    twin_note(symbol);
    *function = reinterpret_cast<void*>(not_supported);
  }
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// The driver's numbers of attributes are the same. TWIN_SM: 80, 89, 90 and so on.
int twin_attribute(int a, int* value) {
  static int sm = getenv("TWIN_SM") ? atoi(getenv("TWIN_SM")) : 90;
  int shared_kib = sm == 89 || sm == 86 ? 100 : sm == 80 ? 164 : 228;  // of a multiprocessor
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *value = sm / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = sm % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = sm == 80 ? 108 : sm == 89 ? 128 : 132; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = sm == 89 || sm == 86 ? 1536 : 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_kib * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (shared_kib - 1) * 1024; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrAsyncEngineCount: *value = 3; break;
    case cudaDevAttrPciBusId: case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrCooperativeLaunch: case cudaDevAttrManagedMemory:
    case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrMemoryPoolsSupported:
      *value = 1; break;
    default: *value = a == 102 || a == 103;  // virtual memory, and its handles
  }
  return 0;
}
}
