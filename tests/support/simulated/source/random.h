// Random numbers: a generator with seed and offset, as CUDA's, whose numbers the CPU's generator draws.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <optional>
#include <vector>

#include "memory.h"

namespace simulated {
// false: numbers come from the CPU's generator, so that a model with dropout can be compared with the CPU
inline bool own_numbers = true;

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device) : GeneratorImpl(Device(TYPE, device), c10::DispatchKeySet(KEY)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0];
    offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* numbers = reinterpret_cast<uint64_t*>(state.mutable_data_ptr());
    numbers[0] = seed_;
    numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* clone = new Generator(device().index());
    clone->seed_ = seed_;
    clone->offset_ = offset_;
    return clone;
  }
};

inline at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> generators;
    for (int i = 0; i < MOST; i++) generators.push_back(at::make_generator<Generator>(DeviceIndex(i)));
    return generators;
  }();
  return all.at(device < 0 ? current : device);
}

// The CPU's default generator draws for a device's during one call, seeded with the device's seed and offset.
struct Draws {
  at::Generator cpu = at::globalContext().defaultGenerator(c10::kCPU);
  Tensor before;
  Generator* generator;
  Draws(std::optional<at::Generator> given, DeviceIndex device) {
    at::Generator used = given ? *given : default_generator(device);
    generator = static_cast<Generator*>(used.unsafeGetGeneratorImpl());
    std::lock_guard<std::mutex> guard(cpu.mutex());
    before = cpu.get_state();
    uint64_t seed = generator->seed_ * 6364136223846793005ull + generator->offset_ * 1442695040888963407ull + 1;
    cpu.set_current_seed(seed);
  }
  // CUDA's formula (DistributionTemplates.h, calc_execution_policy): it depends on the size and on the device.
  void consumed(int64_t elements, DeviceIndex device) {
    int64_t grid = std::min<int64_t>(states[device].multiprocessors * 8, (elements + 255) / 256);
    generator->offset_ += elements ? ((elements - 1) / (256 * grid * 4) + 1) * 4 : 0;
  }
  ~Draws() {
    std::lock_guard<std::mutex> guard(cpu.mutex());
    cpu.set_state(before);
  }
};
}  // namespace simulated
