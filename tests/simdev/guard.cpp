// What torch asks of a backend's devices, streams and events. The host never waits: work is done when it is launched,
// and when it would have been done is found out by a replay of the log.
#include "clock.h"
#include "memory.h"
#include "streams.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// What torch's guard of CUDA does around its events, and around waiting for a device: the device that was current is
// set again, though it may have no context yet.
struct There {
  explicit There(int device) : before(current_device()) { set_device(device); }
  ~There() { set_device(before); }
  int before;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }

  Device getDevice() const override { return Device(kSim, current_device()); }
  Device exchangeDevice(Device device) const override { return Device(kSim, exchange_device(index_of(device))); }
  void setDevice(Device device) const override { set_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { maybe_exchange_device(index_of(device)); }

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return default_stream(index_of(device)); }
  Stream getNewStream(Device device, int priority) const override { return new_stream(index_of(device), priority); }
  Stream getStreamFromGlobalPool(Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const Stream& stream) const override {
    call_runtime(stream.device_index(), "query");
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { launch({Kind::Sync, stream}); }
  void synchronizeDevice(DeviceIndex device) const override {
    There there(device);
    launch({Kind::SyncDevice, default_stream(device)});
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override { keep(data, stream); }

  // An event is the number of its last record.
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    There there(stream.device_index());
    if (*event == nullptr) *event = new uint64_t;
    *static_cast<uint64_t*>(*event) = sim::record(stream);
    stamp(*static_cast<uint64_t*>(*event));
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    There there(stream.device_index());
    wait(stream, *static_cast<uint64_t*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<uint64_t*>(event); }
  bool queryEvent(void*) const override { return true; }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return elapsed(*static_cast<uint64_t*>(first), *static_cast<uint64_t*>(second));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) launch({Kind::SyncEvent, default_stream(0), *static_cast<uint64_t*>(event)});
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return has_context(device); }
  bool isPinnedPtr(const void* data) const override { return pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return maybe_exchange_device(device); }
};

}  // namespace
}  // namespace sim

extern "C" void sim_start(int devices) {
  sim::set_device_count(devices);
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
}
