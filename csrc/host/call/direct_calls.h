// The path of nearly every call: it reads the arguments of a public function where Python has them. It takes plain
// tensors in canonical form (QkvKind in python_call.h) and options of exactly the expected types. Every other call goes
// through flash_attn_ext/functional.py, which brings it into form or says what is wrong with it.
#pragma once

#include <Python.h>

namespace flash_attn_ext::host {

// Adds direct_sdpa, direct_attention and direct_attention_with_kvcache, which are typed in flash_attn_ext/_C.pyi.
// Throws when Python has an error set.
void add_direct_calls(PyObject* module);

}  // namespace flash_attn_ext::host
