// Torch's ops on CUDA tensors, run by the CPU's kernels on the same memory, which is the host's.
//
// One boxed function is in the place of all of torch's CUDA kernels. It hands the op tensors of the CPU that share the
// memory of those that it was given, and hands back tensors of the device; what was read and written goes to order.cpp.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/CompositeImplicitAutogradFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstring>
#include <sstream>

#include "cells.h"
#include "order.h"
#include "work.h"

extern "C" {
void softcuda_access(int device, void* stream, const soft::Access* its, int count, const char* name, double work = 0);
void softcuda_host_waits(int device, void* stream);
void softcuda_at_launch(const soft::Access* its, int count, const char* name);
}

namespace {

using at::Tensor;

bool on_cuda(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

void* stream_of(int device) {
  c10::impl::VirtualGuardImpl impl(c10::DeviceType::CUDA);
  return impl.getStreamNativeHandle(impl.getStream(c10::Device(c10::DeviceType::CUDA, device)));
}

int current_device() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index(); }

// The same memory as the CPU's; it frees nothing.
c10::Storage as_cpu(const c10::Storage& storage) {
  auto memory = c10::DataPtr(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  auto size = c10::Storage::use_byte_size_t();
  return c10::Storage(size, storage.nbytes(), std::move(memory), at::getCPUAllocator(), true);
}

Tensor as_cpu(const Tensor& tensor, c10::Storage storage) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}
Tensor as_cpu(const Tensor& tensor) { return on_cuda(tensor) ? as_cpu(tensor, as_cpu(tensor.storage())) : tensor; }

// From its first byte to its last one. Columns of one matrix are taken for overlapping.
soft::Access extent(const Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {nullptr, 0, writes};
  int64_t last = 0;
  for (int64_t k = 0; k < tensor.dim(); k++) last += (tensor.size(k) - 1) * tensor.stride(k);
  return {tensor.const_data_ptr(), size_t(last + 1) * tensor.itemsize(), writes};
}

// What of an op's schema matters here.
struct Kind {
  std::string name;
  std::vector<bool> writes;          // of each argument, whether the op writes to it
  int generator = -1;                // its place
  bool mixes = false;                // takes tensors of the CPU beside the device's
  bool each = false;                 // works on lists of tensors one by one
  bool tells_host = false;           // has the host wait: the size of its output depends on values
};

Kind read(const c10::FunctionSchema& schema) {
  Kind kind;
  kind.name = schema.name().substr(schema.name().find("::") + 2);
  for (size_t k = 0; k < schema.arguments().size(); k++) {
    auto& it = schema.arguments()[k];
    kind.writes.push_back(it.alias_info() != nullptr && it.alias_info()->isWrite());
    auto type = it.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) kind.generator = k;
  }
  auto starts = [&](const char* prefix) { return kind.name.rfind(prefix, 0) == 0; };
  kind.each = starts("_foreach");
  kind.mixes = kind.each;
  for (auto* it : {"index", "_index", "_ctc", "_fused_a", "_fused_sgd", "_nested", "_cudnn", "_pack", "_amp"})
    kind.mixes |= starts(it);
  for (auto* it : {"equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
                   "bincount", "repeat_interleave"})
    kind.tells_host |= kind.name == it;
  return kind;
}

const Kind& kind_of(const c10::OperatorHandle& op) {
  static std::mutex lock;
  static auto* kinds = new std::unordered_map<c10::OperatorName, Kind>;
  std::lock_guard hold(lock);
  auto it = kinds->find(op.operator_name());
  if (it == kinds->end()) it = kinds->emplace(op.operator_name(), read(op.schema())).first;
  return it->second;
}

// One call of an op: the device's tensors that were given, the CPU's in their place, and the accesses.
class Call {
 public:
  explicit Call(const Kind& kind) : kind_(kind) {}

