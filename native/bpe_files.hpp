// Reads the rules of a `merges.txt` against a vocabulary.
//
// It takes two files that certainly belong together; about anything else Python decides
// (lmcore/data/tokenizer/bpe_files.py), which words the error.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace lmcore {

struct BpeFiles {
  std::array<std::uint32_t, 256> byte_ids;
  std::vector<std::int32_t> triples;  // left, right and merged id of each rule
};

// False where Python must look: a token is missing, a rule is malformed or stands twice, or a token
// is made by no rule and is neither a byte nor in angle or square brackets.
bool read_bpe_files(const std::vector<std::pair<std::string_view, std::uint32_t>> &vocabulary,
                    std::string_view merges, BpeFiles *files);

}  // namespace lmcore
