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

  at::Tensor enter(const at::Tensor& tensor, bool writes) {
    if (!simulated(tensor)) return tensor;
    if (auto block = block_of(tensor)) (writes ? this->writes : reads).push_back(block);
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
    auto made = adopt(tensor, device());
    if (auto block = block_of(made)) writes.push_back(block);
    return made;
  }

  int device() const { return device_ < 0 ? current_device() : device_; }

  std::vector<uint64_t> reads, writes;

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

// Whether the host gets a value of the device: it waits for the stream.
bool tells_host(const std::string& name) {
  return name == "_local_scalar_dense" || name == "equal" || name == "is_nonzero" || name == "nonzero";
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
  for (size_t k = base; k < stack->size(); k++) {
    auto* alias = schema.arguments()[k - base].alias_info();
    bool writes = alias != nullptr && alias->isWrite();
    (*stack)[k] = replaced((*stack)[k], [&](const at::Tensor& tensor) { return call.enter(tensor, writes); });
  }
  call_cpu(op, name, stack, base);
  for (size_t k = base; k < stack->size(); k++)
    (*stack)[k] = replaced((*stack)[k], [&](const at::Tensor& tensor) { return call.leave(tensor); });
  if (only_views(schema)) return;
  auto work = multiplications(name, arguments, c10::ArrayRef<c10::IValue>(*stack).slice(base));
  auto stream = current_stream(call.device());
  launch({Kind::Op, stream, 0, name, work, 0, std::move(call.reads), std::move(call.writes)});
  if (tells_host(name)) launch({Kind::Sync, stream});
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
at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  std::vector<uint64_t> reads, writes;
  if (auto block = simulated(source) ? block_of(source) : 0) reads.push_back(block);
  if (auto block = simulated(target) ? block_of(target) : 0) writes.push_back(block);
  auto to = simulated(target) ? on_cpu(target) : target;
  auto from = simulated(source) ? on_cpu(source) : source;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  }
  if (simulated(target) && simulated(source) && target.device() != source.device()) {
    auto here = current_stream(source.device().index()), there = current_stream(target.device().index());
    wait(here, there);
    launch({Kind::Copy, here, 0, "copy_", 0, source.nbytes(), reads, writes});
    wait(there, here);
  } else {
    auto stream = current_stream((simulated(target) ? target : source).device().index());
    launch({Kind::Op, stream, 0, "copy_", 0, source.nbytes(), reads, writes});
    if (!simulated(target) && !non_blocking) launch({Kind::Sync, stream});
  }
  return target;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { keep(tensor.storage().data_ptr(), stream); }

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