  // The value with each of its tensors replaced; the number of one in a list, or -1, goes with it.
  template <typename Replace>
  static c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
    if (value.isTensor()) return replace(value.toTensor(), -1);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      auto its = value.toTensorList();
      list.reserve(its.size());
      for (size_t k = 0; k < its.size(); k++) list.push_back(replace(its.get(k), k));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> it : value.toOptionalTensorList())
        list.push_back(it.has_value() ? std::optional<Tensor>(replace(*it, -1)) : std::nullopt);
      return list;
    }
    return value;
  }

  // The tensor of the CPU for an argument. Views of one storage share one there, too.
  Tensor enter(const Tensor& tensor, bool writes) {
    if (!on_cuda(tensor)) {
      if (tensor.defined() && tensor.is_cpu() && (tensor.dim() > 0 || writes)) other_ = true;
      return tensor;
    }
    int index = tensor.device().index();
    if (device_ >= 0 && device_ != index && !kind_.each) differ(c10::Device(c10::kCUDA, device_), tensor.device());
    if (device_ < 0) device_ = index;
    accesses_.push_back(extent(tensor, writes));
    if (writes) accesses_.push_back(extent(tensor, false));
    for (auto& it : given_)
      if (it.device.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        given_.push_back({tensor, as_cpu(tensor, it.cpu.storage()), it.memory});
        return given_.back().cpu;
      }
    given_.push_back({tensor, as_cpu(tensor), tensor.storage().data()});
    return given_.back().cpu;
  }

  // Torch's own error for tensors of two devices.
  void check() const {
    if (other_ && device_ >= 0 && !kind_.mixes) differ(c10::Device(c10::kCUDA, device_), c10::Device(c10::kCPU));
  }

  // The tensor of the device for an output: an argument, a view of one, or a new one.
  Tensor leave(const Tensor& tensor, int place) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& it : given_)
      if (it.cpu.is_same(tensor)) return it.device;
    for (auto& it : given_)
      if (tensor.numel() > 0 && it.cpu.storage().is_alias_of(tensor.storage()))
        return at::native::as_strided_tensorimpl(it.device, tensor.sizes(), tensor.strides(), tensor.storage_offset());
    int device = device_;
    if (kind_.each && place >= 0 && size_t(place) < firsts_.size()) device = firsts_[place];
    return adopt(tensor, device);
  }

  // Outputs that the op has resized: torch's own allocator has to know.
  void resized() {
    for (auto& it : given_) {
      if (it.cpu.sizes() == it.device.sizes() && it.cpu.storage().data() == it.memory) continue;
      it.device.resize_(it.cpu.sizes());
      it.device.unsafeGetTensorImpl()->set_sizes_and_strides(it.cpu.sizes(), it.cpu.strides());
      if (it.cpu.storage().data() != it.memory && it.cpu.numel() > 0) {
        auto part = extent(it.cpu, true);
        TORCH_CHECK(part.size <= it.device.storage().nbytes(), "softcuda: an output of ", kind_.name,
                    " was resized to ", part.size, " bytes: expected at most ", it.device.storage().nbytes());
        memcpy(it.device.mutable_data_ptr(), part.at, part.size);
      }
      accesses_.push_back(extent(it.device, true));
    }
  }

  // Of an op on lists: each output is where the first list's tensor is.
  void firsts(const c10::IValue& value) {
    if (value.isTensorList())
      for (const Tensor& it : value.toTensorList()) firsts_.push_back(it.is_cuda() ? it.device().index() : -1);
  }

  // A copy on the device, of torch's own allocator.
  Tensor adopt(const Tensor& tensor, int device) {
    if (device < 0) return tensor;
    auto options = tensor.options().device(c10::Device(c10::kCUDA, device));
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    auto part = extent(tensor, true);
    if (part.size > 0) memcpy(made.mutable_data_ptr(), part.at, part.size);
    accesses_.push_back(extent(made, true));
    return made;
  }

  // Tells what was read and written, on the device's current stream, and how much was multiplied.
  void done(double work) {
    if (device_ < 0) return;
    auto* stream = stream_of(device_);
    softcuda_access(device_, stream, accesses_.data(), accesses_.size(), kind_.name.c_str(), work);
    if (kind_.tells_host) softcuda_host_waits(device_, stream);
  }

  int device_ = -1;

 private:
  [[noreturn]] void differ(c10::Device a, c10::Device b) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
                "! (when checking arguments of ", kind_.name, ", by softcuda)");
  }

  struct Given { Tensor device, cpu; const void* memory; };
  const Kind& kind_;
  bool other_ = false;
  std::vector<Given> given_;
  std::vector<int> firsts_;
  std::vector<soft::Access> accesses_;
};

