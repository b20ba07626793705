// A device that PyTorch takes for a CUDA one, on a machine that has none: its memory is the machine's and its kernels
// are the CPU's. What is real: devices of tensors and whether they may meet in an op, autograd's thread for the
// device, current devices and streams, copies that have not happened until somebody has waited for them, memory that
// is somebody else's once it is freed, blocks of 512 bytes and their peak, pools, a limit, pinned memory, a workspace
// of cuBLAS for each thread that multiplies, and generators that are a seed and an offset.

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/InferSize.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex kDevices = 2;
constexpr unsigned char kFreed = 0xFF;  // NaN in every floating dtype
// Never held where a tensor is freed: that may need Python's lock, which who frees memory here may hold.
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

Device device_of(DeviceIndex index) {
  return Device(DeviceType::CUDA, index);
}

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_streams[kDevices] = {0, 0};

// -- copies ----------------------------------------------------------------------------------------------------------
//
// Kernels run when they are called, on whatever stream. Copies to and from pinned memory that somebody asks for without
// blocking wait in the lane of their stream until a stream or the host waits for them. What is on the host knows of
// them later still: a copy out has reached host memory, and one in has read it, once the host has waited.

using LaneKey = std::pair<DeviceIndex, int64_t>;
using Clock = std::map<LaneKey, int64_t>;  // how many copies of each lane have happened before

struct Copy {
  const void* source;
  void* target;
  size_t size;
  bool out;
  std::vector<char> bytes;  // what was read, once it was
  bool of_unseen = false;  // its source was not there for the host
  int64_t position = 0;
  Clock before;  // what the lane had waited for
};

struct Lane {
  std::deque<Copy> waiting;  // that have not read their source
  std::deque<Copy> unseen;   // that the host can't know to be done
  int64_t done = 0, issued = 0;
  Clock clock;
};

std::map<LaneKey, Lane> lanes;
int64_t streams_made = 0;
std::mt19937 early(0);
bool copies_early = false;
std::string fault;  // the first thing that would have gone wrong on a device

LaneKey key_of(const Stream& stream) {
  return {stream.device_index(), stream.id()};
}

void merge(Clock& into, const Clock& from) {
  for (const auto& [key, position] : from)
    into[key] = std::max(into[key], position);
}

bool overlap(const void* a, size_t size_a, const void* b, size_t size_b) {
  return a < static_cast<const char*>(b) + size_b && b < static_cast<const char*>(a) + size_a;
}

void blame(const char* what) {
  if (fault.empty())
    fault = what;
}

void arrive(const Copy& copy) {
  if (copy.out) {
    const auto* target = static_cast<const unsigned char*>(copy.target);
    if (!std::all_of(target, target + copy.size, [](unsigned char byte) { return byte == kFreed; }))
      blame("host memory was written to while a copy from the device could still be writing it");
    std::memcpy(copy.target, copy.bytes.data(), copy.size);
  } else if (!copy.of_unseen && std::memcmp(copy.source, copy.bytes.data(), copy.size) != 0) {
    blame("host memory was written to while a copy to the device could still be reading it");
  }
}

void run_until(const Clock& clock);

// The device has done that many copies of a lane.
void run_until(const LaneKey& key, int64_t position) {
  auto& lane = lanes[key];
  while (lane.done < position && !lane.waiting.empty()) {
    auto copy = std::move(lane.waiting.front());
    lane.waiting.pop_front();
    ++lane.done;
    run_until(copy.before);
    std::vector<std::tuple<void*, size_t, const char*>> read_early;
    if (!copy.out)  // what this stream knows to have arrived on the host is there to be read
      for (const auto& [other, until] : copy.before)
        for (const auto& written : lanes[other].unseen)
          if (written.out && written.position <= until &&
              overlap(written.target, written.size, copy.source, copy.size))
            read_early.emplace_back(written.target, written.size, written.bytes.data());
    for (auto [target, size, bytes] : read_early)
      std::memcpy(target, bytes, size);
    const auto* source = static_cast<const char*>(copy.source);
    if (copy.bytes.empty())
      copy.bytes.assign(source, source + copy.size);
    copy.of_unseen = !read_early.empty();
    for (auto [target, size, _] : read_early)  // and not yet for the CPU
      std::memset(target, kFreed, size);
    if (!copy.out)
      std::memcpy(copy.target, copy.bytes.data(), copy.size);
    lane.unseen.push_back(std::move(copy));
  }
}

