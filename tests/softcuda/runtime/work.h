// How much an op computes, from shapes alone.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace soft {
namespace {

double product(const c10::IValue& left, const c10::IValue& right) {
  return static_cast<double>(left.toTensor().numel()) * right.toTensor().size(-1);
}

// Each element of a convolution's output (of a transposed one's input) meets a whole kernel.
double convolution(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& output, bool transposed) {
  auto each = static_cast<double>(weight.numel()) / weight.size(0);
  return each * (transposed ? input : output).numel();
}

// Multiplications of a matrix product or a convolution, by name of the op; 0 for all else.
double multiplications(const std::string& op, c10::ArrayRef<c10::IValue> its, c10::ArrayRef<c10::IValue> results) {
  if (op == "mm" || op == "bmm") return product(its[0], its[1]);
  if (op == "addmm" || op == "addmm_" || op == "baddbmm" || op == "baddbmm_") return product(its[1], its[2]);
  if (op == "convolution")
    return convolution(its[0].toTensor(), its[1].toTensor(), results[0].toTensor(), its[6].toBool());
  if (op == "convolution_backward") {
    auto wanted = its[10].toBoolList();
    auto once = convolution(its[1].toTensor(), its[2].toTensor(), its[0].toTensor(), its[7].toBool());
    return once * (wanted[0] + wanted[1]);
  }
  return 0;
}

}  // namespace
}  // namespace soft
