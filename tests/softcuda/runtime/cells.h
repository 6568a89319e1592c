// Cells of recurrent networks. Torch has them fused for devices and not at all for the CPU, so composites are in their
// place, which autograd goes through.
#pragma once
#include <ATen/ATen.h>

namespace soft {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

// The gates of the input and of the hidden state, in so many parts.
struct Gates { std::vector<Tensor> input, hidden; };
Gates gates(int parts, const Tensor& input, const Tensor& hidden, const Bias& input_bias, const Bias& hidden_bias) {
  auto biased = [](const Tensor& x, const Bias& bias) { return bias && bias->defined() ? x + *bias : x; };
  return {biased(input, input_bias).chunk(parts, 1), biased(hidden, hidden_bias).chunk(parts, 1)};
}

// What torch's kernels keep for backward comes last; here nobody needs it.
std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, const Tensor& hidden, const Tensor& before,
                                        const Bias& input_bias, const Bias& hidden_bias) {
  auto its = gates(4, input, hidden, input_bias, hidden_bias);
  auto sum = [&](int k) { return its.input[k] + its.hidden[k]; };
  auto after = sum(1).sigmoid() * before + sum(0).sigmoid() * sum(2).tanh();
  return {sum(3).sigmoid() * after.tanh(), after, Tensor()};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& hidden, const Tensor& before, const Bias& input_bias,
                               const Bias& hidden_bias) {
  auto its = gates(3, input, hidden, input_bias, hidden_bias);
  auto reset = (its.input[0] + its.hidden[0]).sigmoid(), update = (its.input[1] + its.hidden[1]).sigmoid();
  auto fresh = (its.input[2] + reset * its.hidden[2]).tanh();
  return {fresh + update * (before - fresh), Tensor()};
}

}  // namespace
}  // namespace soft
