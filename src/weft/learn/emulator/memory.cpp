// Device memory with guards, shadow cells of each element, and the counts of each warp's accesses.
#include "state.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>

// The linker's names for the start and the end of this library.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));
namespace weft { char weft_guard_behind[GUARD_SHARED] __attribute__((section("weft_shared"), aligned(128))); }
unsigned char weft_dynamic_shared[weft::MAX_SHARED] __attribute__((aligned(128)));

namespace weft {
Counts counts;
Fault fault;
bool in_kernel, has_fault;
jmp_buf host_exit;
uint32_t clock_now = 1, launch_start;
uint64_t unsynchronised_steps;

// A guard is larger than what an index beyond an edge overshoots: pages that nothing touches take no memory.
constexpr size_t ARENA = size_t(1) << 32, GUARD = 1 << 20;
// Basic blocks of one thread between two barriers: more than any exercise's sizes need. It bounds the memory too,
// because the accesses of a warp are kept until all of its lanes have come as far.
constexpr uint64_t MAX_STEPS = 300'000;
static char* arena;
static size_t arena_used;
static std::deque<Buffer> buffers;
static std::vector<Cell> static_cells, dynamic_cells;
static size_t dynamic_size, first_of_call;

// Two faults wait for what happens next. A subscript out of bounds waits for its access, which tells a read from a
// write. A read of an unwritten element in shared memory waits for a thread that writes it later: only then can a
// barrier be what is missing.
struct Subscript { const void* pc = nullptr; int64_t line, column, index; const char* type; uint32_t block, thread; };
struct Unwritten { const Cell* cell = nullptr; const void *pc, *address; std::string reader; size_t bytes; };
static Subscript subscript;
static Unwritten unwritten;

static int64_t offset_of(const void* address) {
  return address ? (const char*)address - &__ehdr_start : 0;
}
static void fail_subscript(const char* does) {
  const Subscript s = subscript;
  subscript.pc = nullptr, unwritten.cell = nullptr;
  fault.line = s.line, fault.column = s.column, fault.index = s.index;
  std::snprintf(fault.type, sizeof fault.type, "%s", s.type);
  fail((in_kernel ? thread_name(s.block, s.thread) : std::string("host code")) + " " + does + " @", s.pc);
}
static void fail_unwritten(const char* why, const void* other) {
  const Unwritten u = unwritten;
  unwritten.cell = nullptr;
  fault.bytes = int64_t(u.bytes);
  fail(u.reader + " reads @, which nothing has written" + why, u.pc, other, u.address);
}
void end_thread() {
  if (subscript.pc) fail_subscript("uses");
}
void end_block() {
  if (unwritten.cell) fail_unwritten(": no thread of the block writes it", nullptr);
}
void fail(const std::string& message, const void* pc, const void* other, const void* address) {
  end_thread();
  if (unwritten.cell) fail_unwritten(" yet", pc);  // the earlier fault is the cause
  std::snprintf(fault.message, sizeof fault.message, "%s", message.c_str());
  // A return address: the instruction before it is the call.
  fault.pc = pc ? offset_of(pc) - 1 : 0, fault.other_pc = other ? offset_of(other) - 1 : 0;
  fault.address = offset_of(address);
  has_fault = true;
  if (in_kernel) leave_kernel();
  _longjmp(host_exit, 1);
}

Buffer& allocate(const char* name, size_t count, size_t element) {
  if (!arena) {
    arena = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena_used = GUARD;
  }
  const size_t bytes = count * element;
  if (arena == MAP_FAILED || arena_used + bytes + 2 * GUARD > ARENA) fail("no device memory is left", nullptr);
  char* begin = arena + arena_used;
  arena_used += (bytes + 255) / 256 * 256 + GUARD;
  std::memset(begin, 0xff, bytes);  // NaN, so that an element that nobody wrote shows
  buffers.push_back(Buffer{name, begin, bytes, element, false, std::vector<Cell>(count), false, {}, {}, {}});
  return buffers.back();
}
bool is_device(const void* address) {
  return arena && (const char*)address >= arena && (const char*)address < arena + ARENA;
}
// The nearest one. An index too large goes farther astray than a negative one, which is why the way back counts more.
Buffer* buffer_of(const void* address) {
  Buffer* nearest = nullptr;
  ptrdiff_t best = PTRDIFF_MAX;
  for (Buffer& buffer : buffers) {
    const ptrdiff_t before = buffer.begin - (const char*)address;
    const ptrdiff_t behind = (const char*)address - (buffer.begin + buffer.bytes);
    const ptrdiff_t distance = std::max({8 * before, behind + 1, ptrdiff_t(0)});
    if (distance < best) best = distance, nearest = &buffer;
  }
  return nearest;
}
void mark_initialised(Buffer& buffer, size_t offset, size_t bytes) {
  for (size_t i = offset / buffer.element; i < (offset + bytes + buffer.element - 1) / buffer.element; ++i)
    buffer.cells[i] = Cell{{}, {}, {}, true};
}

static bool is_ordered(const Access& earlier) {
  if (earlier.reach == NOBODY || earlier.time < launch_start) return true;
  if (earlier.block != current_block)
    return earlier.reach != GRID && earlier.time < fence_time[earlier.block];
  if (earlier.reach == GRID) return false;
  if (earlier.reach == THREAD && earlier.thread == current_thread) return true;
  if (earlier.time < block_sync_time) return true;
  const bool same_warp = earlier.thread / LANES == current_thread / LANES;
  return earlier.reach != BLOCK && same_warp && earlier.time < warp_sync_time[current_thread / LANES];
}
static Access joined(const Access& earlier, const Access& now) {
  if (is_ordered(earlier)) return now;
  Access both = now;
  if (earlier.block != now.block || earlier.reach == GRID) both.reach = GRID;
  else if (earlier.reach == BLOCK || earlier.thread / LANES != now.thread / LANES) both.reach = BLOCK;
  else if (earlier.reach == WARP || earlier.thread != now.thread) both.reach = WARP;
  return both;
}
// After a __threadfence of this block its own update of the cell is the last one: the ticket of the last block.
static bool is_update_ordered(const Access& update) {
  const bool has_ticket = update.block == current_block && fence_time[current_block] > launch_start;
  Access last = update;
  if (last.reach == GRID && has_ticket) last.reach = THREAD;
  return is_ordered(last);
}
static const char* const DID[] = {"reads", "writes", "updates"};
static std::string by(const Access& a) {
  if (a.reach == THREAD && a.block == current_block) {
    const std::string name = thread_name(a.block, a.thread);
    return name.substr(0, name.find(" of block"));
  }
  return a.reach == THREAD ? thread_name(a.block, a.thread) : "several threads";
}
static const char* between(const Access& a, bool is_shared) {
  const bool may_wait = a.block == current_block && a.reach != GRID && (is_shared || counts.barriers);
  return may_wait ? " with no barrier between" : " in the same launch";
}
template <typename Name>  // a function: the text is made for a fault only
static void touch(Cell& cell, int kind, const void* pc, const Name& element, const void* address) {
  const Access now{current_block, uint16_t(current_thread), THREAD, clock_now, pc};
  if (kind != WRITE && !cell.initialised) {
    if (!address) fail(here() + " reads " + element() + ", which nothing has written", pc);
    if (!unwritten.cell) unwritten = {&cell, pc, address, here(), size_t(fault.bytes)};
    if (kind == READ) return;
  }
  if (unwritten.cell == &cell && kind == WRITE) fail_unwritten(" yet. Is a barrier missing?", pc);
  if (unwritten.cell) {  // races behind it are its effect
    if (kind != READ) (kind == WRITE ? cell.write : cell.update) = now, cell.initialised = true;
    return;
  }
  if (!is_ordered(cell.write)) {
    if (kind == WRITE)
      fail("race: " + here() + " and " + by(cell.write) + " write " + element(), pc, cell.write.pc, address);
    fail("race: " + here() + " " + DID[kind] + " " + element() + ", which " + by(cell.write) + " writes" +
             between(cell.write, address), pc, cell.write.pc, address);
  }
  // Atomic updates are ordered among each other. A plain write stays on record beside them: an update of the thread
  // that wrote does not order the write before the updates of others.
  if (kind != ATOMIC && !is_update_ordered(cell.update))
    fail("race: " + here() + " " + DID[kind] + " " + element() + ", which " + by(cell.update) +
             (cell.update.reach == THREAD ? " updates" : " update") + between(cell.update, address), pc,
         cell.update.pc, address);
  if (kind != READ && !is_ordered(cell.read))
    fail("race: " + here() + " " + DID[kind] + " " + element() + ", which " + by(cell.read) +
             (cell.read.reach == THREAD ? " reads" : " read") + between(cell.read, address), pc, cell.read.pc, address);
  if (kind == READ) cell.read = joined(cell.read, now);
  else if (kind == ATOMIC) cell.update = joined(cell.update, now), cell.initialised = true;
  else cell.write = now, cell.initialised = true;
}

// Groups of accesses: the lanes of a warp that execute one instruction for the same time.
struct Group { const void* lanes[LANES]; uint32_t mask; uint8_t bytes, kind; bool shared; };
struct PcState {
  std::vector<Group> groups;        // by occurrence
  std::vector<uint32_t> occurrence = std::vector<uint32_t>(LANES);
};
struct Totals { int64_t excess_sectors[2], excess_wavefronts, idle; };
static std::unordered_map<const void*, int> ids;
static std::vector<const void*> pc_of;
static std::vector<Totals> totals;
static std::vector<PcState> accesses[LANES];              // by warp and pc
static std::vector<std::vector<uint32_t>> steps[LANES];   // basic blocks by warp, pc and lane

static int id_of(const void* pc) {
  static const void* last_pc[256];
  static int last_id[256];
  const unsigned slot = (uintptr_t(pc) >> 1) % 256;
  if (last_pc[slot] == pc) return last_id[slot];
  const auto [entry, is_new] = ids.try_emplace(pc, int(pc_of.size()));
  if (is_new) pc_of.push_back(pc), totals.push_back({});
  last_pc[slot] = pc, last_id[slot] = entry->second;
  return entry->second;
}
static void record(const void* address, size_t bytes, int kind, bool shared, const void* pc) {
  const int id = id_of(pc);
  auto& warp = accesses[current_thread / LANES];
  if (warp.size() <= size_t(id)) warp.resize(id + 1);
  PcState& state = warp[id];
  const unsigned lane = current_thread % LANES, occurrence = state.occurrence[lane]++;
  if (state.groups.size() <= occurrence) state.groups.resize(occurrence + 1, Group{});
  Group& group = state.groups[occurrence];
  group.lanes[lane] = address, group.mask |= 1u << lane;
  group.bytes = uint8_t(bytes), group.kind = uint8_t(kind), group.shared = shared;
}
static void count_global(const Group& group, Totals& total) {
  uint64_t sectors[2 * LANES], number = 0, lanes = 0;
  for (int lane = 0; lane < LANES; ++lane)
    if (group.mask >> lane & 1) {
      const uint64_t first = uint64_t(group.lanes[lane]) / SECTOR;
      ++lanes, sectors[number++] = first;
      if ((uint64_t(group.lanes[lane]) + group.bytes - 1) / SECTOR != first) sectors[number++] = first + 1;
    }
  std::sort(sectors, sectors + number);
  const int64_t distinct = std::unique(sectors, sectors + number) - sectors;
  const int64_t ideal = std::min<int64_t>(distinct, (lanes * group.bytes + SECTOR - 1) / SECTOR);
  const bool is_store = group.kind == WRITE;
  int64_t* c = is_store ? &counts.store_requests : &counts.load_requests;
  c[0] += 1, c[1] += distinct, c[2] += ideal, c[3] += lanes * group.bytes;
  total.excess_sectors[is_store] += distinct - ideal;
  Buffer& buffer = *buffer_of(group.lanes[__builtin_ctz(group.mask)]);
  buffer.requests[is_store] += 1, buffer.sectors[is_store] += distinct, buffer.ideal[is_store] += ideal;
}
static void count_shared(const Group& group, Totals& total) {
  // 8-byte accesses are served by half warps, 16-byte ones by quarter warps.
  const int phase = group.bytes == 16 ? 8 : group.bytes == 8 ? 16 : 32;
  for (int first = 0; first < LANES; first += phase) {
    std::vector<uint64_t> words[32];
    size_t conflicts = 0;
    for (int lane = first; lane < first + phase; ++lane)
      for (int b = 0; group.mask >> lane & 1 && b < std::max<int>(group.bytes, 4); b += 4) {
        const uint64_t word = uint64_t(group.lanes[lane]) / 4 + b / 4;
        auto& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        conflicts = std::max(conflicts, bank.size());
      }
    counts.shared_wavefronts += conflicts, counts.shared_ideal_wavefronts += conflicts > 0;
    total.excess_wavefronts += conflicts ? conflicts - 1 : 0;
  }
  ++counts.shared_requests, counts.shared_loads += group.kind == READ;
}
void flush_counts() {
  for (auto& warp : accesses)
    for (size_t id = 0; id < warp.size(); ++id) {
      for (const Group& group : warp[id].groups)
        group.shared ? count_shared(group, totals[id]) : count_global(group, totals[id]);
      warp[id].groups.clear();
      std::fill(warp[id].occurrence.begin(), warp[id].occurrence.end(), 0);
    }
  for (auto& warp : steps)
    for (size_t id = 0; id < warp.size(); ++id) {
      auto& lanes = warp[id];
      if (lanes.empty()) continue;
      int64_t most = 0, sum = 0;
      for (uint32_t& lane : lanes) most = std::max<int64_t>(most, lane), sum += lane, lane = 0;
      counts.lane_blocks += sum, counts.warp_blocks += most;
      totals[id].idle += most * LANES - sum;
    }
}
void reset_pcs() {
  for (Totals& total : totals) total = {};
}
template <typename F> static int64_t worst(F excess) {
  int64_t most = 0, pc = 0;
  for (size_t id = 0; id < totals.size(); ++id)
    if (excess(totals[id]) > most) most = excess(totals[id]), pc = offset_of(pc_of[id]) - 1;
  return pc;
}

void start_block(size_t dynamic_bytes) {
  const size_t size = shared_bytes();
  subscript.pc = nullptr, unwritten.cell = nullptr;
  static_cells.assign(size, Cell{}), dynamic_cells.assign(dynamic_bytes, Cell{}), dynamic_size = dynamic_bytes;
  if (size) std::memset(shared_begin(), 0xff, size);
  std::memset(weft_dynamic_shared, 0xff, sizeof weft_dynamic_shared);
}
static bool is_between(const void* address, const void* begin, size_t bytes) {
  return (const char*)address >= (const char*)begin && (const char*)address < (const char*)begin + bytes;
}
static bool is_in_library(const char* address) {
  return address >= &__ehdr_start && address < _end;
}
static void access_shared(std::vector<Cell>& cells, const char* base, const char* address, size_t bytes, int kind,
                          const void* pc) {
  const size_t offset = address - base;
  fault.bytes = bytes;
  if (offset + bytes > cells.size())
    fail(here() + " " + DID[kind] + " byte " + std::to_string(offset) + " of the dynamic shared memory, which has " +
             std::to_string(cells.size()) + " bytes", pc);
  const auto name = [] { return std::string("@"); };  // cuda_program.py knows the array, by the address
  for (size_t i = offset; i < offset + bytes; ++i) touch(cells[i], kind, pc, name, address);
  (kind == ATOMIC) ? void(++counts.shared_atomics) : record(address, bytes, kind, true, pc);
}
static void access_global(const char* address, size_t bytes, int kind, const void* pc) {
  Buffer* buffer = buffer_of(address);
  const ptrdiff_t offset = address - buffer->begin, element = buffer->element;
  const ptrdiff_t index = offset >= 0 ? offset / element : -((-offset + element - 1) / element);
  if (offset < 0 || offset + bytes > buffer->bytes)
    fail(here() + " " + DID[kind] + " outside of " + buffer->name + ": element " + std::to_string(index) + " of " +
             std::to_string(buffer->cells.size()) +
             (buffer->is_malloced ? " (cudaMalloc got " + std::to_string(buffer->bytes) + " bytes)" : ""), pc);
  if (buffer->is_freed) fail(here() + " " + DID[kind] + " " + buffer->name + ", which is freed", pc);
  ptrdiff_t i = index;
  const auto name = [&] { return "element " + std::to_string(i) + " of " + buffer->name; };
  for (; i * element < offset + ptrdiff_t(bytes); ++i) touch(buffer->cells[i], kind, pc, name, nullptr);
  (kind == ATOMIC) ? void(++counts.global_atomics) : record(address, bytes, kind, false, pc);
}
void access(const void* pointer, size_t bytes, int kind, const void* pc) {
  const char* address = (const char*)pointer;
  if (subscript.pc && !is_device(address)) fail_subscript(DID[kind]);
  if (!in_kernel) {
    if (is_device(address)) {
      const std::string name = buffer_of(address)->name;
      fail("host code " + std::string(DID[kind]) + " " + name + ", which is device memory: copy it by cudaMemcpy", pc);
    }
    if (is_between(address, __start_weft_constant, __stop_weft_constant - __start_weft_constant) && kind != READ)
      fail("host code writes constant memory: use cudaMemcpyToSymbol", pc);
    return;
  }
  if (is_between(address, stacks, MAX_THREADS * STACK_BYTES)) return;  // a local variable
  const size_t alignment = bytes > 16 ? 16 : bytes;
  if (alignment && uintptr_t(address) % alignment)
    fail(here() + " accesses " + std::to_string(bytes) + " bytes at an address that is no multiple of " +
             std::to_string(alignment), pc);
  if (is_device(address)) return access_global(address, bytes, kind, pc);
  if (is_between(address, shared_begin(), shared_bytes()))
    return access_shared(static_cells, shared_begin(), address, bytes, kind, pc);
  if (is_between(address, weft_guard_before, shared_bytes() + 2 * GUARD_SHARED)) {
    fault.bytes = int64_t(bytes);
    fail(here() + " " + DID[kind] + " @", pc, nullptr, address);
  }
  if (is_between(address, weft_dynamic_shared, MAX_SHARED))
    return access_shared(dynamic_cells, (char*)weft_dynamic_shared, address, bytes, kind, pc);
  if (is_in_library(address)) {
    if (is_between(address, __start_weft_constant, __stop_weft_constant - __start_weft_constant) && kind != READ)
      fail(here() + " writes constant memory, which a kernel may only read", pc);
    return;
  }
  fail(here() + " " + DID[kind] + " memory that is not the device's: a host pointer, or an index far outside", pc);
}
}  // namespace weft

