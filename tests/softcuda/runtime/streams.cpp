// Streams and events: what they order, and who counts as done.
#include <time.h>

#include "runtime.h"

namespace soft {

struct Event { int device; unsigned flags; unsigned long recorded; double time; long asked; Clock clock; };

namespace {

// So many queries of work that the host has not waited for say "not ready". With 0 each query would be a wait, and hide
// what nothing else orders.
const long lag = setting("SOFTCUDA_LAG", 0);

Stream* defaults[kMost];
unsigned long records = 0;  // So far: each has a number.

double now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1e3 + at.tv_nsec / 1e6;
}

bool done(const Clock& clock, long& asked) {
  if (!host_knows(clock) && asked++ < lag) return false;
  return host_waits(clock), asked = 0, true;
}

}  // namespace

Stream* stream_of(Handle handle) { return stream_of(current_device(), handle); }

Stream* stream_of(int device, Handle handle) {
  if (reinterpret_cast<size_t>(handle) > 2) return static_cast<Stream*>(handle);
  Hold hold(lock);
  if (defaults[device] == nullptr) defaults[device] = new Stream{device, 0, new_stream(device)};
  touch(device);
  return defaults[device];
}

}  // namespace soft

using namespace soft;

// An op on memory, done by ops.cpp. The handle is torch's, of a stream of the device.
API void softcuda_access(int device, Handle handle, const Access* its, int count, const char* name, double work) {
  Hold hold(lock);
  if (work > 0) begin_product();
  auto* stream = stream_of(device, handle);
  access(stream->id, its, count, name, work);
}
API void softcuda_host_waits(int device, Handle handle) {
  auto* stream = stream_of(device, handle);
  Hold hold(lock);
  host_waits(clock_of(stream->id));
}

API int cudaStreamCreateWithPriority(Handle* out, unsigned, int priority) {
  Hold hold(lock);
  int device = current_device();
  touch(device);
  return *out = new Stream{device, priority, new_stream(device, priority)}, kOk;
}
API int cudaStreamCreateWithFlags(Handle* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API int cudaStreamCreate(Handle* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API int cudaStreamDestroy(Handle) { return kOk; }  // Its number stays in clocks.
API int cudaStreamGetPriority(Handle handle, int* out) { return *out = stream_of(handle)->priority, kOk; }
API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, kOk; }
API int cudaStreamQuery(Handle handle) {
  auto* stream = stream_of(handle);
  Hold hold(lock);
  return done(clock_of(stream->id), stream->asked) ? kOk : failed(kNotReady);
}
API int cudaStreamSynchronize(Handle handle) {
  auto* stream = stream_of(handle);
  Hold hold(lock);
  return host_waits(clock_of(stream->id)), kOk;
}
API int cudaStreamWaitEvent(Handle handle, Event* event, unsigned) {
  auto* stream = stream_of(handle);
  Hold hold(lock);
  if (event->recorded) stream_waits(stream->id, event->clock), log_event("wait", stream->id, event->recorded);
  return kOk;
}
API int cudaLaunchHostFunc(Handle, void (*call)(void*), void* data) { return call(data), kOk; }
API int cudaStreamIsCapturing(Handle, int* out) { return *out = 0, kOk; }
API int cudaStreamGetCaptureInfo(Handle, int* status, unsigned long long* id, void**, void**, void**, size_t*) {
  *status = 0;
  if (id != nullptr) *id = 0;
  return kOk;
}
API int cudaThreadExchangeStreamCaptureMode(int*) { return kOk; }

API int cudaEventCreateWithFlags(Event** out, unsigned flags) {
  return *out = new Event{current_device(), flags, 0, 0, 0, {}}, kOk;
}
API int cudaEventCreate(Event** out) { return cudaEventCreateWithFlags(out, 0); }
API int cudaEventDestroy(Event* event) { return delete event, kOk; }
API int cudaEventRecordWithFlags(Event* event, Handle handle, unsigned) {
  auto* stream = stream_of(handle);
  if (event->device != stream->device) return failed(kInvalidHandle);  // As a real one does.
  Hold hold(lock);
  event->recorded = ++records, event->asked = 0, event->time = now(), event->clock = clock_of(stream->id);
  log_event("record", stream->id, event->recorded);
  return kOk;
}
API int cudaEventRecord(Event* event, Handle handle) { return cudaEventRecordWithFlags(event, handle, 0); }
API int cudaEventQuery(Event* event) {
  Hold hold(lock);
  return !event->recorded || done(event->clock, event->asked) ? kOk : failed(kNotReady);
}
API int cudaEventSynchronize(Event* event) {
  Hold hold(lock);
  if (event->recorded) host_waits(event->clock);
  return kOk;
}
API int cudaEventElapsedTime(float* out, Event* from, Event* to) {
  constexpr unsigned untimed = 2;
  if (!from->recorded || !to->recorded || ((from->flags | to->flags) & untimed)) return failed(kInvalidHandle);
  return *out = to->time - from->time, kOk;
}
