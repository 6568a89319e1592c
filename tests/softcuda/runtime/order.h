// What happens before what on streams, as vector clocks, and accesses to memory that nothing orders.
//
// All of it is called under the runtime's lock.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace soft {

// By the number of a stream: how much of its work has happened before.
using Clock = std::vector<uint32_t>;

struct Access { const void* at; size_t size; bool writes; };

struct Place { int device, priority; };

// Its number.
int new_stream(int device, int priority = 0);
Place place_of(int stream);
const Clock& clock_of(int stream);

void host_waits(const Clock& clock);
constexpr int kAll = -1;
void host_waits_for(int device);
bool host_knows(const Clock& clock);
void stream_waits(int stream, const Clock& clock);

// The stream's next piece of work, with all that it reads and writes, and how much it is.
void access(int stream, const Access* its, int count, const char* name, double work = 0, size_t bytes = 0);
// The memory is given back: what comes to lie there is something else.
void forget(const void* at, size_t size);

}  // namespace soft
