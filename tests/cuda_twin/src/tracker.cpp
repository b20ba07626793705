// Puts into the record what the caching allocator does, and which memory each op of PyTorch reads and writes.
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include "device.h"

namespace {
namespace allocator = c10::cuda::CUDACachingAllocator;

void allocator_did(const allocator::TraceEntry& e) {
  using Entry = allocator::TraceEntry;
  uint32_t kind = e.action_ == Entry::ALLOC ? ALLOC
      : e.action_ == Entry::FREE_REQUESTED ? FREE_REQUESTED
      : e.action_ == Entry::FREE_COMPLETED ? FREE_COMPLETED : 0;
  if (kind) twin_put(kind, e.stream_, uint64_t(e.addr_), 0, e.size_);
}

// b of READ and WRITE: 1 for memory of the device. n: from the first byte to the last one.
void put(TwinKind kind, const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.numel() == 0 || !(t.is_cuda() || t.is_cpu())) return;
  if (t.key_set().has(c10::DispatchKey::Python)) return;  // a fake tensor, which has no memory
  const void* first = t.storage().data();
  if (!first) return;
  int64_t elements = 1;
  for (int64_t i = 0; i < t.dim(); i++) elements += (t.size(i) - 1) * t.stride(i);
  uint64_t start = uint64_t(first) + uint64_t(t.storage_offset()) * t.element_size();
  twin_put(kind, c10::cuda::getCurrentCUDAStream().stream(), start, t.is_cuda(), uint64_t(elements) * t.element_size());
}
void put(TwinKind kind, const c10::IValue& value) {
  if (value.isTensor()) put(kind, value.toTensor());
  else if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) put(kind, t);
  else if (value.isList()) for (const c10::IValue& v : value.toListRef()) put(kind, v);
}

// Ops that change what a tensor is and touch no bytes. Views are known by their schema, which autograd's own record of
// `detach`, inside of `aten::detach`, has not.
bool is_of_metadata(const std::string& name) {
  if (name == "detach" || name == "detach_") return true;
  for (const char* other : {"set_", "resize_", "detach_", "as_strided_", "t_", "transpose_", "squeeze_", "unsqueeze_"})
    if (name == std::string("aten::") + other) return true;
  return false;
}
struct Before : at::ObserverContext { uint64_t op; bool touches_nothing; };
std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& f) {
  auto before = std::make_unique<Before>();
  before->op = twin_enter_op(f.name());
  auto schema = f.operator_schema();
  bool is_view = schema && !schema->is_mutable() && schema->hasAnyAliasInfo();
  before->touches_nothing = is_view || is_of_metadata(f.name());
  for (size_t i = 0; i < f.inputs().size() && !before->touches_nothing; i++) {
    const c10::AliasInfo* alias = schema && i < schema->arguments().size() ? schema->arguments()[i].alias_info() : nullptr;
    put(alias && alias->isWrite() ? WRITE : READ, f.inputs()[i]);
  }
  return before;
}
void ends(const at::RecordFunction& f, at::ObserverContext* context) {
  auto before = static_cast<Before*>(context);
  if (!before) return;  // the beginning failed, of which PyTorch has told
  if (!before->touches_nothing) for (const c10::IValue& value : f.outputs()) put(WRITE, value);
  twin_leave_op(before->op);
}
}  // namespace

extern "C" void twin_track() {
  allocator::get()->attachAllocatorTraceTracker(allocator_did);
  at::addGlobalCallback(at::RecordFunctionCallback(begins, ends).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}
