// Streams and events.
//
// An op computes in the calling thread, and its result is there for its own stream (order.h).  A
// copy between device and pinned memory is queued, and made as late as it may be: one to the device
// when an op of its stream, or of one that waits for it, needs the memory; one to the host when the
// host waits for the stream or an event behind it, or asks whether it is done.  So a program that
// does neither reads old numbers, in every run.
//
// Time is a stream's own: what is slow delays the stream, not the host, until the host waits.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <functional>
#include <vector>

#include "order.h"

namespace lmcore_sim {

// The calling thread's stream of a device; stream 0 is the default one.
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
Actor actor_of(c10::Stream stream);

// Work that is done late.
struct Job {
  std::function<void()> work;
  std::vector<c10::Storage> used;  // lives until it is done
  bool on_device;                  // it writes to the device's memory, so ops must come after
  size_t num_bytes;                // what it holds besides
};

// Queue a job, which is the stream's next op; `written` is the memory that it writes to, if any.
void enqueue(c10::Stream stream, Job job, const at::Tensor& written);

// Let the stream take longer.
void delay(c10::Stream stream, double seconds);

// Do what ops of the stream, or of any of the device, must come after; the host has not waited.
void run_pending(c10::Stream stream);
void run_pending(c10::DeviceIndex device);

// Do all that is queued, so that the memory that it holds is free; false if there is nothing.
bool run_all(c10::DeviceIndex device);

// Have the host wait; raise what queued work raised.
void wait_stream(c10::Stream stream);
void wait_device(c10::DeviceIndex device);

// Have the host wait until the stream's time has come, without a look at its results.
void wait_time(c10::Stream stream);

// True if the stream's time has come; all is done then.
bool query_stream(c10::Stream stream);

// Events, behind the untyped pointer that torch keeps.
void record_event(void** event, c10::Stream stream);
void make_wait(void* event, c10::Stream stream);
bool query_event(void* event);
void wait_event(void* event);
double elapsed_milliseconds(void* begin, void* end);
void destroy_event(void* event) noexcept;

}  // namespace lmcore_sim
