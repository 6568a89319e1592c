// The log of what streams were given. All of it is called under the runtime's lock.
#pragma once
#include <cstddef>

namespace soft {

// An op, with its multiplications; of a copy to another device, the bytes.
void log_work(int device, int stream, int priority, const char* name, double work, size_t bytes);
// A product is about to be launched by this thread.
void log_product();
// 'r': the stream records the event of that number; 'w': it waits for it.
void log_event(char kind, int device, int stream, int priority, unsigned long event);

}  // namespace soft