using namespace weft;
#define CALLER __builtin_return_address(0)
#define ACCESSES(SIZE)                                                                            \
  void __tsan_read##SIZE(void* p) { access(p, SIZE, READ, CALLER); }                              \
  void __tsan_write##SIZE(void* p) { access(p, SIZE, WRITE, CALLER); }                            \
  void __tsan_unaligned_read##SIZE(void* p) { access(p, SIZE, READ, CALLER); }                    \
  void __tsan_unaligned_write##SIZE(void* p) { access(p, SIZE, WRITE, CALLER); }                  \
  void __tsan_volatile_read##SIZE(void* p) { access(p, SIZE, READ, CALLER); }                     \
  void __tsan_volatile_write##SIZE(void* p) { access(p, SIZE, WRITE, CALLER); }
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, READ, CALLER); }
void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, WRITE, CALLER); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
// In front of an access by a subscript that is outside of its array's type.
void __ubsan_handle_out_of_bounds(void* place, void* index) {
  struct Type { uint16_t kind, info; char name[1]; };
  const struct Data { const char* file; uint32_t line, column; const Type *array, *index; }& data = *(Data*)place;
  end_thread();
  int64_t value = int64_t(index);
  if ((data.index->info >> 1) == 5) value = data.index->info & 1 ? int64_t(int32_t(value)) : int64_t(uint32_t(value));
  subscript = {CALLER, data.line, data.column, value, data.array->name, current_block, current_thread};
}
void __sanitizer_cov_trace_pc() {
  end_thread();
  if (!in_kernel) return;
  const int id = id_of(CALLER);
  auto& warp = steps[current_thread / LANES];
  if (warp.size() <= size_t(id)) warp.resize(id + 1);
  auto& lanes = warp[id];
  if (lanes.empty()) lanes.resize(LANES);
  ++lanes[current_thread % LANES];
  if (++unsynchronised_steps > MAX_STEPS) fail("endless loop: " + here() + " does not leave a loop", CALLER);
}

