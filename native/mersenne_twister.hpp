// The numbers of the standard's Mersenne Twisters, a whole state at a time.
//
// The standard's engines make one number at a call; a state's numbers in one loop take vector
// instructions, and a caller that has them can draw ahead.

#pragma once

#include <cstdint>
#include <random>
#include <type_traits>

namespace lmcore {

// `Engine`: std::mt19937 or std::mt19937_64, whose constants these are.
template <typename Engine>
class MersenneTwister {
 public:
  // The engine's own type may be wider than its numbers.
  using Number = std::conditional_t<Engine::word_size == 32, std::uint32_t, std::uint64_t>;
  static constexpr int kSize = static_cast<int>(Engine::state_size);

  // Writes the state of an engine of this seed, whose numbers are those after it.
  static void seed(Number seed, Number *key) {
    constexpr auto multiplier = static_cast<Number>(Engine::initialization_multiplier);
    key[0] = seed;
    for (int i = 1; i < kSize; ++i) {
      const Number before = key[i - 1] ^ (key[i - 1] >> (Engine::word_size - 2));
      key[i] = multiplier * before + static_cast<Number>(i);
    }
  }

  // Makes the next state of `key`.
  static void advance(Number *key) {
    int i = 0;
    for (; i < kSize - kShift; ++i) {
      key[i] = key[i + kShift] ^ mixed(key[i], key[i + 1]);
    }
    for (; i < kSize - 1; ++i) {
      key[i] = key[i + kShift - kSize] ^ mixed(key[i], key[i + 1]);
    }
    key[i] = key[kShift - 1] ^ mixed(key[i], key[0]);
  }

  // Writes the `kSize` numbers of a state.
  static void temper(const Number *key, Number *numbers) {
    constexpr auto d = static_cast<Number>(Engine::tempering_d);
    constexpr auto b = static_cast<Number>(Engine::tempering_b);
    constexpr auto c = static_cast<Number>(Engine::tempering_c);
    for (int i = 0; i < kSize; ++i) {
      Number value = key[i];
      value ^= (value >> Engine::tempering_u) & d;
      value ^= (value << Engine::tempering_s) & b;
      value ^= (value << Engine::tempering_t) & c;
      numbers[i] = value ^ (value >> Engine::tempering_l);
    }
  }

 private:
  static constexpr int kShift = static_cast<int>(Engine::shift_size);
  static constexpr Number kLow = (Number{1} << Engine::mask_bits) - 1;

  static Number mixed(Number high, Number low) {
    const Number joined = (high & ~kLow) | (low & kLow);
    constexpr auto mask = static_cast<Number>(Engine::xor_mask);
    return (joined >> 1) ^ ((Number{0} - (joined & 1)) & mask);
  }
};

}  // namespace lmcore
