// How much an op computes.
#pragma once
#include <ATen/core/ivalue.h>

#include <string>

namespace soft {

// Multiplications of a matrix product or a convolution, by name of the op; 0 for all else.
double multiplications(const std::string& op, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results);

}  // namespace soft
