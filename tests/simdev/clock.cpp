// When events were recorded, by their numbers.
#include "clock.h"

#include <chrono>
#include <mutex>
#include <vector>

namespace sim {
namespace {

using Clock = std::chrono::steady_clock;

struct Stamps {
  std::mutex lock;
  std::vector<Clock::time_point> at;
};

Stamps& stamps() {
  static auto* it = new Stamps;
  return *it;
}

}  // namespace

void stamp(uint64_t event) {
  std::lock_guard hold(stamps().lock);
  if (stamps().at.size() <= event) stamps().at.resize(2 * event + 1);
  stamps().at[event] = Clock::now();
}

double elapsed(uint64_t first, uint64_t second) {
  std::lock_guard hold(stamps().lock);
  return std::chrono::duration<double, std::milli>(stamps().at.at(second) - stamps().at.at(first)).count();
}

}  // namespace sim
