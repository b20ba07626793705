// libcudnn.so.9: descriptors keep what is set; each heuristic finds one engine, whose plans run and do nothing.
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include "device.h"
#include "libraries.h"

namespace {
struct Descriptor { std::map<int, std::string> set; };
size_t bytes_of(int type) {  // cudnnBackendAttributeType_t
  switch (type) {
    case 0: case 3: case 5: case 6: case 15: return 8;
    case 2: case 24: return 1;
    case 26: return 16;
    default: return 4;
  }
}
enum { ENGINES_FOUND = 202, ENGINE_WORKSPACE = 303, PLAN_WORKSPACE = 402, DESCRIPTOR = 15 };
int work(void* handle, const char* name) { return twin_kernel(*static_cast<void**>(handle), name, 0); }
}  // namespace

#define LEGACY(name)                                                                 \
  int cudnnCreate##name##Descriptor(void** d) { *d = calloc(1, 256); return 0; }      \
  int cudnnDestroy##name##Descriptor(void* d) { free(d); return 0; }

extern "C" {
size_t cudnnGetVersion() { return 92600; }
size_t cudnnGetCudartVersion() { return 13020; }
int cudnnGetProperty(int which, int* v) { *v = which == 0 ? 9 : which == 1 ? 26 : 0; return 0; }
const char* cudnnGetErrorString(int) { return "status of the twin"; }
void cudnnGetLastErrorString(char* text, size_t n) { if (n) *text = 0; }
int cudnnCreate(void** h) { *h = calloc(1, sizeof(void*)); return 0; }
int cudnnDestroy(void*) { return 0; }
int cudnnSetStream(void* h, void* s) { *static_cast<void**>(h) = s; return 0; }
int cudnnGetStream(void* h, void** s) { *s = *static_cast<void**>(h); return 0; }

LEGACY(Tensor) LEGACY(Filter) LEGACY(Convolution) LEGACY(Activation) LEGACY(Pooling)
LEGACY(Dropout) LEGACY(RNN) LEGACY(RNNData) LEGACY(SpatialTransformer) LEGACY(CTCLoss)
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, size_t* n) { *n = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*, size_t* n) { *n = 0; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* n) { *n = 0; return 0; }
int cudnnBatchNormalizationForwardTrainingEx(void* h) { return work(h, "cudnnBatchNormalizationForwardTrainingEx"); }
int cudnnBatchNormalizationForwardInference(void* h) { return work(h, "cudnnBatchNormalizationForwardInference"); }
int cudnnBatchNormalizationBackwardEx(void* h) { return work(h, "cudnnBatchNormalizationBackwardEx"); }
int cudnnPoolingForward(void* h) { return work(h, "cudnnPoolingForward"); }

int cudnnBackendCreateDescriptor(int, void** d) { *d = new Descriptor; return 0; }
int cudnnBackendDestroyDescriptor(void* d) { delete static_cast<Descriptor*>(d); return 0; }
int cudnnBackendFinalize(void*) { return 0; }
int cudnnBackendSetAttribute(void* d, int name, int type, int64_t count, const void* data) {
  static_cast<Descriptor*>(d)->set[name].assign(static_cast<const char*>(data), bytes_of(type) * size_t(count));
  return 0;
}
int cudnnBackendGetAttribute(void* d, int name, int type, int64_t wanted, int64_t* count, void* out) {
  auto& set = static_cast<Descriptor*>(d)->set;
  int64_t found = wanted == 1;  // what was not set is one zero, or a descriptor as it was
  if (name == ENGINES_FOUND) {
    found = 1;
  } else if (name == ENGINE_WORKSPACE || name == PLAN_WORKSPACE) {
    found = 1;
    if (wanted && out) *static_cast<int64_t*>(out) = int64_t(workspace_bytes());
  } else if (auto at = set.find(name); at != set.end()) {
    found = int64_t(at->second.size() / bytes_of(type));
    if (out && wanted > 0) memcpy(out, at->second.data(), bytes_of(type) * size_t(wanted < found ? wanted : found));
  } else if (found && type != DESCRIPTOR && out) {
    memset(out, 0, bytes_of(type));
  }
  if (count) *count = found;
  return 0;
}
int cudnnBackendExecute(void* handle, void*, void*) { return work(handle, "cudnnBackendExecute"); }
}
