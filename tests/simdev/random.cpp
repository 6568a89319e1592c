// Generators of the CPU, one a device: what one device draws does not move another one's.
#include "random.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <mutex>

namespace sim {

at::Generator& generator(int device) {
  static std::mutex lock;
  static auto* made = new std::vector<at::Generator>;
  std::lock_guard hold(lock);
  made->reserve(device_count());
  while (made->size() <= static_cast<size_t>(device)) made->push_back(at::detail::createCPUGenerator());
  return made->at(device);
}

}  // namespace sim

extern "C" {

size_t sim_random_size() { return sim::generator(0).get_state().numel(); }
void sim_get_random(int device, void* state) {
  auto& its = sim::generator(device);
  std::lock_guard hold(its.mutex());
  auto now = its.get_state();
  memcpy(state, now.data_ptr(), now.numel());
}
void sim_set_random(int device, void* state) {
  auto& its = sim::generator(device);
  std::lock_guard hold(its.mutex());
  auto then = its.get_state();
  memcpy(then.data_ptr(), state, then.numel());
  its.set_state(then);
}
void sim_seed(int device, uint64_t seed) {
  auto& its = sim::generator(device);
  std::lock_guard hold(its.mutex());
  its.set_current_seed(seed);
}
}
