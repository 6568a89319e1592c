// The state behind streams.h. One lock for all of it: streams are given work by many threads at once.
#include "streams.h"

#include <algorithm>
#include <array>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>
#include <utility>

namespace sim {
namespace {

constexpr int kPriorities = 4;

struct State {
  std::mutex lock;
  int devices = 0;
  int pool = 32;
  std::vector<std::array<int, kPriorities>> handed_out;  // of a device's streams, by priority
  std::vector<char> contexts;                            // whether a device has one
  std::vector<Made> made;
  std::vector<std::string> unbound;
  uint64_t events = 0;
  size_t locked = 0;
  std::vector<Launch> launches;
};

// Never destroyed: threads outlive the end of main.
State& state() {
  static auto* it = new State;
  return *it;
}

thread_local int device_now = 0;   // of the runtime
thread_local int device_next = -1;  // that torch sets no sooner than needed; -1: none
thread_local bool bound = false;   // whether the thread has a context
thread_local std::vector<c10::StreamId> streams_now;

c10::StreamId& stream_now(int device) {
  if (streams_now.size() <= static_cast<size_t>(device)) streams_now.resize(device + 1, 0);
  return streams_now[device];
}

std::string thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

// Whether this thread has the interpreter's lock; a process without an interpreter has none.
bool has_lock() {
  static auto* check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check();
}

// The runtime's own way to set it, which makes the context. Autograd's threads, one a device, set theirs when they
// start: where torch is built for CUDA they leave out devices without a context.
void set_runtime_device(int device, const char* call) {
  if (has_context(device) || thread().rfind("pt_autograd", 0) != 0) call_runtime(device, call);
  device_now = device;
}

}  // namespace

void set_device_count(int count) {
  state().devices = count;
  state().handed_out.assign(count, {});
  state().contexts.assign(count, 0);
}
int device_count() { return state().devices; }

int current_device() { return device_next < 0 ? device_now : device_next; }
void set_device(int device) {
  device_next = -1;
  if (device != device_now) set_runtime_device(device, "set");
}
int exchange_device(int device) {
  int before = current_device();
  bool waits = std::exchange(device_next, -1) >= 0;
  if (waits || device != device_now) set_runtime_device(device, "exchange");
  return before;
}
int maybe_exchange_device(int device) {
  int before = current_device();
  device_next = -1;
  if (device != device_now && has_context(device)) set_runtime_device(device, "exchange");
  else if (device != device_now) device_next = device;
  return before;
}
void call_runtime(int device, const char* call) {
  bound = true;
  std::lock_guard hold(state().lock);
  if (!std::exchange(state().contexts.at(device), 1)) state().made.push_back({device, call, thread()});
}
bool has_context(int device) {
  std::lock_guard hold(state().lock);
  return state().contexts.at(device);
}
std::vector<Made> contexts() {
  std::lock_guard hold(state().lock);
  return state().made;
}
std::vector<std::string> unbound() {
  std::lock_guard hold(state().lock);
  return state().unbound;
}
size_t locked() {
  std::lock_guard hold(state().lock);
  return state().locked;
}
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}
c10::Stream default_stream(int device) { return stream_of(device, 0); }
c10::Stream current_stream(int device) { return stream_of(device, stream_now(device)); }
c10::Stream exchange_stream(c10::Stream next) {
  return stream_of(next.device_index(), std::exchange(stream_now(next.device_index()), next.id()));
}
// The default stream is 0; number k of a priority's pool is 1 + priority + 4 k.
c10::Stream new_stream(int device, int priority) {
  int level = std::clamp(-priority, 0, kPriorities - 1);
  call_runtime(device, "new stream");
  std::lock_guard hold(state().lock);
  int number = state().handed_out.at(device).at(level)++ % state().pool;
  return stream_of(device, 1 + level + kPriorities * number);
}
void set_pool(int size) {
  std::lock_guard hold(state().lock);
  state().pool = size;
  for (auto& each : state().handed_out) each = {};
}
int priority(c10::Stream stream) { return stream.id() ? -((stream.id() - 1) % kPriorities) : 0; }

void launch(Launch launch) {
  // Freed memory stays with the allocator, which asks the runtime for nothing; a kernel on another device than the
  // current one comes after a guard, which gives the thread that one's context.
  int device = launch.stream.device_index();
  bool computes = launch.kind == Kind::Op || launch.kind == Kind::Copy;
  if (computes && launch.multiplications > 0 && !bound && device == device_now) {
    std::lock_guard hold(state().lock);
    state().unbound.push_back(launch.name + " in " + thread());
  }
  if (computes || launch.kind == Kind::Wait || (launch.kind == Kind::Alloc && !has_context(device)))
    call_runtime(device, computes ? launch.name.c_str() : launch.kind == Kind::Wait ? "wait" : "allocation");
  bool locked = launch.kind == Kind::Wait && has_lock();
  std::lock_guard hold(state().lock);
  state().locked += locked;
  state().launches.push_back(std::move(launch));
}
uint64_t record(c10::Stream stream) {
  call_runtime(stream.device_index(), "record");
  bool locked = has_lock();
  std::lock_guard hold(state().lock);
  state().locked += locked;
  state().launches.push_back({Kind::Record, stream, ++state().events});
  return state().events;
}
void wait(c10::Stream stream, uint64_t event) { launch({Kind::Wait, stream, event}); }
void wait(c10::Stream waiter, c10::Stream other) { wait(waiter, record(other)); }

std::vector<Launch> launches() {
  std::lock_guard hold(state().lock);
  return state().launches;
}
size_t launched() {
  std::lock_guard hold(state().lock);
  return state().launches.size();
}
void forget_launches() {
  std::lock_guard hold(state().lock);
  state().launches.clear();
}

}  // namespace sim
