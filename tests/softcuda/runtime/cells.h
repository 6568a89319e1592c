// Cells of recurrent networks, which torch has no kernel of on the CPU: it asks other devices for them fused.
#pragma once
#include <ATen/core/stack.h>

#include <string>

namespace soft {

// Does the op on the stack's tensors of the CPU, if it is such a cell's; says whether it is.
bool cell(const std::string& name, torch::jit::Stack* stack);

}  // namespace soft
