// What libflash_attn_ext_kernels.so offers: kernels of every backend, their plans, and what the library was built with.
// It knows neither PyTorch nor Python. Parameters are plain data; a stream and workspace belong to the caller. Plans,
// and what people read of them, are C++ objects: both sides use the layouts of libstdc++, which do not change.
//
// The library exports two functions and no other symbol. Facts::interface is a digest of this header and of all that it
// includes, the limits that the extension checks among them, so that code that was compiled with other headers is found
// out before it calls anything.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "attention/append.h"
#include "attention/params.h"
#include "kernels/common/masks/block_table.h"
#include "kernels/common/sums/table_sums.h"
#include "kernels/config/fast_build.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/cpu/services.h"
#include "kernels/derivatives/plain_tile.h"
#include "kernels/plan/materialised_scores.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/report.h"

namespace flash_attn_ext::library {

// `interface` and `version` stay first in every version: they are read before it is known which one the library has.
struct Facts {
  const char* interface;
  const char* version;
  const char* compiler;
  const char* cuda_version;    // of nvcc and of the CUDA runtime inside; nullptr without CUDA
  const char* cuda_archs;      // "8.0;9.0a+PTX"; nullptr without CUDA
  const char* cuda_not_built;  // why; nullptr with CUDA
  const char* fast_build;      // what its GPU kernels take, if some were left out; nullptr in a whole build
};

// What a launch returns: 0, or the CUDA runtime's error.
using Status = int;

struct Backend {
  const char* name;
  plan::ForwardPlan (*plan_forward)(const attention::ForwardParams& params, const plan::Limits& limits);
  plan::BackwardPlan (*plan_backward)(const attention::BackwardParams& params, const plan::Limits& limits);
  // The rest is nullptr where the backend is not built. Each works on the current device and a stream of it, with
  // plan.workspace.bytes of workspace. `append` appends the new keys of a call to their cache, whatever its strides,
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
  Status (*block_table)(const common::BlockTable& table, void* stream);
};

struct Kernels {
  Backend backends[std::size(plan::kPlanners)];  // in order of preference
  GpuFunctions gpu;
  plan::TangentPlan (*plan_tangents)(const attention::TangentParams& params, const plan::Limits& limits);
  std::string (*describe_forward)(const plan::ForwardPlan& plan);
  std::string (*describe_backward)(const plan::BackwardPlan& plan);
  std::string (*describe_tangents)(const plan::TangentPlan& plan);
  plan::Report (*report_forward)(const plan::ForwardPlan& plan);
  plan::Report (*report_backward)(const plan::BackwardPlan& plan);
  std::string (*words_of)(const plan::Report& report);
};

}  // namespace flash_attn_ext::library

extern "C" {

__attribute__((visibility("default"))) const flash_attn_ext::library::Facts* flash_attn_ext_kernels_facts();

// services: what CPU kernels take from the caller, for as long as the process lives.
__attribute__((visibility("default"))) const flash_attn_ext::library::Kernels* flash_attn_ext_kernels(
    const flash_attn_ext::cpu::Services* services);

}  // extern "C"
