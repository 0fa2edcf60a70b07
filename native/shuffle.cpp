// numpy.random.RandomState.shuffle of a one-dimensional array, to the bit.
//
// numpy walks from the last entry down and swaps each with one at or before it.  The place comes
// from the Mersenne Twister's next 32-bit number, masked to the bits of the entry's own place and
// drawn again while it lies behind it.  The time of that walk goes into waiting for memory.  Here
// places are drawn a block ahead and the processor is told to fetch them; drawing has no branch
// that could be mispredicted, and the generator advances 624 numbers at a time.

#include <algorithm>
#include <random>

#include "array.hpp"
#include "mersenne_twister.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

using Twister = MersenneTwister<std::mt19937>;
constexpr int kStateSize = Twister::kSize;
constexpr int kBlock = 2048;

// The generator of a RandomState: its key, and how many numbers of it are used.
class RandomState {
 public:
  RandomState(std::uint32_t *key, int position) : key_(key), position_(position) {
    if (position_ < kStateSize) {
      Twister::temper(key_, tempered_);
    }
  }

  int position() const { return position_; }

  // Numbers that follow; at least one, `size()` of them.
  const std::uint32_t *numbers() {
    if (position_ == kStateSize) {
      Twister::advance(key_);
      Twister::temper(key_, tempered_);
      position_ = 0;
    }
    return tempered_ + position_;
  }
  int size() const { return kStateSize - position_; }
  void consume(int count) { position_ += count; }

 private:
  std::uint32_t *key_;
  int position_;
  std::uint32_t tempered_[kStateSize];
};

// Draws places for the entries from `from` down to `least`, whose places need the bits of `mask`.
// Stops when `places` holds kBlock or the entries are done; returns how many were drawn.
template <typename T>
int draw(RandomState &random, const T *values, std::uint64_t from, std::uint64_t least,
         std::uint32_t mask, std::uint32_t *places) {
  const int wanted = static_cast<int>(std::min<std::uint64_t>(kBlock, from - least + 1));
  int drawn = 0;
  std::uint32_t bound = static_cast<std::uint32_t>(from);
  while (drawn < wanted) {
    const std::uint32_t *numbers = random.numbers();
    const int size = random.size();
    int used = 0;
    while (used < size && drawn < wanted) {
      const std::uint32_t place = numbers[used++] & mask;
      const std::uint32_t taken = place <= bound ? 1U : 0U;
      places[drawn] = place;
      drawn += static_cast<int>(taken);
      bound -= taken;
      __builtin_prefetch(values + place, 1);  // may lie behind the array: fetching that is harmless
    }
    random.consume(used);
  }
  return drawn;
}

template <typename T>
void shuffle_values(T *values, std::int64_t count, RandomState &random,
                    const Progress &progress) {
  std::uint32_t places[kBlock + 1];
  std::uint64_t entry = count > 0 ? static_cast<std::uint64_t>(count - 1) : 0;
  while (entry > 0) {
    std::uint32_t mask = static_cast<std::uint32_t>(entry);
    for (int shift = 1; shift < 32; shift *= 2) {
      mask |= mask >> shift;
    }
    const std::uint64_t least = (static_cast<std::uint64_t>(mask) >> 1) + 1;
    const int drawn = draw(random, values, entry, least, mask, places);
    for (int i = 0; i < drawn; ++i) {
      std::swap(values[entry - static_cast<std::uint64_t>(i)], values[places[i]]);
    }
    entry -= static_cast<std::uint64_t>(drawn);
    progress.add(drawn);
  }
  progress.add(count > 0 ? 1 : 0);
}

// Returns the generator's new position; its key is changed in place, as the values are.
int shuffle(py::array values, py::array key, int position, const py::object &counter) {
  std::uint32_t *state = writable_values_of<std::uint32_t>(key, "key");
  require(key.size() == kStateSize && position >= 0 && position <= kStateSize,
          "not the state of a Mersenne Twister");
  require(values.size() <= (std::int64_t{1} << 32), "too many values to shuffle");
  const Progress progress(counter);
  RandomState random(state, position);
  const auto run = [&](auto *data, std::int64_t count) {
    py::gil_scoped_release release;
    shuffle_values(data, count, random, progress);
  };
  if (has_type<std::int32_t>(values)) {
    run(writable_values_of<std::int32_t>(values, "values"), values.size());
  } else if (has_type<std::uint32_t>(values)) {
    run(writable_values_of<std::uint32_t>(values, "values"), values.size());
  } else {
    run(writable_values_of<std::int64_t>(values, "values"), values.size());
  }
  return random.position();
}

}  // namespace

void register_shuffle(py::module_ &module) {
  module.def("shuffle", &shuffle, py::arg("values"), py::arg("key"), py::arg("position"),
             py::arg("progress") = py::none());
}

}  // namespace lmcore
