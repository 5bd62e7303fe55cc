// State of the emulator, shared by memory.cpp, threads.cpp and host.cpp.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

#define SECTION(NAME) extern char NAME[] __attribute__((weak, visibility("hidden")))
SECTION(__start_weft_constant);
SECTION(__stop_weft_constant);

namespace weft {

constexpr int MAX_THREADS = 1024, LANES = 32, SECTOR = 32;
// Around the file's shared arrays, in their section: what a pointer reaches beside them. By the order of linking.
constexpr size_t GUARD_SHARED = 4096;
extern char weft_guard_before[GUARD_SHARED], weft_guard_behind[GUARD_SHARED];
inline char* shared_begin() { return weft_guard_before + GUARD_SHARED; }
inline size_t shared_bytes() { return size_t(weft_guard_behind - shared_begin()); }
constexpr size_t MAX_SHARED = 48 << 10, STACK_BYTES = 64 << 10;

// A group of threads that accessed a cell: one thread, threads of one warp, of one block, of several blocks.
enum Reach : uint8_t { NOBODY, THREAD, WARP, BLOCK, GRID };
struct Access {
  uint32_t block = 0;
  uint16_t thread = 0;
  Reach reach = NOBODY;
  uint32_t time = 0;
  const void* pc = nullptr;
};
struct Cell {  // shadow of one element of memory
  Access write, update, read;  // a plain write, an atomic update, a plain read
  bool initialised = false;
};
struct Buffer {  // an array in the device's memory
  std::string name;
  char* begin;
  size_t bytes, element;
  bool is_freed;
  std::vector<Cell> cells;
  bool is_malloced = false;                // by the learner's cudaMalloc
  int64_t requests[2], sectors[2], ideal[2];  // of warps' loads and stores in this call
};
struct Counts {  // read by cuda_program.py, in this order
  int64_t launches, blocks, threads, barriers;
  int64_t load_requests, load_sectors, load_ideal_sectors, load_bytes;
  int64_t store_requests, store_sectors, store_ideal_sectors, store_bytes;
  int64_t shared_requests, shared_loads, shared_wavefronts, shared_ideal_wavefronts;
  int64_t global_atomics, shared_atomics, shuffles;
  int64_t lane_blocks, warp_blocks;  // basic blocks executed by lanes, and by warps
  int64_t timeline, serial_time;     // of the operations in streams, in units of host.cpp
  int64_t worst_load_pc, worst_store_pc, worst_shared_pc, worst_idle_pc;
};
struct Fault {  // read by cuda_program.py
  char message[600];
  int64_t pc, other_pc, address, bytes;  // offsets in the library, 0 is none; bytes of the access
  int64_t line, column, index;           // of a subscript outside of its array, and line 0 otherwise
  char type[80];                         // of that array, such as float [16][33]
};

extern Counts counts;
extern Fault fault;
extern bool in_kernel, has_fault;
extern jmp_buf host_exit;  // where a fault in host code leaves the learner's function
extern uint32_t clock_now;  // counts the events that order accesses
extern uint32_t launch_start;
extern uint64_t unsynchronised_steps;  // basic blocks since the thread's last barrier

// threads.cpp
extern uint32_t current_thread, current_block, threads_per_block;
extern uint32_t block_sync_time, warp_sync_time[LANES];
extern std::vector<uint32_t> fence_time;  // of each block of the launch
extern char* stacks;  // all stacks of fibers: local variables
std::string here();   // "thread (1, 0, 0) of block (2, 0, 0)"
std::string thread_name(uint32_t block, uint32_t thread);
[[noreturn]] void leave_kernel();
void run_grid(void (*body)(void*), void* argument, const unsigned* grid, const unsigned* block, size_t shared);

constexpr int64_t MAX_BARRIERS = 20'000;  // of one block: an endless loop with a barrier stops here

// memory.cpp
constexpr int READ = 0, WRITE = 1, ATOMIC = 2;
void access(const void* address, size_t bytes, int kind, const void* pc);
void start_block(size_t dynamic_bytes);
void end_thread();  // a subscript out of bounds that no access followed
void end_block();   // a read of an element that no thread wrote later either
void flush_counts();  // at each barrier and at the end of a block: all lanes have come as far
void reset_pcs();
[[noreturn]] void fail(const std::string& message, const void* pc, const void* other = nullptr,
                       const void* address = nullptr);
Buffer* buffer_of(const void* address);
bool is_device(const void* address);
Buffer& allocate(const char* name, size_t count, size_t element);
void mark_initialised(Buffer& buffer, size_t offset, size_t bytes);

// host.cpp
void drain();
}  // namespace weft