void run_until(const Clock& clock) {
  for (const auto& [key, position] : clock)
    run_until(key, position);
}

// The host knows that these are done.
void see_until(const Clock& clock) {
  run_until(clock);
  for (const auto& [key, position] : clock) {
    auto& lane = lanes[key];
    while (!lane.unseen.empty() && lane.unseen.front().position <= position) {
      arrive(lane.unseen.front());
      lane.unseen.pop_front();
    }
  }
}

Clock clock_of(const LaneKey& key) {
  auto clock = lanes[key].clock;
  clock[key] = lanes[key].issued;
  return clock;
}

void enqueue(const LaneKey& key, Copy copy) {
  auto& lane = lanes[key];
  copy.before = clock_of(key);
  copy.position = ++lane.issued;
  if (copy.out)  // copies that used this host memory before, and that the device has done
    for (auto& [other, used] : lanes)
      for (auto earlier = used.unseen.begin(); earlier != used.unseen.end();) {
        const bool same = overlap(
            earlier->out ? earlier->target : earlier->source, earlier->size, copy.target, copy.size);
        const auto until = copy.before.find(other);
        if (same && (until == copy.before.end() || until->second < earlier->position))
          blame("a copy from the device writes to host memory that another copy could still be using");
        earlier = same ? used.unseen.erase(earlier) : earlier + 1;
      }
  lane.waiting.push_back(std::move(copy));
}

// Before what a stream or, with it, the host does next.
void wait(const LaneKey& key, bool host) {
  Lock lock(mutex);
  if (host)
    see_until(clock_of(key));
  else
    run_until(key, lanes[key].issued);
}

void see_all(DeviceIndex index) {
  for (auto& [key, lane] : lanes)
    if (key.first == index || index < 0)
      see_until({{key, lane.issued}});
}

void run_some() {
  if (!copies_early)
    return;
  for (auto& [key, lane] : lanes)
    while (!lane.waiting.empty() && early() % 10 < 3)
      run_until(key, lane.done + 1);
}

// -- memory ----------------------------------------------------------------------------------------------------------

struct Counts {
  int64_t held = 0, most = 0, limit = int64_t(1) << 40, made = 0, slabs = 0, outside = 0;
};

Counts counts[kDevices];
constexpr int64_t kTotal = int64_t(1) << 40;
bool records = false;
std::vector<std::pair<int64_t, size_t>> record;  // address and bytes of each block that is given; 0 where it is freed

struct Block {
  size_t size;
  DeviceIndex index;  // -1 of pinned memory
  int64_t pool = 0;
};

std::unordered_map<void*, Block> blocks;
std::map<std::pair<DeviceIndex, size_t>, std::vector<void*>> free_blocks;

void* take(size_t size, DeviceIndex index) {
  auto& spare = free_blocks[{index, size}];
  void* found = nullptr;
  if (!spare.empty()) {
    found = spare.back();
    spare.pop_back();
  } else {
    TORCH_CHECK(posix_memalign(&found, 512, size) == 0, "no memory left on the machine");
    std::memset(found, kFreed, size);
  }
  blocks[found] = {size, index};
  return found;
}

// Pools deal out their slabs as PyTorch's caching allocator does large blocks: the smallest hole that is large enough,
// from its start, and all of it where the rest would be small. Small blocks are outside.
constexpr size_t kSmall = size_t(1) << 20;
thread_local int64_t current_pool = 0;
int64_t pools_made = 0;

struct Hole {
  size_t size;
  char* slab;
};

std::map<int64_t, std::map<char*, Hole>> pools;
std::unordered_map<void*, char*> slabs;  // of blocks in pools

