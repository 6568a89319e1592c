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

void set_device_count(int count);
int device_count();

int current_device();
int exchange_device(int device);
// The device itself, or the current one for a device without an index.
int index_of(c10::Device device);

c10::Stream default_stream(int device);
c10::Stream current_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);
// Streams are never handed out twice: no two uses share one by chance, as they may in a pool.
c10::Stream new_stream(int device, int priority);
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
