// Reads `vocab.json` and `merges.txt` of a byte-level BPE.
//
// It takes two files that certainly belong together; about anything else Python decides
// (lmcore/data/tokenizer/bpe_files.py), which words the error.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace lmcore {

struct BpeFiles {
  std::array<std::uint32_t, 256> byte_ids;
  std::vector<std::int32_t> triples;  // left, right and merged id of each rule
  std::int64_t vocab_size = 0;        // the greatest id and one
  std::int64_t end_id = -1;           // of the token `end`; -1: there is none
};

// False where Python must look: the vocabulary is not an object of distinct tokens in UTF-8 and
// distinct ids; a byte has no token; a rule is malformed, stands twice or needs a token that is
// missing; a token is made by no rule and is neither a byte nor in angle or square brackets.
bool read_bpe_files(std::string_view vocabulary, std::string_view merges, std::string_view end,
                    BpeFiles *files);

}  // namespace lmcore