void* take_from_pool(size_t size, DeviceIndex index) {
  auto& holes = pools[current_pool];
  auto best = holes.end();
  for (auto hole = holes.begin(); hole != holes.end(); ++hole)
    if (hole->second.size >= size && (best == holes.end() || hole->second.size < best->second.size))
      best = hole;
  if (best == holes.end()) {
    const size_t slab_size = size < 10 * kSmall ? 20 * kSmall : (size + 2 * kSmall - 1) / (2 * kSmall) * (2 * kSmall);
    void* slab = nullptr;
    TORCH_CHECK(posix_memalign(&slab, 512, slab_size) == 0, "no memory left on the machine");
    std::memset(slab, kFreed, slab_size);
    ++counts[index].slabs;
    best = holes.emplace(static_cast<char*>(slab), Hole{slab_size, static_cast<char*>(slab)}).first;
  }
  auto [data, hole] = *best;
  holes.erase(best);
  if (hole.size - size > kSmall)
    holes[data + size] = {hole.size - size, hole.slab};
  else
    size = hole.size;
  blocks[data] = {size, index, current_pool};
  slabs[data] = hole.slab;
  return data;
}

void return_to_pool(char* data, size_t size, int64_t pool) {
  auto& holes = pools[pool];
  auto* slab = slabs.at(data);
  slabs.erase(data);
  auto after = holes.lower_bound(data);
  if (after != holes.end() && after->second.slab == slab && data + size == after->first) {
    size += after->second.size;
    after = holes.erase(after);
  }
  if (after != holes.begin()) {
    auto before = std::prev(after);
    if (before->second.slab == slab && before->first + before->second.size == data) {
      before->second.size += size;
      return;
    }
  }
  holes[data] = {size, slab};
}

