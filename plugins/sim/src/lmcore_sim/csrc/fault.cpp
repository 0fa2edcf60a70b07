#include "fault.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "device.h"
#include "stream.h"

namespace lmcore_sim {
namespace {

struct Rule {
  Fault fault;
  int64_t calls = 0;
};

std::mutex mutex;
std::vector<Rule> op_rules;
std::vector<Rule> collective_rules;
std::atomic<bool> armed{false};
std::array<std::atomic<bool>, static_cast<size_t>(Switch::count)> switches{};
std::atomic<int64_t> ops{0};

// "aten::add_" -> "add"; rules name an op without namespace and in-place mark.
std::string plain(const std::string& name) {
  auto begin = name.find("::");
  begin = begin == std::string::npos ? 0 : begin + 2;
  auto end = name.size();
  while (end > begin + 1 && name[end - 1] == '_') {
    --end;
  }
  return name.substr(begin, end - begin);
}

// The faults that meet this call.
std::vector<Fault> met(std::vector<Rule>& rules, const std::string& name) {
  const auto wanted = plain(name);
  std::vector<Fault> found;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& rule : rules) {
    if (!rule.fault.target.empty() && rule.fault.target != wanted) {
      continue;
    }
    ++rule.calls;
    if (rule.fault.at == 0 || rule.fault.at == rule.calls) {
      found.push_back(rule.fault);
    }
  }
  return found;
}

[[noreturn]] void hang() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

}  // namespace

void set_faults(std::vector<Fault> faults) {
  const std::lock_guard<std::mutex> lock(mutex);
  op_rules.clear();
  collective_rules.clear();
  for (auto& fault : faults) {
    if (fault.kind == "hang" && fault.target.empty()) {
      collective_rules.push_back({std::move(fault)});  // any collective
      continue;
    }
    if (!fault.target.empty()) {
      collective_rules.push_back({fault});  // a target may name either
    }
    op_rules.push_back({std::move(fault)});
  }
  armed = !op_rules.empty() || !collective_rules.empty();
}

void set_switches(const std::vector<std::string>& names) {
  // In the order of `Switch`.
  constexpr std::array<const char*, static_cast<size_t>(Switch::count)> known{
      "no-rng-restore",       "no-synchronize", "no-stream-synchronize",
      "no-event-synchronize", "no-stream-wait", "query-always-true"};
  for (size_t number = 0; number < known.size(); ++number) {
    switches[number] = std::find(names.begin(), names.end(), known[number]) != names.end();
  }
}

bool is_on(Switch one) noexcept {
  return switches[static_cast<size_t>(one)].load(std::memory_order_relaxed);
}

Effect effect_on_op(const std::string& name) {
  require_usable();
  ++ops;
  Effect effect;
  if (armed.load(std::memory_order_relaxed)) {
    effect.faults = met(op_rules, name);
    for (const auto& fault : effect.faults) {
      effect.seconds += fault.kind == "slow" ? fault.value : 0;
    }
  }
  return effect;
}

double act(const Effect& effect, const std::string& name) {
  double factor = 1;
  for (const auto& fault : effect.faults) {
    if (fault.kind == "wrong") {
      factor *= fault.value;
    } else if (fault.kind == "hang") {
      hang();
    } else if (fault.kind == "lose") {
      lose_devices("told so by LMCORE_SIM_FAULTS, at " + plain(name));
    } else if (fault.kind == "fail") {
      TORCH_CHECK(false, "sim device: ", plain(name), " failed, as LMCORE_SIM_FAULTS told it to");
    }
  }
  require_usable();
  return factor;
}

double before_op(const std::string& name, c10::Stream stream) {
  const auto effect = effect_on_op(name);
  delay(stream, effect.seconds);
  return effect.faults.empty() ? 1 : act(effect, name);
}

double before_collective(const std::string& name) {
  require_usable();
  if (!armed.load(std::memory_order_relaxed)) {
    return 1;
  }
  Effect effect{met(collective_rules, name)};
  for (const auto& fault : effect.faults) {
    if (fault.kind == "slow") {
      std::this_thread::sleep_for(std::chrono::duration<double>(fault.value));
    }
  }
  return act(effect, name);
}

int64_t num_ops() noexcept {
  return ops;
}

}  // namespace lmcore_sim
