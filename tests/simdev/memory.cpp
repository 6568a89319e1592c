// Blocks of memory: a device's storage keeps the CPU's storage that it stands on.
#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace sim {
namespace {

struct Block {
  c10::Storage cpu;
  int device;
  uint64_t number;
  size_t size;  // as it was allocated: an op that writes to an empty output enlarges the CPU's storage
};

Piece whole(const Block& block) { return {block.number, 0, block.size}; }

struct Count {
  size_t now = 0;
  size_t most = 0;
  size_t cached = 0;  // the most there ever was: what is freed is kept for later
};

struct Counts {
  std::mutex lock;
  std::vector<Count> of;
  uint64_t blocks = 0;
  uint64_t asked = 0;     // for memory that is more than none
  uint64_t fails_at = 0;  // which of these is refused
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
    count(block->device).now -= block->size;
  }
  if (block->size) launch({Kind::Free, default_stream(block->device), 0, "-", 0, 0, {}, {whole(*block)}});
  delete block;
}

c10::DataPtr allocate(const c10::Storage& cpu, int device) {
  uint64_t number;
  {
    std::lock_guard hold(counts().lock);
    number = ++counts().blocks;
    if (cpu.nbytes())
      TORCH_CHECK_WITH(OutOfMemoryError, ++counts().asked != counts().fails_at, "sim:", device,
                       " is out of memory, as it was told to be");
    auto& its = count(device);
    its.now += cpu.nbytes();
    its.most = std::max(its.most, its.now);
    its.cached = std::max(its.cached, its.now);
  }
  auto* block = new Block{cpu, device, number, cpu.nbytes()};
  if (cpu.nbytes()) launch({Kind::Alloc, current_stream(device), 0, "-", 0, cpu.nbytes(), {}, {whole(*block)}});
  return {cpu.mutable_data(), block, &free_block, c10::Device(kSim, device)};
}

// Storages that torch makes without a tensor, when it loads a file.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Storage cpu(c10::Storage::use_byte_size_t(), size, c10::GetAllocator(c10::kCPU), false);
    return sim::allocate(cpu, current_device());
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};
Allocator allocator;

// Pinned memory of the host: the CPU's, and where it is.
struct Pins {
  std::mutex lock;
  std::map<const char*, size_t> sizes;
};

Pins& pins() {
  static auto* it = new Pins;
  return *it;
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* cpu = new c10::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(size));
    std::lock_guard hold(pins().lock);
    pins().sizes[static_cast<char*>(cpu->get())] = size;
    return {cpu->get(), cpu, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }

  static void unpin(void* context) {
    auto* cpu = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard hold(pins().lock);
      pins().sizes.erase(static_cast<char*>(cpu->get()));
    }
    delete cpu;
  }
};

at::Tensor shaped(c10::Storage storage, c10::DispatchKey key, const at::Tensor& as) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), as.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(as.sizes(), as.strides(), as.storage_offset());
  made._set_conj(as.is_conj());
  made._set_neg(as.is_neg());
  return made;
}

REGISTER_ALLOCATOR(kSim, &allocator)

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

void become(const at::Tensor& tensor, const at::Tensor& other) {
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(other.storage());
  made->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
}

void note(const at::Tensor& tensor, std::vector<Piece>& pieces) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr || block->cpu.nbytes() == 0 || tensor.numel() == 0) return;
  size_t elements = 1;
  for (int64_t k = 0; k < tensor.dim(); k++) elements += (tensor.size(k) - 1) * tensor.stride(k);
  auto first = tensor.storage_offset() * tensor.itemsize();
  pieces.push_back({block->number, first, first + elements * tensor.itemsize()});
}

void keep(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block && block->size) launch({Kind::Keep, stream, 0, "-", 0, 0, {}, {whole(*block)}});
}

bool pinned(const void* data) {
  std::lock_guard hold(pins().lock);
  auto after = pins().sizes.upper_bound(static_cast<const char*>(data));
  if (after == pins().sizes.begin()) return false;
  auto before = std::prev(after);
  return data < before->first + before->second;
}
c10::Allocator* pinned_allocator() {
  static auto* it = new Pinned;
  return it;
}

void fail_at(uint64_t number) {
  std::lock_guard hold(counts().lock);
  counts().fails_at = number ? counts().asked + number : 0;
}
uint64_t asked() {
  std::lock_guard hold(counts().lock);
  return counts().asked;
}

size_t allocated(int device) {
  std::lock_guard hold(counts().lock);
  return count(device).now;
}
size_t cached(int device) {
  std::lock_guard hold(counts().lock);
  return count(device).cached;
}
size_t most_allocated(int device) {
  std::lock_guard hold(counts().lock);
  return count(device).most;
}
void forget_most_allocated(int device) {
  std::lock_guard hold(counts().lock);
  auto& its = count(device);
  its.most = its.now;
}

}  // namespace sim