// What was freed goes to whoever asks next, and copies that nobody has waited for go on reading and writing it.
void give_back(void* data) {
  Lock lock(mutex);
  auto block = blocks.at(data);
  if (block.index < 0) {  // the allocator of pinned memory waits for the copies that it knows of
    see_all(-1);
  } else {
    counts[block.index].held -= static_cast<int64_t>(block.size);
    if (records)
      record.emplace_back(reinterpret_cast<int64_t>(data), 0);
  }
  std::memset(data, kFreed, block.size);
  blocks.erase(data);
  if (block.pool)
    return_to_pool(static_cast<char*>(data), block.size, block.pool);
  else
    free_blocks[{block.index, block.size}].push_back(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    Lock lock(mutex);
    const auto index = current_device;
    if (wanted == 0)
      return {nullptr, nullptr, &give_nothing, device_of(index)};
    const size_t size = (wanted + 511) / 512 * 512;
    auto& count = counts[index];
    if (count.held + static_cast<int64_t>(size) > count.limit) {
      C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", size, " bytes"));
    }
    const bool pooled = current_pool && size > kSmall;
    void* data = pooled ? take_from_pool(size, index) : take(size, index);
    count.outside += size > kSmall && !pooled;
    count.held += static_cast<int64_t>(blocks[data].size);
    count.most = std::max(count.most, count.held);
    ++count.made;
    if (records)
      record.emplace_back(reinterpret_cast<int64_t>(data), size);
    return {data, data, &give_back, device_of(index)};
  }
  static void give_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    Lock lock(mutex);
    size_t size = 512;
    while (size < wanted)
      size *= 2;
    void* data = take(size, -1);
    return {data, data, &give_back, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;

bool is_pinned(const void* data) {
  Lock lock(mutex);
  for (auto& [start, block] : blocks)
    if (block.index < 0 && data >= start && data < static_cast<char*>(start) + block.size)
      return true;
  return false;
}

// -- devices, streams and events -------------------------------------------------------------------------------------

struct Recorded {
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return device_of(current_device);
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    if (device.index() >= 0)
      current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  static DeviceIndex known(Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  Stream getStream(Device device) const override {
    auto index = known(device);
    return Stream(Stream::UNSAFE, device_of(index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, device_of(known(device)), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    return Stream(Stream::UNSAFE, device_of(known(device)), ++streams_made);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    delete static_cast<Recorded*>(*event);
    *event = new Recorded{clock_of(key_of(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(mutex);
    if (auto* recorded = static_cast<Recorded*>(event)) {
      merge(lanes[key_of(stream)].clock, recorded->clock);
      if (stream.id() == 0 || computes(stream))
        run_until(recorded->clock);
    }
    run_some();
  }
  // Kernels that a stream is given after it waits run at once, so the copies have to.
  static bool computes(const Stream& stream) {
    return lanes[key_of(stream)].issued == 0;
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    if (auto* recorded = static_cast<Recorded*>(event))
      for (const auto& [key, position] : recorded->clock)
        if (lanes[key].done < position)
          return false;
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    return lanes[key_of(stream)].waiting.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(mutex);
    see_until(clock_of(key_of(stream)));
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (auto* recorded = static_cast<Recorded*>(event))
      see_until(recorded->clock);
    run_some();
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    Lock lock(mutex);
    see_all(index);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    std::chrono::duration<double, std::milli> between =
        static_cast<Recorded*>(to)->when - static_cast<Recorded*>(from)->when;
    return between.count();
  }
};

Stream stream_of(int index, int64_t id) {
  return Stream(Stream::UNSAFE, device_of(DeviceIndex(index)), id);
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// -- generators ------------------------------------------------------------------------------------------------------

struct Philox {
  uint64_t seed = 67280421310721, offset = 0;
};

Philox generators[kDevices];

// Lets the CPU's generator stand for that of the device while one kernel draws.
struct Drawing {
  at::Generator generator = at::globalContext().defaultGenerator(Device(DeviceType::CPU));
  at::Tensor before;
  explicit Drawing(DeviceIndex index) {
    std::lock_guard<std::mutex> held(generator.mutex());
    before = generator.get_state();
    auto& philox = generators[index];
    generator.set_current_seed(philox.seed * 6364136223846793005u + philox.offset + 1);
    philox.offset += 4;
  }
  ~Drawing() {
    std::lock_guard<std::mutex> held(generator.mutex());
    generator.set_state(before);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex current_device() const override {
    return ::current_device;
  }
  DeviceIndex getCurrentDevice() const override {
    return ::current_device;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  int getNumGPUs() const override {
    return kDevices;
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  Device getDeviceFromPtr(void*) const override {
    return device_of(::current_device);
  }
};

}  // namespace

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

namespace {

// -- kernels ---------------------------------------------------------------------------------------------------------

bool is_there(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cuda();
}

// A workspace of cuBLAS, for each thread, stream and device that multiplies.
std::map<std::tuple<std::thread::id, DeviceIndex, int64_t>, at::DataPtr> workspaces;
int64_t workspace_bytes = std::getenv("STAND_IN_WORKSPACE") ? std::atoll(std::getenv("STAND_IN_WORKSPACE")) : 8 << 20;

const std::set<std::string> kMultiply = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::addr", "aten::dot",
    "aten::vdot", "aten::addbmm"};

void make_workspace(DeviceIndex index) {
  Lock lock(mutex);
  auto& held = workspaces[{std::this_thread::get_id(), index, current_streams[index]}];
  if (!held)
    held = device_memory.allocate(workspace_bytes);
}

// What a kernel calls is neither differentiated nor cast.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

// Tensors over the same memory for one call of a CPU kernel.
struct Mirror {
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // there, here

  at::Tensor of(const at::Tensor& there) {
    auto* impl = there.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end()) {
      void* data = impl->mutable_data();
      c10::Storage storage(
          c10::Storage::use_byte_size_t(), impl->nbytes(),
          c10::DataPtr(data, data, &DeviceAllocator::give_nothing, Device(DeviceType::CPU)), c10::GetCPUAllocator(),
          /*resizable=*/true);
      found = storages.emplace(impl, std::move(storage)).first;
    }
    auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
    auto here = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), keys, there.dtype());
    here.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides(), there.storage_offset());
    here._set_conj(there.is_conj());
    here._set_neg(there.is_neg());
    seen.emplace_back(there, here);
    return here;
  }

  // Where a kernel gave what it writes to another size, memory on the device of that size.
  void bring_back() {
    for (auto& [there, here] : seen) {
      auto* impl = there.storage().unsafeGetStorageImpl();
      if (here.storage().data() == impl->data() && here.sizes() == there.sizes())
        continue;
      there.resize_(here.sizes());
      if (here.numel()) {
        there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
        const auto size = std::min(there.storage().nbytes(), here.storage().nbytes());
        std::memcpy(there.storage().mutable_data(), here.storage().data(), size);
      }
    }
  }
};

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, caffe2::TypeMeta dtype, Device device) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::typeMetaToScalarType(dtype));
}

// The same values in memory of the device, in the same order of strides.
at::Tensor there_of(const at::Tensor& here, Device device) {
  if (!here.defined() || !here.device().is_cpu())
    return here;
  auto out = empty_strided(here.sizes(), here.strides(), here.dtype(), device);
  if (here.numel())
    std::memcpy(out.mutable_data_ptr(), here.const_data_ptr(), out.storage().nbytes());
  return out;
}

const std::set<std::string> kMayMeet = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto count = arguments.size();
  const auto first = stack->size() - count;
  Mirror mirror;
  std::optional<Device> device;
  bool from_host = false;
  std::vector<c10::IValue> originals(stack->begin() + first, stack->end());
  // Kernels of optimizers and gradient scaling, which read no count or scale on the host.
  const bool strict = schema.name().rfind("aten::_fused_", 0) == 0 || schema.name().rfind("aten::_amp_", 0) == 0;

  auto see = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!is_there(tensor)) {
      TORCH_CHECK(
          !strict || !tensor.defined(), "CUDA error: an illegal memory access was encountered in ", schema.name());
      from_host |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(
        !device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ", *device,
        " and ", tensor.device(), " in ", schema.name());
    device = tensor.device();
    return mirror.of(tensor);
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      if (arguments[i].name() != "lr" || is_there(value.toTensor()))  // a rate on the host is read there
        value = see(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(see(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<at::Tensor>(see(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      value = Device(DeviceType::CPU);
    }
  }
  if (device && device->index() < 0)
    device = device_of(current_device);
  const Device where = device.value_or(device_of(current_device));
  TORCH_CHECK(
      !from_host || !device || kMayMeet.count(schema.name()),
      "Expected all tensors to be on the same device, but found some on the CPU and some on ", where, " in ",
      schema.name());
  c10::OptionalDeviceGuard guard(where);
  if (kMultiply.count(schema.name()))
    make_workspace(where.index());
  {
    Below below;
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded))
      drawing.emplace(where.index());
    op.callBoxed(stack);
  }
  mirror.bring_back();

  const auto& returns = schema.returns();
  const auto start = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[start + i];
    const auto* alias = returns[i].alias_info();
    if (value.isTensor()) {
      if (alias != nullptr) {
        TORCH_CHECK(alias->isWrite(), "the stand-in for CUDA has no kernel for the view ", schema.name());
        for (size_t j = 0; j < count; ++j)
          if (arguments[j].alias_info() != nullptr && *arguments[j].alias_info() == *alias)
            value = originals[j];
      } else {
        value = there_of(value.toTensor(), where);
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(there_of(tensor, where));
      value = list;
    }
  }
}

at::Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_there(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  return empty_strided(
      size, stride, c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)), device.value_or(device_of(current_device)));
}

at::Tensor view_of(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return out;
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  auto inferred = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return view_of(self, inferred, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  Mirror mirror;
  auto here = mirror.of(self).unfold(dim, size, step);
  return view_of(self, here.sizes(), here.strides(), here.storage_offset());
}

// Views in another dtype share the memory, so the CPU's kernel says what they look like.
at::Tensor view_as(const at::Tensor& self, const at::Tensor& here) {
  auto keys = self.key_set();
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), keys.remove(c10::DispatchKey::Conjugate), here.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
  return out;
}

at::Tensor view_as_real(const at::Tensor& self) {
  Mirror mirror;
  return view_as(self, at::view_as_real(mirror.of(self)));
}

at::Tensor view_as_complex(const at::Tensor& self) {
  Mirror mirror;
  return view_as(self, at::view_as_complex(mirror.of(self)));
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t wanted = (self.storage_offset() + self.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (wanted > storage->nbytes()) {
    auto memory = device_memory.allocate(wanted);
    if (storage->nbytes())
      std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(wanted);
  }
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_and_strides(size, c10::contiguous_strides(size), offset);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  const auto needed = at::detail::computeStorageNbytes(size, self.strides(), self.itemsize(), offset);
  TORCH_CHECK(self.numel() == 0 || needed <= self.storage().nbytes(), "set_ beyond the end of a storage");
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, /*resizable=*/true);
  return set_storage(self, std::move(storage), 0, {0}, {1});
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0 && source.numel() == 0)
    return self;
  const bool out = !self.device().is_cuda();
  const bool in = !source.device().is_cuda();
  const auto index = out ? source.device().index() : self.device().index();
  const LaneKey key{index, current_streams[index]};
  const bool plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
      self.strides() == source.strides() && self.is_non_overlapping_and_dense() && !self.is_conj() &&
      !source.is_conj() && !self.is_neg() && !source.is_neg();
  if (in != out && non_blocking && plain && is_pinned(out ? self.const_data_ptr() : source.const_data_ptr())) {
    Lock lock(mutex);
    Copy waiting{source.const_data_ptr(), self.mutable_data_ptr(), self.nbytes(), out, {}};
    const auto* bytes = static_cast<const char*>(waiting.source);
    const bool computing = key.second == 0;
    if (computing && out)  // kernels that come after it on the same stream may write to the source
      waiting.bytes.assign(bytes, bytes + waiting.size);
    std::memset(waiting.target, kFreed, waiting.size);
    enqueue(key, std::move(waiting));
    if (computing)
      run_until(key, lanes[key].issued);
    run_some();
    return self;
  }
  wait(key, /*host=*/in != out);
  Mirror mirror;
  auto target = is_there(self) ? mirror.of(self) : self;
  auto from = is_there(source) ? mirror.of(source) : source;
  Below below;
  target.copy_(from);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto index = self.device().index();
  wait({index, current_streams[index]}, /*host=*/true);
  Mirror mirror;
  return at::_local_scalar_dense(mirror.of(self));
}

void record_stream(at::Tensor&, Stream) {
  TORCH_CHECK(false, "record_stream is not for memplan");
}

// -- attention: the kernels that a GPU would choose, which keep a seed and an offset for what they drop --------------

int64_t attention_choice(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool grouped) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (half && !mask && at::globalContext().userEnabledFlashSDP())
    return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  const bool known = half || query.scalar_type() == at::kFloat;
  if (known && !grouped && query.dim() == 4 && at::globalContext().userEnabledMemEfficientSDP())
    return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

using OptionalTensor = std::optional<at::Tensor>;

struct Attention {
  at::Tensor query, key, value, weights, lse, kept;
  double scale;
  int64_t groups;

  Attention(
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& bias, bool causal,
      std::optional<double> wanted, double dropout, uint64_t seed, uint64_t offset)
      : query(q.to(at::kFloat)), key(k.to(at::kFloat)), value(v.to(at::kFloat)),
        scale(wanted.value_or(1.0 / std::sqrt(double(q.size(-1))))), groups(q.size(1) / k.size(1)) {
    if (groups > 1) {
      key = key.repeat_interleave(groups, 1);
      value = value.repeat_interleave(groups, 1);
    }
    auto scores = at::matmul(query, key.transpose(-2, -1)) * scale;
    if (bias && bias->defined())
      scores = scores + bias->to(at::kFloat);
    if (causal) {
      auto above = at::ones({scores.size(-2), scores.size(-1)}, scores.options().dtype(at::kBool)).triu(1);
      scores = scores.masked_fill(above, -INFINITY);
    }
    lse = at::logsumexp(scores, -1);
    weights = at::nan_to_num(at::exp(scores - lse.unsqueeze(-1)), 0.0);
    if (dropout > 0) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 6364136223846793005u + offset);
      auto drawn = at::empty(weights.sizes(), at::kFloat).uniform_(0, 1, generator);
      kept = there_of(drawn.ge(dropout).to(at::kFloat).div(1 - dropout), weights.device());
    }
  }

  at::Tensor dropped(const at::Tensor& tensor) const {
    return kept.defined() ? tensor * kept : tensor;
  }

  at::Tensor output() const {
    return at::matmul(dropped(weights), value);
  }

  // Gradients of query, key, value and bias.
  std::array<at::Tensor, 4> backward(const at::Tensor& grad) const {
    auto given = grad.to(at::kFloat);
    auto of_weights = dropped(at::matmul(given, value.transpose(-2, -1)));
    auto of_scores = weights * (of_weights - (of_weights * weights).sum(-1, true));
    auto of_key = at::matmul(of_scores.transpose(-2, -1), query) * scale;
    auto of_value = at::matmul(dropped(weights).transpose(-2, -1), given);
    auto together = [&](const at::Tensor& t) {
      return groups == 1 ? t : t.reshape({t.size(0), t.size(1) / groups, groups, t.size(2), t.size(3)}).sum(2);
    };
    return {at::matmul(of_scores, key) * scale, together(of_key), together(of_value), of_scores};
  }
};

