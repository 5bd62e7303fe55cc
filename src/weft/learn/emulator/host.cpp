// The host's functions: device memory, copies, and streams as queues of operations.
//
// An operation in a stream runs when something waits for it, and no sooner: what a program does not wait for is
// really not there. A log of all operations in the order of the calls gives the time line: one engine for each
// direction of copies and one for kernels, so that an exercise can see what overlaps.
#include <math.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "cuda.hpp"
#include "state.hpp"

using namespace weft;
#define CALLER __builtin_return_address(0)

constexpr int64_t BYTES_PER_UNIT = 64;
enum Engine { COPY_IN, COPY_OUT, COMPUTE };
struct Operation {
  std::function<int64_t()> run;  // returns its duration; empty for an event's operation
  size_t entry = 0;              // its entry in the log
  WeftEvent *waits_for = nullptr, *records = nullptr;
  int64_t ticket = 0;            // of the record that it waits for
};
struct WeftStream { std::deque<Operation> queue; };
struct WeftEvent { WeftStream* stream = nullptr; int64_t ticket = 0, reached = 0; };
enum What { OPERATION, RECORD, WAIT, HOST_WAITS, HOST_WAITS_FOR_EVENT };
struct Entry { What what; WeftStream* stream; WeftEvent* event; Engine engine; int64_t duration; };

double weft_result;
static std::vector<std::unique_ptr<WeftStream>> streams;
static std::vector<std::unique_ptr<WeftEvent>> events;
static WeftStream default_stream;
static std::vector<Entry> timeline;
static std::map<const char*, size_t> pinned;

static void run_until(WeftStream& stream, const WeftEvent* event, int64_t ticket);
static void run_next(WeftStream& stream) {
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (const WeftEvent* event = operation.waits_for) {
    if (event->reached < operation.ticket && event->stream) run_until(*event->stream, event, operation.ticket);
  } else if (operation.records) {
    operation.records->reached = operation.ticket;
  } else {
    timeline[operation.entry].duration = operation.run();
  }
}
static void run_until(WeftStream& stream, const WeftEvent* event, int64_t ticket) {
  while (!stream.queue.empty() && !(event && event->reached >= ticket)) run_next(stream);
}
static void wait_for(WeftStream& stream) {
  run_until(stream, nullptr, 0);
  timeline.push_back({HOST_WAITS, &stream, nullptr, COMPUTE, 0});
}
static void require_stream(cudaStream_t stream, const void* pc, const std::string& where = "") {
  for (auto& created : streams)
    if (created.get() == stream) return;
  if (stream) fail(where + "the stream is not created: cudaStreamCreate(&s) comes before its use", pc);
}
static void require_event(cudaEvent_t event, const void* pc) {
  for (auto& created : events)
    if (created.get() == event) return;
  fail("the event is not created: cudaEventCreate(&e) comes before its use", pc);
}
static void wait_for_all() {
  for (auto& stream : streams) wait_for(*stream);
}
static void count_time() {
  std::map<const WeftStream*, int64_t> stream_end;
  std::map<const WeftEvent*, int64_t> event_end;
  int64_t engine_end[3] = {}, host = 0;
  for (const Entry& entry : timeline) {
    int64_t& stream = stream_end[entry.stream];
    if (entry.what == OPERATION) {
      int64_t& engine = engine_end[entry.engine];
      stream = engine = std::max({stream, engine, host}) + entry.duration;
      counts.serial_time += entry.duration;
      counts.timeline = std::max(counts.timeline, stream);
    }
    if (entry.what == RECORD) event_end[entry.event] = stream;
    if (entry.what == WAIT) stream = std::max(stream, event_end[entry.event]);
    if (entry.what == HOST_WAITS) host = std::max(host, stream);
    if (entry.what == HOST_WAITS_FOR_EVENT) host = std::max(host, event_end[entry.event]);
  }
}
namespace weft {
void drain() {
  // What nothing waited for has not happened as far as the host can know.
  count_time();
  streams.clear(), events.clear(), pinned.clear(), timeline.clear(), default_stream.queue.clear();
}
}  // namespace weft
// The default stream waits for all others, and what is put into it runs at once.
static void enqueue(cudaStream_t stream, Operation operation, What what, Engine engine) {
  if (!stream) wait_for_all();
  WeftStream& queue = stream ? *stream : default_stream;
  operation.entry = timeline.size();
  WeftEvent* event = operation.records ? operation.records : operation.waits_for;
  timeline.push_back({what, &queue, event, engine, 0});
  queue.queue.push_back(std::move(operation));
  if (!stream) run_until(queue, nullptr, 0);
}

