// A call as Python hands it over.
#pragma once

#include <Python.h>

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// What a call's q, k and v are, for the Python side: asked there attribute by attribute, the questions would take
// longer than the answer to the call. Each kind is also all that stands above it from kPlain on.
enum class Operands : int {
  kSymbolic,  // not all hold memory that the extension may read now: subclasses, meta tensors, lazy views, tensors of
              // PyTorch's older vmap, watched or traced calls
  kTransformed,  // they do, but under torch.func or forward mode, whose derivatives only Python's Function carries
  kPlain,        // tensors (no subclass) with memory behind them
  kCanonical,    // dense in the sense of inputs.h as they are, of one dtype and batch size, k and v of one number of
                 // heads, and autocast would not cast them
  kEqualHeads,   // all three of one number of heads
};

struct PythonOperands {
  PyObject* q;
  PyObject* k;
  PyObject* v;
};
Operands operands_of(const PythonOperands& operands);

// The tuple of a Problem (flash_attn_ext/_problem.py), in the order of kFields. Throws TypeError for what is no such
// tuple.
AttentionInputs inputs_of(PyObject* problem);

// The same of a KvCache.
KvCacheInputs cache_of(PyObject* cache);

}  // namespace flash_attn_ext::host
