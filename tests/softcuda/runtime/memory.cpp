// Memory of devices, pinned memory, and copies.
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "runtime.h"

namespace soft {
namespace {

constexpr int kPinned = -1;
struct Block { size_t size; int device; };
std::map<char*, Block> blocks;
size_t sizes[kMost];
std::vector<Clock> reads;  // Of copies from pinned memory that were begun without a wait.

int allocate(void** out, size_t size, int device) {
  Hold hold(lock);
  if (size == 0) return *out = nullptr, kOk;
  size = (size + 4095) / 4096 * 4096;
  if (device != kPinned && sizes[device] + size > memory_size()) return failed(kNoMemory);
  auto* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return failed(kNoMemory);
  if (device != kPinned) sizes[device] += size, touch(device);
  blocks[static_cast<char*>(made)] = {size, device};
  return *out = made, kOk;
}

int release(void* at) {
  Hold hold(lock);
  if (at == nullptr) return kOk;
  auto it = blocks.find(static_cast<char*>(at));
  if (it == blocks.end()) return failed(kInvalid);
  host_waits_for(kAll);  // cudaFree waits for the device.
  forget(at, it->second.size);
  if (it->second.device != kPinned) sizes[it->second.device] -= it->second.size;
  munmap(at, it->second.size);
  blocks.erase(it);
  return kOk;
}

const Block* find(const void* at) {
  auto it = blocks.upper_bound(static_cast<char*>(const_cast<void*>(at)));
  if (it == blocks.begin()) return nullptr;
  --it;
  return static_cast<const char*>(at) < it->first + it->second.size ? &it->second : nullptr;
}

int copy(void* to, const void* from, size_t size, Handle handle, bool waits) {
  memmove(to, from, size);
  auto* stream = stream_of(handle);
  Hold hold(lock);
  Access seen[2];
  int count = 0;
  for (auto& it : {Access{from, size, false}, Access{to, size, true}})
    if (find(it.at) != nullptr) seen[count++] = it;
  auto *source = find(from), *target = find(to);
  bool leaves = source != nullptr && target != nullptr && source->device != target->device;
  access(stream->id, seen, count, "memcpy", 0, leaves ? size : 0);
  if (!waits && source != nullptr && source->device == kPinned) reads.push_back(clock_of(stream->id));
  // Pageable memory of the host has been read, or is written, when the call returns.
  if (waits || count < 2) host_waits(clock_of(stream->id));
  return kOk;
}

}  // namespace
}  // namespace soft

using namespace soft;

// Of each copy from pinned memory since the last call, a line: whether it is done or may still be reading.
API const char* softcuda_reads() {
  Hold hold(lock);
  std::string text;
  for (auto& it : reads) text += host_knows(it) ? "done\n" : "reading\n";
  return reads.clear(), told(text);
}

API int cudaMalloc(void** out, size_t size) { return allocate(out, size, current_device()); }
API int cudaFree(void* at) { return release(at); }
API int cudaHostAlloc(void** out, size_t size, unsigned) { return allocate(out, size, kPinned); }
API int cudaFreeHost(void* at) { return release(at); }
API int cudaMemGetInfo(size_t* free, size_t* total) {
  Hold hold(lock);
  return *total = memory_size(), *free = memory_size() - sizes[current_device()], kOk;
}
// Of cudaPointerAttributes: the kind (host's, pinned, a device's), the device, and two addresses.
API int cudaPointerGetAttributes(char* out, const void* at) {
  Hold hold(lock);
  auto* found = find(at);
  int kind = found == nullptr ? 0 : found->device == kPinned ? 1 : 2;
  int device = kind == 2 ? found->device : kind == 1 ? current_device() : -2;
  memset(out, 0, 88);
  memcpy(out, &kind, 4), memcpy(out + 4, &device, 4);
  if (kind != 0) memcpy(out + 8, &at, 8);
  if (kind != 2) memcpy(out + 16, &at, 8);
  return kOk;
}
API int cudaMemcpy(void* to, const void* from, size_t size, int) { return copy(to, from, size, nullptr, true); }
API int cudaMemcpyAsync(void* to, const void* from, size_t size, int, Handle stream) {
  return copy(to, from, size, stream, false);
}
API int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, Handle stream) {
  return copy(to, from, size, stream, false);
}
API int cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return kOk; }
API int cudaGetSymbolAddress(void** out, const void* symbol) { return *out = const_cast<void*>(symbol), kOk; }
