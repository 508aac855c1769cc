// Memory and operators of a CUDA that is not there: tensors on "cuda" are memory of the host, and every operator is the
// CPU's, given the same memory under another name. What is computed is therefore what a CPU computes.
//
// As on a GPU, an operator refuses tensors of different devices, memory is counted and limited by device, whoever
// watches the allocator is told of a request it refuses, and a copy to or from ordinary memory of the host waits for
// the stream.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using at::Tensor;

constexpr size_t kBlock = 512; // of what CUDA's caching allocator gives out
constexpr size_t kPage = 4096;
constexpr size_t kAddresses = size_t{1} << 40;
constexpr int64_t kTotal = 85'029'158'912; // bytes of an H100

// The allocator

struct Statistics {
  int64_t allocated = 0, peak = 0, limit = kTotal;
};

std::mutex mutex;
std::array<Statistics, 64> statistics;
std::unordered_map<void*, std::pair<int64_t, c10::DeviceIndex>> blocks;
void (*observer)(int64_t device, int64_t asked, int64_t total, int64_t free) = nullptr;

c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

template <typename Tell>
void trace(Tell tell) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace())
    tell(*interpreter);
}

void release(void* pointer) {
  if (pointer == nullptr)
    return;
  trace([&](auto& tell) { tell->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer)); });
  int64_t size = 0;
  {
    std::lock_guard lock(mutex);
    auto block = blocks.extract(pointer);
    size = block.mapped().first;
    statistics[block.mapped().second].allocated -= size;
  }
  madvise(pointer, size, MADV_DONTNEED);
}

// An address is given out once: who follows accesses by address never takes a tensor for an earlier one's.
void* fresh(int64_t size) {
  static char* next = static_cast<char*>(
      mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  TORCH_CHECK(next != MAP_FAILED, "no addresses for the fake CUDA");
  return std::exchange(next, next + (size + kPage - 1) / kPage * kPage);
}

// As torch's caching allocator writes a size into its message: rounded.
std::string rounded(int64_t size) {
  const char* units[] = {"KiB", "MiB", "GiB"};
  if (size <= 1024)
    return std::to_string(size) + " bytes";
  double scaled = size;
  int unit = -1;
  do
    scaled /= 1024;
  while (++unit < 2 && scaled > 1024);
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f %s", scaled, units[unit]);
  return text;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    auto device = guard().getDevice();
    if (asked == 0)
      return {nullptr, device};
    auto size = static_cast<int64_t>((asked + kBlock - 1) / kBlock * kBlock);
    auto& own = statistics[device.index()];
    bool enough = false;
    {
      std::lock_guard lock(mutex);
      enough = own.allocated + size <= own.limit;
      if (enough) {
        own.allocated += size;
        own.peak = std::max(own.peak, own.allocated);
      }
    }
    if (!enough && observer)
      observer(device.index(), size, kTotal, kTotal - own.allocated);
    TORCH_CHECK_WITH(
        OutOfMemoryError, enough, "CUDA out of memory. Tried to allocate ", rounded(size), ". GPU ", int(device.index()),
        " has a total capacity of ", rounded(kTotal), " of which ", rounded(own.limit - own.allocated), " is free.");
    void* pointer = nullptr;
    {
      std::lock_guard lock(mutex);
      pointer = fresh(size);
      blocks[pointer] = {size, device.index()};
    }
    trace([&](auto& tell) { tell->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer)); });
    return {pointer, pointer, &release, device};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &allocator)

// The profiler

struct Kernel {
  std::string name;
  int device;
  int64_t stream, began_ns, ended_ns;
};

std::atomic<bool> profiling = false;
std::vector<Kernel> kernels;

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// What runs as long as this lives is in the profile, if one is being taken.
class Profiled {
 public:
  explicit Profiled(const c10::OperatorHandle& op)
      : launches_(profiling && launches_kernel(op.schema())), name_(op.schema().name()), began_ns_(now_ns()) {}
  ~Profiled() {
    if (!launches_)
      return;
    const auto stream = guard().getStream(guard().getDevice());
    std::lock_guard lock(mutex);
    kernels.push_back({name_, stream.device_index(), stream.id(), began_ns_, now_ns()});
  }
  void rename(std::string name) { name_ = std::move(name); }

