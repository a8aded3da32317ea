// Every operation on a device runs the CPU's kernel on aliases of its tensors.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>
#include <string>

#include "random.h"

namespace simulated {
using c10::IValue;

struct KernelsOnly {  // the CPU's kernels, without autograd and without the CPU's autocast
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs;     // of the device, its alias of the host
  std::vector<std::pair<Storage, Storage>> memory;  // the same of storages
  std::optional<DeviceIndex> device;
  bool host = false;  // an argument with dimensions is on the host

  static void copy_marks(const Tensor& from, Tensor& to) {
    to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (from.is_conj()) to._set_conj(true);
    if (from.is_neg()) to._set_neg(true);
  }
  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != TYPE) {
      host |= tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    if (!device) device = tensor.device().index();
    for (auto& [own, alias] : pairs)
      if (own.is_same(tensor)) return alias;
    Storage own = tensor.storage(), shared;
    for (auto& [known, alias] : memory)
      if (known.is_alias_of(own)) shared = alias;
    if (!shared) {
      DataPtr data(const_cast<void*>(own.data()), Device(c10::kCPU));
      shared = Storage(Storage::use_byte_size_t(), own.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      memory.emplace_back(own, shared);
    }
    c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(Storage(shared), cpu, tensor.dtype());
    copy_marks(tensor, alias);
    pairs.emplace_back(tensor, alias);
    return alias;
  }
  void take_over_resized() {
    for (auto& [tensor, alias] : pairs) {
      auto *own = tensor.unsafeGetTensorImpl(), *other = alias.unsafeGetTensorImpl();
      if (alias.storage().data() != tensor.storage().data() || alias.storage().nbytes() != tensor.storage().nbytes()) {
        Storage storage = tensor.storage(), grown = alias.storage();
        size_t bytes = grown.nbytes();
        storage.set_data_ptr_noswap(adopt(std::move(grown), tensor.device().index()));
        storage.set_nbytes(bytes);
      }
      if (own->sizes() != other->sizes() || own->strides() != other->strides() ||
          own->storage_offset() != other->storage_offset())
        own->set_sizes_and_strides(other->sizes(), other->strides(), other->storage_offset());
    }
  }
  Tensor to_device(const Tensor& result, DeviceIndex index) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [own, alias] : pairs)
      if (alias.is_same(result) || own.is_same(result)) return own;
    Storage storage;
    for (auto& [own, alias] : memory)
      if (alias.is_alias_of(result.storage())) storage = own;
    if (!storage) {
      size_t bytes = result.storage().nbytes();
      storage = Storage(Storage::use_byte_size_t(), bytes, adopt(result.storage(), index), &allocator, true);
      memory.emplace_back(storage, result.storage());
    }
    Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(KEY), result.dtype());
    copy_marks(result, tensor);
    return tensor;
  }
  // CUDA's kernels refuse tensors of several devices, unless they have no dimension.
  void refuse_mixed(const std::string& name) const {
    static const std::set<std::string> MIXED = {
        "aten::index.Tensor", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put",
        "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_pack_padded_sequence",
        "aten::_local_scalar_dense", "aten::_pack_padded_sequence_backward", "aten::_reshape_alias"};
    if (!device) return;
    const char* message = "Expected all tensors to be on the same device, but found at least two devices, ";
    std::string first = Device(TYPE, *device).str();
    TORCH_CHECK(!host || MIXED.count(name), message, "cpu and ", first, "! (", name, ")");
    for (auto& [own, alias] : pairs)
      TORCH_CHECK(own.device().index() == *device || own.dim() == 0, message, first, " and ", own.device().str(),
                  "! (", name, ")");
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  calls++;
  KernelsOnly guard;
  const auto& schema = op.schema();
  const auto& name = schema.name();
  size_t arguments = schema.arguments().size(), begin = stack->size() - arguments;
  Call call;
  std::optional<DeviceIndex> wanted;
  std::optional<at::Generator> generator;
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded), without_dropout = false;
  if (name == "aten::_local_scalar_dense") reads++;
  for (size_t i = 0; i < arguments; i++) {
    IValue& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    draws |= argument.name() == "generator";
    if (value.isTensor()) {
      value = call.to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.to_cpu(tensor));
      value = std::move(list);
    } else if (value.isList() && argument.type()->str().find("Tensor") != std::string::npos) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& element : value.toListRef())
        list.push_back(element.isNone() ? std::optional<Tensor>() : call.to_cpu(element.toTensor()));
      value = std::move(list);
    } else if (value.isDevice()) {
      if (value.toDevice().type() == TYPE) {
        wanted = index_of(value.toDevice());
        value = IValue(Device(c10::kCPU));
      }
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().type() == TYPE) {
        generator = value.toGenerator();
        value = IValue();
      } else {
        TORCH_CHECK(!own_numbers, "Expected a '", Device(TYPE).str(), "' device type for generator but found '",
                    value.toGenerator().device().str(), "'");
      }
    } else if (argument.name() == "pin_memory") {
      value = IValue(false);
    } else if (argument.name() == "dropout_p") {  // attention without dropout has the tag, and draws nothing
      without_dropout = value.toDouble() == 0;
    }
  }
  call.refuse_mixed(schema.overload_name().empty() ? name : name + "." + schema.overload_name());
  DeviceIndex device = wanted ? *wanted : call.device ? *call.device : current;
  std::optional<Draws> state;
  if (own_numbers && draws && !without_dropout) state.emplace(generator, device);
  op.callBoxed(stack);
  call.take_over_resized();
  size_t results = schema.returns().size(), from = stack->size() - results;
  int64_t elements = 0;
  for (size_t i = 0; i < results; i++) {
    IValue& value = (*stack)[from + i];
    if (value.isTensor()) {
      if (!i) elements = value.toTensor().numel();
      value = call.to_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.to_device(tensor, device));
      value = std::move(list);
    }
  }
  if (state) state->consumed(elements, device);
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  calls++;
  KernelsOnly guard;
  Call call;
  Tensor to = call.to_cpu(self), from = call.to_cpu(source);
  if (!self.device().is_cpu() && source.device().is_cpu()) to_device += source.nbytes();
  if (self.device().is_cpu()) {
    to_host += source.nbytes();
    reads++;
  }
  to.copy_(from);
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  copy_(to, self, non_blocking);
  return to;
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  Tensor to = target;
  to.resize_(self.sizes());
  copy_(to, self, false);
  return to;
}
inline Tensor& set_storage(Tensor& self, Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> steps(stride.begin(), stride.end());
  if (steps.size() != size.size()) {
    steps.assign(size.size(), 1);
    for (int64_t i = int64_t(size.size()) - 2; i >= 0; i--) steps[i] = steps[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  own->set_sizes_and_strides(size, steps, offset);
  return self;
}
inline Tensor& set_whole(Tensor& self, Storage source) {
  int64_t elements = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {elements}, {1});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline void record_stream(Tensor&, c10::Stream) {}  // memory is freed when no operation runs

// Attention takes the kernel that the CPU would take, or the formula where the CPU takes it.
inline Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                        double dropout, bool causal, std::optional<double> scale, bool grouped) {
  int64_t choice;
  {
    KernelsOnly guard;
    Call call;
    auto cpu = [&](const Tensor& tensor) {
      Tensor alias = call.to_cpu(tensor).alias();
      alias.set_requires_grad(tensor.requires_grad());
      return alias;
    };
    std::optional<Tensor> hosted;
    if (mask && mask->defined()) hosted = cpu(*mask);
    choice = at::_fused_sdp_choice(cpu(query), cpu(key), cpu(value), hosted, dropout, causal, scale, grouped);
  }
  if (choice != int64_t(at::SDPBackend::flash_attention))
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, {}, scale, grouped));
  std::optional<Tensor> bias = mask;
  if (mask && mask->defined() && mask->dtype() == at::kBool)
    bias = at::where(mask->logical_not(), -std::numeric_limits<double>::infinity(),
                     at::scalar_tensor(0.0, at::TensorOptions().dtype(query.dtype()).device(query.device())));
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale));
}
}  // namespace simulated
