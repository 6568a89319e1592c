// Cells of recurrent networks, which torch has no kernel of on the CPU: it asks other devices for them fused.
//
// What they give and keep for backward: of an LSTM the gates (in, forget, cell, out), of a GRU the gates (reset,
// update, new), the state that was given and the hidden part of the new gate.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/stack.h>

namespace soft {
namespace {

using at::Tensor;
using Values = std::vector<c10::IValue>;

Tensor biased(const Tensor& gates, const c10::IValue& bias) {
  return bias.isTensor() && bias.toTensor().defined() ? gates + bias.toTensor() : gates;
}
Tensor or_zeros(const c10::IValue& grad, const Tensor& like) {
  return grad.isTensor() && grad.toTensor().defined() ? grad.toTensor() : at::zeros_like(like);
}
// The gradient in front of a sigmoid, and of a tanh, that gave y.
Tensor behind_sigmoid(const Tensor& grad, const Tensor& y) { return grad * y * (1 - y); }
Tensor behind_tanh(const Tensor& grad, const Tensor& y) { return grad * (1 - y * y); }
Tensor bias_grad(bool has_bias, const Tensor& gates) { return has_bias ? gates.sum(0) : Tensor(); }

Values lstm(const Values& its) {
  auto parts = (biased(its[0].toTensor(), its[3]) + biased(its[1].toTensor(), its[4])).chunk(4, 1);
  auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  auto c = forget * its[2].toTensor() + in * cell;
  return {out * c.tanh(), c, at::cat({in, forget, cell, out}, 1)};
}

Values lstm_backward(const Values& its) {
  if (!its[0].isTensor() && !its[1].isTensor()) return {Tensor(), Tensor(), Tensor()};
  auto before = its[2].toTensor(), after = its[3].toTensor();
  auto gates = its[4].toTensor().chunk(4, 1);
  auto in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
  auto grad_h = or_zeros(its[0], after);
  auto grad_c = or_zeros(its[1], after) + behind_tanh(grad_h * out, after.tanh());
  auto grads = at::cat({behind_sigmoid(grad_c * cell, in), behind_sigmoid(grad_c * before, forget),
                        behind_tanh(grad_c * in, cell), behind_sigmoid(grad_h * after.tanh(), out)}, 1);
  return {grads, grad_c * forget, bias_grad(its[5].toBool(), grads)};
}

Values gru(const Values& its) {
  auto in = biased(its[0].toTensor(), its[3]).chunk(3, 1), hidden = biased(its[1].toTensor(), its[4]).chunk(3, 1);
  auto h = its[2].toTensor();
  auto reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  auto fresh = (in[2] + reset * hidden[2]).tanh();
  return {fresh + update * (h - fresh), at::cat({reset, update, fresh, h, hidden[2]}, 1)};
}

Values gru_backward(const Values& its) {
  auto grad = its[0].toTensor();
  auto kept = its[1].toTensor().chunk(5, 1);
  auto reset = kept[0], update = kept[1], fresh = kept[2], h = kept[3], hidden = kept[4];
  auto grad_fresh = behind_tanh(grad * (1 - update), fresh);
  auto grad_reset = behind_sigmoid(grad_fresh * hidden, reset);
  auto grad_update = behind_sigmoid(grad * (h - fresh), update);
  auto grad_in = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  auto has_bias = its[2].toBool();
  return {grad_in, grad_hidden, grad * update, bias_grad(has_bias, grad_in), bias_grad(has_bias, grad_hidden)};
}

// Does the op on the stack's tensors of the CPU, if it is such a cell's; says whether it is.
bool cell(const std::string& name, torch::jit::Stack* stack) {
  struct Cell { Values (*run)(const Values&); size_t arguments; };
  static const std::unordered_map<std::string, Cell> its = {
      {"_thnn_fused_lstm_cell", {lstm, 5}}, {"_thnn_fused_lstm_cell_backward_impl", {lstm_backward, 6}},
      {"_thnn_fused_gru_cell", {gru, 5}}, {"_thnn_fused_gru_cell_backward", {gru_backward, 3}}};
  auto it = its.find(name);
  if (it == its.end()) return false;
  auto made = it->second.run(torch::jit::pop(*stack, it->second.arguments));
  stack->insert(stack->end(), made.begin(), made.end());
  return true;
}

}  // namespace
}  // namespace soft
