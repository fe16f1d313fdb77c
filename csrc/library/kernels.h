// What libflash_attn_ext_kernels.so offers: kernels of every backend, their plans, and what the library was built with.
// It knows neither PyTorch nor Python. What passes are trivially copyable structs, function pointers and opaque plans.
// Text goes to a function of the caller. An allocation that fails in the library is a status or a null plan; only what
// the caller's own services throw passes through it. A stream and workspace belong to the caller.
//
// The library exports two functions and no other symbol. Facts::interface is a digest of this header, of all that it
// includes, the limits that the extension checks among them, and of kernels/plan/report.{h,cpp}. So code that was
// compiled with other headers, and a package that reads other plans, are found out before they call anything.
#pragma once

#include <cstdint>

#include "attention/append.h"
#include "attention/params.h"
#include "kernels/common/masks/block_mask.h"
#include "kernels/common/sums/table_sums.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/cpu/services.h"
#include "kernels/derivatives/plain_tile.h"
#include "kernels/plan/interface.h"
#include "kernels/plan/materialised_scores.h"

namespace flash_attn_ext::plan {
struct ForwardPlan;
struct BackwardPlan;
}  // namespace flash_attn_ext::plan

namespace flash_attn_ext::library {

// `interface` and `version` stay first in every version: they are read before it is known which one the library has.
struct Facts {
  const char* interface;
  const char* version;
  const char* compiler;
  const char* cuda_version;     // of nvcc and of the CUDA runtime inside; nullptr without CUDA
  const char* cuda_archs;       // "8.0;9.0a+PTX"; nullptr without CUDA
  const char* cuda_not_built;   // why; nullptr with CUDA
  int64_t fast_build_head_dim;  // the largest of a fast build's GPU kernels, all bfloat16; 0 in a whole build
};

// What a launch returns, or a function that writes a text: 0, the CUDA runtime's error, or one of these.
using Status = int;
inline constexpr Status kNoMemory = -1;  // for the buffers of a CPU kernel, or for a text

// A plan, and what its caller must know of it. `plan` is nullptr if there was no memory for it; Kernels::free_forward
// and free_backward free it.
struct PlannedForward {
  const plan::ForwardPlan* plan;
  int64_t workspace_bytes;
};
struct PlannedBackward {
  const plan::BackwardPlan* plan;
  int64_t workspace_bytes;
  int64_t co_resident_ctas;  // that must be resident at the same time, each on an SM of its own; 0: it does not matter
  bool writes_dbias_once;  // each element in the bias's own type; otherwise it is added to zeros of the accumulate type
};

// Where a text goes. `append` gets its parts, each of which ends with a 0. It may throw std::bad_alloc: the function
// that writes the text then returns kNoMemory.
struct TextSink {
  void* context;
  void (*append)(void* context, const char* part);
};

inline constexpr int kNumBackends = 3;

struct Backend {
  const char* name;
  PlannedForward (*plan_forward)(const attention::ForwardParams& params, const plan::Limits& limits);
  PlannedBackward (*plan_backward)(const attention::BackwardParams& params, const plan::Limits& limits);
  // The rest is nullptr where the backend is not built. Each works on the current device and a stream of it, with
  // the plan's workspace. `append` appends the new keys of a call to their cache, whatever its strides,
  // and rotates them and q. `forward` does so first if there are any.
  Status (*append)(const attention::AppendParams& params, void* stream);
  Status (*forward)(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                    void* stream);
  Status (*backward)(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                     void* stream);
  Status (*delta)(const attention::DeltaParams& params, void* stream);
};

// A GPU, as the CUDA runtime describes it. If status is not 0, nothing else is set.
struct Gpu {
  Status status;
  char name[256];
  int major;
  int minor;
  int64_t memory_bytes;
  int64_t l2_bytes;
  int64_t sms;
  bool has_code;  // whether this library was compiled for it
};

// Nothing of it is set in a library without CUDA.
struct GpuFunctions {
  const Gpu& (*gpu)(int device);
  // The error in words. It is forgotten, so that no later launch returns it.
  const char* (*take_error)(Status status);
  Status (*tangents)(const attention::TangentParams& params, const plan::TangentPlan& plan, void* stream);
  Status (*plain_weights)(const derivatives::PlainTile& tile, const derivatives::PlainWeights& results, void* stream);
  Status (*plain_gradients)(const derivatives::PlainTile& tile, const derivatives::PlainGradients& gradients,
                            void* stream);
  Status (*look_up)(const common::TableLookUp& table, void* stream);
  Status (*table_sums)(const common::TableSums& table, void* stream);
  Status (*block_mask)(const common::BlockMaskOfLists& mask, void* stream);
};

struct Kernels {
  Backend backends[kNumBackends];  // in order of preference
  GpuFunctions gpu;
  // What a library that was compiled for `archs`, as in Facts, has for a GPU of a compute capability: "machine code",
  // "PTX" or nullptr. A library without CUDA answers too.
  const char* (*code_for)(int major, int minor, const char* archs);
  plan::TangentPlan (*plan_tangents)(const attention::TangentParams& params, const plan::Limits& limits);
  void (*free_forward)(const plan::ForwardPlan* plan);
  void (*free_backward)(const plan::BackwardPlan* plan);
  // A plan as text, for people and profiles.
  Status (*describe_forward)(const plan::ForwardPlan& plan, const TextSink& text);
  Status (*describe_backward)(const plan::BackwardPlan& plan, const TextSink& text);
  Status (*describe_tangents)(const plan::TangentPlan& plan, const TextSink& text);
  // A plan as JSON, under the names of the fields of flash_attn_ext/_explanation.py; nullptr: no kernel runs, since
  // there are no heads.
  Status (*report_forward)(const plan::ForwardPlan* plan, const TextSink& text);
  Status (*report_backward)(const plan::BackwardPlan* plan, const TextSink& text);
};

}  // namespace flash_attn_ext::library

extern "C" {

__attribute__((visibility("default"))) const flash_attn_ext::library::Facts* flash_attn_ext_kernels_facts();

// services: what CPU kernels take from the caller, for as long as the process lives. Those of the first call count.
__attribute__((visibility("default"))) const flash_attn_ext::library::Kernels* flash_attn_ext_kernels(
    const flash_attn_ext::cpu::Services* services);

}  // extern "C"
