// Graphs: ops of a stream that are noted, and done whenever the graph is played.
//
// As on hardware, a capture changes nothing on the device: what its ops write is put back at the
// end, what they make holds no numbers (all bits are 1) until the graph is played.  Ops are played
// on the memory that they were noted with, and with new random numbers.  A call that would have the
// host wait for the stream is refused, and spoils the capture.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>

#include <functional>

namespace lmcore_sim {

using Stack = torch::jit::Stack;

bool is_captured(c10::Stream stream);

// Before an op that is noted writes to a tensor, or to some: keeps the bytes, to be put back.
void keep_for_capture(c10::Stream stream, const c10::IValue& written);

// Note what has just been done; `again` does it once more.
void note_in_capture(c10::Stream stream, std::function<void()> again);

// A tensor was made, whose numbers are not those that it has now until the graph is played.
void made_in_capture(c10::Stream stream, const at::Tensor& tensor);

// Raise where the stream, or any of the device's, is captured; `what` says what the host waits for.
void refuse_in_capture(c10::Stream stream, const char* what);
void refuse_in_capture(c10::DeviceIndex device, const char* what);

// The same values, with tensors of the device that know no gradients: so a graph keeps memory alone.
Stack without_gradients(const Stack& values);

// Give the tensors that were made when an op was noted the numbers that it has made now.
void overwrite(const Stack& noted, const Stack& now);

}  // namespace lmcore_sim
