// Every op of the simulated devices: the CPU's kernel, run at once on the device's memory, and an entry of the log.
#include "cells.h"
#include "memory.h"
#include "random.h"
#include "streams.h"
#include "work.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
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
    note(tensor, writes ? this->writes : reads);
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
        if (it.device.sizes() != tensor.sizes()) become(it.device, adopt(tensor, device()));  // An output of any size.
        return it.device;
      }
    for (auto& it : given_)
      if (it.cpu.storage().is_alias_of(tensor.storage())) return view(tensor, it.device);
    auto made = adopt(tensor, device());
    note(made, writes);
    return made;
  }

  int device() const { return device_ < 0 ? current_device() : device_; }

  std::vector<Piece> reads, writes;

 private:
  struct Given {
    at::Tensor device, cpu;
  };
  std::string name_;
  int device_ = -1;
  std::vector<Given> given_;
};

// As on the CPU, but for the generator that it takes its numbers from.
void dropout(torch::jit::Stack* stack, int device) {
  auto its = torch::jit::pop(*stack, 3);
  auto input = its[0].toTensor();
  auto kept = 1 - its[1].toDouble();
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(kept, generator(device));
  torch::jit::push(*stack, input * mask / kept, mask);
}

// Convolutions reach a backend under names of their own, and cells of recurrent networks fused.
void call_cpu(const c10::OperatorHandle& op, const std::string& name, torch::jit::Stack* stack, size_t base,
              int device) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (name == "convolution_overrideable") {
    dispatcher.findSchemaOrThrow("aten::convolution", "").callBoxed(stack);
  } else if (name == "convolution_backward_overrideable") {
    std::vector<int64_t> bias{(*stack)[base].toTensor().size(1)};
    stack->insert(stack->begin() + base + 3, c10::IValue(bias));
    dispatcher.findSchemaOrThrow("aten::convolution_backward", "").callBoxed(stack);
  } else if (name == "native_dropout") {
    dropout(stack, device);
  } else if (!cell(name, stack)) {
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

// Whether the argument is a generator of random numbers.
bool draws(const c10::Argument& argument) {
  auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
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
  for (size_t k = base; k < stack->size(); k++)
    if ((*stack)[k].isNone() && draws(schema.arguments()[k - base])) (*stack)[k] = generator(call.device());
  call_cpu(op, name, stack, base, call.device());
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
  std::vector<Piece> reads, writes;
  if (simulated(source)) note(source, reads);
  if (simulated(target)) note(target, writes);
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
    bool pins = !simulated(source) && pinned(source.const_data_ptr());
    auto name = pins && non_blocking ? "copy_ that the host does not wait for" : "copy_";
    launch({Kind::Op, stream, 0, name, 0, source.nbytes(), reads, writes});
    // Memory that is not pinned has been read when the call returns.
    if ((!simulated(target) || pins) && !non_blocking) launch({Kind::Sync, stream});
  }
  return target;
}

// Torch's way to make tensors of what it has loaded, and to save them.
at::Tensor& set_part(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size,
                     at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.empty()) {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  return tensor;
}

at::Tensor& set_whole(at::Tensor& tensor, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
  return set_part(tensor, std::move(source), 0, {elements}, {1});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { keep(tensor.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace sim