// The CPU's generator for one call, by the state of the device's, which moves on: by 4, as torch's small kernels do.
at::Generator generator(const c10::IValue& given, int device) {
  auto& context = at::globalContext();
  auto its = given.isNone() ? context.defaultGenerator(c10::Device(c10::kCUDA, device)) : given.toGenerator();
  TORCH_CHECK(its.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", its.device(), "'");
  std::lock_guard hold(its.mutex());
  uint64_t seed = its.current_seed(), offset = its.get_offset();
  its.set_offset(offset + 4);
  // Odd numbers without a pattern, so that neighbouring seeds and offsets have little in common.
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset * 0xD1B54A32D192ED03ull);
}

// In the place of every kernel.
void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto& kind = kind_of(op);
  size_t base = stack->size() - kind.writes.size();
  Call call(kind);
  if (kind.each) call.firsts((*stack)[base]);
  for (size_t k = base; k < stack->size(); k++) {
    bool writes = kind.writes[k - base];
    auto enter = [&](const Tensor& tensor, int) { return call.enter(tensor, writes); };
    (*stack)[k] = Call::replaced((*stack)[k], enter);
  }
  call.check();
  if (call.device_ < 0) call.device_ = current_device();
  if (kind.generator >= 0)
    (*stack)[base + kind.generator] = generator((*stack)[base + kind.generator], call.device_);
  auto given = torch::jit::last(stack, kind.writes.size()).vec();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  double work = soft::multiplications(kind.name, given, c10::ArrayRef(*stack).slice(base));
  call.resized();
  auto leave = [&](const Tensor& tensor, int place) { return call.leave(tensor, place); };
  for (size_t k = base; k < stack->size(); k++) (*stack)[k] = Call::replaced((*stack)[k], leave);
  call.done(work);
}

// Whether torch copies one to the other with a single memcpy.
bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() && b.is_contiguous() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// Allocations so far, and the number of the one that fails; 0: none.
std::atomic<uint64_t> asked{0}, failing{0};

// In the place of torch's own, which do the same.
c10::Allocator* allocator() {
  TORCH_CHECK_WITH(OutOfMemoryError, ++asked != failing, "softcuda: out of memory, as it was asked for");
  return c10::GetAllocator(c10::kCUDA);
}
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(c10::kCUDA, current_device())));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(type), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(c10::kCUDA, current_device())));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, c10::dtype_or_default(type));
}

// Torch's own, with its events and streams. Where it launches a kernel, which does nothing here, the CPU copies.
Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  bool within = on_cuda(target) && on_cuda(source) && !target.is_same(source);
  if (!within || same_bytes(target, source)) return at::native::copy_(target, source, non_blocking);
  soft::Access its[] = {extent(source, false), extent(target, true)};
  if (target.device() == source.device()) {
    softcuda_access(target.device().index(), stream_of(target.device().index()), its, 2, "copy_");
  } else {
    softcuda_at_launch(its, 2, "copy_");
    at::native::copy_(target, source, non_blocking);
    softcuda_at_launch(nullptr, 0, nullptr);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  as_cpu(target).copy_(as_cpu(source));
  return target;
}

void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  for (size_t k = 0; k < targets.size(); k++) targets[k].copy_(sources[k], non_blocking);
}

// For torch's warnings that kernels are replaced.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// Replaces the kernels of these ops of aten, a name a line.
extern "C" void softops_replace(const char* names) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::istringstream lines(names);
  for (std::string name; std::getline(lines, name);)
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  library->impl("copy_", &copy_);
  library->impl("empty.memory_format", &empty);
  library->impl("empty_strided", &empty_strided);
  library->impl("_foreach_copy_", &foreach_copy_);
  // Draws by the device's generator, as all that it calls is of the device.
  library->impl("native_dropout", TORCH_FN(at::native::native_dropout_cpu));
  for (auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA}) {
    auto* composites = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    composites->impl("_fused_rms_norm", TORCH_FN(at::compositeimplicitautograd::_fused_rms_norm));
    composites->impl("_thnn_fused_lstm_cell", &soft::lstm);
    composites->impl("_thnn_fused_gru_cell", &soft::gru);
  }
}

// Has the allocation of this number fail, counted from the next one, when torch.OutOfMemoryError is raised; 0: none.
// How many allocations there were so far.
extern "C" uint64_t softops_fail_at(uint64_t number) {
  uint64_t before = asked;
  return failing = number == 0 ? 0 : before + number, before;
}
