// Blocks of memory: a device's storage keeps the CPU's storage that it stands on.
#include "memory.h"
#include "streams.h"

#include <algorithm>
#include <mutex>

namespace sim {
namespace {

struct Block {
  c10::Storage cpu;
  int device;
  uint64_t number;
};

struct Count {
  size_t now = 0;
  size_t most = 0;
};

struct Counts {
  std::mutex lock;
  std::vector<Count> of;
  uint64_t blocks = 0;
};

Counts& counts() {
  static auto* it = new Counts;
  return *it;
}

Count& count(int device) {
  auto& known = counts().of;
  if (known.size() <= static_cast<size_t>(device)) known.resize(device + 1);
  return known[device];
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard hold(counts().lock);
    count(block->device).now -= block->cpu.nbytes();
  }
  if (block->cpu.nbytes()) launch({Kind::Free, default_stream(block->device), 0, "-", 0, 0, {}, {block->number}});
  delete block;
}

c10::DataPtr allocate(const c10::Storage& cpu, int device) {
  uint64_t number;
  {
    std::lock_guard hold(counts().lock);
    number = ++counts().blocks;
    auto& its = count(device);
    its.now += cpu.nbytes();
    its.most = std::max(its.most, its.now);
  }
  if (cpu.nbytes()) launch({Kind::Alloc, current_stream(device), 0, "-", 0, cpu.nbytes(), {}, {number}});
  return {cpu.mutable_data(), new Block{cpu, device, number}, &free_block, c10::Device(kSim, device)};
}

at::Tensor shaped(c10::Storage storage, c10::DispatchKey key, const at::Tensor& as) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), as.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(as.sizes(), as.strides(), as.storage_offset());
  return made;
}

}  // namespace

at::Tensor adopt(const at::Tensor& cpu, int device) {
  auto data = allocate(cpu.storage(), device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), cpu.storage().nbytes(), std::move(data), nullptr, false);
  return shaped(std::move(storage), c10::DispatchKey::PrivateUse1, cpu);
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  auto made = shaped(block->cpu, c10::DispatchKey::CPU, tensor);
  // A Python number in an expression does not decide its dtype; a tensor that stands for one must not either.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor view(const at::Tensor& cpu, const at::Tensor& base) {
  return shaped(base.storage(), c10::DispatchKey::PrivateUse1, cpu);
}

uint64_t block_of(const at::Tensor& tensor) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  return block && block->cpu.nbytes() && tensor.numel() ? block->number : 0;
}
void keep(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block && block->cpu.nbytes()) launch({Kind::Keep, stream, 0, "-", 0, 0, {}, {block->number}});
}

size_t allocated(int device) {
  std::lock_guard hold(counts().lock);
  return count(device).now;
}
size_t most_allocated(int device) {
  std::lock_guard hold(counts().lock);
  return count(device).most;
}
void forget_most_allocated() {
  std::lock_guard hold(counts().lock);
  for (auto& its : counts().of) its.most = its.now;
}

}  // namespace sim
