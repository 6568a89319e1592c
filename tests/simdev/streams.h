// Devices, the current one and the current stream of each thread, and the log of all that streams are given.
#pragma once
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// What streams are given; what the host waits for; and what becomes of memory.
enum class Kind : char {
  Op = 'o', Copy = 'c', Record = 'r', Wait = 'w',
  Sync = 's', SyncDevice = 'd', SyncEvent = 'e',
  Alloc = 'a', Free = 'f', Keep = 'k',
};

// Bytes of a block of memory, from the first to one past the last.
struct Piece {
  uint64_t block;
  size_t first, last;
};

// One entry of the log, in the order in which the host made them.
struct Launch {
  Kind kind;
  c10::Stream stream;
  uint64_t event = 0;  // of a record and what waits for it: the number of that record
  std::string name = "-";
  double multiplications = 0;
  size_t bytes = 0;
  std::vector<Piece> reads, writes;  // of an op or a copy. Alloc, Free, Keep: one block, all of it, that is written.
};

// A primary context as CUDA makes it: a device has one from a thread's first call of the runtime there on.
struct Made {
  int device;
  std::string call, thread;
};

void set_device_count(int count);
int device_count();

// The current device as torch keeps it for CUDA. To set one is a call of the runtime, but not the one that it is
// already: a thread that starts has device 0, and no context. A device without a context is set no sooner than needed
// by the guards' `maybe`.
int current_device();
void set_device(int device);
int exchange_device(int device);
int maybe_exchange_device(int device);
// A call of the runtime for a device.
void call_runtime(int device, const char* call);
bool has_context(int device);
std::vector<Made> contexts();
// Products that a thread began without a context, for which cuBLAS warns: the name of each and of its thread.
std::vector<std::string> unbound();
// Records and waits that a thread gave to the driver with the interpreter's lock in its hand.
size_t locked();
// The device itself, or the current one for a device without an index.
int index_of(c10::Device device);

c10::Stream stream_of(int device, c10::StreamId id);
c10::Stream default_stream(int device);
c10::Stream current_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);
// From a pool for each priority, of which there are as many as torch has for CUDA; it begins anew after the last one.
c10::Stream new_stream(int device, int priority);
void set_pool(int size);
int priority(c10::Stream stream);

void launch(Launch launch);
// A point in the stream, by a number of its own.
uint64_t record(c10::Stream stream);
void wait(c10::Stream stream, uint64_t event);
// What the waiter is given from now on starts after all that the other has been given so far.
void wait(c10::Stream waiter, c10::Stream other);

std::vector<Launch> launches();
size_t launched();
void forget_launches();

}  // namespace sim
