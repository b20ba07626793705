// The device that the stub libraries share. It lives in the stub of libcudart, which the others link against.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// What the record holds. twin.py has the same list.
enum TwinKind : uint32_t {
  MALLOC, FREE, KERNEL, COPY, SET, RECORD, WAIT, EVENT_SYNC, EVENT_QUERY, STREAM_SYNC, STREAM_QUERY, DEVICE_SYNC,
  HOST_ALLOC, HOST_FREE, MAP, UNMAP, GRAPH,
  ALLOC, FREE_REQUESTED, FREE_COMPLETED, OP, READ, WRITE  // from the tracker: the caching allocator's, and PyTorch's ops
};
// a, b, n: address, second address or number, bytes. op: the PyTorch op that ran when this was called, 0 for none.
struct TwinEntry { uint64_t op, a, b, n; uint32_t kind, stream; };

void twin_note(const char* name);  // a function of a library was called that does nothing
void twin_put(uint32_t kind, void* stream, uint64_t a, uint64_t b, uint64_t n);
uint64_t twin_enter_op(const char* name);  // gives the op that ran before
void twin_leave_op(uint64_t before);

int twin_attribute(int attribute, int* value);
size_t twin_total_bytes();
int twin_memory_info(size_t* free_bytes, size_t* total_bytes);
int twin_malloc(void** pointer, size_t bytes);
int twin_free(void* pointer);
int twin_host_alloc(void** pointer, size_t bytes);
int twin_host_register(void* pointer, size_t bytes);
int twin_host_free(void* pointer, bool registered);
int twin_pointer_type(const void* pointer);     // 0 host, 1 pinned, 2 device
int twin_reserve(void** pointer, size_t bytes);  // address space, to be mapped
int twin_unreserve(void* pointer, size_t bytes);
int twin_create(size_t bytes, uint64_t* handle);  // memory, to be mapped
int twin_release(uint64_t handle);
int twin_map(void* pointer, size_t bytes, uint64_t handle);
int twin_unmap(void* pointer, size_t bytes);

int twin_kernel(void* stream, const char* name, double seconds);
int twin_product(void* stream, const char* name, double flops, bool half);
int twin_copy(void* to, const void* from, size_t bytes, void* stream, bool waits);
int twin_set(void* at, int value, size_t bytes, void* stream);
int twin_stream_create(void** stream, int priority);
int twin_stream_priority(void* stream);
int twin_stream_wait(void* stream, void* event);
int twin_stream_sync(void* stream);
int twin_stream_query(void* stream);
int twin_device_sync();
int twin_capture_begin(void* stream, int mode);  // modes as cudaStreamCaptureMode
int twin_capture_end(void* stream, void** graph);
int twin_capture_status(void* stream, uint64_t* id, void** graph);  // as cudaStreamCaptureStatus
void twin_capture_mode(int* mode);                                  // exchanges this thread's
size_t twin_graph_size(void* graph);
int twin_graph_launch(void* graph, void* stream);
int twin_event_create(void** event);
int twin_event_destroy(void* event);
int twin_event_record(void* event, void* stream);
int twin_event_sync(void* event);
int twin_event_query(void* event);
int twin_event_elapsed(float* ms, void* start, void* end);
}
