// Streams and events.
//
// Work that must be done before its call returns (every op) waits for what is queued on its stream
// and then runs in the calling thread.  Work that may be late (copies from and to pinned memory)
// is queued, and a thread per stream does it.  So streams are ordered in themselves and race with
// each other, as on hardware: who reads across streams without an event reads too early.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <functional>
#include <vector>

namespace lmcore_sim {

// The calling thread's stream of a device; stream 0 is the default one.
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);

// Queue `work`; `used` lives until it is done.
void enqueue(c10::Stream stream, std::function<void()> work, std::vector<c10::Storage> used);
bool is_idle(c10::Stream stream);
void wait_stream(c10::Stream stream);
void wait_device(c10::DeviceIndex device);

// Events, behind the untyped pointer that torch keeps.
void record_event(void** event, c10::Stream stream);
void make_wait(void* event, c10::Stream stream);
bool is_done(void* event);
void wait_event(void* event);
double elapsed_milliseconds(void* begin, void* end);
void destroy_event(void* event) noexcept;

}  // namespace lmcore_sim