 private:
  // A view launches nothing: what it gives is an argument's memory, which it does not write.
  static bool launches_kernel(const c10::FunctionSchema& schema) {
    for (const auto& given : schema.returns())
      if (given.alias_info() && !given.alias_info()->isWrite())
        return false;
    return true;
  }

  bool launches_;
  std::string name_;
  int64_t began_ns_;
};

// Operators

// Of one call: which memory of the host stands for which storage of the device.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : name_(op.schema().name()) {}

  IValue to_host(const IValue& value) {
    if (value.isTensor())
      return host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const auto& tensor : value.toTensorVector())
        tensors.push_back(host(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional(host(*tensor)) : std::nullopt);
      return tensors;
    }
    if (value.isDevice() && value.toDevice().is_cuda())
      return c10::Device(c10::kCPU);
    return value;
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor())
      return on_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const auto& tensor : value.toTensorVector())
        tensors.push_back(on_device(tensor));
      return tensors;
    }
    return value;
  }

  // What the operator did to its arguments' sizes and memory.
  void write_back() {
    for (auto& [alias, own] : arguments_) {
      auto storage = own.storage();
      const auto& changed = alias.storage();
      if (changed.data() != storage.data() || changed.nbytes() != storage.nbytes())
        replace(storage, changed);
      if (alias.sizes() != own.sizes() || alias.strides() != own.strides())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

 private:
  Tensor host(const Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(
          tensor.dim() == 0 || name_ == "aten::copy_" || name_.rfind("aten::index", 0) == 0 ||
              name_.rfind("aten::_index", 0) == 0,
          "Expected all tensors to be on the same device, but found at least two devices, ", tensor.device(),
          " and cuda: ", name_);
      return tensor;
    }
    TORCH_CHECK(
        tensor.dim() == 0 || !device_ || *device_ == tensor.device() || name_ == "aten::copy_",
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
        tensor.device(), ": ", name_);
    if (!device_)
      guard_.reset_device(*(device_ = tensor.device()));
    auto storage = tensor.storage();
    auto& alias = aliases_[storage.unsafeGetStorageImpl()];
    if (!alias) {
      alias = c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(storage.mutable_data(), c10::kCPU),
          c10::GetAllocator(c10::kCPU), /*resizable=*/true);
      originals_.emplace(alias.unsafeGetStorageImpl(), storage);
    }
    auto made = tensor_on(alias, DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    arguments_.emplace_back(made, tensor);
    return made;
  }

  Tensor on_device(const Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    for (auto& [alias, own] : arguments_)
      if (alias.is_same(tensor))
        return own;
    auto storage = tensor.storage();
    auto known = originals_.find(storage.unsafeGetStorageImpl());
    if (known == originals_.end()) {
      c10::Storage made(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, /*resizable=*/true);
      replace(made, storage);
      known = originals_.emplace(storage.unsafeGetStorageImpl(), made).first;
      kept_.push_back(storage);
    }
    return tensor_on(known->second, DispatchKey::CUDA, tensor);
  }

  static Tensor tensor_on(const c10::Storage& storage, DispatchKey key, const Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
  }

  static void replace(c10::Storage& storage, const c10::Storage& content) {
    auto memory = allocator.allocate(content.nbytes());
    if (content.nbytes() > 0)
      std::memcpy(memory.get(), content.data(), content.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(content.nbytes());
  }

  std::string name_;
  std::optional<c10::Device> device_; // of its first tensor that is on one, on which it runs
  c10::OptionalDeviceGuard guard_;
  std::map<c10::StorageImpl*, c10::Storage> aliases_;
  std::map<c10::StorageImpl*, c10::Storage> originals_;
  std::vector<c10::Storage> kept_;
  std::vector<std::pair<Tensor, Tensor>> arguments_;
};

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op);
  const auto arguments = op.schema().arguments().size();
  for (auto at = stack->size() - arguments; at < stack->size(); ++at)
    (*stack)[at] = call.to_host((*stack)[at]);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.write_back();
  for (auto at = stack->size() - op.schema().returns().size(); at < stack->size(); ++at)
    (*stack)[at] = call.to_device((*stack)[at]);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Profiled profiled(op);
  compute(op, stack);
}

