// Devices, streams and events of a CUDA that is not there, for a torch built without CUDA.
//
// Registers what torch asks of CUDA through its own interfaces: a device guard (with which autograd's engine, DDP's
// reducer and torch.Stream and torch.Event work) and CUDAHooks (with which torch.accelerator finds it). Nothing runs
// asynchronously here. What a stream or the host may rely on is followed by vector clocks, one number per stream, so
// that an event whose time is read before anybody waited for it is an error, as cudaErrorNotReady is.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;
using Clock = std::map<c10::StreamId, int64_t>;

struct FakeEvent {
  c10::StreamId stream = 0;
  int64_t number = 0; // of its record in its stream
  Clock seen; // what had been done when it was recorded
  std::chrono::steady_clock::time_point at;
};

std::mutex mutex;
std::map<c10::StreamId, Clock> streams; // what each stream has waited for
Clock host; // what the host has waited for
std::atomic<c10::StreamId> last_stream{0};
thread_local c10::DeviceIndex this_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current;

c10::DeviceIndex count() {
  const char* asked = std::getenv("FAKE_CUDA_DEVICES");
  return static_cast<c10::DeviceIndex>(asked ? std::atoi(asked) : 8);
}

void join(Clock& into, const Clock& other) {
  for (const auto& [stream, number] : other)
    into[stream] = std::max(into[stream], number);
}

// What torch.cuda._sanitizer and others who follow the GPU are told, as by a real device guard.
template <typename Tell>
void trace(Tell tell) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace())
    tell(*interpreter);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  c10::Device getDevice() const override { return {kCUDA, this_device}; }
  c10::Device exchangeDevice(c10::Device other) const override {
    auto before = getDevice();
    setDevice(other);
    return before;
  }
  void setDevice(c10::Device other) const override {
    TORCH_CHECK(other.index() < count(), "CUDA error: invalid device ordinal");
    this_device = other.index();
  }
  void uncheckedSetDevice(c10::Device other) const noexcept override { this_device = other.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }

  c10::Stream stream(c10::Device where, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, {kCUDA, where.has_index() ? where.index() : this_device}, id);
  }
  c10::Stream getStream(c10::Device where) const override { return stream(where, current[stream(where, 0).device_index()]); }
  c10::Stream getDefaultStream(c10::Device where) const override { return stream(where, 0); }
  c10::Stream getNewStream(c10::Device where, int) const override {
    auto made = stream(where, ++last_stream);
    trace([&](auto& tell) { tell->trace_gpu_stream_creation(kCUDA, made.id()); });
    return made;
  }
  c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where, 0); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto before = getStream(other.device());
    current[other.device_index()] = other.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    trace([&](auto& tell) { tell->trace_gpu_stream_synchronization(kCUDA, stream.id()); });
    std::lock_guard lock(mutex);
    join(host, streams[stream.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    trace([&](auto& tell) { tell->trace_gpu_device_synchronization(kCUDA); });
    std::lock_guard lock(mutex);
    for (const auto& [_, clock] : streams)
      join(host, clock);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new FakeEvent;
      trace([&](auto& tell) { tell->trace_gpu_event_creation(kCUDA, reinterpret_cast<uintptr_t>(*event)); });
    }
    trace([&](auto& tell) { tell->trace_gpu_event_record(kCUDA, reinterpret_cast<uintptr_t>(*event), stream.id()); });
    std::lock_guard lock(mutex);
    auto& clock = streams[stream.id()];
    auto& recorded = *static_cast<FakeEvent*>(*event);
    recorded.number = ++clock[stream.id()];
    recorded.stream = stream.id();
    recorded.seen = clock;
    recorded.at = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr)
      return;
    trace([&](auto& tell) { tell->trace_gpu_event_wait(kCUDA, reinterpret_cast<uintptr_t>(event), stream.id()); });
    std::lock_guard lock(mutex);
    join(streams[stream.id()], static_cast<FakeEvent*>(event)->seen);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr)
      return;
    trace([&](auto& tell) { tell->trace_gpu_event_synchronization(kCUDA, reinterpret_cast<uintptr_t>(event)); });
    std::lock_guard lock(mutex);
    join(host, static_cast<FakeEvent*>(event)->seen);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr)
      return;
    trace([&](auto& tell) { tell->trace_gpu_event_deletion(kCUDA, reinterpret_cast<uintptr_t>(event)); });
    delete static_cast<FakeEvent*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    std::lock_guard lock(mutex);
    const auto &before = *static_cast<FakeEvent*>(first), &after = *static_cast<FakeEvent*>(second);
    for (const auto* event : {&before, &after})
      TORCH_CHECK(
          host[event->stream] >= event->number,
          "CUDA error: device not ready: the time of an event is read that nobody waited for");
    return std::chrono::duration<double, std::milli>(after.at - before.at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// Memory of the host, of which is known that it is pinned.
std::map<const char*, const char*> pinned; // first and last + 1

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* memory = static_cast<char*>(std::malloc(size + 1));
    std::lock_guard lock(mutex);
    pinned[memory] = memory + size;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* memory) {
    {
      std::lock_guard lock(mutex);
      pinned.erase(static_cast<const char*>(memory));
    }
    std::free(memory);
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

} // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {

// Torch looks it up by this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return this_device; }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  void setCurrentDevice(DeviceIndex other) const override { this_device = other; }
  DeviceIndex exchangeDevice(DeviceIndex other) const override { return std::exchange(this_device, other); }
  DeviceIndex maybeExchangeDevice(DeviceIndex other) const override { return other < 0 ? this_device : exchangeDevice(other); }
  void deviceSynchronize(DeviceIndex) const override { Guard().synchronizeDevice(this_device); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    return after != pinned.begin() && static_cast<const char*>(data) < std::prev(after)->second;
  }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  // The CPU's, so that what is drawn from a seed is what a CPU draws.
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

} // namespace at

namespace c10d {

// DDP's reducer times its phases by one of these.
struct FakeTimer final : Timer {
  explicit FakeTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer);

} // namespace c10d
