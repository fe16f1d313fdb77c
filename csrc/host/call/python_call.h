// A call as Python hands it over.
#pragma once

#include <Python.h>

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Classifies a call's q, k and v for the Python side. To ask for each attribute there would take longer than a small
// call itself. kCanonical tensors are also kPlain, and kEqualHeads tensors are both.
enum class QkvKind : int {
  kSymbolic,  // not all hold memory that the extension may read now: subclasses, meta tensors, lazy views, tensors of
              // PyTorch's older vmap, watched or traced calls
  kTransformed,  // they hold memory, but under torch.func or forward mode, whose derivatives only Python's Function
                 // carries
  kPlain,        // tensors (no subclass) with memory behind them
  kCanonical,    // dense in the sense of inputs.h as they are, of one dtype and batch size, k and v of one number of
                 // heads, and autocast would not cast them
  kEqualHeads,   // all three of one number of heads
};

struct PythonQkv {
  PyObject* q;
  PyObject* k;
  PyObject* v;
};
QkvKind kind_of_qkv(const PythonQkv& qkv);

// Reads a Problem (flash_attn_ext/_call/problem.py), a tuple in the order of kFields. Throws TypeError for anything
// else.
AttentionInputs inputs_of(PyObject* problem);

// The same for a KvCache.
KvCacheInputs cache_of(PyObject* cache);

}  // namespace flash_attn_ext::host
