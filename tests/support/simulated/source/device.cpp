// A simulated accelerator for tests: tensors are "on" a device, memory is the host's, kernels are the CPU's.
// Compiled twice: for PrivateUse1, and, with -DSIMULATED_CUDA, for CUDA in a build of torch that has no CUDA.
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/extension.h>

#include <chrono>

#include "calls.h"

namespace simulated {
using Time = std::chrono::steady_clock::time_point;
thread_local int64_t stream_of[MOST] = {};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(TYPE, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count(), "invalid device ordinal");
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(TYPE, index_of(device)), stream_of[index_of(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(TYPE, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{1};
    return c10::Stream(c10::Stream::UNSAFE, Device(TYPE, index_of(device)), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    stream_of[stream.device_index()] = stream.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Time*>(event); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    events++;
    if (!*event) *event = new Time;
    *static_cast<Time*>(*event) = std::chrono::steady_clock::now();  // operations are synchronous
  }
  void block(void*, const c10::Stream&) const override { waits++; }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waits++; }
  void synchronizeEvent(void*) const override { waits++; }
  void synchronizeDevice(const DeviceIndex) const override { waits++; }
  void recordDataPtrOnStream(const DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Time*>(second) - *static_cast<Time*>(first)).count();
  }
};

#ifdef SIMULATED_CUDA
using Interface = at::CUDAHooksInterface;
#else
using Interface = at::PrivateUse1HooksInterface;
#endif
struct Hooks : Interface {
  Hooks() = default;
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(TYPE, current); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
#ifdef SIMULATED_CUDA
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return count(); }
  void deviceSynchronize(DeviceIndex) const override { waits++; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
#else
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    Storage own = storage, grown = host_memory(bytes);
    std::memcpy(grown.mutable_data(), storage.data(), std::min(bytes, storage.nbytes()));
    own.set_data_ptr_noswap(adopt(std::move(grown), storage.device().index()));
    own.set_nbytes(bytes);
  }
#endif
};
#ifdef SIMULATED_CUDA
struct CUDAHooks : Hooks {
  using Hooks::Hooks;
};
}  // namespace simulated
namespace at {
using ::simulated::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
namespace simulated {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
#else
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);
#endif
const bool allocator_registered = (c10::SetAllocator(TYPE, &allocator), true);

void refuse_collectives(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": collectives of simulated devices do not exist; copy the "
                              "tensors to the host");
}

// Operations that have a kernel of the CPU and a composite one would take the composite one here, with other last bits.
int register_kernels() {
  static torch::Library aten(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  static torch::Library collectives(torch::Library::IMPL, "c10d", c10::DispatchKey::SIMULATED_AUTOGRAD, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int number = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto op = dispatcher.findOp(name);
    if (!op) continue;
    if (name.name.rfind("c10d::", 0) == 0 && !op->hasKernelForDispatchKey(c10::DispatchKey::SIMULATED_AUTOGRAD))
      collectives.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_collectives>());
    if (name.name.rfind("aten::", 0) || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(KEY)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    number++;
  }
  return number;
}
}  // namespace simulated

TORCH_LIBRARY_IMPL(_, SIMULATED_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>());
}
TORCH_LIBRARY_IMPL(aten, SIMULATED_KEY, library) {
  library.impl("copy_", &simulated::copy_);
  library.impl("_copy_from", &simulated::copy_from);
  library.impl("_copy_from_and_resize", &simulated::copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", &simulated::set_storage);
  library.impl("set_.source_Storage", &simulated::set_whole);
  library.impl("set_.source_Tensor", &simulated::set_tensor);
  library.impl("record_stream", &simulated::record_stream);
  // composite operations that would choose another kernel for this device than for the CPU
  for (const char* name : {"convolution", "convolution_backward", "convolution_overrideable",
                           "convolution_backward_overrideable", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>());
}
TORCH_LIBRARY_IMPL(aten, SIMULATED_AUTOGRAD, library) {
  library.impl("scaled_dot_product_attention", &simulated::attention);
}
#ifndef SIMULATED_CUDA
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define OPTIONAL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_PROMOTE(PROMOTE)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPTIONAL)
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  module.attr("kernels") = register_kernels();
  module.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(DeviceIndex(device))));
  });
  module.def("count", [] { return count(); });
  module.def("set_count", [](int number) { devices = std::clamp(number, 1, MOST); });
  module.def("current", [] { return int(current); });
  module.def("set_current", [](int device) {
    TORCH_CHECK(device < count(), "invalid device ordinal");
    int old = current;
    if (device >= 0) current = device;
    return old;
  });
  module.def("limit", [](int device, int64_t bytes) { states[device].limit = bytes; });
  module.def("multiprocessors", [](int device, int number) { states[device].multiprocessors = number; });
  module.def("memory", [](int device) {
    auto& state = states[device];
    return py::dict(py::arg("used") = state.used, py::arg("peak") = state.peak, py::arg("limit") = state.limit,
                    py::arg("allocations") = state.allocations, py::arg("multiprocessors") = state.multiprocessors);
  });
  module.def("reset_peak", [](int device) { states[device].peak = states[device].used; });
  module.def("own_numbers", [](bool own) { own_numbers = own; });
  module.def("counters", [] {
    return py::dict(py::arg("calls") = calls.load(), py::arg("reads") = reads.load(),
                    py::arg("to_device") = to_device.load(), py::arg("to_host") = to_host.load(),
                    py::arg("events") = events.load(), py::arg("waits") = waits.load());
  });
}
