// The host's clock, at each record of an event: work is done when it is launched, so that is when it was done.
#pragma once
#include <cstdint>

namespace sim {

void stamp(uint64_t event);
// Milliseconds from one record to another.
double elapsed(uint64_t first, uint64_t second);

}  // namespace sim
