// What the parts of the fake runtime share. Devices are parts of the host's memory, a call has done its work when it
// returns, kernels do nothing (ops.cpp runs the CPU's in their place).
#pragma once
#include <mutex>
#include <string>

#include "order.h"

#define API extern "C" __attribute__((visibility("default")))

namespace soft {

// CUDA's own numbers.
enum Error { kOk = 0, kInvalid = 1, kNoMemory = 2, kNoDevice = 100, kNoSuchDevice = 101, kInvalidHandle = 400,
             kNotReady = 600 };
constexpr int kMost = 64;  // devices

using Handle = void*;  // Of a stream, as torch has it: nullptr, 1 and 2 are default streams.
// `asked`: how often somebody wanted to know whether it is done, and was told that it is not.
struct Stream { int device, priority, id; long asked = 0; };

// One for all: under the interpreter's own lock there is little to gain by more.
extern std::recursive_mutex lock;
using Hold = std::lock_guard<std::recursive_mutex>;

// A number of the environment.
long setting(const char* name, long otherwise);
// The error, which cudaGetLastError then knows.
int failed(int error);
// The text for Python, kept until this thread is told another one.
const char* told(std::string text);
int device_count();
size_t memory_size();
// The thread's device.
int current_device();
// The device has a context from now on, and so has this thread.
void touch(int device);
// This thread begins a product, for which it needs one.
void begin_product();

// For the log of what streams were given (log.cpp), under the lock.
// An op, with its multiplications; of a copy to another device, the bytes.
void log_work(int stream, const char* name, double work, size_t bytes);
// The stream does a "record" of the event of that number, or a "wait" for it.
void log_event(const char* kind, int stream, unsigned long event);

Stream* stream_of(Handle handle);
Stream* stream_of(int device, Handle handle);

}  // namespace soft