void* weft_allocate(const char* name, size_t count, size_t element, const void* data) {
  Buffer& buffer = allocate(name, count, element);
  if (data) {
    std::memcpy(buffer.begin, data, buffer.bytes);
    mark_initialised(buffer, 0, buffer.bytes);
  }
  return buffer.begin;
}
// The first element that nothing has written, or -1.
int64_t weft_unwritten(const void* begin) {
  const Buffer* buffer = buffer_of(begin);
  for (size_t i = 0; i < buffer->cells.size(); ++i)
    if (!buffer->cells[i].initialised) return int64_t(i);
  return -1;
}
const Counts* weft_counts() {
  counts.worst_load_pc = worst([](const Totals& t) { return t.excess_sectors[0]; });
  counts.worst_store_pc = worst([](const Totals& t) { return t.excess_sectors[1]; });
  counts.worst_shared_pc = worst([](const Totals& t) { return t.excess_wavefronts; });
  counts.worst_idle_pc = worst([](const Totals& t) { return t.idle; });
  return &counts;
}
const Fault* weft_fault() { return &fault; }
// The name of an array that the call took by cudaMalloc and did not free, or "".
const char* weft_unfreed() {
  for (size_t i = first_of_call; i < buffers.size(); ++i)
    if (buffers[i].is_malloced && !buffers[i].is_freed) return buffers[i].name.c_str();
  return "";
}
// For the i-th array: its name, and its requests, sectors and least sectors of loads and of stores.
const char* weft_array_counts(size_t i, int64_t* values) {
  if (i >= buffers.size()) return nullptr;
  for (int kind = 0; kind < 2; ++kind) {
    const Buffer& b = buffers[i];
    *values++ = b.requests[kind], *values++ = b.sectors[kind], *values++ = b.ideal[kind];
  }
  return buffers[i].name.c_str();
}
// The elements of an array in shared memory that the last block has written: how many, the first and the last.
void weft_shared_written(int64_t offset, int64_t size, int64_t element, int64_t* values) {
  const char* begin = &__ehdr_start + offset;
  const bool is_static = begin >= shared_begin() && begin < weft_guard_behind;
  const std::vector<Cell>& cells = is_static ? static_cells : dynamic_cells;
  const size_t first = begin - (is_static ? shared_begin() : (const char*)weft_dynamic_shared);
  values[0] = 0, values[1] = values[2] = -1;
  for (int64_t i = 0; i < size / element && first + i * element < cells.size(); ++i)
    if (cells[first + i * element].initialised) {
      if (!values[0]++) values[1] = i;
      values[2] = i;
    }
}
// Call the learner's function; 1 if a fault ended it.
int weft_call(void (*function)(const long long*), const long long* arguments) {
  counts = {}, fault = {}, has_fault = false, in_kernel = false;
  subscript.pc = nullptr, unwritten.cell = nullptr;
  first_of_call = buffers.size();
  for (Buffer& b : buffers)
    for (int kind = 0; kind < 2; ++kind) b.requests[kind] = b.sectors[kind] = b.ideal[kind] = 0;
  reset_pcs();
  if (_setjmp(host_exit)) return 1;
  function(arguments);
  drain();
  return has_fault;
}
}
void weft_copy(void* to, const void* from, int bytes) {
  access(from, bytes, READ, CALLER);
  access(to, bytes, WRITE, CALLER);
  std::memcpy(to, from, bytes);
}
