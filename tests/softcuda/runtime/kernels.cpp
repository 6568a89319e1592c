// Kernels of torch's libraries: counted, and not run.
#include <algorithm>
#include <atomic>
#include <string>
#include <unordered_map>

#include "runtime.h"

namespace soft {
namespace {

struct Dim3 { unsigned x, y, z; };

// By the address of the host's stub.
auto& names = *new std::unordered_map<const void*, std::string>;
auto& launches = *new std::unordered_map<const void*, long>;
std::atomic<long> launched{0};
const bool by_name = setting("SOFTCUDA_NUMBERS", 1) != 0;  // Else all of torch's kernels run, and are timed.

// The accesses of the next kernel that this thread launches, whose work is done elsewhere.
struct Pending { Access its[2]; int count; const char* name; };
thread_local Pending pending;

int launch(const void* kernel, Handle handle) {
  if (pending.name != nullptr) {
    auto* stream = stream_of(handle);
    Hold hold(lock);
    return access(stream->id, pending.its, pending.count, pending.name), kOk;
  }
  launched.fetch_add(1, std::memory_order_relaxed);
  if (by_name) {
    Hold hold(lock);
    launches[kernel]++;
  }
  return kOk;
}

struct Configuration { Dim3 grid, block; size_t shared; void* stream; };
thread_local Configuration configuration;

}  // namespace
}  // namespace soft

using namespace soft;

// How many kernels were launched; softcuda_kernels has "count name" of each, a line each.
API long softcuda_launched() { return launched.load(); }
API const char* softcuda_kernels() {
  Hold hold(lock);
  std::string text;
  for (auto& it : launches) {
    auto found = names.find(it.first);
    text += std::to_string(it.second) + " " + (found == names.end() ? "?" : found->second) + "\n";
  }
  return told(text);
}
API void softcuda_forget_kernels() {
  Hold hold(lock);
  launches.clear();
  launched = 0;
}
// What the kernels that this thread launches from now on access; without a name, they are kernels as others again.
API void softcuda_at_launch(const Access* its, int count, const char* name) {
  pending.count = count, pending.name = name;
  std::copy_n(its, count, pending.its);
}

API void** __cudaRegisterFatBinary(void*) {
  static void* none;
  return &none;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  if (by_name) names[host] = name;
}
API int __cudaGetKernel(const void** out, const void* host) { return *out = host, kOk; }
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  return configuration = {grid, block, shared, stream}, 0;
}
API int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  return *stream = configuration.stream, kOk;
}
API int __cudaLaunchKernel(const void* kernel, Dim3, Dim3, void**, size_t, Handle at) { return launch(kernel, at); }
API int cudaLaunchKernel(const void* kernel, Dim3, Dim3, void**, size_t, Handle at) { return launch(kernel, at); }
API int cudaLaunchKernelExC(const void*, const void* kernel, void**) { return launch(kernel, nullptr); }
API int cudaFuncSetAttribute(const void*, int, int) { return kOk; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) { return *out = 2, kOk; }
API int cudaProfilerStart() { return kOk; }
API int cudaProfilerStop() { return kOk; }
