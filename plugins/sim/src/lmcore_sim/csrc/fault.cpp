#include "fault.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "device.h"

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
std::atomic<bool> deny_restore{false};
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

double act_on(const std::vector<Fault>& faults, const std::string& name) {
  double factor = 1;
  for (const auto& fault : faults) {
    if (fault.kind == "slow") {
      std::this_thread::sleep_for(std::chrono::duration<double>(fault.value));
    } else if (fault.kind == "wrong") {
      factor *= fault.value;
    } else if (fault.kind == "hang") {
      hang();
    } else if (fault.kind == "lose") {
      lose_devices("told so by LMCORE_SIM_FAULTS, at " + plain(name));
    } else {
      TORCH_CHECK(false, "sim device: ", plain(name), " failed, as LMCORE_SIM_FAULTS told it to");
    }
  }
  require_usable();
  return factor;
}

}  // namespace

void set_faults(std::vector<Fault> faults) {
  const std::lock_guard<std::mutex> lock(mutex);
  op_rules.clear();
  collective_rules.clear();
  for (auto& fault : faults) {
    auto& rules = fault.kind == "hang" ? collective_rules : op_rules;
    if (fault.kind != "hang" && !fault.target.empty()) {
      collective_rules.push_back({fault});  // a target may name either
    }
    rules.push_back({std::move(fault)});
  }
  armed = !op_rules.empty() || !collective_rules.empty();
}

void set_rng_restore_denied(bool denied) {
  deny_restore = denied;
}

bool rng_restore_denied() noexcept {
  return deny_restore;
}

double before_op(const std::string& name) {
  require_usable();
  ++ops;
  return armed.load(std::memory_order_relaxed) ? act_on(met(op_rules, name), name) : 1;
}

double before_collective(const std::string& name) {
  require_usable();
  return armed.load(std::memory_order_relaxed) ? act_on(met(collective_rules, name), name) : 1;
}

int64_t num_ops() noexcept {
  return ops;
}

}  // namespace lmcore_sim
