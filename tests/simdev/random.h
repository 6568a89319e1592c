// A generator of random numbers for each simulated device.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {

at::Generator& generator(int device);

}  // namespace sim