static bool is_pinned(const void* pointer) {
  auto next = pinned.upper_bound((const char*)pointer);
  return next != pinned.begin() && (--next, (const char*)pointer < next->first + next->second);
}
static Buffer& require_device(const void* pointer, size_t bytes, const char* what, const void* pc) {
  const bool is_copy = std::strncmp(what, "the copy", 8) == 0;
  if (!is_device(pointer))
    fail(std::string(what) + " is host memory, and must be device memory" +
             (is_copy ? ": the target comes first, then the source" : ""), pc);
  Buffer& buffer = *buffer_of(pointer);
  const ptrdiff_t offset = (const char*)pointer - buffer.begin;
  if (offset < 0 || offset + bytes > buffer.bytes)
    fail(std::string(what) + ": " + std::to_string(bytes) + " bytes from byte " + std::to_string(offset) + " on, and " +
             buffer.name + " has " + std::to_string(buffer.bytes) + " bytes", pc);
  if (buffer.is_freed) fail(std::string(what) + ": " + buffer.name + " is freed", pc);
  return buffer;
}
static void require_host(const void* pointer, const char* what, const void* pc) {
  if (is_device(pointer))
    fail(std::string(what) + " is device memory, and must be host memory: the target comes first, then the source", pc);
}
static void enqueue_copy(cudaStream_t stream, void* to, const void* from, size_t bytes, cudaMemcpyKind kind, const void* pc) {
  require_stream(stream, pc);
  if (kind == cudaMemcpyDefault)
    kind = is_device(to) ? (is_device(from) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                         : (is_device(from) ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  to_device ? void(require_device(to, bytes, "the copy's target", pc)) : require_host(to, "the copy's target", pc);
  from_device ? void(require_device(from, bytes, "the copy's source", pc))
              : require_host(from, "the copy's source", pc);
  auto run = [=]() -> int64_t {
    if (from_device) {
      Buffer& source = *buffer_of(from);
      const size_t first = ((const char*)from - source.begin) / source.element;
      for (size_t i = first; i * source.element < first * source.element + bytes; ++i)
        if (!source.cells[i].initialised)
          fail("the copy reads element " + std::to_string(i) + " of " + source.name + ", which nothing has written", pc);
    }
    std::memmove(to, from, bytes);
    if (to_device) {
      Buffer& target = *buffer_of(to);
      mark_initialised(target, (char*)to - target.begin, bytes);
    }
    return int64_t(bytes / BYTES_PER_UNIT) + 1;
  };
  enqueue(stream, {run}, OPERATION, from_device && to_device ? COMPUTE : from_device ? COPY_OUT : COPY_IN);
}

void weft_enqueue(WeftBody* body, const char* name, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  const void* pc = CALLER;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z, blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (in_kernel) fail("a kernel launches a kernel, which this emulator does not run", pc);
  const std::string launch = "the launch of " + std::string(name) + ": ";
  require_stream(stream, pc, launch);
  if (!threads || threads > MAX_THREADS)
    fail(launch + std::to_string(threads) + " threads a block; 1 to " + std::to_string(MAX_THREADS) + " are possible", pc);
  if (!blocks || grid.y > 65535 || grid.z > 65535)
    fail(launch + "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
             std::to_string(grid.z) + " blocks is invalid", pc);
  if (shared > MAX_SHARED) fail(launch + std::to_string(shared) + " bytes of shared memory; 49152 are possible", pc);
  auto run = [=]() -> int64_t {
    std::unique_ptr<WeftBody> owned(body);
    const unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
    const int64_t before = counts.load_bytes + counts.store_bytes;
    run_grid([](void* p) { ((WeftBody*)p)->run(); }, body, g, b, shared);
    if (has_fault) _longjmp(host_exit, 1);
    return (counts.load_bytes + counts.store_bytes - before) / 2 / BYTES_PER_UNIT + 1;
  };
  enqueue(stream, {run}, OPERATION, COMPUTE);
}

// ``text`` is the argument as the learner wrote it, such as &a; ``size`` is that of an element, 0 if unknown.
cudaError_t weft_malloc(void** pointer, size_t bytes, size_t size, const char* type, const char* text) {
  std::string name(text);
  name.erase(0, name.find_last_of("&*() ") + 1);
  if (is_device(pointer)) fail("cudaMalloc: its first argument is the address of a pointer of the host", CALLER);
  // By floats: an index in a reason is that of an element, and nearly all arrays are of 4-byte elements.
  if (!size) size = bytes % 4 ? 1 : 4;
  if (bytes % size)
    fail(name + " has " + std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes") + ", and one " + type + " needs " +
             std::to_string(size) + ": cudaMalloc(" + text + ", n * sizeof(" + type + "))", CALLER);
  Buffer& buffer = allocate(name.c_str(), bytes / size, size);
  buffer.is_malloced = true;
  *pointer = buffer.begin;
  return cudaSuccess;
}
cudaError_t weft_malloc_host(void** pointer, size_t bytes) {
  *pointer = malloc(bytes ? bytes : 1);
  pinned[(const char*)*pointer] = bytes;
  return cudaSuccess;
}
extern "C" void weft_pin(const void* pointer, size_t bytes) { pinned[(const char*)pointer] = bytes; }
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  wait_for_all();
  Buffer& buffer = require_device(pointer, 0, "cudaFree", CALLER);
  if (buffer.begin != pointer) fail("cudaFree: the pointer is not the start of an array", CALLER);
  buffer.is_freed = true;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  wait_for_all();
  pinned.erase((const char*)pointer);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  enqueue_copy(nullptr, to, from, bytes, kind, CALLER);
  timeline.push_back({HOST_WAITS, &default_stream, nullptr, COMPUTE, 0});
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  enqueue_copy(stream, to, from, bytes, kind, CALLER);
  // Pageable memory: the driver stages it, and the call waits.
  const void* host = is_device(to) ? from : to;
  if (stream && !is_device(host) && !is_pinned(host)) wait_for(*stream);
  return cudaSuccess;
}
static void enqueue_set(cudaStream_t stream, void* to, int value, size_t bytes, const void* pc) {
  require_stream(stream, pc);
  require_device(to, bytes, "cudaMemset", pc);
  auto run = [=]() -> int64_t {
    std::memset(to, value, bytes);
    Buffer& buffer = *buffer_of(to);
    mark_initialised(buffer, (char*)to - buffer.begin, bytes);
    return int64_t(bytes / BYTES_PER_UNIT) + 1;
  };
  enqueue(stream, {run}, OPERATION, COMPUTE);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return enqueue_set(nullptr, to, value, bytes, CALLER), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return enqueue_set(stream, to, value, bytes, CALLER), cudaSuccess;
}
cudaError_t weft_to_symbol(void* symbol, size_t size, const void* from, size_t bytes) {
  require_host(from, "the source of cudaMemcpyToSymbol", CALLER);
  if (bytes > size)
    fail("cudaMemcpyToSymbol: " + std::to_string(bytes) + " bytes into " + std::to_string(size), CALLER);
  wait_for_all();
  std::memcpy(symbol, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return wait_for_all(), cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  streams.push_back(std::make_unique<WeftStream>());
  *stream = streams.back().get();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  require_stream(stream, CALLER);
  if (stream) wait_for(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  require_stream(stream, CALLER);
  return stream ? wait_for(*stream) : wait_for_all(), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  events.push_back(std::make_unique<WeftEvent>());
  *event = events.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  require_event(event, CALLER), require_stream(stream, CALLER);
  event->stream = stream ? stream : &default_stream;
  Operation operation;
  operation.records = event, operation.ticket = ++event->ticket;
  return enqueue(stream, operation, RECORD, COMPUTE), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  require_event(event, CALLER);
  if (event->stream) run_until(*event->stream, event, event->ticket);
  timeline.push_back({HOST_WAITS_FOR_EVENT, event->stream, event, COMPUTE, 0});
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  require_event(event, CALLER), require_stream(stream, CALLER);
  Operation operation;
  operation.waits_for = event, operation.ticket = event->ticket;
  return enqueue(stream, operation, WAIT, COMPUTE), cudaSuccess;
}

#define EXTREMES(T)                             \
  T max(T a, T b) { return a > b ? a : b; }     \
  T min(T a, T b) { return a < b ? a : b; }
EXTREMES(int)
EXTREMES(unsigned)
EXTREMES(long long)
EXTREMES(size_t)
EXTREMES(float)
EXTREMES(double)
float rsqrtf(float x) { return 1 / sqrtf(x); }
float __expf(float x) { return expf(x); }
float __logf(float x) { return logf(x); }
float __fdividef(float x, float y) { return x / y; }
float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
int __popc(unsigned x) { return __builtin_popcount(x); }
int __ffs(int x) { return __builtin_ffs(x); }
int __clz(int x) { return x ? __builtin_clz(x) : 32; }