// The host has the value only when the stream has come that far.
void then_wait(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto stream = guard().getStream(guard().getDevice());
  on_cpu(op, stack);
  guard().synchronizeStream(stream);
}

void copy_(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& target = torch::jit::peek(*stack, 0, 3).toTensor();
  const auto& source = torch::jit::peek(*stack, 1, 3).toTensor();
  const auto& other = target.is_cuda() ? source : target;
  const bool non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  const bool waits = !other.is_cuda() && !(non_blocking && other.is_pinned());
  {
    Profiled profiled(op);
    if (!other.is_cuda())
      profiled.rename(target.is_cuda() ? "Memcpy HtoD" : "Memcpy DtoH");
    compute(op, stack);
  }
  if (waits)
    guard().synchronizeStream(guard().getStream(guard().getDevice()));
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    own->set_storage_offset(offset);
    own->set_sizes_contiguous(size);
  } else {
    own->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {});
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("record_stream", &record_stream);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_>());
  m.impl("_local_scalar_dense", torch::CppFunction::makeFromBoxedFunction<&then_wait>());
}

// For the tests' Python

Tensor host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(
          tensor.storage().mutable_data(), new c10::Storage(tensor.storage()),
          [](void* owner) { delete static_cast<c10::Storage*>(owner); }, c10::kCPU),
      c10::GetAllocator(c10::kCPU), /*resizable=*/false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

void resize_storage(const Tensor& tensor, int64_t size) {
  auto storage = tensor.storage();
  auto memory = allocator.allocate(size);
  if (auto both = std::min<int64_t>(size, storage.nbytes()))
    std::memcpy(memory.get(), storage.data(), both);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(size);
}

void touch(at::TensorList, at::TensorList) {}

// Between two calls of it lies a collective, which is one kernel.
int64_t clock_ns() { return now_ns(); }

void collective(std::string name, int64_t began_ns) {
  if (!profiling)
    return;
  const auto stream = guard().getStream(guard().getDevice());
  std::lock_guard lock(mutex);
  kernels.push_back({"ncclDevKernel_" + name, stream.device_index(), stream.id(), began_ns, now_ns()});
}

double elapsed_ms(int64_t first, int64_t last) {
  return guard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(last), 0);
}

TORCH_LIBRARY(fakecuda, m) {
  m.def("elapsed_ms(int first, int last) -> float", &elapsed_ms);
  m.def("clock_ns() -> int", &clock_ns);
  m.def("collective(str name, int began_ns) -> ()", &collective);
  m.def("host(Tensor(a) tensor) -> Tensor(a)");
  m.def("resize_storage(Tensor tensor, int size) -> ()");
  m.def("touch(Tensor[] read, Tensor(a!)[] written) -> ()");
}

TORCH_LIBRARY_IMPL(fakecuda, CompositeExplicitAutograd, m) {
  m.impl("host", &host);
  m.impl("resize_storage", &resize_storage);
  m.impl("touch", &touch);
}

} // namespace

extern "C" {

int64_t fake_cuda_allocated(int device) { return statistics[device].allocated; }
int64_t fake_cuda_peak(int device) { return statistics[device].peak; }
int64_t fake_cuda_total() { return kTotal; }
void fake_cuda_reset_peak(int device) { statistics[device].peak = statistics[device].allocated; }
void fake_cuda_limit(int device, int64_t bytes) { statistics[device].limit = bytes; }
void fake_cuda_profile(bool on) {
  std::lock_guard lock(mutex);
  profiling = on;
  kernels.clear();
}
int64_t fake_cuda_kernels() { return kernels.size(); }
const char* fake_cuda_kernel(int64_t at, int64_t* numbers) {
  const auto& kernel = kernels.at(at);
  for (auto number : {int64_t{kernel.device}, kernel.stream, kernel.began_ns, kernel.ended_ns})
    *numbers++ = number;
  return kernel.name.c_str();
}
void fake_cuda_observe(void (*told)(int64_t, int64_t, int64_t, int64_t)) { observer = told; }

}
