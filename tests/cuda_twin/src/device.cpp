// The device: memory as address space with a hard limit, streams with vector clocks, events, and a record of all calls.
//
// Nothing computes. Small copies are made, so that what the host wrote comes back. Work takes seconds of a clock of the
// device's own: a wait of the host moves that clock on instead of taking time.
#include "device.h"
#include <sys/mman.h>
#include <time.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <pthread.h>
#include <string>
#include <unordered_map>
#include <vector>

namespace {
constexpr size_t PAGE = 2u << 20;
constexpr int OUT_OF_MEMORY = 2, INVALID = 1, NOT_READY = 600;
constexpr int UNSUPPORTED = 900, INVALIDATED = 901, UNJOINED = 904, ISOLATION = 905, CAPTURED = 907;  // of captures
constexpr double KERNEL_S = 5e-6, MEMORY_RATE = 2.4e12, LINK_RATE = 50e9, FLOPS_HALF = 600e12, FLOPS = 45e12;

using Clock = std::vector<uint64_t>;  // by stream: how much of its work is meant
void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
bool covers(const Clock& done, const Clock& wanted) {
  for (size_t i = 0; i < wanted.size(); i++)
    if (wanted[i] > (i < done.size() ? done[i] : 0)) return false;
  return true;
}
struct Node { TwinKind kind; double seconds; void* to; const void* from; int value; size_t bytes; };
struct Graph { std::vector<Node> nodes; };
struct Stream;
struct Capture { uint64_t id; int mode; pthread_t thread; Stream* origin; bool is_broken; Graph* graph; };
struct Stream { uint32_t id; int priority; Clock clock; double free_at; Capture* capture; bool has_left; };
struct Event { uint64_t id; bool recorded; Clock clock; double at; Capture* capture; Stream* stream; };
double number(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}

struct Device {
  std::mutex lock;
  size_t total = size_t(number("TWIN_MEMORY_GIB", 80) * 1073741824.0), used = size_t(520) << 20;  // the context's
  size_t small_copy = 65536;
  bool lazy = number("TWIN_LAZY", 0) != 0;  // work ends when somebody waits for it, not by the clock
  bool recording = false;
  double skew = 0;  // what waits have added to the host's clock
  std::map<uintptr_t, size_t> allocations, reserved, pinned;
  std::map<uintptr_t, std::pair<size_t, uint64_t>> mapped;            // bytes and handle
  std::unordered_map<uint64_t, std::pair<size_t, int>> handles;       // bytes and how many hold it
  uint64_t next_handle = 1, next_event = 1, next_op = 1;
  std::vector<Stream*> streams{new Stream{}};
  std::vector<Capture*> captures;  // that are going on
  Clock done;  // what the host knows to have ended
  std::vector<TwinEntry> record;
  std::vector<std::string> names;
  std::unordered_map<std::string, uint64_t> name_ids, notes;
};
struct Held {  // the device, for one caller
  Device* d;
  std::unique_lock<std::mutex> held;
  Held() : d(device()), held(d->lock) {}
  Device* operator->() { return d; }
  static Device* device() {
    static Device* d = new Device;  // never destroyed: libraries call it while the process ends
    return d;
  }
};
thread_local uint64_t op = 0;
thread_local int capture_mode = 0;  // 0 global, 1 of this thread, 2 relaxed

double now(Held& d) {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9 + d->skew;
}
Stream* stream_of(Held& d, void* handle) {  // 0, 1 and 2 are names of the default stream
  return uintptr_t(handle) <= 2 ? d->streams[0] : static_cast<Stream*>(handle);
}
void put(Held& d, TwinKind kind, uint32_t stream, uint64_t a = 0, uint64_t b = 0, uint64_t n = 0) {
  if (d->recording) d->record.push_back({op, a, b, n, kind, stream});
}
uint64_t name_id(Held& d, const char* name) {
  auto [at, is_new] = d->name_ids.try_emplace(name, d->names.size());
  if (is_new) d->names.push_back(name);
  return at->second;
}
void work(Held& d, Stream* s, double seconds) {
  s->clock.resize(std::max<size_t>(s->clock.size(), s->id + 1));
  s->clock[s->id]++;
  s->free_at = std::max(s->free_at, now(d)) + seconds;
}
int broken(Capture* c, int code) {
  c->is_broken = true;
  return code;
}
int forbidden(Held& d) {  // a call that captures may forbid, which it then breaks: an error, or 0
  for (Capture* c : d->captures) {
    bool own = pthread_equal(c->thread, pthread_self());
    if (capture_mode != 2 && (own ? c->mode != 2 : capture_mode == 0 && c->mode == 0)) return broken(c, UNSUPPORTED);
  }
  return 0;
}
int captured(Stream* s, const Node& node) {
  if (s->capture->is_broken) return INVALIDATED;
  s->capture->graph->nodes.push_back(node);
  s->has_left = s != s->capture->origin;  // until the first stream waits for it
  return 0;
}
void finish(Held& d, const Clock& clock, double at) {  // the host waits
  merge(d->done, clock);
  if (!d->lazy) d->skew += std::max(0.0, at - now(d));
}
bool has_ended(Held& d, const Clock& clock, double at) {
  if (!d->lazy && at <= now(d)) merge(d->done, clock);
  return covers(d->done, clock);
}
size_t up(size_t bytes, size_t unit) { return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit; }
void* address_space(size_t bytes) {
  char* p = static_cast<char*>(
      mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (p == MAP_FAILED) return nullptr;
  char* start = reinterpret_cast<char*>(up(uintptr_t(p), PAGE));
  if (start > p) munmap(p, start - p);
  if (start < p + PAGE) munmap(start + bytes, p + PAGE - start);
  madvise(start, bytes, MADV_NOHUGEPAGE);
  return start;
}
bool within(const std::map<uintptr_t, size_t>& ranges, const void* pointer) {
  auto after = ranges.upper_bound(uintptr_t(pointer));
  return after != ranges.begin() && uintptr_t(pointer) < std::prev(after)->first + std::prev(after)->second;
}
int type_of(Held& d, const void* pointer) {
  if (within(d->allocations, pointer) || within(d->reserved, pointer)) return 2;
  return within(d->pinned, pointer) ? 1 : 0;
}
bool take(Held& d, size_t bytes) {
  if (d->used + bytes > d->total) return false;
  d->used += bytes;
  return true;
}
void drop(Held& d, uint64_t handle) {
  auto at = d->handles.find(handle);
  if (at == d->handles.end() || --at->second.second) return;
  d->used -= at->second.first;
  d->handles.erase(at);
}
}  // namespace

extern "C" {
void twin_note(const char* name) { Held()->notes[name]++; }
void twin_put(uint32_t kind, void* stream, uint64_t a, uint64_t b, uint64_t n) {
  Held d;
  put(d, TwinKind(kind), stream_of(d, stream)->id, a, b, n);
}
uint64_t twin_enter_op(const char* name) {
  Held d;
  uint64_t before = op;
  op = d->next_op++;
  if (d->recording) put(d, OP, 0, name_id(d, name));
  return before;
}
void twin_leave_op(uint64_t before) { op = before; }

// Memory.
size_t twin_total_bytes() { return Held()->total; }
int twin_memory_info(size_t* free_bytes, size_t* total_bytes) {
  Held d;
  if (free_bytes) *free_bytes = d->total - std::min(d->total, d->used);
  if (total_bytes) *total_bytes = d->total;
  return 0;
}
int twin_malloc(void** pointer, size_t bytes) {
  Held d;
  if (int error = forbidden(d)) return error;
  size_t size = up(bytes, PAGE);
  *pointer = take(d, size) ? address_space(size) : nullptr;
  if (!*pointer) return OUT_OF_MEMORY;
  d->allocations[uintptr_t(*pointer)] = size;
  put(d, MALLOC, 0, uintptr_t(*pointer), 0, size);
  return 0;
}
int twin_free(void* pointer) {
  Held d;
  if (int error = forbidden(d)) return error;
  auto at = d->allocations.find(uintptr_t(pointer));
  if (at == d->allocations.end()) return pointer ? INVALID : 0;
  put(d, FREE, 0, at->first, 0, at->second);
  munmap(pointer, at->second);
  d->used -= at->second;
  d->allocations.erase(at);
  for (Stream* s : d->streams) finish(d, s->clock, s->free_at);  // it waits for the device
  return 0;
}
int twin_host_register(void* pointer, size_t bytes) {
  Held d;
  if (int error = forbidden(d)) return error;
  d->pinned[uintptr_t(pointer)] = bytes;
  put(d, HOST_ALLOC, 0, uintptr_t(pointer), 0, bytes);
  return 0;
}
int twin_host_alloc(void** pointer, size_t bytes) {
  *pointer = mmap(nullptr, up(bytes, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *pointer == MAP_FAILED ? OUT_OF_MEMORY : twin_host_register(*pointer, bytes);
}
int twin_host_free(void* pointer, bool registered) {
  Held d;
  if (int error = forbidden(d)) return error;
  auto at = d->pinned.find(uintptr_t(pointer));
  if (at == d->pinned.end()) return INVALID;
  put(d, HOST_FREE, 0, uintptr_t(pointer));
  if (!registered) munmap(pointer, up(at->second, 4096));
  d->pinned.erase(at);
  return 0;
}
int twin_pointer_type(const void* pointer) {
  Held d;
  return type_of(d, pointer);
}
int twin_reserve(void** pointer, size_t bytes) {
  Held d;
  *pointer = address_space(bytes);
  if (!*pointer) return OUT_OF_MEMORY;
  d->reserved[uintptr_t(*pointer)] = bytes;
  return 0;
}
int twin_unreserve(void* pointer, size_t bytes) {
  Held d;
  if (!d->reserved.erase(uintptr_t(pointer))) return INVALID;
  munmap(pointer, bytes);
  return 0;
}
int twin_create(size_t bytes, uint64_t* handle) {
  Held d;
  if (!take(d, bytes)) return OUT_OF_MEMORY;
  *handle = d->next_handle++;
  d->handles[*handle] = {bytes, 1};
  return 0;
}
int twin_release(uint64_t handle) {
  Held d;
  drop(d, handle);
  return 0;
}
int twin_map(void* pointer, size_t bytes, uint64_t handle) {
  Held d;
  d->handles[handle].second++;
  d->mapped[uintptr_t(pointer)] = {bytes, handle};
  put(d, MAP, 0, uintptr_t(pointer), handle, bytes);
  return 0;
}
int twin_unmap(void* pointer, size_t bytes) {
  Held d;
  auto at = d->mapped.lower_bound(uintptr_t(pointer));
  while (at != d->mapped.end() && at->first < uintptr_t(pointer) + bytes) {
    drop(d, at->second.second);
    at = d->mapped.erase(at);
  }
  madvise(pointer, bytes, MADV_DONTNEED);
  put(d, UNMAP, 0, uintptr_t(pointer), 0, bytes);
  return 0;
}

// Work.
int twin_kernel(void* stream, const char* name, double seconds) {
  Held d;
  Stream* s = stream_of(d, stream);
  if (s->capture) return captured(s, {KERNEL, std::max(KERNEL_S, seconds)});
  work(d, s, std::max(KERNEL_S, seconds));
  put(d, KERNEL, s->id, d->recording ? name_id(d, name) : 0);
  return 0;
}
int twin_product(void* stream, const char* name, double flops, bool half) {
  return twin_kernel(stream, name, flops / (half ? FLOPS_HALF : FLOPS));
}
int twin_copy(void* to, const void* from, size_t bytes, void* stream, bool waits) {
  Held d;
  Stream* s = stream_of(d, stream);
  int to_type = type_of(d, to), from_type = type_of(d, from);
  bool on_device = to_type == 2 && from_type == 2;
  double seconds = std::max(KERNEL_S, bytes / (on_device ? MEMORY_RATE / 2 : LINK_RATE));
  if (s->capture && to_type && from_type) return captured(s, {COPY, seconds, to, from, 0, bytes});
  if (s->capture) return broken(s->capture, UNSUPPORTED);  // of memory that is not pinned
  if (int error = waits ? forbidden(d) : 0) return error;
  work(d, s, seconds);
  if (bytes <= d->small_copy) memmove(to, from, bytes);
  put(d, COPY, s->id, uintptr_t(to), uintptr_t(from), bytes);
  if (waits || (!on_device && (to_type == 0 || from_type == 0))) {  // memory that is not pinned has no copies beside
    put(d, STREAM_SYNC, s->id, 1);
    finish(d, s->clock, s->free_at);
  }
  return 0;
}
int twin_set(void* at, int value, size_t bytes, void* stream) {
  Held d;
  Stream* s = stream_of(d, stream);
  if (s->capture) return captured(s, {SET, std::max(KERNEL_S, bytes / MEMORY_RATE), at, nullptr, value, bytes});
  work(d, s, std::max(KERNEL_S, bytes / MEMORY_RATE));
  if (bytes <= d->small_copy) memset(at, value, bytes);
  put(d, SET, s->id, uintptr_t(at), 0, bytes);
  return 0;
}

// Streams and events.
int twin_stream_create(void** stream, int priority) {
  Held d;
  d->streams.push_back(new Stream{uint32_t(d->streams.size()), priority});
  *stream = d->streams.back();
  return 0;
}
int twin_stream_priority(void* stream) {
  Held d;
  return stream_of(d, stream)->priority;
}
int twin_stream_wait(void* stream, void* event) {
  Held d;
  Stream* s = stream_of(d, stream);
  Event* e = static_cast<Event*>(event);
  if (s->capture && e->capture != s->capture) return broken(s->capture, ISOLATION);
  if (e->capture) {
    if (std::find(d->captures.begin(), d->captures.end(), e->capture) == d->captures.end()) return CAPTURED;
    s->capture = e->capture;  // which this stream joins
    if (s == s->capture->origin) e->stream->has_left = false;
    return 0;
  }
  put(d, WAIT, s->id, e->id);
  if (e->recorded) {
    merge(s->clock, e->clock);
    s->free_at = std::max(s->free_at, e->at);
  }
  return 0;
}
int twin_stream_sync(void* stream) {
  Held d;
  Stream* s = stream_of(d, stream);
  if (s->capture) return broken(s->capture, UNSUPPORTED);
  if (int error = forbidden(d)) return error;
  put(d, STREAM_SYNC, s->id);
  finish(d, s->clock, s->free_at);
  return 0;
}
int twin_stream_query(void* stream) {
  Held d;
  Stream* s = stream_of(d, stream);
  if (s->capture) return broken(s->capture, UNSUPPORTED);
  if (int error = forbidden(d)) return error;
  bool ended = has_ended(d, s->clock, s->free_at);
  put(d, STREAM_QUERY, s->id, 0, ended);
  return ended ? 0 : NOT_READY;
}
int twin_device_sync() {
  Held d;
  if (int error = forbidden(d)) return error;
  put(d, DEVICE_SYNC, 0);
  for (Stream* s : d->streams) finish(d, s->clock, s->free_at);
  return 0;
}
int twin_event_create(void** event) {
  *event = new Event{Held()->next_event++};
  return 0;
}
int twin_event_destroy(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int twin_event_record(void* event, void* stream) {
  Held d;
  Stream* s = stream_of(d, stream);
  Event* e = static_cast<Event*>(event);
  if (s->capture) {
    *e = {e->id, false, {}, 0, s->capture, s};
    return 0;
  }
  work(d, s, 0);
  *e = {e->id, true, s->clock, s->free_at};
  put(d, RECORD, s->id, e->id);
  return 0;
}
int twin_event_sync(void* event) {
  Held d;
  Event* e = static_cast<Event*>(event);
  if (e->capture) return broken(e->capture, CAPTURED);
  if (int error = forbidden(d)) return error;
  put(d, EVENT_SYNC, 0, e->id);
  if (e->recorded) finish(d, e->clock, e->at);
  return 0;
}
int twin_event_query(void* event) {
  Held d;
  Event* e = static_cast<Event*>(event);
  if (e->capture) return broken(e->capture, CAPTURED);
  if (int error = forbidden(d)) return error;
  bool ended = !e->recorded || has_ended(d, e->clock, e->at);
  put(d, EVENT_QUERY, 0, e->id, ended);
  return ended ? 0 : NOT_READY;
}
int twin_event_elapsed(float* ms, void* start, void* end) {
  Held d;
  *ms = float((static_cast<Event*>(end)->at - static_cast<Event*>(start)->at) * 1e3);
  return 0;
}

// Graphs: what streams of a capture are given, in order, to be launched together.
int twin_capture_begin(void* stream, int mode) {
  Held d;
  Stream* s = stream_of(d, stream);
  if (s->id == 0 || s->capture) return UNSUPPORTED;
  s->capture = new Capture{d->next_op++, mode, pthread_self(), s, false, new Graph};
  d->captures.push_back(s->capture);
  return 0;
}
int twin_capture_end(void* stream, void** graph) {
  Held d;
  Capture* c = stream_of(d, stream)->capture;
  if (!c || c->origin != stream_of(d, stream)) return INVALID;
  bool has_left = false;
  for (Stream* s : d->streams)
    if (s->capture == c) has_left |= s->has_left, s->capture = nullptr, s->has_left = false;
  d->captures.erase(std::find(d->captures.begin(), d->captures.end(), c));
  *graph = c->is_broken || has_left ? nullptr : c->graph;
  return c->is_broken ? INVALIDATED : has_left ? UNJOINED : 0;  // events still point at the capture
}
int twin_capture_status(void* stream, uint64_t* id, void** graph) {
  Held d;
  Capture* c = stream_of(d, stream)->capture;
  *id = c ? c->id : 0, *graph = c ? c->graph : nullptr;
  return !c ? 0 : c->is_broken ? 2 : 1;
}
void twin_capture_mode(int* mode) { std::swap(*mode, capture_mode); }
size_t twin_graph_size(void* graph) { return static_cast<Graph*>(graph)->nodes.size(); }
int twin_graph_launch(void* graph, void* stream) {
  Held d;
  Stream* s = stream_of(d, stream);
  double seconds = 0;
  for (const Node& node : static_cast<Graph*>(graph)->nodes) {
    seconds += node.seconds;
    if (node.bytes > d->small_copy) continue;
    if (node.kind == COPY) memmove(node.to, node.from, node.bytes);
    if (node.kind == SET) memset(node.to, node.value, node.bytes);
  }
  work(d, s, seconds);
  put(d, GRAPH, s->id, 0, 0, twin_graph_size(graph));
  return 0;
}

// For twin.py.
void twin_set_recording(int on) {
  Held d;
  d->recording = on != 0;
  if (on) d->record.clear();
}
void twin_set_lazy(int on) { Held()->lazy = on != 0; }
void twin_set_total(uint64_t bytes) { Held()->total = bytes; }
uint64_t twin_record_size() { return Held()->record.size(); }
const TwinEntry* twin_record() { return Held()->record.data(); }
const char* twin_name(uint64_t id) { return Held()->names[id].c_str(); }
uint64_t twin_notes(const char** name, uint64_t at) {  // gives how often the function at this place was called
  Held d;
  auto found = d->notes.begin();
  for (; at && found != d->notes.end(); at--) ++found;
  if (found == d->notes.end()) return 0;
  *name = found->first.c_str();
  return found->second;
}
}
