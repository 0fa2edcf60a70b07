// What each file of native/ adds to the module; module.cpp calls them all.

#pragma once

#include <pybind11/pybind11.h>

namespace lmcore {

void register_sample_index(pybind11::module_ &module);
void register_blend(pybind11::module_ &module);
void register_shuffle(pybind11::module_ &module);
void register_sentence_mapping(pybind11::module_ &module);
void register_sample_reader(pybind11::module_ &module);
void register_text(pybind11::module_ &module);
void register_minhash(pybind11::module_ &module);
void register_mapping_guard(pybind11::module_ &module);
void register_streaming_copy(pybind11::module_ &module);
void register_background_check(pybind11::module_ &module);
void register_background_writer(pybind11::module_ &module);

}  // namespace lmcore
