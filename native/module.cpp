// lmcore._native: what lmcore does in C++ where Python loops and temporary arrays are slow: most of it
// for lmcore.data; for checkpoints the copy past the caches, and files that are
// checked and written in the background.
//
// All but the guard of mapped files has a twin in Python beside its caller that gives the same bytes;
// the tests compare them.  Input arrays are read in place, never copied or converted; nothing is read or
// written outside them, whatever they hold; the interpreter is free meanwhile.

#include "registration.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "What lmcore does in C++; lmcore.data.native says whether it is used.";
  module.attr("INTERFACE") = 5;  // as in lmcore/data/native.py
  lmcore::register_sample_index(module);
  lmcore::register_blend(module);
  lmcore::register_shuffle(module);
  lmcore::register_sentence_mapping(module);
  lmcore::register_sample_reader(module);
  lmcore::register_text(module);
  lmcore::register_minhash(module);
  lmcore::register_mapping_guard(module);
  lmcore::register_streaming_copy(module);
  lmcore::register_background_check(module);
  lmcore::register_background_writer(module);
}
