// Devices and their properties, and errors.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"

namespace soft {
namespace {

thread_local int device = 0;
thread_local int last_error = kOk;
thread_local bool has_context = false;
bool touched[kMost];
long unbound = 0;

// Of the devices that there are, those that CUDA_VISIBLE_DEVICES leaves: up to the first that there is not.
int visible(int count) {
  auto* its = getenv("CUDA_VISIBLE_DEVICES");
  if (its == nullptr) return count;
  int seen = 0;
  for (char* end; *its && seen < kMost; seen++, its = *end == ',' ? end + 1 : end) {
    long number = strtol(its, &end, 10);
    if (end == its || number < 0 || number >= count) break;
  }
  return seen;
}

}  // namespace

std::recursive_mutex lock;

long setting(const char* name, long otherwise) {
  auto* value = getenv(name);
  return value != nullptr && *value ? atol(value) : otherwise;
}

int failed(int error) {
  if (error != kOk) last_error = error;
  return error;
}

const char* told(std::string text) {
  static thread_local std::string last;
  return (last = std::move(text)).c_str();
}

int device_count() {
  static const int count = visible(std::min<long>(kMost, setting("SOFTCUDA_DEVICES", 2)));
  return count;
}

size_t memory_size() {
  static const size_t size = size_t(setting("SOFTCUDA_MEMORY_MIB", 8192)) << 20;
  return size;
}

int current_device() { return device; }
void touch(int device) { has_context = touched[device] = true; }
void begin_product() { unbound += !has_context; }

}  // namespace soft

using namespace soft;

// Whether the device has a context.
API int softcuda_primary(int device) { return device >= 0 && device < device_count() && touched[device]; }
// Products that a thread began without a context, which cuBLAS warns of.
API long softcuda_unbound() { return unbound; }

API int cudaGetDeviceCount(int* count) { return *count = device_count(), *count > 0 ? kOk : failed(kNoDevice); }
API int cudaGetDevice(int* out) { return *out = device, kOk; }
API int cudaSetDevice(int to) {
  if (to < 0 || to >= device_count()) return failed(kNoSuchDevice);
  device = to;
  return touch(to), kOk;
}
API int cudaDeviceSynchronize() {
  Hold hold(lock);
  return host_waits_for(device), kOk;
}
API int cudaDriverGetVersion(int* out) { return *out = 13000, kOk; }
API int cudaRuntimeGetVersion(int* out) { return *out = 13000, kOk; }
// The first so many reach each other's memory. Between others torch copies what is not contiguous in two steps.
API int cudaDeviceCanAccessPeer(int* out, int device, int peer) {
  return *out = device != peer && std::max(device, peer) < setting("SOFTCUDA_PEERS", kMost), kOk;
}
API int cudaDeviceEnablePeerAccess(int, unsigned) { return kOk; }
// An H100's, by their places in CUDA 13's cudaDeviceProp, whose header is not needed then.
API int cudaGetDeviceProperties(char* out, int device) {
  if (device < 0 || device >= device_count()) return failed(kNoSuchDevice);
  memset(out, 0, 1008);
  auto number = [&](int place, int value) { memcpy(out + place, &value, 4); };
  auto large = [&](int place, size_t value) { memcpy(out + place, &value, 8); };
  snprintf(out, 256, "softcuda (no GPU)");
  memcpy(out + 256, "softcuda", 8), out[264] = char('0' + device);
  large(288, memory_size()), large(296, 49152), number(304, 65536), number(308, 32), large(312, 2147483647);
  number(320, 1024), number(324, 1024), number(328, 1024), number(332, 64);
  number(336, 2147483647), number(340, 65535), number(344, 65535), large(352, 65536);
  number(360, 9), number(364, 0), large(368, 512), number(384, 132), number(392, 1);
  number(560, 1), number(568, 16 + device), number(584, 3), number(588, 1), number(592, 5120);
  number(596, 52428800), number(604, 2048), number(608, 1), number(612, 1), number(616, 1);
  large(624, 233472), number(632, 65536), number(636, 1), number(668, 1), large(672, 232448);
  number(688, 32), large(696, 1024), number(704, 1);
  return kOk;
}

API int cudaGetLastError() {
  auto was = last_error;
  return last_error = kOk, was;
}
API int cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(int error) { return error == kNoMemory ? "cudaErrorMemoryAllocation" : "cudaError"; }
API const char* cudaGetErrorString(int error) {
  static const std::map<int, const char*> its = {
      {kOk, "no error"}, {kInvalid, "invalid argument"}, {kNoMemory, "out of memory"}, {kNotReady, "device not ready"},
      {kNoDevice, "no CUDA-capable device is detected"}, {kNoSuchDevice, "invalid device ordinal"},
      {kInvalidHandle, "invalid resource handle"}};
  auto it = its.find(error);
  return it == its.end() ? "softcuda has no such thing" : it->second;
}
