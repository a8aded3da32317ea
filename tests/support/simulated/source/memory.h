// Which device is simulated, its memory, and the pinned memory of the host.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#ifdef SIMULATED_CUDA
#define SIMULATED_KEY CUDA
#define SIMULATED_AUTOGRAD AutogradCUDA
#else
#define SIMULATED_KEY PrivateUse1
#define SIMULATED_AUTOGRAD AutogradPrivateUse1
#endif

namespace simulated {
using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::Storage;

constexpr auto TYPE = c10::DeviceType::SIMULATED_KEY;
constexpr auto KEY = c10::DispatchKey::SIMULATED_KEY;
constexpr int MOST = 16;  // devices

inline std::atomic<int> devices{4};
inline int count() { return devices; }

struct State {
  int64_t used = 0, peak = 0, limit = -1, allocations = 0;  // bytes; a limit of -1: none
  int multiprocessors = 132;
};
inline State states[MOST];
inline std::mutex lock;  // of `states` and `pinned`
inline thread_local DeviceIndex current = 0;
inline std::atomic<int64_t> calls{0}, reads{0}, to_device{0}, to_host{0}, events{0}, waits{0};

inline DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

inline void account(DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  auto& state = states[device];
  if (bytes > 0 && state.limit >= 0 && state.used + bytes > state.limit)
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device ", int(device), " out of memory. Tried to allocate ",
                     bytes, " bytes; ", state.used, " of ", state.limit, " are in use");
  state.used += bytes;
  state.peak = std::max(state.peak, state.used);
  state.allocations += bytes > 0;
}

// Host memory becomes memory of a device without a copy. Its context keeps the host's storage, and accounts for it.
struct Adopted {
  Storage memory;
  DeviceIndex device;
  int64_t bytes;
};
inline void release(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  account(adopted->device, -adopted->bytes);
  delete adopted;
}
inline DataPtr adopt(Storage memory, DeviceIndex device) {
  int64_t bytes = (memory.nbytes() + 511) / 512 * 512;  // as CUDA's caching allocator rounds
  account(device, bytes);
  void* data = memory.mutable_data();
  return DataPtr(data, new Adopted{std::move(memory), device, bytes}, &release, Device(TYPE, device));
}
inline Storage host_memory(size_t bytes) {
  auto* cpu = c10::GetCPUAllocator();
  return Storage(Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, false);
}

struct Allocator : c10::Allocator {
  DataPtr allocate(size_t bytes) override { return adopt(host_memory(bytes), current); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline Allocator allocator;

inline std::set<const void*> pinned;
struct PinnedAllocator : c10::Allocator {
  static void drop(void* data) {
    {
      std::lock_guard<std::mutex> guard(lock);
      pinned.erase(data);
    }
    c10::free_cpu(data);
  }
  DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(data);
    return DataPtr(data, data, &drop, Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;
}  // namespace simulated
