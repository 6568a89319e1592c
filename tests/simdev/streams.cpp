// The state behind streams.h. One lock for all of it: streams are given work by many threads at once.
#include "streams.h"

#include <mutex>
#include <utility>

namespace sim {
namespace {

struct State {
  std::mutex lock;
  int devices = 0;
  std::vector<std::vector<int>> priorities;  // of a device's streams, by number; 0 is the default stream
  uint64_t events = 0;
  std::vector<Launch> launches;
};

// Never destroyed: threads outlive the end of main.
State& state() {
  static auto* it = new State;
  return *it;
}

thread_local int device_now = 0;
thread_local std::vector<c10::StreamId> streams_now;

c10::StreamId& stream_now(int device) {
  if (streams_now.size() <= static_cast<size_t>(device)) streams_now.resize(device + 1, 0);
  return streams_now[device];
}

c10::Stream stream(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

}  // namespace

void set_device_count(int count) {
  state().devices = count;
  state().priorities.assign(count, {0});
}
int device_count() { return state().devices; }

int current_device() { return device_now; }
int exchange_device(int device) { return std::exchange(device_now, device); }
int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }

c10::Stream default_stream(int device) { return stream(device, 0); }
c10::Stream current_stream(int device) { return stream(device, stream_now(device)); }
c10::Stream exchange_stream(c10::Stream next) {
  return stream(next.device_index(), std::exchange(stream_now(next.device_index()), next.id()));
}
c10::Stream new_stream(int device, int priority) {
  std::lock_guard hold(state().lock);
  auto& known = state().priorities.at(device);
  known.push_back(priority);
  return stream(device, known.size() - 1);
}
int priority(c10::Stream stream) {
  std::lock_guard hold(state().lock);
  return state().priorities.at(stream.device_index()).at(stream.id());
}

void launch(Launch launch) {
  std::lock_guard hold(state().lock);
  state().launches.push_back(std::move(launch));
}
uint64_t record(c10::Stream stream) {
  std::lock_guard hold(state().lock);
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
