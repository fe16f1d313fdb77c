// What the Python side asks about q, k and v before every call. Asked attribute by attribute from Python, the questions
// would take longer than the answer to the call.
#pragma once

#include <Python.h>

namespace flash_attn_ext::host {

struct PythonOperands {
  PyObject* q;
  PyObject* k;
  PyObject* v;
};

// Tensors (no subclass) with memory behind them, while nothing watches or traces what is called.
bool hold_memory(const PythonOperands& operands);

// Tensors (no subclass) that are canonical as they are: dense in the sense of inputs.h, of one dtype and batch size, k
// and v of one number of heads, and autocast would not cast them.
bool are_canonical(const PythonOperands& operands);

}  // namespace flash_attn_ext::host