// Heads beside each other in memory, as the kernels write them.
at::Tensor heads_last(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.transpose(1, 2).to(dtype).contiguous().transpose(1, 2);
}

at::Tensor on_host(int64_t value) {
  return at::scalar_tensor(value, at::kLong);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& bias, bool compute_lse,
    double dropout, bool causal, std::optional<double> scale) {
  Below below;
  auto& philox = generators[q.device().index()];
  const auto seed = philox.seed, offset = philox.offset;
  if (dropout > 0)
    philox.offset += 4;
  Attention attention(q, k, v, bias, causal, scale, dropout, seed, offset);
  const auto rows = compute_lse ? (q.size(2) + 31) / 32 * 32 : 0;
  auto lse = at::empty({q.size(0), q.size(1), rows}, q.options().dtype(at::kFloat));
  if (compute_lse) {
    lse.fill_(INFINITY);
    lse.narrow(2, 0, q.size(2)).copy_(attention.lse);
  }
  const bool drops = dropout > 0;
  return {heads_last(attention.output(), q.scalar_type()), lse, on_host(drops ? int64_t(seed) : 0),
          on_host(drops ? int64_t(offset) : 0)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    const at::Tensor&, const at::Tensor& lse, const at::Tensor& seed, const at::Tensor& offset, double dropout,
    std::array<bool, 4> mask, bool causal, std::optional<double> scale) {
  if (!grad.defined())
    return {};
  TORCH_CHECK(seed.device().is_cpu() && offset.device().is_cpu(), "seed and offset are on the device");
  TORCH_CHECK(lse.size(2) >= q.size(2), "attention's sums are missing");
  Below below;
  Attention attention(
      q, k, v, bias, causal, scale, dropout, dropout > 0 ? uint64_t(seed.item<int64_t>()) : 0,
      dropout > 0 ? uint64_t(offset.item<int64_t>()) : 0);
  auto found = attention.backward(grad);
  at::Tensor of_bias;
  if (mask[3] && bias.defined())
    of_bias = at::sum_to(found[3].to(bias.scalar_type()), bias.sizes());
  return {heads_last(found[0], q.scalar_type()), heads_last(found[1], k.scalar_type()),
          heads_last(found[2], v.scalar_type()), of_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool,
    std::optional<double> scale) {
  Below below;
  auto& philox = generators[q.device().index()];
  const auto seed = philox.seed, offset = philox.offset;
  if (dropout > 0)
    philox.offset += 4;
  Attention attention(q, k, v, std::nullopt, causal, scale, dropout, seed, offset);
  auto out = at::empty_like(q);
  out.copy_(attention.output());
  auto state = at::empty({2}, at::kLong);
  state.data_ptr<int64_t>()[0] = int64_t(seed);
  state.data_ptr<int64_t>()[1] = int64_t(offset);
  auto there = there_of(state.view(at::kUInt64), q.device());
  auto unused = at::empty({}, q.options().dtype(at::kUInt64));
  return {out, attention.lse, {}, {}, q.size(2), k.size(2), there, unused, at::empty({0}, q.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const at::Tensor& state, const at::Tensor&, std::optional<double> scale) {
  if (!grad.defined())
    return {};
  TORCH_CHECK(state.device().is_cuda(), "what flash attention draws with is not on the device");
  Below below;
  Mirror mirror;
  auto here = mirror.of(state);
  const auto* drawn = static_cast<const uint64_t*>(here.const_data_ptr());
  Attention attention(q, k, v, std::nullopt, causal, scale, dropout, drawn[0], drawn[1]);
  auto found = attention.backward(grad);
  auto like = [](const at::Tensor& gradient, const at::Tensor& tensor) {
    return at::empty_like(tensor).copy_(gradient);
  };
  return {like(found[0], q), like(found[1], k), like(found[2], v)};
}

// -- convolutions for which PyTorch has a kernel of its own on CUDA ------------------------------------------------------

at::Tensor depthwise(
    const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef, const OptionalTensor& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation) {
  Below below;
  Mirror mirror;
  OptionalTensor added;
  if (bias && bias->defined())
    added = mirror.of(*bias);
  return there_of(
      at::convolution(mirror.of(x), mirror.of(weight), added, stride, padding, dilation, false, {0, 0}, x.size(1)),
      x.device());
}

std::tuple<at::Tensor, at::Tensor> depthwise_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, std::array<bool, 2> mask) {
  Below below;
  Mirror mirror;
  auto found = at::convolution_backward(
      mirror.of(grad), mirror.of(x), mirror.of(weight), std::nullopt, stride, padding, dilation, false, {0, 0},
      x.size(1), {mask[0], mask[1], false});
  return {there_of(std::get<0>(found), x.device()), there_of(std::get<1>(found), x.device())};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // These by name: PyTorch decomposes them in a trace where the device has no kernel of that name.
  for (const char* name :
       {"native_batch_norm", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
        "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided_there);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &view_as_real);
  m.impl("view_as_complex", &view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_conv_depthwise2d", &depthwise);
  m.impl("_scaled_dot_product_efficient_attention", &efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &device_memory, 1);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice);
  at::native::conv_depthwise2d_backward_stub.set_cuda_dispatch_ptr(&depthwise_backward);
  m.def("cuda_type", [] { return int64_t(DeviceType::CUDA); });
  m.def("device_count", [] { return int(kDevices); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { Guard().setDevice(device_of(DeviceIndex(index))); });
  m.def("synchronize", [](int index) { Guard().synchronizeDevice(DeviceIndex(index)); });
  m.def("current_stream", [](int index) { return current_streams[index]; });
  m.def("set_stream", [](int index, int64_t id) { current_streams[index] = id; });
  m.def("new_stream", [](int index) { return Guard().getNewStream(device_of(DeviceIndex(index)), 0).id(); });
  m.def("wait_stream", [](int index, int64_t id, int other_index, int64_t other) {
    void* event = nullptr;
    Guard().record(&event, stream_of(other_index, other), DeviceIndex(index), c10::EventFlag::PYTORCH_DEFAULT);
    Guard().block(event, stream_of(index, id));
    Guard().destroyEvent(event, 0);
  });
  m.def("synchronize_stream", [](int index, int64_t id) { Guard().synchronizeStream(stream_of(index, id)); });
  m.def("fault", [] { return std::exchange(fault, std::string()); });
  m.def("query_stream", [](int index, int64_t id) { return Guard().queryStream(stream_of(index, id)); });
  py::class_<Recorded>(m, "Recorded");
  m.def("record", [](int index, int64_t id) {
    void* event = nullptr;
    Guard().record(&event, stream_of(index, id), DeviceIndex(index), c10::EventFlag::PYTORCH_DEFAULT);
    return std::unique_ptr<Recorded>(static_cast<Recorded*>(event));
  });
  m.def("wait_event", [](Recorded& event, int index, int64_t id) { Guard().block(&event, stream_of(index, id)); });
  m.def("synchronize_event", [](Recorded& event) { Guard().synchronizeEvent(&event); });
  m.def("query_event", [](Recorded& event) { return Guard().queryEvent(&event); });
  m.def("elapsed", [](Recorded& from, Recorded& to) { return Guard().elapsedTime(&from, &to, 0); });
  m.def("held", [](int index) { return counts[index].held; });
  m.def("most", [](int index) { return counts[index].most; });
  m.def("made", [](int index) { return counts[index].made; });
  m.def("slabs", [](int index) { return counts[index].slabs; });
  m.def("outside", [](int index) { return counts[index].outside; });
  m.def("record_blocks", [](bool on) {
    records = on;
    return std::exchange(record, {});
  });
  m.def("new_pool", [] { return ++pools_made; });
  m.def("use_pool", [](int64_t pool) { current_pool = pool; });
  m.def("allocate", [](size_t size) {
    auto block = device_memory.allocate(size);
    return reinterpret_cast<int64_t>(block.release_context());
  });
  m.def("free", [](int64_t address) { give_back(reinterpret_cast<void*>(address)); });
  m.def("forget_most", [](int index) { counts[index].most = counts[index].held; });
  m.def("limit", [](int index, double share) { counts[index].limit = int64_t(share * double(kTotal)); });
  m.def("total", [] { return kTotal; });
  m.def("seed", [](int index) { return generators[index].seed; });
  m.def("offset", [](int index) { return generators[index].offset; });
  m.def("set_generator", [](int index, uint64_t seed, uint64_t offset) { generators[index] = {seed, offset}; });
  m.def("workspace_bytes", [] { return workspace_bytes; });
  m.def("clear_workspaces", [] { workspaces.clear(); });
  m.def("copy_early", [](std::optional<int64_t> seed) {
    copies_early = seed.has_value();
    early.seed(seed.value_or(0));
  });
}
