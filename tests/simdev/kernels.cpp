// Every op of the simulated devices: the CPU's kernel, run at once on the device's memory, and an entry of the log.
#include "memory.h"
#include "streams.h"
#include "work.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sim {
namespace {

bool simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The value with its tensors replaced, those in lists as well.
template <typename Replace>
c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (!value.isList()) return value;
  auto list = value.toList().copy();
  for (size_t k = 0; k < list.size(); k++) list.set(k, replaced(list.get(k), replace));
  return list;
}

// The tensors of one call, on the device and as the CPU's kernel gets them.
class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  at::Tensor enter(const at::Tensor& tensor) {
    if (!simulated(tensor)) return tensor;
    auto device = tensor.device().index();
    TORCH_CHECK(device_ < 0 || device_ == device, name_, " got tensors of sim:", device_, " and sim:", device);
    device_ = device;
    given_.push_back({tensor, on_cpu(tensor)});
    return given_.back().cpu;
  }

  at::Tensor leave(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& it : given_)
      if (it.cpu.is_same(tensor)) {
        TORCH_CHECK(it.device.sizes() == tensor.sizes(), name_, " has resized a tensor, which is not simulated");
        return it.device;
      }
    for (auto& it : given_)
      if (it.cpu.storage().is_alias_of(tensor.storage())) return view(tensor, it.device);
    return adopt(tensor, device());
  }

  int device() const { return device_ < 0 ? current_device() : device_; }

 private:
  struct Given {
    at::Tensor device, cpu;
  };
  std::string name_;
  int device_ = -1;
  std::vector<Given> given_;
};

// Convolutions reach a backend under names of their own.
void call_cpu(const c10::OperatorHandle& op, const std::string& name, torch::jit::Stack* stack, size_t base) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (name == "convolution_overrideable") {
    dispatcher.findSchemaOrThrow("aten::convolution", "").callBoxed(stack);
  } else if (name == "convolution_backward_overrideable") {
    std::vector<int64_t> bias{(*stack)[base].toTensor().size(1)};
    stack->insert(stack->begin() + base + 3, c10::IValue(bias));
    dispatcher.findSchemaOrThrow("aten::convolution_backward", "").callBoxed(stack);
  } else {
    op.callBoxed(stack);
  }
}

// Whether all that the op returns are views of what it was given: no device has work with it.
bool only_views(const c10::FunctionSchema& schema) {
  for (auto& result : schema.returns())
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
  return !schema.returns().empty();
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto name = schema.name().substr(schema.name().find("::") + 2);
  size_t base = stack->size() - schema.arguments().size();
  std::vector<c10::IValue> arguments(stack->begin() + base, stack->end());
  Call call(name);
  for (size_t k = base; k < stack->size(); k++)
    (*stack)[k] = replaced((*stack)[k], [&](const at::Tensor& tensor) { return call.enter(tensor); });
  call_cpu(op, name, stack, base);
  for (size_t k = base; k < stack->size(); k++)
    (*stack)[k] = replaced((*stack)[k], [&](const at::Tensor& tensor) { return call.leave(tensor); });
  if (only_views(schema)) return;
  auto work = multiplications(name, arguments, c10::ArrayRef<c10::IValue>(*stack).slice(base));
  launch({Kind::Op, current_stream(call.device()), 0, name, work});
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return adopt(at::detail::empty_cpu(size, c10::dtype_or_default(dtype), false, format), index_of(*device));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return adopt(at::detail::empty_strided_cpu(size, stride, c10::dtype_or_default(dtype), false), index_of(*device));
}

// Between devices as CUDA does it: on the source's stream, which waits for the target's, and is then waited for by it.
at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool) {
  auto to = simulated(target) ? on_cpu(target) : target;
  auto from = simulated(source) ? on_cpu(source) : source;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  }
  if (simulated(target) && simulated(source) && target.device() != source.device()) {
    auto here = current_stream(source.device().index()), there = current_stream(target.device().index());
    wait(here, there);
    launch({Kind::Copy, here, 0, "copy_", 0, source.nbytes()});
    wait(there, here);
  } else {
    auto stream = current_stream((simulated(target) ? target : source).device().index());
    launch({Kind::Op, stream, 0, "copy_", 0, source.nbytes()});
  }
  return target;
}

// Blocks are never reused, so there is nobody to keep one from.
void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace sim
